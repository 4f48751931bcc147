-- Jobs, newest first.
-- ARGV: most jobs, state or '', most bytes of requests.
-- Looks at 2,000 live and 2,000 ended jobs at most, and stops early where the requests are big.
-- Replies a list of {id, job as the `job` script tells it}. Writes nothing.
local limit, wanted, room = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local reply = {}
for _, index in ipairs({ 'live', 'ended' }) do
  for _, id in ipairs(redis.call('ZREVRANGE', TAG .. index, 0, 1999)) do
    if #reply >= limit or room < 0 then return reply end
    local state = redis.call('HGET', TAG .. 'job:' .. id, 'state')
    if state and (wanted == '' or state == wanted) then
      room = room - redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request')
      reply[#reply + 1] = { id, describe(id) }
    end
  end
end
return reply
