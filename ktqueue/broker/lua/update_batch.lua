-- Renews the lease of a batch for its owner, and stores what the owner knows about it.
-- ARGV: id, fence, lease in us, status before, status after ('' '': it stays), facts ('': they stay), failures without
--        progress from now on, if there are facts, speed ('': it stays). A speed is no progress.
-- Replies {now in us, fields and values}. Refuses with LEASE_LOST if the batch has another owner.
-- Promises: a status only follows the one that the owner expects. Otherwise nothing is stored, and the reply shows it.
local ENDED = { failed = true, completed = true, expired = true, cancelled = true }
local id, from, to = ARGV[1], ARGV[4], ARGV[5]
local batch, now = TAG .. 'batch:' .. id, now_us()
local fence, status, tenant = unpack(redis.call('HMGET', batch, 'fence', 'status', 'tenant'))
if fence ~= ARGV[2] then return redis.error_reply('LEASE_LOST ' .. id) end
redis.call('ZADD', TAG .. 'batches', now + ARGV[3], id)
if from == '' or status == from then
  if ARGV[6] ~= '' then
    redis.call('HSET', batch, 'facts', ARGV[6], 'failures', ARGV[7], 'deaths', 0, 'progress', fence)
  end
  if ARGV[8] ~= '' then redis.call('HSET', batch, 'speed', ARGV[8]) end
  if to ~= '' then
    redis.call('HSET', batch, 'status', to, 'at:' .. to, digits(now))
    if ENDED[to] then redis.call('SREM', TAG .. 'batches:open:' .. tenant, id) end
  end
end
return { digits(now), redis.call('HGETALL', batch) }
