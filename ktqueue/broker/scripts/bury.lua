-- A worker's process is known to have ended: its lease ends now, and its jobs go to others with the next reap.
-- ARGV: worker id.
-- Promises: nothing happens where the worker has left, or is dead already.
redis.call('ZADD', TAG .. 'leases', 'XX', 1, ARGV[1])
return 1
