-- A failed job was submitted again: its request is deleted, and its record names the new job.
-- ARGV: id, id of the new job.
-- Replies 1, or 0 if the record has expired. A repeated call changes nothing.
local job = TAG .. 'job:' .. ARGV[1]
if redis.call('EXISTS', job) == 0 then return 0 end
local entry = redis.call('HSTRLEN', job, 'request') .. ' ' .. ARGV[1]
if redis.call('ZREM', TAG .. 'failed', entry) == 1 then
  add_to(TAG .. 'failed:bytes', nil, -redis.call('HSTRLEN', job, 'request'))
end
drop_request(job)
redis.call('HSET', job, 'retried', ARGV[2])
return 1
