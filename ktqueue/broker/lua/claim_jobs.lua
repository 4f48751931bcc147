-- A worker claims jobs of its model.
-- ARGV: worker id, lease in us, claim number, rows for any class, rows in all, batch share (one free row in this many),
--       expired event, job TTLs (see `finish`), journal TTL in ms, 1 if the worker waits for a job if there is none,
--       else '', rows beyond all for the job of an owner with few rows, (tenant, caller, rows of its interactive jobs)*.
-- Replies {jobs, us after which jobs that were left to other workers are free}. A job is {id, request, attempt, deaths
-- of workers without progress, us until its deadline or false, rank in its class, journal entries, us
-- from its arrival to its first claim, owner}.
-- Order: interactive before batch, but one free row in `batch share` goes to batch. Within a class tenants and their
-- callers take turns (`turns.lua`), and the jobs of one caller go by arrival and priority. Jobs that lost their workers
-- go first.
-- Rows: a job takes a row for each of its choices, and none if it wants only its prompt. The last job may take more
-- rows than are left, or it would never start. Rows beyond those for any class are taken from running batch jobs; an
-- interactive job gets them only if all its rows are available. If none is left, the interactive job whose turn it is
-- gets rows nevertheless, if another tenant, or caller of its tenant, has more rows here even afterwards. The worker
-- takes them from that one.
-- Prefixes: among the first jobs of a class, the job with the longest prefix in this worker's cache goes first. A job
-- that has just arrived is left for a moment to a worker that has more of its prefix and free rows.
-- Size: a claim ends with the job that makes its reply heavy, and takes at most MAX_TAKEN jobs, because Redis serves
-- nobody else meanwhile.
-- Compatibility: a job that has started goes only to workers with the same model digest, and a worker gets no job that
-- it cannot read.
-- Waiting: a worker that waits is parked. `submit_job` may hand it one job as the answer to this claim, on its channel.
-- Promises: a job has one worker only; the same claim number returns the same jobs again, including one that
-- `submit_job` handed over.
local WINDOW = 16 -- waiting jobs of a class among which a job with a cached prefix is searched
local WORTH = 2000000 -- us of waiting that a cached prefix is worth: no job overtakes one that arrived so much earlier
local WORTH_TOKENS = 2048 -- tokens that a cached prefix is worth: no job goes so much before the turn of another caller
local LEAVE = 20000 -- us for which a job is left to another worker
local MAX_CHUNK = 64 -- jobs that are read together
local MAX_MEMBERS = 256 -- tenants, and callers of a tenant, whose turns one claim looks at
local MAX_ENTERED = 256 -- jobs of older gateways in a queue to which one claim gives a place in the turns
local MAX_TAKEN = 256 -- jobs of one claim
local HEAVY, EVENT = 8388608, 512 -- bytes of requests and journals in a reply; rough bytes of an event
local worker, lease, number = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local free, most, share = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local job_ttl, journal_ttl = ARGV[8], ARGV[9]
local extra = tonumber(ARGV[11] or 0)
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
  local chunk = math.min(MAX_CHUNK, most + (knows and WINDOW or 1))
  local queues, jobs, others = {}, {}, nil

  local function look_up(id)
    if not jobs[id] then
      local deadline, rows_taken, prefix, order, tenant, account, state, format, job_digest, caller, cost, charged, line =
        unpack(redis.call('HMGET', TAG .. 'job:' .. id, 'deadline', 'rows', 'prefix', 'order', 'tenant', 'account',
          'state', 'format', 'digest', 'caller', 'cost', 'charged', 'line'))
      jobs[id] = {
        deadline = deadline and tonumber(deadline), rows = tonumber(rows_taken or 1), hashes = prefix_hashes_of(prefix),
        order = tonumber(order), tenant = tenant, account = account, state = state, format = tonumber(format or 1),
        digest = job_digest, caller = caller or '', cost = cost, charged = charged, line = line,
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

  -- Give the first jobs of a queue their places in the turns, up to one that has its place: older gateways give none.
  -- Ids of jobs that no longer wait are removed.
  local function enter_first(class, queue)
    local rank = 0
    for _ = 1, MAX_ENTERED do
      local id, place = unpack(redis.call('ZRANGE', queue, rank, rank, 'WITHSCORES'))
      if not id then return end
      local job = look_up(id)
      if job.state ~= 'queued' then
        redis.call('ZREM', queue, id)
      elseif job.line and redis.call('ZSCORE', TAG .. job.line, id) and (job.charged
        or redis.call('ZSCORE', callers_of(class, field[1], job.tenant).turns, job.caller)
        and redis.call('ZSCORE', tenants_of(class, field[1]).turns, job.tenant)) then
        return
      else
        enter_turns(id, class, field[1], place, now, job.format, job.tenant, job.caller, job.charged)
        rank = rank + 1
      end
    end
  end

  -- The jobs of several sorted sets in the order of their scores. `kept`: entries that were read and are still there.
  local function stream_of(keys)
    local parts = {}
    for i, key in ipairs(keys) do parts[i] = { key = key, list = {}, next = 1, kept = 0 } end
    return parts
  end

  local function first_of(stream)
    local first
    for _, part in ipairs(stream) do
      if part.next > #part.list and not part.is_over then
        part.list = redis.call('ZRANGE', part.key, part.kept, part.kept + chunk - 1, 'WITHSCORES')
        part.next, part.is_over = 1, #part.list < 2 * chunk
      end
      local id, place = part.list[part.next], tonumber(part.list[part.next + 1])
      if id and (not first or place < first.place or place == first.place and id < first.id) then
        first = { id = id, place = place, part = part }
      end
    end
    return first
  end

  -- The earliest turns: `time` is that of the next turn, and `planned` counts the jobs that were read too.
  local function members_of(list)
    local members, found = redis.call('ZRANGE', list.turns, 0, MAX_MEMBERS, 'WITHSCORES'), {}
    for i = 1, #members, 2 do
      local time = tonumber(members[i + 1])
      if members[i] ~= CLOCK then found[#found + 1] = { name = members[i], time = time, planned = time } end
    end
    return found
  end

  local function earliest_of(members)
    local earliest
    for _, member in ipairs(members) do
      if not member.is_over and (not earliest or member.planned < earliest.planned) then earliest = member end
    end
    return earliest
  end

  -- The waiting jobs of a class that this worker could take. `window`: jobs that were read and not taken.
  local function open(class)
    local model = field[1]
    local queue = { class = class, window = {}, seen = {}, front = {}, rest = {}, tenants = {} }
    local common, fronts, started = { TAG .. 'queue:' .. class .. ':' .. model }, {}, {}
    for format = 1, reads do
      if format > 1 then common[format] = bound_key(class, format .. ':-', model) end
      fronts[format] = TAG .. front_of(class, format, model)
      if digest ~= '' then started[format] = bound_key(class, format .. ':' .. digest, model) end
    end
    for _, key in ipairs(started) do fronts[#fronts + 1] = key end
    queue.front = stream_of(fronts)
    if redis.call('EXISTS', unpack(common)) == 0 then return queue end
    for _, key in ipairs(common) do enter_first(class, key) end
    queue.rest, queue.tenants = stream_of(common), members_of(tenants_of(class, model))
    return queue
  end

  -- The first job of the tenant and caller whose turn is next.
  local function first_in_turn(queue)
    while true do
      local tenant = earliest_of(queue.tenants)
      if not tenant then return end
      if not tenant.callers then
        tenant.callers = members_of(callers_of(queue.class, field[1], tenant.name))
        tenant.weight = weight_of(tenant.name)
        tenant.mean = select(3, account_of(tenants_of(queue.class, field[1]), tenant.name))
      end
      local caller = earliest_of(tenant.callers)
      if caller and not caller.stream then
        local lines = {}
        for format = 1, reads do
          lines[format] = TAG .. line_of(queue.class, format, field[1], tenant.name, caller.name)
        end
        caller.stream = stream_of(lines)
      end
      local entry = caller and first_of(caller.stream)
      if entry then
        entry.tenant, entry.caller = tenant, caller
        return entry
      elseif caller then
        caller.is_over = true
        end_turn(queue.class, field[1], tenant.name, caller.name)
      else
        tenant.is_over = true
      end
    end
  end

  -- Read the next job of a class: one that lost its worker, else the one whose turn it is. A job that lost its worker
  -- does not overtake a job of the same caller that ranks before it.
  local function read_next(queue)
    local front, entry = first_of(queue.front), first_in_turn(queue)
    if front then
      local job = look_up(front.id)
      if not entry or front.place <= entry.place or job.tenant ~= entry.tenant.name or job.caller ~= entry.caller.name then
        entry = front
      end
    end
    entry = entry or first_of(queue.rest) -- jobs whose turns were lost
    if not entry then return end
    if entry.tenant then
      local prompt, most = tokens_of(look_up(entry.id).cost, entry.id)
      entry.tokens = estimate(prompt, most, look_up(entry.id).rows, entry.tenant.mean)
      entry.caller.planned = entry.caller.planned + entry.tokens
      entry.tenant.planned = entry.tenant.planned + entry.tokens / entry.tenant.weight
    end
    entry.part.next, entry.part.kept = entry.part.next + 2, entry.part.kept + 1
    return entry
  end

  -- By how many tokens a job would go before the turn of another one. Of the same caller: 0.
  local function jump(entry, first)
    if not entry.tenant or not first.tenant or entry.caller == first.caller then return 0 end
    if entry.tenant == first.tenant then return entry.caller.time - first.caller.time end
    return (entry.tenant.time - first.tenant.time) * first.tenant.weight
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

  -- The next job of a class for this worker, or nil, then its queue, its place in the window, and the job whose turn it
  -- is.
  local function pick(class)
    local queue = queues[class] or open(class)
    queues[class] = queue
    local best, longest, earliest, seen, first, i = nil, -1, nil, 0, nil, 1
    while late < 256 do
      local entry = queue.window[i] or read_next(queue)
      if not entry then break end
      if not queue.window[i] and queue.seen[entry.id] then
        entry = nil
      else
        queue.seen[entry.id], queue.window[i] = true, entry
      end
      if entry and not may_take(entry.id, class, entry.place) then
        table.remove(queue.window, i)
        redis.call('ZREM', entry.part.key, entry.id)
        entry.part.kept = entry.part.kept - 1
      elseif entry then
        first, earliest, seen = first or entry, math.min(earliest or entry.place, entry.place), seen + 1
        if seen > WINDOW then break end
        if not best or entry.place - earliest <= WORTH and jump(entry, first) <= WORTH_TOKENS then
          local job = look_up(entry.id)
          job.cached = job.cached or (knows and shared(warm, job.hashes) or 0)
          if job.cached > longest and not leave(job, job.cached) then best, longest = i, job.cached end
        end
        if best and not knows then break end
        i = i + 1
      end
    end
    return best and queue.window[best], queue, best, first
  end

  local charges = {} -- for all jobs of this claim together

  local function add_charge(list, name, tokens, clock)
    local key = list.turns .. ' ' .. name
    charges[key] = charges[key] or { list = list, name = name, tokens = 0 }
    charges[key].tokens, charges[key].clock = charges[key].tokens + tokens, clock
  end

  -- Charge a job that is taken for its turn, unless it was charged before.
  local function charge_turn(entry, class, first)
    local job, tenant, caller, tokens = look_up(entry.id), entry.tenant, entry.caller, entry.tokens
    if job.charged then return end
    if not tenant then
      local prompt, most = tokens_of(job.cost, entry.id)
      tenant, caller = { name = job.tenant, weight = weight_of(job.tenant), time = 0 }, { name = job.caller, time = 0 }
      tokens = estimate(prompt, most, job.rows, 0)
    end
    local is_in_turn = entry.tenant and first.tenant
    add_charge(callers_of(class, field[1], tenant.name), caller.name, tokens, is_in_turn and caller.time)
    add_charge(tenants_of(class, field[1]), tenant.name, tokens / tenant.weight,
      is_in_turn and math.min(first.tenant.time, tenant.time))
    tenant.time, caller.time = tenant.time + tokens / tenant.weight, caller.time + tokens
    redis.call('HSET', TAG .. 'job:' .. entry.id, 'charged', exact(tokens))
  end

  local held = {} -- rows of interactive jobs on this worker by tenant and caller
  local function hold_rows(tenant, caller, count)
    held[tenant] = held[tenant] or { all = 0, of = {} }
    held[tenant].all = held[tenant].all + count
    held[tenant].of[caller] = (held[tenant].of[caller] or 0) + count
  end
  for i = 12, #ARGV, 3 do hold_rows(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])) end

  -- Whether a job may take rows from the tenant or caller that has most of them.
  local function is_owed(job)
    if job.rows > extra or job.deadline and job.deadline <= now then return false end
    hold_rows(job.tenant, job.caller, 0)
    local richest
    for tenant, count in pairs(held) do
      if not richest or count.all / weight_of(tenant) > held[richest].all / weight_of(richest) then richest = tenant end
    end
    if richest ~= job.tenant then
      return (held[job.tenant].all + job.rows) / weight_of(job.tenant)
        <= (held[richest].all - job.rows) / weight_of(richest)
    end
    local callers, longest = held[richest].of, 0
    for _, count in pairs(callers) do longest = math.max(longest, count) end
    return callers[job.caller] + job.rows <= longest - job.rows
  end

  -- The reaper and the next claim find the other expired jobs.
  while rows <= most and weight < HEAVY and late < 256 and #taken < MAX_TAKEN do
    local class = 'interactive'
    local entry, queue, place, first = pick(class)
    if rows < free and (not entry or slots % share == share - 1) then
      local other, other_queue, other_place, other_first = pick('batch')
      if other then class, entry, queue, place, first = 'batch', other, other_queue, other_place, other_first end
    end
    if not entry then break end
    local id = entry.id
    local job = TAG .. 'job:' .. id
    local needed, deadline = look_up(id).rows, look_up(id).deadline
    local is_late = deadline and deadline <= now
    if not is_late and rows >= free and rows + needed > most then
      entry, place = queue.window[1], 1
      id, needed = entry.id, look_up(entry.id).rows
      job = TAG .. 'job:' .. id
      if class ~= 'interactive' or not is_owed(look_up(id)) then break end
      rows = most + 1 -- this is the last job
    end
    if not is_late then charge_turn(entry, class, first) end
    dequeue(id, class, field[1])
    table.remove(queue.window, place)
    entry.part.kept = entry.part.kept - 1
    if is_late then
      finish(id, 'expired', ARGV[7], tail_of(id) + 1, now, job_ttl, journal_ttl)
      late = late + 1
    else
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
      for _, hash in ipairs(look_up(id).hashes) do learnt[#learnt + 1] = hash end
      if rows < free then slots = slots + 1 end
      rows = rows + needed
      if class == 'interactive' then hold_rows(look_up(id).tenant, look_up(id).caller, needed) end
    end
  end
  for _, one in pairs(charges) do charge(one.list, one.name, one.tokens, now, one.clock) end
  if #taken == 0 and late >= 256 then again = LEAVE end -- there may be jobs behind those that were dropped
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
  local request, attempts, deadline, order, priority_offset, deaths_without_progress, started, tenant, caller =
    unpack(redis.call('HMGET', TAG .. 'job:' .. id, 'request', 'attempts', 'deadline', 'order', 'shift', 'futile',
      'started', 'tenant', 'caller'))
  local rank = digits(order + (priority_offset or 0))
  reply[#reply + 1] = {
    id, request, tonumber(attempts), tonumber(deaths_without_progress or 0),
    deadline and math.max(0, deadline - now), rank,
    journal_of(id, '-'), math.max(0, (tonumber(started) or now) - order),
    owner_of(tenant, caller or ''),
  }
end
return { reply, again }
