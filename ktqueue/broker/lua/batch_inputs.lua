-- Prepended to every script, after `prelude.lua`.
-- The input files of a tenant's batches that have not ended: for each file's id, the id of such a batch.
local function batch_inputs(tenant)
  local inputs = {}
  for _, batch in ipairs(redis.call('SMEMBERS', TAG .. 'batches:open:' .. tenant)) do
    local request = redis.call('HGET', TAG .. 'batch:' .. batch, 'request')
    if request then inputs[cjson.decode(request).input_file_id] = batch end
  end
  return inputs
end

