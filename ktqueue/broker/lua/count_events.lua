-- How many events the journals of these jobs have: the seq of the last one. ARGV: ids. Replies a number for each.
-- Writes nothing.
local reply = {}
for place, id in ipairs(ARGV) do
  local last = redis.call('XREVRANGE', TAG .. 'journal:' .. id, '+', '-', 'COUNT', 1)[1]
  reply[place] = last and tonumber(string.match(last[1], '^%d+')) or 0
end
return reply
