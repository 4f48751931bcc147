-- Waiting jobs that only some workers of their model can take.
-- Replies {model, format, digest or '-', interactive jobs, batch jobs, us since such a worker was last seen}*, at most
-- 64. Writes nothing.
local now = now_us()
local reply = {}
for _, queue in ipairs(bound_queues(MAX_BOUND)) do
  local format, digest = string.match(queue.takers, '^(%d+):(.*)$')
  local interactive = redis.call('ZCARD', bound_key('interactive', queue.takers, queue.model))
  local batch = redis.call('ZCARD', bound_key('batch', queue.takers, queue.model))
  if interactive + batch > 0 then
    reply[#reply + 1] = { queue.model, tonumber(format), digest, interactive, batch, now - queue.since }
  end
end
return reply
