-- A worker hands back jobs that it cannot read, because a newer version wrote their records or journals.
-- ARGV: worker id, lease in us, cancelled event, expired event, job TTLs (see `finish`), journal TTL in ms, (job id,
--       format)*.
-- Promises: only under a valid lease; other workers' jobs are left alone; the jobs go to workers that can read the
-- format, and it does not count as an attempt.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
local running, events = TAG .. 'running:' .. worker, { cancelled = ARGV[3], expired = ARGV[4] }
for i = 7, #ARGV, 2 do
  local id = ARGV[i]
  local tail = redis.call('HGET', running, id)
  if tail then
    redis.call('HDEL', running, id)
    redis.call('HDEL', TAG .. 'cancels:' .. worker, id)
    redis.call('HSET', TAG .. 'job:' .. id, 'format', ARGV[i + 1])
    give_back(id, tonumber(tail), now, 'released', 0, events, ARGV[5], ARGV[6])
  end
end
return 1
