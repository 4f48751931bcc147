-- Gives a batch back. ARGV: id, fence, TTL in ms of the record of a batch that has ended ('' if objects of it are left),
--        lease in us, after which a run that failed is repeated ('' if it did not fail), and the failures in a row after
--        which it is not ('': it always is).
-- Replies 1, or 0 if the batch has another owner, or 2 if it is not repeated.
-- A batch that has ended and left nothing is no longer owned by anybody, and expires. So does one that is not repeated,
-- because its record is damaged. Another one can be taken at once.
local ENDED = { failed = true, completed = true, expired = true, cancelled = true }
local batch = TAG .. 'batch:' .. ARGV[1]
local fence, status, tenant = unpack(redis.call('HMGET', batch, 'fence', 'status', 'tenant'))
if fence ~= ARGV[2] then return 0 end
redis.call('HDEL', batch, 'owner') -- it did not die
local failures = ARGV[4] ~= '' and redis.call('HINCRBY', batch, 'failures', 1)
local is_last = failures and ARGV[5] ~= '' and failures >= tonumber(ARGV[5])
if is_last then redis.call('SREM', TAG .. 'batches:open:' .. tenant, ARGV[1]) end
if failures and not is_last then
  redis.call('ZADD', TAG .. 'batches', 'XX', now_us() + ARGV[4], ARGV[1])
elseif is_last or ENDED[status] and ARGV[3] ~= '' then
  redis.call('ZREM', TAG .. 'batches', ARGV[1])
  redis.call('PEXPIRE', batch, ARGV[3])
  if redis.call('SCARD', TAG .. 'batches:open:' .. tenant) == 0 then
    redis.call('PEXPIRE', TAG .. 'batches:of:' .. tenant, ARGV[3])
  end
else
  redis.call('ZADD', TAG .. 'batches', 'XX', now_us(), ARGV[1])
end
return is_last and 2 or 1
