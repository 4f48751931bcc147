-- Queues a job, or hands it to a waiting worker.
-- ARGV: id, model, class, tenant, request, hashes of the request (`request_hashes` in codec.py), life in us (''
--        forever), idempotency key ('' none), idempotency TTL in ms, most jobs in the queue, priority offset in us: the
--        job ranks as if it had arrived so much later (negative: earlier), rows that it takes, most bytes in all
--        queues, tenant's limits ('': not counted; or ten numbers, 0 for no limit: live jobs, queued jobs, queued
--        bytes, requests per minute and at once, tokens per minute and at once, tokens of the prompt, tokens to
--        reserve, stored bytes), 1 if it has a webhook, else '', hashes of the prompt's prefixes, the shortest first,
--        summary that replaces the request after the end, thousandths of the server's memory that clients may fill, and
--        the thousandths of these that one tenant may fill, for how many ms record and journal are kept after the end
--        if that is longer than usual, the tenant's caller, estimates 'PROMPT MOST' of tokens (`tokens_of`), and the
--        tenant's weight ('': not known).
-- Replies {1, arrival, place, requests left, us until all are available, tokens left, us until all are available} for a
-- new job, and {0, id, job} for an existing one. Instead of the place it is the worker, if one has the job at once.
-- Refuses with QUEUE_BYTES, MEMORY and TENANT_*. Details: value, limit, and for TENANT_* the us to wait (0: until jobs
-- end). The memory that clients may not fill is for the writes of workers, which Redis never refuses.
-- If nothing waits and a parked worker has rows, the job is handed to it at once, as if its claim had found it. Its
-- channel gets the message `CLAIM ID DEADLINE RANK OWNER`, a newline, the request. A lost message does no harm: the worker
-- claims again under the same number.
-- Promises: the same id or idempotency key never makes a second job, and never counts twice; another request under it
-- is refused with CONFLICT.
local PARKED = 1000000 -- us after which a silent worker no longer counts as waiting
local MAX_PARKED = 16 -- parked workers that are considered
local MAX_HANDED = 65536 -- most bytes of a request in a message
-- Bytes; for a larger request the server's memory is measured now, else the reaper's last value is used.
local LARGE = 16384
local NEWCOMERS = 8 -- a full queue takes one more job for each so many, of tenants without waiting jobs
local RECORD, KEY = 4096, 512 -- rough bytes of a job and its first event without its request, and of an idempotency key
local id, model, class, idempotency = ARGV[1], ARGV[2], ARGV[3], ARGV[8]
local hash, older_hash = string.match(ARGV[6], '^(%x+) ?(%x*)$')
local now = now_us()
local known = id
if idempotency ~= '' then
  local held_hash, held_id = made_under(idempotency)
  if held_hash then
    if held_hash ~= hash and held_hash ~= older_hash then return redis.error_reply('CONFLICT ' .. held_id) end
    if redis.call('EXISTS', TAG .. 'job:' .. held_id) == 0 then return redis.error_reply('GONE ' .. held_id) end
    known = held_id
  end
end
local known_hash = redis.call('HGET', TAG .. 'job:' .. known, 'hash')
if known_hash then
  if known_hash ~= hash and known_hash ~= older_hash then return redis.error_reply('CONFLICT ' .. known) end
  return { 0, known, describe(known) }
end
local seen = redis.call('ZSCORE', TAG .. 'models:seen', model)
if not seen or tonumber(seen) <= now then
  if redis.call('ZCOUNT', TAG .. 'models:seen', '(' .. digits(now), '+inf') == 0 then
    return redis.error_reply('NO_MODELS none')
  end
  return redis.error_reply('MODEL_UNKNOWN ' .. model)
end
local format = string.match(ARGV[5], '^{"v":(%d+)') or '1'
local queue = format == '1' and TAG .. 'queue:' .. class .. ':' .. model or bound_key(class, format .. ':-', model)
local waiting = redis.call('ZCARD', queue)
-- A full queue has some room more, for tenants and then for callers of whom nothing waits: nobody shuts others out.
local room = tonumber(ARGV[10])
if waiting >= room and waiting < room + math.floor(room / NEWCOMERS) then
  if not redis.call('ZSCORE', tenants_of(class, model).turns, ARGV[4]) then
    room = room + math.floor(room / NEWCOMERS)
  elseif not redis.call('ZSCORE', callers_of(class, model, ARGV[4]).turns, ARGV[20]) then
    room = room + math.floor(room / NEWCOMERS / 2)
  end
end
if waiting >= room then return redis.error_reply('QUEUE_FULL ' .. waiting) end
local size, bytes = #ARGV[5], count_of(text_of(TAG .. 'waiting'))
if bytes + size > tonumber(ARGV[13]) then return redis.error_reply('QUEUE_BYTES ' .. bytes .. ' ' .. ARGV[13]) end
local share, tenant_share = string.match(ARGV[18], '^(%d+) (%d+)$')
local used_memory, all_memory
if size > LARGE then
  used_memory, all_memory = memory()
