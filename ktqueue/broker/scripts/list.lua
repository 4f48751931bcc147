-- Jobs, newest first.
-- ARGV: most jobs, state or '', most bytes of requests, tenant or ''.
-- Looks at 2,000 live and 2,000 ended jobs at most, and stops early where the requests are big.
-- Replies a list of {id, job as the `job` script tells it}. Writes nothing.
local limit, wanted, room, owner = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4]
local reply = {}
for _, index in ipairs({ 'live', 'ended' }) do
  for _, id in ipairs(redis.call('ZREVRANGE', TAG .. index, 0, 1999)) do
    if #reply >= limit or room < 0 then return reply end
    local at = redis.call('HMGET', TAG .. 'job:' .. id, 'state', 'tenant')
    if at[1] and (wanted == '' or at[1] == wanted) and (owner == '' or at[2] == owner) then
      room = room - redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request')
      reply[#reply + 1] = { id, describe(id) }
    end
  end
end
return reply
