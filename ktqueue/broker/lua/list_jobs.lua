-- Lists jobs, newest first.
-- ARGV: most jobs, state or '', most bytes of requests, tenant or '', class or '', model or ''.
-- Searches at most 2,000 live (for state failed: failed) and 2,000 ended jobs, and stops early if the requests are big.
-- Replies a list of {id, job as in `get_job`}. Writes nothing.
local limit, room = tonumber(ARGV[1]), tonumber(ARGV[3])
local wanted = { ARGV[2], ARGV[4], ARGV[5], ARGV[6] }

-- Whether a job exists and has the wanted {state, tenant, class, model}.
local function fits(fields)
  for i = 1, 4 do
    if wanted[i] ~= '' and fields[i] ~= wanted[i] then return false end
  end
  return fields[1]
end

local reply, listed = {}, {}
for _, index in ipairs({ ARGV[2] == 'failed' and 'failed' or 'live', 'ended' }) do
  for _, entry in ipairs(redis.call('ZREVRANGE', TAG .. index, 0, 1999)) do
    local id = index == 'failed' and string.match(entry, '^%d+ (.*)$') or entry
    if #reply >= limit or room < 0 then return reply end
    local fields = redis.call('HMGET', TAG .. 'job:' .. id, 'state', 'tenant', 'class', 'model')
    if fits(fields) and not listed[id] then
      listed[id] = true
      room = room - redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request')
      reply[#reply + 1] = { id, describe(id) }
    end
  end
end
return reply
