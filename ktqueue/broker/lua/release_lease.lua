-- A worker's process is known to have ended: its lease ends now, and its jobs go to others with the next reap.
-- ARGV: worker id, 1 where none of its jobs can be to blame, else ''.
-- Promises: nothing happens where the worker has left, or is dead already.
if redis.call('ZSCORE', TAG .. 'leases', ARGV[1]) then
  redis.call('ZADD', TAG .. 'leases', 'XX', 1, ARGV[1])
  if ARGV[2] ~= '' then redis.call('HSET', TAG .. 'worker:' .. ARGV[1], 'blameless', 1) end
end
return 1
