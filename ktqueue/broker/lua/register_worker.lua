-- Registers a worker under a new id.
-- ARGV: worker id, lease in us, model, model card, facts (JSON), model TTL in ms, newer fields of the card that older
--       versions cannot read (JSON), the model's digest or '', the newest record format that the worker can read, 1 if
--       it reads the owner of a job that is handed to it.
-- Promises: the id is the fencing token, and no other worker ever has it; registering twice is harmless.
local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_us()
tick(now, lease, ARGV[6])
local record = TAG .. 'worker:' .. worker
redis.call('HSET', record, 'model', ARGV[3], 'card', ARGV[4], 'facts', ARGV[5], 'started', digits(now), 'stats', '{}',
  'step', 0, 'claim', 0, 'slots', 0, 'more', ARGV[7], 'digest', ARGV[8], 'format', ARGV[9], 'owners', ARGV[10])
renew(worker, now, lease, ARGV[3], ARGV[4], ARGV[7], ARGV[6])
return 1
