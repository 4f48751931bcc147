-- A worker renews its lease and publishes its statistics.
-- ARGV: worker id, lease in us, statistics (JSON), model TTL in ms.
-- Promises: an expired lease is never renewed.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
tick(now, lease, ARGV[4])
local record = TAG .. 'worker:' .. worker
local model, card, newer_fields = unpack(redis.call('HMGET', record, 'model', 'card', 'more'))
if not model then return lease_lost(worker) end
redis.call('HSET', record, 'stats', ARGV[3], 'home', home_of(worker))
redis.call('PEXPIRE', TAG .. 'warm:' .. worker, math.floor(lease * 30 / 1000))
renew(worker, now, lease, model, card, newer_fields, ARGV[4])
return 1
