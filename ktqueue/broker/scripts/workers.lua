-- Workers whose lease lives: {id, card, facts (JSON), statistics (JSON), started, jobs running}*. Writes nothing.
local reply = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now_us()), '+inf')) do
  local field = redis.call('HMGET', TAG .. 'worker:' .. worker, 'card', 'facts', 'stats', 'started')
  if field[1] then
    reply[#reply + 1] = { worker, field[1], field[2], field[3], field[4], redis.call('HLEN', TAG .. 'running:' .. worker) }
  end
end
return reply
