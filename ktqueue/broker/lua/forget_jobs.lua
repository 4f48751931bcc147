-- Deletes ended jobs whose answers are stored elsewhere. ARGV: ids.
-- Replies how many were deleted. A job that has not ended stays, and so does one whose webhook is due.
local deleted = 0
for _, id in ipairs(ARGV) do
  local job = TAG .. 'job:' .. id
  local state, tenant, held = unpack(redis.call('HMGET', job, 'state', 'tenant', 'held'))
  if state and state ~= 'queued' and state ~= 'running' and not redis.call('ZSCORE', TAG .. 'webhooks', id) then
    for entry in string.gmatch(held or '', '[^\n]+') do
      if redis.call('ZREM', TAG .. 'held', entry) == 1 then add_stored(tenant, -string.match(entry, '^%d+')) end
    end
    if redis.call('ZREM', TAG .. 'failed', redis.call('HSTRLEN', job, 'request') .. ' ' .. id) == 1 then
      add_to(TAG .. 'failed:bytes', nil, -redis.call('HSTRLEN', job, 'request'))
    end
    redis.call('ZREM', TAG .. 'ended', id)
    redis.call('DEL', job, TAG .. 'journal:' .. id)
    deleted = deleted + 1
  end
end
return deleted
