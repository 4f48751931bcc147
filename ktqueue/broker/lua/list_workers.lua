-- Workers with a valid lease: {id, card, facts (JSON), statistics (JSON), started, jobs running, us left of the lease,
-- us since its last step or false, newer fields of the card that older versions cannot read, or false}*. Writes
-- nothing.
local now = now_us()
local reply = {}
local leases = redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now), '+inf', 'WITHSCORES')
for i = 1, #leases, 2 do
  local worker = leases[i]
  local field = redis.call('HMGET', TAG .. 'worker:' .. worker, 'card', 'facts', 'stats', 'started', 'stepped', 'more')
  if field[1] then
    local stepped = tonumber(field[5] or '')
    reply[#reply + 1] = {
      worker, field[1], field[2], field[3], field[4], redis.call('HLEN', TAG .. 'running:' .. worker),
      leases[i + 1] - now, stepped and math.max(0, now - stepped) or false, field[6],
    }
  end
end
return reply
