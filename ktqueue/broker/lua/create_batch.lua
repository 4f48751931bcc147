-- Creates a batch, or finds the one that was created under the same idempotency key.
-- ARGV: id, tenant, request, request hash, completion window in us, idempotency key ('' none), idempotency TTL in ms,
--        most batches of the tenant that have not ended, most batches in its list.
-- Replies {1, id, fields and values} for a new batch and {0, id, fields and values} for an existing one.
-- Refuses with CONFLICT ID, GONE ID, OPEN COUNT.
-- Promises: the same id or idempotency key never makes a second batch.
local id, tenant, key = ARGV[1], ARGV[2], ARGV[6]
local now, batch = now_us(), TAG .. 'batch:' .. ARGV[1]
if key ~= '' then
  local held = redis.call('GET', TAG .. 'idempotency:' .. key)
  if held then
    local hash, known = string.match(held, '^(%S+) (%S+)$')
    if hash ~= ARGV[4] then return redis.error_reply('CONFLICT ' .. known) end
    local fields = redis.call('HGETALL', TAG .. 'batch:' .. known)
    if #fields == 0 then return redis.error_reply('GONE ' .. known) end
    return { 0, known, fields }
  end
end
if redis.call('EXISTS', batch) == 1 then return { 0, id, redis.call('HGETALL', batch) } end
local open, list = TAG .. 'batches:open:' .. tenant, TAG .. 'batches:of:' .. tenant
local count = redis.call('SCARD', open)
if count >= tonumber(ARGV[8]) then return redis.error_reply('OPEN ' .. count) end
-- Newer than all others in the tenant's list, even if the clock went back.
local order, newest = now, redis.call('ZREVRANGE', list, 0, 0, 'WITHSCORES')
if #newest > 0 and tonumber(newest[2]) >= order then order = tonumber(newest[2]) + 1 end
redis.call('HSET', batch, 'tenant', tenant, 'request', ARGV[3], 'status', 'validating', 'fence', 0,
  'created', digits(now), 'expires', digits(now + ARGV[5]))
redis.call('SADD', open, id)
redis.call('ZADD', list, order, id)
redis.call('ZREMRANGEBYRANK', list, 0, -ARGV[9] - 1)
redis.call('PERSIST', list)
redis.call('ZADD', TAG .. 'batches', now, id)
if key ~= '' then redis.call('SET', TAG .. 'idempotency:' .. key, ARGV[4] .. ' ' .. id, 'PX', ARGV[7]) end
return { 1, id, redis.call('HGETALL', batch) }
