-- Prepended to every script, after `turns.lua` and `journals.lua`.
-- All times are microseconds (us) since 1970 by the server's clock. Events are opaque bytes.
-- A script that refuses replies with an error "CODE detail" before it has written anything.
local MAX_ENDED = 10000 -- ended jobs kept for listings
local MAX_WEBHOOKS = 100000 -- ended jobs whose webhook is not called yet
local MAX_BOUND = 64 -- queues of jobs for some workers only that one call looks at
local MAX_FAILED = 10000 -- failed jobs that keep their requests
local INDEXED = 512 -- rough bytes of a job in lists of jobs
local MINUTE = 60000000
local MAX_WARM = 1024 -- prefix hashes that are remembered for a worker
local MOST_DEATHS = 10 -- times the most attempts: limit of all deaths of a job's workers, with or without progress
local SPARE = 5 -- times the model TTL: lifetime of keys that only a forward step of the clock makes stale

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The hash of the request under an idempotency key, and the id that it made. Nil if the key is new, or damaged.
local function made_under(key)
  local hash, id = string.match(text_of(TAG .. 'idempotency:' .. key) or '', '^(%x+) (%S+)$')
  if hash and #hash == 64 then return hash, id end
end

-- Count the bytes that wait, and the waiting jobs of the tenant if the job has an account. `sign`: 1 if the job enters
-- its queue, -1 if it leaves it.
local function count_waiting(id, sign, tenant, account)
  local size = redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request') * sign
  if add_to(TAG .. 'waiting', nil, size) <= 0 then redis.call('DEL', TAG .. 'waiting') end
  if account then
    add_to(TAG .. 'tenant:' .. tenant, 'queued', sign)
    add_to(TAG .. 'tenant:' .. tenant, 'bytes', size)
  end
end

-- The time in us in which a rate provides `count` units. Rounded down, so that a burst of single units fits the limit.
local function time_for(count, per_minute)
  return math.floor(count * MINUTE / per_minute)
end

-- The times in us at which all requests and all tokens of a tenant are available again. If the clock has gone back
-- since they were written, so do they, and nobody waits for the time by which the clock was ahead.
local function rates_of(key, now)
  local requests, tokens, updated = unpack(redis.call('HMGET', key, 'requests', 'tokens', 'updated'))
  local back = math.max(0, (tonumber(updated) or 0) - now)
  return (tonumber(requests) or 0) - back, (tonumber(tokens) or 0) - back
end

-- A job of a tenant has ended: it is no longer live, and the tokens that it reserved but did not use are returned.
local function end_account(tenant, account, used, now)
  local key = of_type('hash', TAG .. 'tenant:' .. tenant)
  local reserved, per_minute = string.match(account, '(%d+) (%d+)$')
  local requests, tokens = rates_of(key, now)
  if per_minute ~= '0' then
    -- Not before now: what has become available by time alone is not returned a second time.
    tokens = math.max(now, math.max(now, tokens) - time_for(reserved, per_minute) + time_for(used, per_minute))
  end
  redis.call('HSET', key, 'requests', digits(requests), 'tokens', digits(tokens), 'updated', digits(now))
  if add_to(key, 'live', -1) <= 0 then
    redis.call('PEXPIRE', key, math.max(0, math.ceil((math.max(tokens, requests) - now) / 1000)))
  end
end

-- The bytes that a key takes, or `guess` if the user of `broker.url` may not ask.
local function size_of(key, guess)
  local size = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0)
  return type(size) == 'number' and size or guess
end

-- Add to the stored bytes of a tenant's jobs, which include ended jobs until their records and journals expire.
local function add_stored(tenant, bytes)
  if add_to(TAG .. 'stored', tenant, bytes) <= 0 then redis.call('HDEL', TAG .. 'stored', tenant) end
end

-- Count bytes that expire in `ttl` ms. The reaper subtracts them then. Returns their entry in `held`.
local function hold(tenant, bytes, name, now, ttl)
  add_stored(tenant, bytes)
  local entry = digits(bytes) .. ' ' .. name .. ' ' .. tenant
  redis.call('ZADD', TAG .. 'held', now + ttl * 1000, entry)
  for _, key in ipairs({ TAG .. 'stored', TAG .. 'held' }) do
    if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
  end
  return entry
end

-- An ended job no longer needs its prompt: its request is replaced by the summary.
local function drop_request(job)
  local summary = redis.call('HGET', job, 'summary')
  if summary then -- none: submitted by an older version
    redis.call('HSET', job, 'request', summary, 'dropped', 1)
    redis.call('HDEL', job, 'summary')
  end
end