else
  used_memory, all_memory = string.match(text_of(TAG .. 'memory') or '', '^(%d+) (%d+)$')
end
local free_for_clients = tonumber(all_memory or 0) * share / 1000
if free_for_clients > 0 and used_memory + size > free_for_clients then
  return redis.error_reply(string.format('MEMORY %.0f %.0f', used_memory, free_for_clients))
end
local requests_left, requests_reset, tokens_left, tokens_reset = 0, 0, 0, 0
if ARGV[14] ~= '' then
  local limit = {}
  for word in string.gmatch(ARGV[14], '%d+') do limit[#limit + 1] = tonumber(word) end
  local record = of_type('hash', TAG .. 'tenant:' .. ARGV[4])
  local live, queued, queued_bytes = unpack(redis.call('HMGET', record, 'live', 'queued', 'bytes'))
  live, queued, queued_bytes = count_of(live), count_of(queued), count_of(queued_bytes)
  local requests, tokens = rates_of(record, now)
  local function refuse(code, value, most, wait)
    return redis.error_reply(string.format('TENANT_%s %.0f %.0f %.0f', code, value, most, wait))
  end
  if limit[1] > 0 and live >= limit[1] then return refuse('LIVE', live, limit[1], 0) end
  if limit[2] > 0 and queued >= limit[2] then return refuse('JOBS', queued, limit[2], 0) end
  if limit[3] > 0 and queued_bytes + size > limit[3] then return refuse('BYTES', queued_bytes, limit[3], 0) end
  local stored, most_stored = count_of(redis.call('HGET', of_type('hash', TAG .. 'stored'), ARGV[4])), limit[10]
  if most_stored == 0 then most_stored = free_for_clients * tenant_share / 1000 end
  local cost = size + #ARGV[17] + RECORD
  if most_stored > 0 and stored + cost > most_stored then return refuse('STORED', stored, most_stored, 0) end
  -- The generic cell rate algorithm. `available`: the time at which everything used so far is available again.
  local function rate(available, per_minute, most, count)
    local before = math.max(available, now)
    local after = before + time_for(count, per_minute)
    local whole = time_for(most, per_minute)
    local used = math.ceil((before - now) * per_minute / MINUTE)
    -- The most whose time span fits into what is left.
    local left = math.ceil((whole - after + now + 1) * per_minute / MINUTE) - 1
    return after, after - now - whole, used, left
  end
  local wait, used
  if limit[4] > 0 then
    requests, wait, used, requests_left = rate(requests, limit[4], limit[5], 1)
    if wait > 0 then return refuse('REQUESTS', used, limit[5], wait) end
    requests_reset = requests - now
  end
  if limit[6] > 0 then
    tokens, wait, used, tokens_left = rate(tokens, limit[6], limit[7], limit[9])
    if wait > 0 then return refuse('TOKENS', used, limit[7], wait) end
    tokens_reset = tokens - now
  end
  redis.call('HSET', record, 'requests', digits(requests), 'tokens', digits(tokens), 'updated', digits(now))
  add_to(record, 'live', 1)
  redis.call('PERSIST', record)
  redis.call('HSET', TAG .. 'job:' .. id, 'account', limit[8] .. ' ' .. limit[9] .. ' ' .. limit[6], 'stored', cost)
  add_stored(ARGV[4], cost)
  if idempotency ~= '' then hold(ARGV[4], KEY, 'key:' .. id, now, ARGV[9]) end
  redis.call('PERSIST', TAG .. 'stored')
end
-- The arrival must be later than that of every live job, even if the clock went back.
local arrival = now
local newest = redis.call('ZREVRANGE', of_type('zset', TAG .. 'live'), 0, 0, 'WITHSCORES')
if #newest > 0 and tonumber(newest[2]) >= arrival then arrival = tonumber(newest[2]) + 1 end
local job, hashes, rows = TAG .. 'job:' .. id, prefix_hashes_of(ARGV[16]), tonumber(ARGV[12])
local deadline = ARGV[7] ~= '' and now + ARGV[7]

-- The parked worker with the longest prefix in its cache, and among equals the one with the most free rows, and fields
-- of its record. Nil if there is none, or if a worker that is not parked has a longer prefix. A claim is answered only
-- once. A batch job never overtakes an interactive one.
local function find_taker()
  if waiting > 0 or #ARGV[5] > MAX_HANDED then return end
  local parked = redis.call('ZRANGEBYSCORE', TAG .. 'parked:' .. model, now - PARKED, digits(now), 'LIMIT', 0, MAX_PARKED)
  local best, most, field = nil, -1, nil
  for _, worker in ipairs(parked) do
    local fields = redis.call('HMGET', TAG .. 'worker:' .. worker, 'claim', 'idle', 'slots', 'claimed', 'format', 'digest',
      'owners')
    local claim, idle, _, claimed, newest_format = unpack(fields)
    if claim and claimed == '' and tonumber(format) <= tonumber(newest_format or 1) and tonumber(idle) >= rows then
      local count = shared(TAG .. 'warm:' .. worker, hashes)
      if count > most or (count == most and tonumber(idle) > tonumber(field[2])) then
        best, most, field = worker, count, fields
      end
    end
  end
  if not best then return end
  if class == 'batch' and redis.call('EXISTS', TAG .. 'queue:interactive:' .. model) == 1 then return end
  if most < #hashes then
    for _, warm in ipairs(warm_elsewhere(model, best, now)) do
      if shared(warm, hashes) > most then return end
    end
  end
  return best, field
end

local taker, taker_fields = find_taker()
redis.call('HSET', job, 'state', taker and 'running' or 'queued', 'model', model, 'class', class, 'tenant', ARGV[4],
  'request', ARGV[5], 'summary', ARGV[17], 'hash', hash, 'order', digits(arrival), 'attempts', taker and 1 or 0,
  unpack(taker and { 'worker', taker, 'started', digits(now) } or {}))
if format ~= '1' then redis.call('HSET', job, 'format', format) end
if taker and taker_fields[6] and taker_fields[6] ~= '' then redis.call('HSET', job, 'digest', taker_fields[6]) end
if ARGV[11] ~= '0' then redis.call('HSET', job, 'shift', ARGV[11]) end
if ARGV[15] ~= '' then redis.call('HSET', job, 'webhook', 1) end
if ARGV[16] ~= '' then redis.call('HSET', job, 'prefix', ARGV[16]) end
if ARGV[19] ~= '0' then redis.call('HSET', job, 'keep', ARGV[19]) end
if rows ~= 1 then redis.call('HSET', job, 'rows', rows) end
if deadline then
  redis.call('HSET', job, 'deadline', digits(deadline))
  redis.call('ZADD', TAG .. 'deadlines', deadline, id)
end
if idempotency ~= '' then
  redis.call('SET', TAG .. 'idempotency:' .. idempotency, hash .. ' ' .. id, 'PX', ARGV[9])
end
redis.call('HSET', job, 'cost', ARGV[21])
if ARGV[20] ~= '' then redis.call('HSET', job, 'caller', ARGV[20]) end
if ARGV[22] ~= '' then
  redis.call('HSET', TAG .. 'weights', ARGV[4], ARGV[22])
  keep(TAG .. 'weights')
end
redis.call('ZADD', TAG .. 'live', arrival, id)
add_to(TAG .. 'backlog', class .. ':' .. model, 1)

-- Only now, because a server without memory refuses a script's first write only, so all later ones succeed.
if taker then
  local head = table.concat({ taker_fields[1], id, deadline and digits(deadline) or '-', digits(arrival + ARGV[11]) }, ' ')
  if taker_fields[7] then head = head .. ' ' .. owner_of(ARGV[4], ARGV[20]) end -- older workers cannot read it
  if redis.call('PUBLISH', TAG .. 'worker:' .. taker, head .. '\n' .. ARGV[5]) == 0 then -- its process has exited
    redis.call('HSET', job, 'state', 'queued', 'attempts', 0)
    redis.call('HDEL', job, 'worker', 'started', 'digest')
    taker = nil
  end
end
local place = taker
if taker then
  redis.call('HSET', TAG .. 'running:' .. taker, id, 0)
  redis.call('HSET', TAG .. 'worker:' .. taker, 'claimed', id, 'idle', taker_fields[2] - rows,
    'slots', taker_fields[3] + 1)
  if #hashes > 0 then remember_prefixes(taker, hashes, now) end
  local tenants = tenants_of(class, model)
  local prompt, most = tokens_of(ARGV[21], id)
  local tokens = estimate(prompt, most, rows, select(3, account_of(tenants, ARGV[4])))
  charge(callers_of(class, model, ARGV[4]), ARGV[20], tokens, now)
  charge(tenants, ARGV[4], tokens / weight_of(ARGV[4]), now)
  redis.call('HSET', job, 'charged', exact(tokens))
else
  local is_newcomer = enqueue(id, class, model, arrival + ARGV[11], 0, now)
  count_waiting(id, 1, ARGV[4], ARGV[14] ~= '')
  place = place_of(id)
  redis.call('PUBLISH', TAG .. 'wake:' .. model, rows == 0 and 'prompt' or class)
  if is_newcomer and class == 'interactive' then redis.call('PUBLISH', TAG .. 'wake:' .. model, 'newcomer') end
end
return { 1, digits(arrival), place, requests_left, requests_reset, tokens_left, tokens_reset }
