-- Joined in front of every script.
-- KEYS[1]: the hash tag that begins every key of the shard ("{ktq:s0}").
-- All times are microseconds since 1970 by the server's clock; events are opaque bytes.
-- A script that refuses replies with an error "CODE detail" before it has written anything.
local TAG = KEYS[1] .. ':'
local MAX_ENDED = 10000 -- ended jobs kept in the listing
local MAX_WEBHOOKS = 100000 -- ended jobs whose webhook nobody has called yet
local MAX_BOUND = 64 -- queues of jobs for some workers only that are looked at in one go
local MAX_FAILED = 10000 -- failed jobs that keep their requests
local INDEXED = 512 -- bytes, about, of a job in lists of jobs
local MINUTE = 60000000
local MAX_WARM = 1024 -- names of prefixes that are remembered of a worker
local MOST_DEATHS = 10 -- times as many as the most tries without a token: of a job's workers in all
local SPARE = 5 -- times the model TTL: how long keys stay that only a clock that steps forward could make stale

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Lua's own conversion keeps 14 digits only.
local function digits(number)
  return string.format('%.0f', number)
end

-- The seq of a journal's last event; 0 when there is none.
local function tail_of(id)
  local last = redis.call('XREVRANGE', TAG .. 'journal:' .. id, '+', '-', 'COUNT', 1)
  if #last == 0 then return 0 end
  return tonumber(string.match(last[1][1], '^%d+'))
end

-- Journal first, then publish: no reader can see what the journal does not hold.
local function append(id, seq, event)
  local key = TAG .. 'journal:' .. id
  redis.call('XADD', key, digits(seq) .. '-0', 'e', event)
  redis.call('PUBLISH', key, digits(seq) .. ':' .. event)
end

-- The bytes that wait, and what waits of the job's tenant if it has an account: `sign` 1 where a job comes into its
-- queue, -1 where it leaves it.
local function count_waiting(id, sign, tenant, account)
  local size = redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request') * sign
  if redis.call('INCRBY', TAG .. 'waiting', size) <= 0 then redis.call('DEL', TAG .. 'waiting') end
  if account then
    redis.call('HINCRBY', TAG .. 'tenant:' .. tenant, 'queued', sign)
    redis.call('HINCRBY', TAG .. 'tenant:' .. tenant, 'bytes', size)
  end
end

-- How long a rate takes to make good so many, in us. Rounded down, so that a burst of single ones fits its whole.
local function span(count, per_minute)
  return math.floor(count * MINUTE / per_minute)
end

-- When a tenant's requests and its tokens are made good, in us. If the clock has gone back since they were written, so
-- do they: nobody waits for the time that the clock was ahead.
local function rates_of(key, now)
  local at = redis.call('HMGET', key, 'requests', 'tokens', 'updated')
  local back = math.max(0, (tonumber(at[3]) or 0) - now)
  return (tonumber(at[1]) or 0) - back, (tonumber(at[2]) or 0) - back
end

-- A job of a tenant has ended: it lives no more, and of the tokens that it reserved those not used come back.
local function settle(tenant, account, used, now)
  local key = TAG .. 'tenant:' .. tenant
  local reserved, per_minute = string.match(account, '(%d+) (%d+)$')
  local requests, tokens = rates_of(key, now)
  if per_minute ~= '0' then
    -- Never before now: what has been made good by time alone is not given a second time.
    tokens = math.max(now, math.max(now, tokens) - span(reserved, per_minute) + span(used, per_minute))
  end
  redis.call('HSET', key, 'requests', digits(requests), 'tokens', digits(tokens), 'updated', digits(now))
  if redis.call('HINCRBY', key, 'live', -1) <= 0 then
    redis.call('PEXPIRE', key, math.max(0, math.ceil((math.max(tokens, requests) - now) / 1000)))
  end
end

-- The bytes that a key takes; `guess` where the user of `broker.url` may not ask.
local function size_of(key, guess)
  local size = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0)
  return type(size) == 'number' and size or guess
end

-- Adds to the bytes that the jobs of a tenant hold, ended ones too, for as long as their records and journals are kept.
local function add_stored(tenant, bytes)
  if redis.call('HINCRBY', TAG .. 'stored', tenant, bytes) <= 0 then redis.call('HDEL', TAG .. 'stored', tenant) end
end

