-- Cancels a job for a client.
-- ARGV: id, cancelled event, job TTLs (see `finish`), journal TTL in ms.
-- Replies the job, or false if there is none.
-- Promises: a queued job ends now; a running job's worker learns of it with its next commit; an ended job is unchanged.
local id = ARGV[1]
local job = TAG .. 'job:' .. id
local field = redis.call('HMGET', job, 'state', 'class', 'model', 'worker')
if field[1] == 'queued' then
  dequeue(id, field[2], field[3])
  finish(id, 'cancelled', ARGV[2], tail_of(id) + 1, now_us(), ARGV[3], ARGV[4])
elseif field[1] == 'running' then
  redis.call('HSET', job, 'cancel', 1)
  redis.call('HSETNX', TAG .. 'cancels:' .. field[4], id, 0)
end
return describe(id)
