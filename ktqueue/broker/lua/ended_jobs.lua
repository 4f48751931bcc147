-- Which of these jobs have ended, or are unknown. ARGV: ids. Replies their ids. Writes nothing.
local reply = {}
for _, id in ipairs(ARGV) do
  local state = redis.call('HGET', TAG .. 'job:' .. id, 'state')
  if state ~= 'queued' and state ~= 'running' then reply[#reply + 1] = id end
end
return reply