-- Counts what stays for so many ms from now, and is counted no more then. The reaper looks.
local function hold(tenant, bytes, name, now, ttl)
  add_stored(tenant, bytes)
  redis.call('ZADD', TAG .. 'held', now + ttl * 1000, digits(bytes) .. ' ' .. name .. ' ' .. tenant)
  for _, key in ipairs({ TAG .. 'stored', TAG .. 'held' }) do
    if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
  end
end

-- An ended job needs its prompt no more: what is left of its request is the summary.
local function drop_request(job)
  local summary = redis.call('HGET', job, 'summary')
  if summary then -- none: submitted by an older version
    redis.call('HSET', job, 'request', summary, 'dropped', 1)
    redis.call('HDEL', job, 'summary')
  end
end

-- A failed job is to be looked at, and may be sent again: it keeps its request until there are too many of them, or
-- too many bytes. Then the oldest lose theirs.
local function keep_failed(id, now, usual_ttl, ttl, most_bytes)
  local list, bytes = TAG .. 'failed', TAG .. 'failed:bytes'
  local size = redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request')
  redis.call('ZADD', list, now, size .. ' ' .. id)
  local total = redis.call('INCRBY', bytes, size)
  while total > tonumber(most_bytes) or redis.call('ZCARD', list) > MAX_FAILED do
    local oldest = redis.call('ZRANGE', list, 0, 0)[1]
    if not oldest then break end
    local its_size, its_id = string.match(oldest, '^(%d+) (.*)$')
    redis.call('ZREM', list, oldest)
    total = redis.call('INCRBY', bytes, -its_size)
    drop_request(TAG .. 'job:' .. its_id)
    redis.call('PEXPIRE', TAG .. 'job:' .. its_id, usual_ttl)
  end
  redis.call('PEXPIRE', list, ttl)
  redis.call('PEXPIRE', bytes, ttl)
end

-- The one way into a terminal state. `seq` is the seq of `event`, the job's last. `job_ttl`: how long the record stays,
-- how long a failed job's with its request does (both in ms), and the most bytes of such requests. `used`: the job's
-- tokens, where known. `final`: it would fail again, so that its request is not kept.
local function finish(id, state, event, seq, now, job_ttl, journal_ttl, used, final)
  local job = TAG .. 'job:' .. id
  local at = redis.call('HMGET', job, 'class', 'model', 'state', 'tenant', 'account', 'started', 'stored')
  redis.call('ZREM', TAG .. 'live', id)
  redis.call('ZREM', TAG .. 'deadlines', id)
  if not at[3] then return end -- somebody has deleted the record
  local usual_ttl, failed_ttl, most_failed = string.match(job_ttl, '^(%d+) (%d+) (%d+)$')
  local keeps = state == 'failed' and not final
  local ttl = keeps and failed_ttl or usual_ttl
  if at[3] == 'queued' then count_waiting(id, -1, at[4], at[5]) end
  if at[5] then
    -- Of a job whose worker is gone we know the prompt about, and that each event is a token or more.
    local least = at[6] and tonumber(string.match(at[5], '^%d+')) + seq - 1 or 0
    settle(at[4], at[5], used or least, now)
  end
  append(id, seq, event)
  redis.call('HSET', job, 'state', state, 'finished', digits(now), 'end', event)
  redis.call('PEXPIRE', job, ttl)
  redis.call('PEXPIRE', TAG .. 'journal:' .. id, journal_ttl)
  if keeps then keep_failed(id, now, usual_ttl, ttl, most_failed) else drop_request(job) end
  if at[7] then
    add_stored(at[4], -at[7])
    hold(at[4], size_of(job, redis.call('HSTRLEN', job, 'request') + 1024) + INDEXED, 'job:' .. id, now, ttl)
    hold(at[4], size_of(TAG .. 'journal:' .. id, 4096 + 100 * seq) + INDEXED, 'journal:' .. id, now, journal_ttl)
  end
  if redis.call('HEXISTS', job, 'webhook') == 1 then
    redis.call('ZADD', TAG .. 'webhooks', now, id)
    redis.call('ZREMRANGEBYRANK', TAG .. 'webhooks', 0, -MAX_WEBHOOKS - 1)
    redis.call('PEXPIRE', TAG .. 'webhooks', usual_ttl)
  end
  redis.call('ZADD', TAG .. 'ended', now + usual_ttl * 1000, id)
  redis.call('ZREMRANGEBYRANK', TAG .. 'ended', 0, -MAX_ENDED - 1)
  redis.call('PEXPIRE', TAG .. 'ended', usual_ttl)
  local queue = at[1] .. ':' .. at[2]
  if redis.call('HINCRBY', TAG .. 'backlog', queue, -1) <= 0 then
    redis.call('HDEL', TAG .. 'backlog', queue)
  end
