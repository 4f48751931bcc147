-- Known models: {card, newer fields of the card that older versions cannot read, or false}*. Writes nothing.
local reply = {}
for _, model in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'models:seen', '(' .. digits(now_us()), '+inf')) do
  local card = redis.call('HGET', TAG .. 'models', model)
  if card then reply[#reply + 1] = { card, redis.call('HGET', TAG .. 'models:more', model) } end
end
return reply
