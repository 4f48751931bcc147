-- A worker's process has exited: its lease expires now, and the next reap puts its jobs back into the queue.
-- ARGV: worker id, 1 if none of its jobs can have caused the exit, else ''.
-- Promises: nothing happens if the worker has left or has no lease.
if redis.call('ZSCORE', TAG .. 'leases', ARGV[1]) then
  redis.call('ZADD', TAG .. 'leases', 'XX', 1, ARGV[1])
  if ARGV[2] ~= '' then redis.call('HSET', TAG .. 'worker:' .. ARGV[1], 'blameless', 1) end
end
return 1
