-- Deletes a file's record. ARGV: id, tenant. Replies 1, or 0 if the tenant has no such file.
-- Refuses with IN_USE BATCH if the file is the input of a batch that has not ended.
-- Promises: for a day, a list can begin after a deleted file, unless 20,000 others of the tenant were deleted since.
local DAY, MAX_DELETED = 86400000, 20000 -- ms; more than two of the longest pages
local id, tenant = ARGV[1], ARGV[2]
local file, bytes = TAG .. 'file:' .. id, TAG .. 'files:bytes'
local owner, size = unpack(redis.call('HMGET', file, 'tenant', 'size'))
if owner and owner ~= tenant then return 0 end
local reader = owner and batch_inputs(tenant)[id]
if reader then return redis.error_reply('IN_USE ' .. reader) end
redis.call('ZREM', TAG .. 'files:expiry', id)
local list, deleted = TAG .. 'files:of:' .. tenant, TAG .. 'files:deleted:' .. tenant
local place = redis.call('ZSCORE', list, id)
redis.call('ZREM', list, id)
if place then
  redis.call('ZADD', deleted, place, id)
  if redis.call('ZCARD', deleted) > MAX_DELETED then -- forget the one farthest from here, as pages are read in order
    local farthest = redis.call('ZRANK', deleted, id) < MAX_DELETED / 2 and -1 or 0
    redis.call('ZREMRANGEBYRANK', deleted, farthest, farthest)
  end
  redis.call('PEXPIRE', deleted, DAY)
end
if not owner then return 0 end
redis.call('DEL', file)
-- 0 - 0 is 0, but -0 is '-0' for older servers, which refuse it.
if redis.call('HINCRBY', bytes, tenant, 0 - size) <= 0 then redis.call('HDEL', bytes, tenant) end
return 1