end

-- Where jobs wait that only some workers of their model can take. `takers` is 'FORMAT:DIGEST': the format that a worker
-- must read, and the digest that it must have; '-' where any will do.
local function bound_key(class, takers, model)
  return TAG .. 'bound:' .. class .. ':' .. takers .. ':' .. model
end

-- Puts a job into the queue of those who can take it. A job whose record is of the first format, and that has not begun,
-- waits in the queue of its class, where older versions look. `seq`: of the last event in its journal.
local function enqueue(id, class, model, place, seq, now)
  local job = TAG .. 'job:' .. id
  local at = redis.call('HMGET', job, 'format', 'digest')
  local takers = (at[1] or '1') .. ':' .. (seq > 0 and at[2] or '-')
  if seq == 0 and at[2] then redis.call('HDEL', job, 'digest') end
  if takers == '1:-' then
    redis.call('ZADD', TAG .. 'queue:' .. class .. ':' .. model, place, id)
  else
    redis.call('HSET', job, 'bound', takers)
    redis.call('ZADD', bound_key(class, takers, model), place, id)
    redis.call('ZADD', TAG .. 'bound', 'NX', now, takers .. ':' .. model)
  end
end

-- Takes a waiting job out of its queue; of both, since an older version may have moved it.
local function dequeue(id, class, model)
  redis.call('ZREM', TAG .. 'queue:' .. class .. ':' .. model, id)
  local takers = redis.call('HGET', TAG .. 'job:' .. id, 'bound')
  if takers then
    redis.call('ZREM', bound_key(class, takers, model), id)
    redis.call('HDEL', TAG .. 'job:' .. id, 'bound')
  end
end

