-- Checks the next keys of the installation and repairs what contradicts the jobs' records: lists and counts may have
-- been deleted by hand, or come from an older backup.
-- ARGV: cancelled event, expired event, poison event, most attempts, job TTLs (see `finish`), journal TTL in ms,
--        keys to check, us between two passes.
-- Replies {records and lists repaired, 1 if the pass is over}. Any process may call it at any time: the progress is
-- stored here.
-- A job that should wait is queued again. A job whose worker does not run it goes back to its queue, which does not
-- count as an attempt. An ended job gets a time to live. At the end of a pass, all counts are computed again.
-- Promises: a job that is where its record says is left alone; the number of keys per call is limited; live jobs and
-- stored bytes are counted only if there are few enough for one call.
local MOST_LOOKED_AT = 20 -- jobs at the head of a line
local MOST_COUNTED = 5000 -- the most live jobs, and entries of `held`, that are counted
local events = { cancelled = ARGV[1], expired = ARGV[2], poison = ARGV[3] }
local max_attempts, job_ttl, journal_ttl = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local now = now_us()
local place = TAG .. 'scrub' -- the cursor, the end of the last pass, and the tenants that this pass has seen
local repaired = 0

local function restore(key, score, id)
  if redis.call('ZSCORE', key, id) then return end
  redis.call('ZADD', key, score, id)
  repaired = repaired + 1
  return true
end

local function must_expire(key, ttl)
  if redis.call('PTTL', key) == -1 then redis.call('PEXPIRE', key, ttl) end
end

-- A field of a job's record, or false if there is none.
local function field_of(id, name)
  return ignore_wrong_type(redis.pcall('HGET', TAG .. 'job:' .. id, name), false)
end

local function check_job(id)
  local job = TAG .. 'job:' .. id
  local state, class, model, order, priority_offset, deadline, worker, cancel, finished, takers = unpack(redis.call(
    'HMGET', job, 'state', 'class', 'model', 'order', 'shift', 'deadline', 'worker', 'cancel', 'finished', 'bound'))
  local usual_ttl, failed_ttl = string.match(job_ttl, '^(%d+) (%d+)')
  if state == 'queued' or state == 'running' then
    redis.call('PERSIST', job)
    restore(TAG .. 'live', order, id)
    if deadline then restore(TAG .. 'deadlines', deadline, id) end
  end
  if state == 'queued' then
    local queue = TAG .. 'queue:' .. class .. ':' .. model
    if takers then
      queue = bound_key(class, takers, model)
      redis.call('ZADD', TAG .. 'bound', 'NX', now, takers .. ':' .. model)
    end
    if restore(queue, order + (priority_offset or 0), id) then redis.call('PUBLISH', TAG .. 'wake:' .. model, class) end
  elseif state == 'running' then
    local runs = worker and redis.call('ZSCORE', TAG .. 'leases', worker)
      and redis.call('HEXISTS', TAG .. 'running:' .. worker, id) == 1
    if not runs then
      if worker then redis.call('HDEL', TAG .. 'running:' .. worker, id) end
      give_back(id, tail_of(id), now, 'blameless', max_attempts, events, job_ttl, journal_ttl)
      repaired = repaired + 1
    elseif cancel then
      redis.call('HSETNX', TAG .. 'cancels:' .. worker, id, 0)
    end
  elseif finished then
    must_expire(job, state == 'failed' and failed_ttl or usual_ttl)
    must_expire(TAG .. 'journal:' .. id, journal_ttl)
    if finished + usual_ttl * 1000 > now and redis.call('ZCARD', TAG .. 'ended') < MAX_ENDED then
      restore(TAG .. 'ended', finished + usual_ttl * 1000, id)
    end
    if redis.call('HEXISTS', job, 'webhook') == 1 and redis.call('ZCARD', TAG .. 'webhooks') < MAX_WEBHOOKS then
      restore(TAG .. 'webhooks', finished, id)
    end
    if state == 'failed' and redis.call('HEXISTS', job, 'summary') == 1 then
      restore(TAG .. 'failed', finished, redis.call('HSTRLEN', job, 'request') .. ' ' .. id)
    end
  else
    must_expire(job, usual_ttl)
  end
end

-- A worker without a lease runs no jobs: its jobs are checked, and everything else of it is deleted.
local function check_worker(worker)
  if redis.call('ZSCORE', TAG .. 'leases', worker) then return end
  for _, id in ipairs(redis.call('HKEYS', TAG .. 'running:' .. worker)) do
    if field_of(id, 'worker') == worker then check_job(id) end
  end
  delete_worker(worker)
end

-- An older worker takes jobs from the queues and leaves them in their lines.
local function check_line(key)
  for _, id in ipairs(redis.call('ZRANGE', key, 0, MOST_LOOKED_AT - 1)) do
    if field_of(id, 'state') ~= 'queued' then
      redis.call('ZREM', key, id)
      repaired = repaired + 1
    end
  end
end

