-- Creates a batch, or finds the one that was created under the same idempotency key. With the id '' it only finds.
-- ARGV: id, tenant, request, request hash, completion window in us, idempotency key ('' none), idempotency TTL in ms,
--        most batches of the tenant that have not ended, most batches in its list, the tenant's caller.
-- Replies {1, id, fields and values} for a new batch, {0, id, fields and values} for an existing one, and false if it
-- only looked for one.
-- Refuses with CONFLICT ID, GONE ID, OPEN COUNT MOST, SHARE COUNT MOST.
-- Promises: the same id or idempotency key never makes a second batch. A caller always gets an even share of the
-- tenant's batches: if others hold it, the caller gets it beside them, up to twice as many batches in all.
local id, tenant, key = ARGV[1], ARGV[2], ARGV[6]
local now, batch = now_us(), TAG .. 'batch:' .. ARGV[1]
if key ~= '' then
  local hash, known = made_under(key)
  if hash then
    if hash ~= ARGV[4] then return redis.error_reply('CONFLICT ' .. known) end
    local fields = redis.call('HGETALL', TAG .. 'batch:' .. known)
    if #fields == 0 then return redis.error_reply('GONE ' .. known) end
    return { 0, known, fields }
  end
end
if id == '' then return false end
if redis.call('EXISTS', batch) == 1 then return { 0, id, redis.call('HGETALL', batch) } end
local open, list = TAG .. 'batches:open:' .. tenant, TAG .. 'batches:of:' .. tenant
local caller, most, count = ARGV[10], tonumber(ARGV[8]), redis.call('SCARD', open)
local function refuse(code, held, limit) return redis.error_reply(string.format('%s %d %d', code, held, limit)) end
if count >= most and caller == '' then return refuse('OPEN', count, most) end
if count >= most then
  local held, callers = { [caller] = 0 }, 1
  for _, other in ipairs(redis.call('SMEMBERS', open)) do
    local name = redis.call('HGET', TAG .. 'batch:' .. other, 'caller') or ''
    if not held[name] then callers = callers + 1 end
    held[name] = (held[name] or 0) + 1
  end
  local share = math.max(1, math.floor(most / callers))
  if held[caller] >= share then return refuse('SHARE', held[caller], share) end
  if count >= 2 * most then return refuse('OPEN', count, 2 * most) end
end
-- Newer than all others in the tenant's list, even if the clock went back.
local order, newest = now, redis.call('ZREVRANGE', list, 0, 0, 'WITHSCORES')
if #newest > 0 and tonumber(newest[2]) >= order then order = tonumber(newest[2]) + 1 end
redis.call('HSET', batch, 'tenant', tenant, 'request', ARGV[3], 'status', 'validating', 'fence', 0,
  'created', digits(now), 'expires', digits(now + ARGV[5]))
if caller ~= '' then redis.call('HSET', batch, 'caller', caller) end
redis.call('SADD', open, id)
redis.call('ZADD', list, order, id)
redis.call('ZREMRANGEBYRANK', list, 0, -ARGV[9] - 1)
redis.call('PERSIST', list)
redis.call('ZADD', TAG .. 'batches', now, id)
if key ~= '' then redis.call('SET', TAG .. 'idempotency:' .. key, ARGV[4] .. ' ' .. id, 'PX', ARGV[7]) end
return { 1, id, redis.call('HGETALL', batch) }
