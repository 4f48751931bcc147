-- Fails jobs that no worker of their model can take: the workers have another digest, or cannot read the record's
-- format.
-- ARGV: us to wait for such a worker while others serve the model, failed event for another digest, failed event for a
--       newer format, job TTLs (see `finish`), journal TTL in ms.
-- Replies the number of jobs that were failed.
-- Promises: no job is failed while no worker of the model is alive, or while one that can take it is; at most 256 per
-- call.
local patience, events = tonumber(ARGV[1]), { digest = ARGV[2], format = ARGV[3] }
local queues = bound_queues(MAX_BOUND)
if #queues == 0 then return 0 end
local now = now_us()
local workers = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now), '+inf')) do
  local model, digest, format = unpack(redis.call('HMGET', TAG .. 'worker:' .. worker, 'model', 'digest', 'format'))
  if model then
    workers[model] = workers[model] or {}
    table.insert(workers[model], { digest = digest or '', reads = tonumber(format or 1) })
  end
end
local failed = 0
for _, waiting in ipairs(queues) do
  local format, digest = string.match(waiting.takers, '^(%d+):(.*)$')
  local served, has_digest = workers[waiting.model], false
  local able = not served
  for _, worker in ipairs(served or {}) do
    local fits, reads = digest == '-' or worker.digest == digest, worker.reads >= tonumber(format)
    has_digest, able = has_digest or fits, able or (fits and reads)
  end
  local left = 0
  for _, class in ipairs({ 'interactive', 'batch' }) do
    local queue = bound_key(class, waiting.takers, waiting.model)
    if not able and now - waiting.since >= patience and failed < 256 then
      for _, id in ipairs(redis.call('ZRANGE', queue, 0, 255 - failed)) do
        redis.call('ZREM', queue, id)
        if redis.call('HGET', TAG .. 'job:' .. id, 'state') == 'queued' then
          finish(id, 'failed', has_digest and events.format or events.digest, tail_of(id) + 1, now, ARGV[4], ARGV[5])
          failed = failed + 1
        end
      end
    end
    left = left + redis.call('ZCARD', queue)
  end
  if left == 0 then
    redis.call('ZREM', TAG .. 'bound', waiting.name)
  elseif able then
    redis.call('ZADD', TAG .. 'bound', 'XX', now, waiting.name)
  end
end
return failed
