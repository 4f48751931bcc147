-- A job into its queue.
-- ARGV: id, model, class, tenant, request, request hash, life in us ('' for ever), idempotency key ('' none),
--       idempotency TTL in ms, most jobs in the queue, shift in us: its place is that of a job that came so much later (earlier where
--       negative), rows of an engine that it takes.
-- Replies {1, arrival, place} for a new job, {0, id, job} for one that is already there.
-- Promises: the same id or idempotency key never makes a second job; another request under it is CONFLICT.
local id, model, class, hash, idempotency = ARGV[1], ARGV[2], ARGV[3], ARGV[6], ARGV[8]
local now = now_us()
local known = id
if idempotency ~= '' then
  local held = redis.call('GET', TAG .. 'idempotency:' .. idempotency)
  if held then
    local held_hash, held_id = string.match(held, '^(%S+) (%S+)$')
    if held_hash ~= hash then return redis.error_reply('CONFLICT ' .. held_id) end
    if redis.call('EXISTS', TAG .. 'job:' .. held_id) == 0 then return redis.error_reply('GONE ' .. held_id) end
    known = held_id
  end
end
local known_hash = redis.call('HGET', TAG .. 'job:' .. known, 'hash')
if known_hash then
  if known_hash ~= hash then return redis.error_reply('CONFLICT ' .. known) end
  return { 0, known, describe(known) }
end
local seen = redis.call('ZSCORE', TAG .. 'models:seen', model)
if not seen or tonumber(seen) <= now then
  if redis.call('ZCOUNT', TAG .. 'models:seen', '(' .. digits(now), '+inf') == 0 then
    return redis.error_reply('NO_MODELS none')
  end
  return redis.error_reply('MODEL_UNKNOWN ' .. model)
end
local queue = TAG .. 'queue:' .. class .. ':' .. model
local waiting = redis.call('ZCARD', queue)
if waiting >= tonumber(ARGV[10]) then return redis.error_reply('QUEUE_FULL ' .. waiting) end
-- The arrival is later than that of every live job, even if the clock went back.
local order = now
local newest = redis.call('ZREVRANGE', TAG .. 'live', 0, 0, 'WITHSCORES')
if #newest > 0 and tonumber(newest[2]) >= order then order = tonumber(newest[2]) + 1 end
local job = TAG .. 'job:' .. id
redis.call('HSET', job, 'state', 'queued', 'model', model, 'class', class, 'tenant', ARGV[4], 'request', ARGV[5],
  'hash', hash, 'order', digits(order), 'attempts', 0)
if ARGV[11] ~= '0' then redis.call('HSET', job, 'shift', ARGV[11]) end
if ARGV[12] ~= '1' then redis.call('HSET', job, 'rows', ARGV[12]) end
if ARGV[7] ~= '' then
  local deadline = now + ARGV[7]
  redis.call('HSET', job, 'deadline', digits(deadline))
  redis.call('ZADD', TAG .. 'deadlines', deadline, id)
end
if idempotency ~= '' then
  redis.call('SET', TAG .. 'idempotency:' .. idempotency, hash .. ' ' .. id, 'PX', ARGV[9])
end
redis.call('ZADD', queue, order + ARGV[11], id)
redis.call('ZADD', TAG .. 'live', order, id)
redis.call('HINCRBY', TAG .. 'backlog', class .. ':' .. model, 1)
redis.call('PUBLISH', TAG .. 'wake:' .. model, class)
return { 1, digits(order), redis.call('ZRANK', queue, id) }