-- A failed job keeps its request, so that it can be inspected and retried. If there are too many of these jobs, or too
-- many bytes, the oldest lose theirs.
local function keep_failed(id, now, usual_ttl, ttl, most_bytes)
  local list, bytes = TAG .. 'failed', TAG .. 'failed:bytes'
  local size = redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request')
  redis.call('ZADD', list, now, size .. ' ' .. id)
  local total = add_to(bytes, nil, size)
  while total > tonumber(most_bytes) or redis.call('ZCARD', list) > MAX_FAILED do
    local oldest = redis.call('ZRANGE', list, 0, 0)[1]
    if not oldest then break end
    local oldest_size, oldest_id = string.match(oldest, '^(%d+) (.*)$')
    redis.call('ZREM', list, oldest)
    total = add_to(bytes, nil, -oldest_size)
    drop_request(TAG .. 'job:' .. oldest_id)
    redis.call('PEXPIRE', TAG .. 'job:' .. oldest_id, usual_ttl)
  end
  redis.call('PEXPIRE', list, ttl)
  redis.call('PEXPIRE', bytes, ttl)
end

-- Replace what a job was charged for its turn by the tokens that it used.
local function end_turns(id, class, model, tenant, caller, cost, charged, used)
  local prompt, most = tokens_of(cost, id)
  local answer = most > 0 and math.max(1, used - prompt) or nil
  settle(callers_of(class, model, tenant), caller or '', used - charged)
  settle(tenants_of(class, model), tenant, (used - charged) / weight_of(tenant), answer)
end

-- The only way into a terminal state. `seq`: of `event`, the job's last event. `job_ttl`: lifetime of a record,
-- lifetime of a failed job's record with its request (both in ms), and the most bytes of such requests. `used`: the
-- job's tokens if known. `final`: a retry would fail too, so the request is not kept.
local function finish(id, state, event, seq, now, job_ttl, journal_ttl, used, final)
  local job = TAG .. 'job:' .. id
  local class, model, old_state, tenant, account, started, stored, kept, charged, caller, cost = unpack(redis.call(
    'HMGET', job, 'class', 'model', 'state', 'tenant', 'account', 'started', 'stored', 'keep', 'charged', 'caller',
    'cost'))
  redis.call('ZREM', TAG .. 'live', id)
  redis.call('ZREM', TAG .. 'deadlines', id)
  if not old_state then return end -- the record was deleted by hand
  local usual_ttl, failed_ttl, most_failed = string.match(job_ttl, '^(%d+) (%d+) (%d+)$')
  local keeps = state == 'failed' and not final
  local ttl = keeps and failed_ttl or usual_ttl
  if kept then -- whoever submitted it reads its answer later than usual
    ttl, journal_ttl = math.max(ttl, kept), math.max(journal_ttl, kept)
  end
  if old_state == 'queued' then count_waiting(id, -1, tenant, account) end
  if account then
    -- If the worker is dead, an estimate: the prompt, and at least one token for each event.
    local least = started and tonumber(string.match(account, '^%d+')) + seq - 1 or 0
    end_account(tenant, account, used or least, now)
  end
  if charged and used then end_turns(id, class, model, tenant, caller, cost, charged, used) end
  append(id, seq, event)
  redis.call('PUBLISH', TAG .. 'ends', id)
  redis.call('HSET', job, 'state', state, 'finished', digits(now), 'end', event)
  redis.call('PEXPIRE', job, ttl)
  redis.call('PEXPIRE', TAG .. 'journal:' .. id, journal_ttl)
  if keeps then keep_failed(id, now, usual_ttl, ttl, most_failed) else drop_request(job) end
  if stored then
    add_stored(tenant, -stored)
    local record = hold(tenant, size_of(job, redis.call('HSTRLEN', job, 'request') + 1024) + INDEXED, 'job:' .. id,
      now, ttl)
    local journal = hold(tenant, size_of(TAG .. 'journal:' .. id, 4096 + 100 * seq) + INDEXED, 'journal:' .. id, now,
      journal_ttl)
    if kept then redis.call('HSET', job, 'held', record .. '\n' .. journal) end -- it may be forgotten earlier
  end
  if redis.call('HEXISTS', job, 'webhook') == 1 then
    redis.call('ZADD', TAG .. 'webhooks', now, id)
    redis.call('ZREMRANGEBYRANK', TAG .. 'webhooks', 0, -MAX_WEBHOOKS - 1)
    redis.call('PEXPIRE', TAG .. 'webhooks', usual_ttl)
  end
  redis.call('ZADD', TAG .. 'ended', now + usual_ttl * 1000, id)
  redis.call('ZREMRANGEBYRANK', TAG .. 'ended', 0, -MAX_ENDED - 1)
  redis.call('PEXPIRE', TAG .. 'ended', usual_ttl)
  local queue = class .. ':' .. model
  if add_to(TAG .. 'backlog', queue, -1) <= 0 then redis.call('HDEL', TAG .. 'backlog', queue) end