-- The queues of jobs that only some workers of a model can take, those first that had such a worker longest ago.
-- `since`: when they had one, in us.
local function bound_queues(most)
  local found = {}
  local entries = redis.call('ZRANGE', TAG .. 'bound', 0, most - 1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local takers, model = string.match(entries[i], '^(%d+:[^:]+):(.*)$')
    found[#found + 1] = { takers = takers, model = model, since = tonumber(entries[i + 1]), name = entries[i] }
  end
  return found
end

-- Whether a job's journal has grown since its worker claimed it. `seq`: of its last event.
local function has_grown(id, seq)
  return seq > tonumber(redis.call('HGET', TAG .. 'job:' .. id, 'from') or 0)
end

-- A running job whose worker is gone or lets go of it: ended if it was cancelled, is too late or is poison, else back
-- to its old place in the queue. `how`: 'released' (not even a try), 'blameless', or 'suspect': the death of its
-- worker may be its doing.
local function give_back(id, seq, now, how, max_attempts, events, job_ttl, journal_ttl)
  local job = TAG .. 'job:' .. id
  local field = redis.call('HMGET', job, 'class', 'model', 'order', 'attempts', 'deadline', 'cancel', 'shift',
    'tenant', 'account')
  if not field[1] then return end -- somebody has deleted the record
  if field[6] then
    return finish(id, 'cancelled', events.cancelled, seq + 1, now, job_ttl, journal_ttl)
  elseif field[5] and tonumber(field[5]) <= now then
    return finish(id, 'expired', events.expired, seq + 1, now, job_ttl, journal_ttl)
  elseif how == 'released' then
    redis.call('HINCRBY', job, 'attempts', -1)
  elseif how == 'suspect' and redis.call('HINCRBY', job, 'futile', 1) >= max_attempts
    or tonumber(field[4]) >= MOST_DEATHS * max_attempts then
    return finish(id, 'failed', events.poison, seq + 1, now, job_ttl, journal_ttl)
  elseif has_grown(id, seq) then
    redis.call('HDEL', job, 'futile')
  end
  redis.call('HSET', job, 'state', 'queued')
  redis.call('HDEL', job, 'worker')
  count_waiting(id, 1, field[8], field[9])
  enqueue(id, field[1], field[2], field[3] + (field[7] or 0), seq, now)
  redis.call('PUBLISH', TAG .. 'wake:' .. field[2], field[1])
end

-- How many of a prefix's names are warm in a worker, the longest counted.
local function shared(warm, names)
  for i = #names, 1, -1 do
    if redis.call('ZSCORE', warm, names[i]) then return i end
  end
  return 0
end

-- What is warm in the living workers of a model with rows to spare, but for one of them.
local function warm_elsewhere(model, but, now)
  local keys = {}
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now), '+inf')) do
    local at = redis.call('HMGET', TAG .. 'worker:' .. worker, 'model', 'idle')
    if worker ~= but and at[1] == model and tonumber(at[2] or 0) >= 1 then keys[#keys + 1] = TAG .. 'warm:' .. worker end
  end
  return keys
end

local function names_of(prefix)
  local names = {}
  for name in string.gmatch(prefix or '', '%w+') do names[#names + 1] = name end
  return names
end

-- A worker has jobs with these prefixes now.
local function learn(worker, names, now)
  local warm = TAG .. 'warm:' .. worker
  for _, name in ipairs(names) do redis.call('ZADD', warm, now, name) end
  redis.call('ZREMRANGEBYRANK', warm, 0, -MAX_WARM - 1)
  redis.call('PEXPIRE', warm, MINUTE / 1000) -- each beat gives it as long as the worker's record has
end

-- A worker is gone, and all that is known of it.
local function forget(worker)
  local record = TAG .. 'worker:' .. worker
  redis.call('ZREM', TAG .. 'leases', worker)
  redis.call('ZREM', TAG .. 'parked:' .. (redis.call('HGET', record, 'model') or ''), worker)
  redis.call('DEL', record, TAG .. 'running:' .. worker, TAG .. 'cancels:' .. worker, TAG .. 'warm:' .. worker)
end

-- The server's name for itself, another one after each start; '' if the user of `broker.url` may not ask.
local function run_id()
  local facts = redis.pcall('INFO', 'server')
  return type(facts) == 'string' and string.match(facts, 'run_id:(%w+)') or ''
end

-- Where a worker is connected: this server's run id if its subscription is here; '' where it is not, or if the user of
-- `broker.url` may not ask.
local function home_of(worker)
  local heard = redis.pcall('PUBSUB', 'NUMSUB', TAG .. 'worker:' .. worker)
  if heard.err or heard[2] == 0 then return '' end
  return run_id()
end

-- The server's memory: bytes used, and allowed (0 for no limit). Zeros if the user of `broker.url` may not ask.
local function memory()
  local facts = redis.pcall('INFO', 'memory')
  if type(facts) ~= 'string' then return 0, 0 end
  return tonumber(string.match(facts, 'used_memory:(%d+)')), tonumber(string.match(facts, 'maxmemory:(%d+)') or 0)
end

-- `tick` is the last time that anybody beat or reaped. A long gap means that the server or all of us were away, or that
-- its clock stepped forward, so that nobody could renew: whoever held a lease when the gap began gets one more, and no
-- model is forgotten for the gap.
local function bridge_outage(now, lease)
  local tick = redis.call('GET', TAG .. 'tick')
  if not tick or now - tick <= lease / 2 then return end
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. tick, '+inf')) do
    redis.call('ZADD', TAG .. 'leases', 'GT', now + lease, worker)
  end
  local models = redis.call('ZRANGEBYSCORE', TAG .. 'models:seen', '(' .. tick, '+inf', 'WITHSCORES')
  for i = 1, #models, 2 do redis.call('ZADD', TAG .. 'models:seen', models[i + 1] + now - tick, models[i]) end
  redis.call('SET', TAG .. 'tick', digits(now), 'KEEPTTL')
end

local function tick(now, lease, model_ttl)
  bridge_outage(now, lease)
  redis.call('SET', TAG .. 'tick', digits(now), 'PX', math.max(math.floor(lease * 30 / 1000), SPARE * model_ttl))
end

-- The fence: does this worker's lease live, by the server's clock, now?
local function lease_lives(worker, now, lease)
  bridge_outage(now, lease)
  local expiry = redis.call('ZSCORE', TAG .. 'leases', worker)
  return expiry and tonumber(expiry) > now
end

local function lease_lost(worker)
  return redis.error_reply('LEASE_LOST ' .. worker)
end

-- A job as readers see it: {fields and values, place in the queue from 0 or false}.
local function describe(id)
  local fields = redis.call('HGETALL', TAG .. 'job:' .. id)
  if #fields == 0 then return false end
  local at = redis.call('HMGET', TAG .. 'job:' .. id, 'state', 'class', 'model', 'bound')
  local place = false
  if at[1] == 'queued' then
    place = redis.call('ZRANK', TAG .. 'queue:' .. at[2] .. ':' .. at[3], id)
      or at[4] and redis.call('ZRANK', bound_key(at[2], at[4], at[3]), id)
  end
  return { fields, place }
end
