-- The files that have expired first, except for inputs of batches that have not ended. ARGV: most files.
-- Replies a list of {id, tenant}; the tenant of a file without a record is ''. Writes nothing.
local MAX_LOOKED_AT = 5000 -- of which at most twice `broker.max_open_batches` of each tenant are inputs
local now, inputs, found = now_us(), {}, {}
local looked = redis.call('ZRANGEBYSCORE', TAG .. 'files:expiry', '-inf', now, 'LIMIT', 0, MAX_LOOKED_AT)
for _, id in ipairs(looked) do
  if #found == tonumber(ARGV[1]) then break end
  local tenant = redis.call('HGET', TAG .. 'file:' .. id, 'tenant') or ''
  inputs[tenant] = inputs[tenant] or batch_inputs(tenant)
  if not inputs[tenant][id] then found[#found + 1] = { id, tenant } end
end
return found
