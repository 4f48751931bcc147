-- Ended jobs whose webhook is to be called.
-- ARGV: most ids, ids that are done*.
-- Replies the ids that are due, oldest first.
-- Promises: an id stays until it is done; removing it twice changes nothing.
for i = 2, #ARGV, 1000 do
  redis.call('ZREM', TAG .. 'webhooks', unpack(ARGV, i, math.min(i + 999, #ARGV)))
  for k = i, math.min(i + 999, #ARGV) do redis.call('HDEL', TAG .. 'job:' .. ARGV[k], 'webhook') end
end
return redis.call('ZRANGE', TAG .. 'webhooks', 0, ARGV[1] - 1)
