-- Waiting jobs that only some workers of their model can take.
-- Replies {model, format, digest or '-', interactive jobs, batch jobs, us since such a worker was last seen}*, at most
-- 64. Writes nothing.
local now = now_us()
local reply = {}
for _, one in ipairs(bound_queues(MAX_BOUND)) do
  local format, digest = string.match(one.takers, '^(%d+):(.*)$')
  local interactive = redis.call('ZCARD', bound_key('interactive', one.takers, one.model))
  local batch = redis.call('ZCARD', bound_key('batch', one.takers, one.model))
  if interactive + batch > 0 then
    reply[#reply + 1] = { one.model, tonumber(format), digest, interactive, batch, now - one.since }
  end
end
return reply