local function write_counts(key, counts)
  redis.call('DEL', key)
  for name, count in pairs(counts) do redis.call('HSET', key, name, count) end
end

-- Compute the counts of live jobs and their bytes from their records.
local function recount()
  local live = redis.call('ZRANGE', TAG .. 'live', 0, MOST_COUNTED)
  if #live > MOST_COUNTED then return end
  local backlog, waiting, tenants, stored = {}, 0, {}, {}
  for _, name in ipairs(redis.call('HKEYS', place)) do
    local tenant = string.match(name, '^tenant:(.*)$')
    if tenant then tenants[tenant] = { live = 0, queued = 0, bytes = 0 } end
  end
  for _, id in ipairs(live) do
    local job = TAG .. 'job:' .. id
    local state, class, model, tenant, account, job_bytes = unpack(redis.call(
      'HMGET', job, 'state', 'class', 'model', 'tenant', 'account', 'stored'))
    if state ~= 'queued' and state ~= 'running' then
      redis.call('ZREM', TAG .. 'live', id)
    else
      local queue = class .. ':' .. model
      backlog[queue] = (backlog[queue] or 0) + 1
      local size = state == 'queued' and redis.call('HSTRLEN', job, 'request') or 0
      waiting = waiting + size
      if account then
        local load = tenants[tenant] or { live = 0, queued = 0, bytes = 0 }
        load.live, load.bytes = load.live + 1, load.bytes + size
        if state == 'queued' then load.queued = load.queued + 1 end
        tenants[tenant] = load
        stored[tenant] = (stored[tenant] or 0) + (job_bytes or 0)
      end
    end
  end
  write_counts(TAG .. 'backlog', backlog)
  if waiting > 0 then redis.call('SET', TAG .. 'waiting', digits(waiting)) else redis.call('DEL', TAG .. 'waiting') end
  for tenant, load in pairs(tenants) do
    local key = TAG .. 'tenant:' .. tenant
    if load.live > 0 or redis.call('EXISTS', key) == 1 then
      redis.call('HSET', key, 'live', load.live, 'queued', load.queued, 'bytes', digits(load.bytes))
      if load.live > 0 then redis.call('PERSIST', key) else must_expire(key, MINUTE / 1000) end
    end
  end
  if redis.call('ZCARD', TAG .. 'held') <= MOST_COUNTED then
    for _, entry in ipairs(redis.call('ZRANGE', TAG .. 'held', 0, -1)) do
      local bytes, tenant = string.match(entry, '^(%d+) %S+ (.*)$')
      stored[tenant] = (stored[tenant] or 0) + bytes
    end
    local ttl = redis.call('PTTL', TAG .. 'stored')
    write_counts(TAG .. 'stored', stored)
    if ttl > 0 then redis.call('PEXPIRE', TAG .. 'stored', ttl) end
  end
  local failed = 0
  for _, entry in ipairs(redis.call('ZRANGE', TAG .. 'failed', 0, MAX_FAILED)) do
    failed = failed + string.match(entry, '^%d+')
  end
  if failed > 0 then
    local ttl = string.match(job_ttl, '^%d+ (%d+)')
    redis.call('SET', TAG .. 'failed:bytes', digits(failed), 'PX', ttl)
    redis.call('PEXPIRE', TAG .. 'failed', ttl)
  end
end

local cursor, last_end = unpack(redis.call('HMGET', place, 'cursor', 'ended'))
if not cursor and last_end and math.abs(now - last_end) < tonumber(ARGV[8]) then return { 0, 1 } end
local looked = redis.pcall('SCAN', cursor or '0', 'MATCH', TAG .. '*', 'COUNT', ARGV[7])
if looked.err then return { 0, 1 } end -- the user of `broker.url` lacks the permission to scan
for _, key in ipairs(looked[2]) do
  local kind, name = string.match(string.sub(key, #TAG + 1), '^(%a+):(.*)$')
  if kind == 'job' and ignore_wrong_type(redis.pcall('HEXISTS', key, 'state'), nil) then
    check_job(name)
  elseif kind == 'job' then -- what was known of the job is lost, and no script can read this key
    redis.call('DEL', key)
    repaired = repaired + 1
  elseif kind == 'journal' then
    if redis.call('EXISTS', TAG .. 'job:' .. name) == 0 then must_expire(key, journal_ttl) end
  elseif kind == 'running' or kind == 'cancels' or kind == 'worker' then
    check_worker(name)
  elseif kind == 'line' or kind == 'front' then
    check_line(key)
  elseif kind == 'tenant' then
    redis.call('HSET', place, 'tenant:' .. name, 1)
  end
end
local over = looked[1] == '0'
if over then
  recount()
  redis.call('DEL', place)
  redis.call('HSET', place, 'ended', digits(now))
else
  redis.call('HSET', place, 'cursor', looked[1])
end
redis.call('PEXPIRE', place, math.max(1000, ARGV[8] / 1000))
return { repaired, over and 1 or 0 }
