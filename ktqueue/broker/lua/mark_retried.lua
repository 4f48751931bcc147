-- A failed job has been sent again as another one: its request goes, the record says where.
-- ARGV: id, id of the new job.
-- Replies 1; 0 where the record has expired. Once more changes nothing.
local job = TAG .. 'job:' .. ARGV[1]
if redis.call('EXISTS', job) == 0 then return 0 end
local entry = redis.call('HSTRLEN', job, 'request') .. ' ' .. ARGV[1]
if redis.call('ZREM', TAG .. 'failed', entry) == 1 then
  redis.call('INCRBY', TAG .. 'failed:bytes', -redis.call('HSTRLEN', job, 'request'))
end
drop_request(job)
redis.call('HSET', job, 'retried', ARGV[2])
return 1
