-- What counts for tenants' limits. ARGV: tenant*. Replies a list of {live jobs, queued jobs, queued bytes, stored
-- bytes}, in their order. Writes nothing.
local reply = {}
for _, name in ipairs(ARGV) do
  local live, queued, bytes = unpack(redis.pcall('HMGET', TAG .. 'tenant:' .. name, 'live', 'queued', 'bytes'))
  local stored = ignore_wrong_type(redis.pcall('HGET', TAG .. 'stored', name), false)
  reply[#reply + 1] = { count_of(live), count_of(queued), count_of(bytes), count_of(stored) }
end
return reply
