-- One batch of a tenant. ARGV: id, tenant. Replies fields and values, or false. Writes nothing.
local batch = TAG .. 'batch:' .. ARGV[1]
if redis.call('HGET', batch, 'tenant') ~= ARGV[2] then return false end
return redis.call('HGETALL', batch)
