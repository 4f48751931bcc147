-- Prepended to every script, after `prelude.lua`.
-- The input files of a tenant's batches that have not ended: for each file's id, the id of such a batch.
local function batch_inputs(tenant)
  local inputs = {}
  for _, batch in ipairs(redis.call('SMEMBERS', TAG .. 'batches:open:' .. tenant)) do
    local is_json, request = pcall(cjson.decode, redis.pcall('HGET', TAG .. 'batch:' .. batch, 'request'))
    local file = is_json and type(request) == 'table' and request.input_file_id
    if file then inputs[file] = batch end -- a damaged batch has none
  end
  return inputs
end

