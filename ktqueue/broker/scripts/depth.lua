-- How much waits and runs. Replies a list of {model, interactive waiting, batch waiting, running}. Writes nothing.
local live = {}
for _, model in ipairs(redis.call('HKEYS', TAG .. 'models')) do live[model] = 0 end
local backlog = redis.call('HGETALL', TAG .. 'backlog')
for i = 1, #backlog, 2 do live[backlog[i]] = tonumber(backlog[i + 1]) end
local reply = {}
for model, count in pairs(live) do
  local interactive = redis.call('ZCARD', TAG .. 'queue:interactive:' .. model)
  local batch = redis.call('ZCARD', TAG .. 'queue:batch:' .. model)
  reply[#reply + 1] = { model, interactive, batch, count - interactive - batch }
end
return reply
