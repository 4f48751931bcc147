-- The batches that have not ended, at most 256 of them. Replies a list of {status, facts or false, 1 if it has an owner
-- else 0, speed or false}. Writes nothing.
local now, found = now_us(), {}
local live = redis.call('ZRANGE', TAG .. 'batches', 0, 255, 'WITHSCORES')
for i = 1, #live, 2 do
  local status, facts, speed = unpack(redis.pcall('HMGET', TAG .. 'batch:' .. live[i], 'status', 'facts', 'speed'))
  if status then found[#found + 1] = { status, facts, tonumber(live[i + 1]) > now and 1 or 0, speed } end
end
return found
