-- A worker begins with a job that may be what killed its workers before: until it shows a token, a death is its doing.
-- ARGV: worker id, lease in us, job id.
-- Promises: only under a live lease; one job at a time, the last one told.
local worker, lease = ARGV[1], tonumber(ARGV[2])
if not lease_lives(worker, now_us(), lease) then return lease_lost(worker) end
redis.call('HSET', TAG .. 'worker:' .. worker, 'trial', ARGV[3])
return 1
