-- Registers a worker under a new id.
-- ARGV: worker id, lease in us, model, model card, facts (JSON), model TTL in ms, newer fields of the card that older
--       versions cannot read (JSON), the model's digest or '', the newest record format that the worker can read.
-- Promises: the id is the fencing token, and no other worker ever has it; registering twice is harmless.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
tick(now, lease, ARGV[6])
local record = TAG .. 'worker:' .. worker
redis.call('ZADD', TAG .. 'leases', now + lease, worker)
redis.call('HSET', record, 'model', ARGV[3], 'card', ARGV[4], 'facts', ARGV[5], 'started', digits(now), 'stats', '{}',
  'step', 0, 'claim', 0, 'slots', 0, 'more', ARGV[7], 'digest', ARGV[8], 'format', ARGV[9])
redis.call('PEXPIRE', record, math.max(math.floor(lease * 30 / 1000), SPARE * ARGV[6]))
redis.call('HSET', TAG .. 'models', ARGV[3], ARGV[4])
redis.call('HSET', TAG .. 'models:more', ARGV[3], ARGV[7])
redis.call('ZADD', TAG .. 'models:seen', now + ARGV[6] * 1000, ARGV[3])
redis.call('PEXPIRE', TAG .. 'models', SPARE * ARGV[6])
redis.call('PEXPIRE', TAG .. 'models:more', SPARE * ARGV[6])
redis.call('PEXPIRE', TAG .. 'models:seen', SPARE * ARGV[6])
return 1
