-- Models known: {card}*. Writes nothing.
local reply = {}
for _, model in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'models:seen', '(' .. digits(now_us()), '+inf')) do
  local card = redis.call('HGET', TAG .. 'models', model)
  if card then reply[#reply + 1] = card end
end
return reply
