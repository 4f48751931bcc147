-- Lists a tenant's batches, newest first.
-- ARGV: tenant, most batches, id of the batch after which the list begins, or ''.
-- Replies {list of {id, fields and values}, 1 if there are more}, or false if there is no such batch to begin after.
-- Looks at no more ids than a tenant's list can have. Writes nothing.
local list, most = TAG .. 'batches:of:' .. ARGV[1], tonumber(ARGV[2])
local first = 0
if ARGV[3] ~= '' then
  local rank = redis.call('ZREVRANK', list, ARGV[3])
  -- A batch that newer ones have displaced was the last one of the list.
  if not rank then return redis.call('HGET', TAG .. 'batch:' .. ARGV[3], 'tenant') == ARGV[1] and { {}, 0 } end
  first = rank + 1
end
local found = {}
for _, id in ipairs(redis.call('ZREVRANGE', list, first, -1)) do
  local fields = redis.call('HGETALL', TAG .. 'batch:' .. id)
  if #fields > 0 then
    if #found == most then return { found, 1 } end
    found[#found + 1] = { id, fields }
  end
end
return { found, 0 }
