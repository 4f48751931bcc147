-- Gives a batch back. ARGV: id, fence, TTL in ms of the record of a batch that has ended ('' if objects of it are left),
--        lease in us, after which a run that failed is repeated ('' if it did not fail).
-- Replies 1, or 0 if the batch has another owner.
-- A batch that has ended and left nothing is no longer owned by anybody, and expires. Another one can be taken at once.
local ENDED = { failed = true, completed = true, expired = true, cancelled = true }
local batch = TAG .. 'batch:' .. ARGV[1]
local fence, status, tenant = unpack(redis.call('HMGET', batch, 'fence', 'status', 'tenant'))
if fence ~= ARGV[2] then return 0 end
redis.call('HDEL', batch, 'owner') -- it did not die
if ARGV[4] ~= '' then
  redis.call('HINCRBY', batch, 'failures', 1)
  redis.call('ZADD', TAG .. 'batches', 'XX', now_us() + ARGV[4], ARGV[1])
elseif ENDED[status] and ARGV[3] ~= '' then
  redis.call('ZREM', TAG .. 'batches', ARGV[1])
  redis.call('PEXPIRE', batch, ARGV[3])
  if redis.call('SCARD', TAG .. 'batches:open:' .. tenant) == 0 then
    redis.call('PEXPIRE', TAG .. 'batches:of:' .. tenant, ARGV[3])
  end
else
  redis.call('ZADD', TAG .. 'batches', 'XX', now_us(), ARGV[1])
end
return 1