end

-- The queue of jobs that only some workers of the model can take. `takers` is 'FORMAT:DIGEST': the format that a worker
-- must be able to read, and the digest that it must have, or '-' for any digest.
local function bound_key(class, takers, model)
  return TAG .. 'bound:' .. class .. ':' .. takers .. ':' .. model
end

-- Give a waiting job that has not started its place in the turns. Returns whether nothing of its caller waited.
local function enter_turns(id, class, model, place, now, format, tenant, caller, charged)
  if charged then return join_front(id, class, format or 1, model, place) end
  return join_line(id, class, format or 1, model, tenant, caller or '', place, now)
end

-- Put a job into the queue for the workers that can take it. A job that has not started and has the first record format
-- waits in the common queue of its class, which older versions read. `seq`: of the last event in its journal.
-- Returns whether nothing of its caller waited.
local function enqueue(id, class, model, place, seq, now)
  local job = TAG .. 'job:' .. id
  local format, digest, tenant, caller, charged = unpack(redis.call(
    'HMGET', job, 'format', 'digest', 'tenant', 'caller', 'charged'))
  local takers = (format or '1') .. ':' .. (seq > 0 and digest or '-')
  if seq == 0 and digest then redis.call('HDEL', job, 'digest') end
  if takers == '1:-' then
    redis.call('ZADD', TAG .. 'queue:' .. class .. ':' .. model, place, id)
  else
    redis.call('HSET', job, 'bound', takers)
    redis.call('ZADD', bound_key(class, takers, model), place, id)
    redis.call('ZADD', TAG .. 'bound', 'NX', now, takers .. ':' .. model)
  end
  if string.sub(takers, -2) == ':-' then
    return enter_turns(id, class, model, place, now, format, tenant, caller, charged)
  end
end

-- Remove a waiting job from its queue. Both queues are tried, because an older version may have moved it.
local function dequeue(id, class, model)
  redis.call('ZREM', TAG .. 'queue:' .. class .. ':' .. model, id)
  local takers, line, tenant, caller = unpack(redis.call(
    'HMGET', TAG .. 'job:' .. id, 'bound', 'line', 'tenant', 'caller'))
  if line then leave_line(id, class, model, line, tenant, caller) end
  if takers then
    redis.call('ZREM', bound_key(class, takers, model), id)
    redis.call('HDEL', TAG .. 'job:' .. id, 'bound')
  end
end

