-- A worker renews its lease and publishes its statistics.
-- ARGV: worker id, lease in us, statistics (JSON), model TTL in ms, the last step that was acknowledged.
-- Promises: an expired lease is never renewed. Nor is one whose acknowledged step the server has lost: the worker may
-- have ended jobs that run again here, and commits nothing while it has no others.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
tick(now, lease, ARGV[4])
local record = TAG .. 'worker:' .. worker
local model, card, newer_fields, step = unpack(redis.call('HMGET', record, 'model', 'card', 'more', 'step'))
if not model or tonumber(step or -1) < tonumber(ARGV[5]) then return lease_lost(worker) end
redis.call('HSET', record, 'stats', ARGV[3], 'home', home_of(worker))
redis.call('PEXPIRE', TAG .. 'warm:' .. worker, math.floor(lease * 30 / 1000))
renew(worker, now, lease, model, card, newer_fields, ARGV[4])
return 1
