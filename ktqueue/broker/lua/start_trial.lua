-- A worker starts a job that may have killed its workers before. Until it adds a token, a death counts for this job
-- only.
-- ARGV: worker id, lease in us, job id.
-- Promises: only under a valid lease; only the latest such job is on trial.
local worker, lease = ARGV[1], tonumber(ARGV[2])
if not lease_lives(worker, now_us(), lease) then return lease_lost(worker) end
redis.call('HSET', TAG .. 'worker:' .. worker, 'trial', ARGV[3])
return 1
