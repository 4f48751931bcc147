-- The files that have expired first. ARGV: most files. Replies a list of {id, tenant}; the tenant of a file without a
-- record is ''. Writes nothing.
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'files:expiry', '-inf', now_us(), 'LIMIT', 0, ARGV[1])) do
  found[#found + 1] = { id, redis.call('HGET', TAG .. 'file:' .. id, 'tenant') or '' }
end
return found
