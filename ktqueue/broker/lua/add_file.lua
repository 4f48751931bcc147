-- Adds a file to those of a tenant, or describes the one with this id anew. With the id '' it only looks for room.
-- ARGV: id, tenant, filename, purpose, bytes, life in us, most files and most bytes of the tenant ('' no limit).
-- Replies fields and values of the file; none if it only looked.
-- Refuses with FILES COUNT, BYTES COUNT.
-- Promises: a file counts once, however often it is added, and a tenant never gets more than it may have.
local id, tenant, size = ARGV[1], ARGV[2], tonumber(ARGV[5])
local file, list, bytes = TAG .. 'file:' .. id, TAG .. 'files:of:' .. tenant, TAG .. 'files:bytes'
local now = now_us()
local old_size = redis.call('HGET', file, 'size')
local count, used = redis.call('ZCARD', list), tonumber(redis.call('HGET', bytes, tenant) or 0)
if ARGV[7] ~= '' and not old_size and count >= tonumber(ARGV[7]) then return redis.error_reply('FILES ' .. count) end
if ARGV[8] ~= '' and used - (old_size or 0) + size > tonumber(ARGV[8]) then
  return redis.error_reply('BYTES ' .. digits(used))
end
if id == '' then return {} end
local created = redis.call('HGET', file, 'created') or digits(now)
redis.call('HSET', file, 'tenant', tenant, 'filename', ARGV[3], 'purpose', ARGV[4], 'size', ARGV[5],
  'created', created, 'expires', digits(created + ARGV[6]))
local last = 0 -- place in order of arrival, even if the clock goes back; no place of a deleted file is given again
for _, files in ipairs({ list, TAG .. 'files:deleted:' .. tenant }) do
  last = math.max(last, redis.call('ZREVRANGE', files, 0, 0, 'WITHSCORES')[2] or 0)
end
redis.call('ZADD', list, 'NX', last + 1, id)
redis.call('ZADD', TAG .. 'files:expiry', created + ARGV[6], id)
redis.call('HINCRBY', bytes, tenant, size - (old_size or 0))
return redis.call('HGETALL', file)
