-- A worker puts jobs aside that it cannot read: a newer version has written their records or their journals.
-- ARGV: worker id, lease in us, cancelled event, expired event, job TTL in ms, journal TTL in ms, (job id, format)*.
-- Promises: only under a live lease; jobs that are not its own are left alone; they go to workers that read the format,
-- and it does not count as a try.
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
