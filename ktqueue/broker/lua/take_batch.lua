-- Takes a batch without a living owner. ARGV: owner, lease in us, 1 if only of a caller without owned batches, else ''.
-- Replies {id, fence, now in us, fields and values}, or false if there is none.
-- Of the first 1,024 such batches it takes one of the caller that has the fewest batches with an owner. Where there are
-- API keys, a tenant is one caller.
-- Promises: a batch has one owner at a time. Each owner has a larger fence than those before it.
local MAX_FREE, MAX_OWNED = 1024, 256
local now, lease, live = now_us(), tonumber(ARGV[2]), TAG .. 'batches'
-- If the clock went back, no lease may last longer for it.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '(' .. digits(now + 2 * lease), '+inf', 'LIMIT', 0, MAX_FREE)) do
  redis.call('ZADD', live, now + lease, id)
end
-- Who has created a batch, or nil if its record was deleted by hand.
local function caller_of(id)
  local tenant, caller = unpack(redis.call('HMGET', TAG .. 'batch:' .. id, 'tenant', 'caller'))
  return tenant and tenant .. ' ' .. (caller or '')
end

local owned = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '(' .. digits(now), '+inf', 'LIMIT', 0, MAX_OWNED)) do
  local caller = caller_of(id)
  if caller then owned[caller] = (owned[caller] or 0) + 1 end
end
local chosen, fewest
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', digits(now), 'LIMIT', 0, MAX_FREE)) do
  local caller = caller_of(id)
  if not caller then
    redis.call('ZREM', live, id)
  elseif (owned[caller] or 0) < (fewest or (ARGV[3] ~= '' and 1 or math.huge)) then
    chosen, fewest = id, owned[caller] or 0
  end
end
if not chosen then return false end
local batch = TAG .. 'batch:' .. chosen
redis.call('ZADD', live, now + lease, chosen)
redis.call('HSET', batch, 'owner', ARGV[1])
-- The time, so that no two owners have the same one even if Redis lost its last second, in which the batch was taken.
local fence = math.max(now, redis.call('HGET', batch, 'fence') + 1)
redis.call('HSET', batch, 'fence', digits(fence))
return { chosen, fence, digits(now), redis.call('HGETALL', batch) }
