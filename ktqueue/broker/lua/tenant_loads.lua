-- What counts for tenants' limits. ARGV: tenant*. Replies a list of {live jobs, queued jobs, queued bytes, stored
-- bytes}, in their order. Writes nothing.
local reply = {}
for _, name in ipairs(ARGV) do
  local live, queued, bytes = unpack(redis.call('HMGET', TAG .. 'tenant:' .. name, 'live', 'queued', 'bytes'))
  local stored = redis.call('HGET', TAG .. 'stored', name)
  reply[#reply + 1] = { tonumber(live or 0), tonumber(queued or 0), tonumber(bytes or 0), tonumber(stored or 0) }
end
return reply
