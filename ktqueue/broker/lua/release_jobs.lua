-- A worker hands jobs back without using up an attempt, or leaves.
-- ARGV: worker id, lease in us, '1' to leave, cancelled event, expired event, job TTLs (see `finish`), journal
--        TTL in ms, job id*.
-- Promises: only under a valid lease; other workers' jobs are left alone; leaving hands all its jobs back.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
local running = TAG .. 'running:' .. worker
local events = { cancelled = ARGV[4], expired = ARGV[5] }
local ids = { unpack(ARGV, 8) }
if ARGV[3] == '1' then ids = redis.call('HKEYS', running) end
for _, id in ipairs(ids) do
  local tail = redis.call('HGET', running, id)
  if tail then
    redis.call('HDEL', running, id)
    redis.call('HDEL', TAG .. 'cancels:' .. worker, id)
    give_back(id, tonumber(tail), now, 'released', 0, events, ARGV[6], ARGV[7])
  end
end
if ARGV[3] == '1' then delete_worker(worker) end
return 1
