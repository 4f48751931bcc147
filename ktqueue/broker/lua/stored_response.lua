-- Stores, reads or deletes a response of /v1/responses.
-- ARGV: store, read or delete, tenant, digest of tenant and response, the value, TTL in ms, most bytes of a tenant.
-- Replies the value for read, else how many responses the tenant has stored.
-- Promises: the responses of one tenant never have more bytes than it may use; the oldest are deleted first.
local action, tenant, name = ARGV[1], ARGV[2], ARGV[3]
local key, list = TAG .. 'response:' .. name, TAG .. 'responses:' .. tenant
if action == 'read' then return redis.call('GET', key) end
if action == 'delete' then
  redis.call('DEL', key)
  return redis.call('ZCARD', list)
end
local value, ttl, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_us()
redis.call('SET', key, value, 'PX', ttl)
redis.call('ZADD', list, now, name)
redis.call('PEXPIRE', list, ttl)
-- Bytes are counted anew from the newest on: there are at most 1,000 entries, and a length costs Redis nothing.
local bytes = 0
for place, stored in ipairs(redis.call('ZREVRANGE', list, 0, -1)) do
  local size = redis.call('STRLEN', TAG .. 'response:' .. stored)
  bytes = bytes + size
  if size == 0 or place > 1000 or (bytes > most and place > 1) then
    redis.call('DEL', TAG .. 'response:' .. stored)
    redis.call('ZREM', list, stored)
  end
end
return redis.call('ZCARD', list)
