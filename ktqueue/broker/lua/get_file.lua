-- One file of a tenant. ARGV: id, tenant. Replies fields and values, or false if it is unknown or has expired,
-- which it also has if its record does not say when. Writes nothing.
local file = TAG .. 'file:' .. ARGV[1]
local tenant, expires = unpack(redis.call('HMGET', file, 'tenant', 'expires'))
if tenant ~= ARGV[2] or (tonumber(expires or '') or 0) <= now_us() then return false end
return redis.call('HGETALL', file)
