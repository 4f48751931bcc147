-- Asks the owner of a batch to cancel it. ARGV: id, tenant.
-- Replies fields and values, or false if the tenant has no such batch.
-- Promises: a batch whose lines have ended stays as it is.
local batch = TAG .. 'batch:' .. ARGV[1]
local tenant, status = unpack(redis.call('HMGET', batch, 'tenant', 'status'))
if tenant ~= ARGV[2] then return false end
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', batch, 'status', 'cancelling', 'at:cancelling', digits(now_us()))
end
return redis.call('HGETALL', batch)