-- The queues of jobs that only some workers can take, sorted by the time at which such a worker was last seen (`since`,
-- in us).
local function bound_queues(most)
  local found = {}
  local entries = redis.call('ZRANGE', TAG .. 'bound', 0, most - 1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local takers, model = string.match(entries[i], '^(%d+:[^:]+):(.*)$')
    if takers then
      found[#found + 1] = { takers = takers, model = model, since = tonumber(entries[i + 1]), name = entries[i] }
    end
  end
  return found
end

-- Whether a job's journal has grown since its worker claimed it. `seq`: of the last event.
local function has_grown(id, seq)
  return seq > tonumber(redis.call('HGET', TAG .. 'job:' .. id, 'from') or 0)
end

-- Take a running job from its worker. It ends if it was cancelled, has expired or has killed too many workers, else it
-- goes back to its old place in the queue. `how`: 'released' (does not count as an attempt), 'blameless', or 'suspect'
-- (the job may have caused the death of its worker).
local function give_back(id, seq, now, how, max_attempts, events, job_ttl, journal_ttl)
  local job = TAG .. 'job:' .. id
  local field = redis.call('HMGET', job, 'class', 'model', 'order', 'attempts', 'deadline', 'cancel', 'shift',
    'tenant', 'account')
  if not field[1] then return end -- the record was deleted by hand
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

-- The number of the job's prefix hashes, in order, that a worker has in its cache: the longest one counts.
local function shared(warm, hashes)
  for i = #hashes, 1, -1 do
    if redis.call('ZSCORE', warm, hashes[i]) then return i end
  end
  return 0
end

-- The `warm` keys of a model's live workers with free rows, except one worker.
local function warm_elsewhere(model, but, now)
  local keys = {}
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now), '+inf')) do
    local served, idle = unpack(redis.call('HMGET', TAG .. 'worker:' .. worker, 'model', 'idle'))
    if worker ~= but and served == model and tonumber(idle or 0) >= 1 then keys[#keys + 1] = TAG .. 'warm:' .. worker end
  end
  return keys
end

local function prefix_hashes_of(prefix)
  local hashes = {}
  for hash in string.gmatch(prefix or '', '%w+') do hashes[#hashes + 1] = hash end
  return hashes
end

-- Remember that a worker has these prefixes in its cache.
local function remember_prefixes(worker, hashes, now)
  local warm = TAG .. 'warm:' .. worker
  for _, hash in ipairs(hashes) do redis.call('ZADD', warm, now, hash) end
  redis.call('ZREMRANGEBYRANK', warm, 0, -MAX_WARM - 1)
  redis.call('PEXPIRE', warm, MINUTE / 1000) -- each renewal of the lease extends it
end

-- Delete everything that is stored about a worker.
local function delete_worker(worker)
  local record = TAG .. 'worker:' .. worker
  redis.call('ZREM', TAG .. 'leases', worker)
  redis.call('ZREM', TAG .. 'parked:' .. (redis.call('HGET', record, 'model') or ''), worker)
  redis.call('DEL', record, TAG .. 'running:' .. worker, TAG .. 'cancels:' .. worker, TAG .. 'warm:' .. worker)
end

-- The server's run id, which differs after each start, or '' if the user of `broker.url` may not ask.
local function run_id()
  local facts = redis.pcall('INFO', 'server')
  return type(facts) == 'string' and string.match(facts, 'run_id:(%w+)') or ''
end

-- This server's run id if the worker's subscription is here, or '' if it is not or the user of `broker.url` may not
-- ask.
local function home_of(worker)
  local subscribers = redis.pcall('PUBSUB', 'NUMSUB', TAG .. 'worker:' .. worker)
  if subscribers.err or subscribers[2] == 0 then return '' end
  return run_id()
end

-- The server's memory in bytes: used, and allowed (0 for no limit). Zeros if the user of `broker.url` may not ask.
local function memory()
  local facts = redis.pcall('INFO', 'memory')
  if type(facts) ~= 'string' then return 0, 0 end
  return tonumber(string.match(facts, 'used_memory:(%d+)')), tonumber(string.match(facts, 'maxmemory:(%d+)') or 0)
end

-- `tick` is the time of the last renewal or reap by any process. A long gap means that the server or all processes were
-- away, or that the clock stepped forward, so that no lease could be renewed. Every lease that was valid when the gap
-- began gets one more lease time, and no model expires because of the gap.
local function bridge_outage(now, lease)
  local tick = text_of(TAG .. 'tick')
  if not tonumber(tick or '') or now - tick <= lease / 2 then return end
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

-- The fence: whether this worker's lease is valid now, by the server's clock.
local function lease_lives(worker, now, lease)
  bridge_outage(now, lease)
  local expiry = redis.call('ZSCORE', TAG .. 'leases', worker)
  return expiry and tonumber(expiry) > now
end

-- Give a worker a lease time from now, and list its model for `model_ttl` ms. `newer_fields`: of the card (JSON).
local function renew(worker, now, lease, model, card, newer_fields, model_ttl)
  local ttl = SPARE * model_ttl
  redis.call('ZADD', TAG .. 'leases', now + lease, worker)
  redis.call('PEXPIRE', TAG .. 'worker:' .. worker, math.max(math.floor(lease * 30 / 1000), ttl))
  redis.call('HSET', TAG .. 'models', model, card)
  redis.call('HSET', TAG .. 'models:more', model, newer_fields)
  redis.call('ZADD', TAG .. 'models:seen', now + model_ttl * 1000, model)
  for _, key in ipairs({ 'models', 'models:more', 'models:seen' }) do redis.call('PEXPIRE', TAG .. key, ttl) end
end

local function lease_lost(worker)
  return redis.error_reply('LEASE_LOST ' .. worker)
end

-- The place of a waiting job in its class, from 0, or false. With other tenants waiting it is an estimate.
local function place_of(id)
  local class, model, takers, tenant, caller, line = unpack(redis.call(
    'HMGET', TAG .. 'job:' .. id, 'class', 'model', 'bound', 'tenant', 'caller', 'line'))
  local queue = takers and bound_key(class, takers, model) or TAG .. 'queue:' .. class .. ':' .. model
  local place = line and place_in_turns(id, class, model, tenant, caller or '', line, redis.call('ZCARD', queue))
  return place or redis.call('ZRANK', queue, id)
end

-- A job for readers: {fields and values, place in the queue from 0, or false}.
local function describe(id)
  local fields = redis.call('HGETALL', TAG .. 'job:' .. id)
  if #fields == 0 then return false end
  return { fields, redis.call('HGET', TAG .. 'job:' .. id, 'state') == 'queued' and place_of(id) }
end
