-- Deletes a file's record. ARGV: id, tenant. Replies 1, or 0 if the tenant has no such file.
-- Refuses with IN_USE BATCH if the file is the input of a batch that has not ended.
local id, tenant = ARGV[1], ARGV[2]
local file, bytes = TAG .. 'file:' .. id, TAG .. 'files:bytes'
local owner, size = unpack(redis.call('HMGET', file, 'tenant', 'size'))
if owner and owner ~= tenant then return 0 end
local reader = owner and batch_inputs(tenant)[id]
if reader then return redis.error_reply('IN_USE ' .. reader) end
redis.call('ZREM', TAG .. 'files:expiry', id)
redis.call('ZREM', TAG .. 'files:of:' .. tenant, id)
if not owner then return 0 end
redis.call('DEL', file)
-- 0 - 0 is 0, but -0 is '-0' for older servers, which refuse it.
if redis.call('HINCRBY', bytes, tenant, 0 - size) <= 0 then redis.call('HDEL', bytes, tenant) end
return 1
