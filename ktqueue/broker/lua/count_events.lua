-- How many events the journals of these jobs have. ARGV: ids. Replies a number for each. Writes nothing.
local reply = {}
for place, id in ipairs(ARGV) do reply[place] = redis.call('XLEN', TAG .. 'journal:' .. id) end
return reply
