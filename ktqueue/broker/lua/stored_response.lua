-- Stores, reads or deletes a response of /v1/responses.
-- ARGV: store, read or delete, tenant, digest of tenant and response, the value, TTL in ms, most bytes of a tenant.
-- Replies the value for read, else how many responses the tenant has stored.
-- Promises: the responses of one tenant never have more bytes than it may use; the oldest are deleted first.
local action, tenant, name = ARGV[1], ARGV[2], ARGV[3]
local key, list, sum = TAG .. 'response:' .. name, TAG .. 'responses:' .. tenant, TAG .. 'responses:bytes:' .. tenant
local function length_of(response)
  local length = redis.pcall('STRLEN', response)
  return type(length) == 'number' and length or 0 -- else it has another type
end
if action == 'read' then return text_of(key) or false end
local old = length_of(key)
if action == 'delete' then
  redis.call('DEL', key)
  redis.call('ZREM', list, name)
  if redis.call('EXISTS', sum) == 1 then redis.pcall('INCRBY', sum, -old) end -- a damaged sum is counted anew later
  return redis.call('ZCARD', list)
end
local value, ttl, most = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_us()
local is_counted = redis.call('EXISTS', sum) == 1
redis.call('SET', key, value, 'PX', ttl)
redis.call('ZADD', list, now, name)
redis.call('PEXPIRE', list, ttl)
local bytes = redis.pcall('INCRBY', sum, #value - old)
redis.call('PEXPIRE', sum, ttl)
is_counted = is_counted and type(bytes) == 'number' and bytes >= #value -- else it is damaged
if is_counted and bytes <= most and redis.call('ZCARD', list) <= 1000 then return redis.call('ZCARD', list) end
-- The sum does not know which responses have expired, so the bytes are counted anew, from the newest on. A tenth is
-- made free, so that this is rare.
bytes = 0
for place, stored in ipairs(redis.call('ZREVRANGE', list, 0, -1)) do
  local size = length_of(TAG .. 'response:' .. stored)
  if size == 0 or place > 1 and (place > 900 or bytes + size > most * 0.9) then
    redis.call('DEL', TAG .. 'response:' .. stored)
    redis.call('ZREM', list, stored)
  else
    bytes = bytes + size
  end
end
redis.call('SET', sum, bytes, 'PX', ttl)
return redis.call('ZCARD', list)
