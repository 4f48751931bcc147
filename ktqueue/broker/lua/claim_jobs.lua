-- A worker claims jobs of its model.
-- ARGV: worker id, lease in us, claim number, rows for any class, rows in all, batch share (one free row in this many),
--       expired event, job TTLs (see `finish`), journal TTL in ms, 1 if the worker waits for a job if there is none,
--       else ''.
-- Replies {jobs, us after which jobs that were left to other workers are free}. A job is {id, request, attempt, deaths
-- of workers without progress, deadline or false, rank in its class, journal entries, us
-- from its arrival to its first claim}.
-- Order: interactive before batch, but one free row in `batch share` goes to batch. Within a class by arrival and
-- priority.
-- Rows: a job takes a row for each of its choices, and none if it wants only its prompt. The last job may take more rows than are left, or it would never
-- start. Rows beyond those for any class are taken from running batch jobs; an interactive job gets them only if all
-- its rows are available.
-- Prefixes: among the first jobs of a class, the job with the longest prefix in this worker's cache goes first. A job
-- that has just arrived is left for a moment to a worker that has more of its prefix and free rows.
-- Size: a claim ends with the job that makes its reply heavy, because Redis serves nobody else meanwhile.
-- Compatibility: a job that has started goes only to workers with the same model digest, and a worker gets no job that
-- it cannot read.
-- Waiting: a worker that waits is parked. `submit_job` may hand it one job as the answer to this claim, on its channel.
-- Promises: a job has one worker only; the same claim number returns the same jobs again, including one that
-- `submit_job` handed over.
local WINDOW = 16 -- waiting jobs of a class among which a job with a cached prefix is searched
local WORTH = 2000000 -- us of waiting that a cached prefix is worth: no job overtakes one that arrived so much earlier
local LEAVE = 20000 -- us for which a job is left to another worker
local HEAVY, EVENT = 8388608, 512 -- bytes of requests and journals in a reply; rough bytes of an event
local worker, lease, number = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local free, most, share = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local job_ttl, journal_ttl = ARGV[8], ARGV[9]
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
local record, running = TAG .. 'worker:' .. worker, TAG .. 'running:' .. worker
local field = redis.call('HMGET', record, 'model', 'claim', 'claimed', 'slots', 'digest', 'format')
if not field[1] then return lease_lost(worker) end
local digest, reads = field[5] or '', tonumber(field[6] or 1)
local warm, parked = TAG .. 'warm:' .. worker, TAG .. 'parked:' .. field[1]
local taken, again = {}, 0
if field[2] == number then
  for id in string.gmatch(field[3], '%S+') do
    if redis.call('HEXISTS', running, id) == 1 then taken[#taken + 1] = id end
  end
end
if #taken == 0 then
  local slots = tonumber(field[4])
  local rows, late, weight = 0, 0, 0
  local knows = redis.call('EXISTS', warm) == 1
  local learnt = {}
  local lists, jobs, others = {}, {}, nil

  local function look_up(id)
    if not jobs[id] then
      local deadline, rows_taken, prefix, order, tenant, account, state, format, job_digest = unpack(redis.call(
        'HMGET', TAG .. 'job:' .. id, 'deadline', 'rows', 'prefix', 'order', 'tenant', 'account', 'state', 'format',
        'digest'))
      jobs[id] = {
        deadline = deadline and tonumber(deadline), rows = tonumber(rows_taken or 1), hashes = prefix_hashes_of(prefix),
        order = tonumber(order), tenant = tenant, account = account, state = state, format = tonumber(format or 1),
        digest = job_digest,
      }
    end
    return jobs[id]
  end

  -- Whether this worker may take a waiting job. If an older version left the job in the wrong queue, it is moved.
  local function may_take(id, class, place)
    local job = look_up(id)
    local begun = job.digest and job.digest ~= digest and tail_of(id) or 0
    if job.state == 'queued' and job.format <= reads and begun == 0 then return true end
    dequeue(id, class, field[1])
    if job.state == 'queued' then enqueue(id, class, field[1], place, begun, now) end
    late = late + 1
    return false
  end

  -- The first jobs of a class that this worker could take, with their ranks: from the common queue, from the queue of
  -- jobs that started under its digest, and from the queues of newer formats.
  local function waiting(class, count)
    local list = redis.call('ZRANGE', TAG .. 'queue:' .. class .. ':' .. field[1], 0, count - 1, 'WITHSCORES')
    local found = { list }
    for format = 1, reads do
      for _, mine in ipairs({ '-', digest }) do
        local takers = format .. ':' .. mine
        if mine ~= '' and takers ~= '1:-' then
          local some = redis.call('ZRANGE', bound_key(class, takers, field[1]), 0, count - 1, 'WITHSCORES')
          if #some > 0 then found[#found + 1] = some end
        end
      end
    end
    if #found == 1 then return list end
    local all = {}
    for _, some in ipairs(found) do
      for i = 1, #some, 2 do all[#all + 1] = { some[i], tonumber(some[i + 1]) } end
    end
    table.sort(all, function(a, b) return a[2] < b[2] or a[2] == b[2] and a[1] < b[1] end)
    list = {}
    for i = 1, math.min(#all, count) do
      list[2 * i - 1], list[2 * i] = all[i][1], all[i][2]
    end
    return list
  end

  -- Whether to leave the job to a live worker with free rows that has more of the job's prefix. `cached`: the number of
  -- the job's prefix hashes that this worker has.
  local function leave(job, cached)
    if #job.hashes <= cached or now - job.order >= LEAVE then return false end
    others = others or warm_elsewhere(field[1], worker, now)
    for _, key in ipairs(others) do
      if shared(key, job.hashes) > cached then
        again = math.max(again, LEAVE - (now - job.order))
        return true
      end
    end
    return false
  end

  -- The next job of a class for this worker, or nil. Entries of the list that are used up become false.
  local function pick(class)
    local list = lists[class]
    if not list or (list.first > #list and #list >= list.asked) then
      local asked = 2 * (most + WINDOW)
      list = waiting(class, asked / 2)
      list.first, list.asked, lists[class] = 1, asked, list
    end
    local best, longest, earliest, seen = nil, -1, nil, 0
    for i = list.first, #list, 2 do
      local id = list[i]
      if not id then
        if i == list.first then list.first = i + 2 end -- taken
      elseif not may_take(id, class, list[i + 1]) then
        list[i] = false
        if late >= 256 then break end
      else
        earliest = earliest or tonumber(list[i + 1])
        seen = seen + 1
        if seen > WINDOW or (best and tonumber(list[i + 1]) - earliest > WORTH) then break end
        local job = look_up(id)
        job.cached = job.cached or (knows and shared(warm, job.hashes) or 0)
        if job.cached > longest and not leave(job, job.cached) then best, longest = i, job.cached end
        if best and not knows then break end
      end
    end
    return best and list[best], list, best
  end

  while rows <= most and weight < HEAVY and late < 256 do -- the reaper and the next claim find the other expired jobs
    local class = 'interactive'
    local id, list, place = pick(class)
    if rows < free and (not id or slots % share == share - 1) then
      local other, other_list, other_place = pick('batch')
      if other then class, id, list, place = 'batch', other, other_list, other_place end
    end
    if not id then break end
    local job = TAG .. 'job:' .. id
    local needed, deadline = look_up(id).rows, look_up(id).deadline
    if deadline and deadline <= now then
      dequeue(id, class, field[1])
      finish(id, 'expired', ARGV[7], tail_of(id) + 1, now, job_ttl, journal_ttl)
      late = late + 1
      list[place] = false
    elseif rows >= free and rows + needed > most then
      break
    else
      dequeue(id, class, field[1])
      redis.call('HSET', job, 'state', 'running', 'worker', worker)
      if digest == '' then redis.call('HDEL', job, 'digest') else redis.call('HSET', job, 'digest', digest) end
      count_waiting(id, -1, look_up(id).tenant, look_up(id).account)
      redis.call('HSETNX', job, 'started', digits(now))
      redis.call('HINCRBY', job, 'attempts', 1)
      local tail = tail_of(id)
      redis.call('HSET', running, id, tail)
      if tail > 0 then redis.call('HSET', job, 'from', tail) end
      taken[#taken + 1] = id
      weight = weight + redis.call('HSTRLEN', job, 'request') + EVENT * tail
      list[place] = false
      for _, hash in ipairs(look_up(id).hashes) do learnt[#learnt + 1] = hash end
      if rows < free then slots = slots + 1 end
      rows = rows + needed
    end
  end
  if #learnt > 0 then remember_prefixes(worker, learnt, now) end
  redis.call('HSET', record, 'claim', number, 'claimed', table.concat(taken, ' '), 'slots', slots,
    'idle', math.max(0, free - rows))
  if #taken == 0 and free > 0 and ARGV[10] ~= '' then
    redis.call('ZADD', parked, now, worker)
    redis.call('PEXPIRE', parked, MINUTE / 1000)
  else
    redis.call('ZREM', parked, worker)
  end
end
local reply = {}
for _, id in ipairs(taken) do
  local request, attempts, deadline, order, priority_offset, deaths_without_progress, started = unpack(redis.call(
    'HMGET', TAG .. 'job:' .. id, 'request', 'attempts', 'deadline', 'order', 'shift', 'futile', 'started'))
  local rank = digits(order + (priority_offset or 0))
  reply[#reply + 1] = {
    id, request, tonumber(attempts), tonumber(deaths_without_progress or 0), deadline, rank,
    redis.call('XRANGE', TAG .. 'journal:' .. id, '-', '+'), math.max(0, (tonumber(started) or now) - order),
  }
end
return { reply, again }
