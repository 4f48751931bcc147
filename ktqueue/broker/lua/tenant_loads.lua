-- What counts for tenants' limits. ARGV: tenant*. Replies a list of {live jobs, queued jobs, queued bytes, stored
-- bytes}, in their order. Writes nothing.
local reply = {}
for _, name in ipairs(ARGV) do
  local has = redis.call('HMGET', TAG .. 'tenant:' .. name, 'live', 'queued', 'bytes')
  local stored = redis.call('HGET', TAG .. 'stored', name)
  reply[#reply + 1] = { tonumber(has[1] or 0), tonumber(has[2] or 0), tonumber(has[3] or 0), tonumber(stored or 0) }
end
return reply
