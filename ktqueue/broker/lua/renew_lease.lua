-- A worker renews its lease and publishes its statistics.
-- ARGV: worker id, lease in us, statistics (JSON), model TTL in ms.
-- Promises: an expired lease is never renewed.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
tick(now, lease, ARGV[4])
local record = TAG .. 'worker:' .. worker
local field = redis.call('HMGET', record, 'model', 'card', 'more')
if not field[1] then return lease_lost(worker) end
redis.call('ZADD', TAG .. 'leases', now + lease, worker)
redis.call('HSET', record, 'stats', ARGV[3], 'home', home_of(worker))
redis.call('PEXPIRE', record, math.max(math.floor(lease * 30 / 1000), SPARE * ARGV[4]))
redis.call('PEXPIRE', TAG .. 'warm:' .. worker, math.floor(lease * 30 / 1000))
redis.call('HSET', TAG .. 'models', field[1], field[2])
redis.call('HSET', TAG .. 'models:more', field[1], field[3])
redis.call('ZADD', TAG .. 'models:seen', now + ARGV[4] * 1000, field[1])
redis.call('PEXPIRE', TAG .. 'models', SPARE * ARGV[4])
redis.call('PEXPIRE', TAG .. 'models:more', SPARE * ARGV[4])
redis.call('PEXPIRE', TAG .. 'models:seen', SPARE * ARGV[4])
return 1
