-- Stores or finds the latest answer of a conversation.
-- ARGV: digest of tenant and conversation, the new value or '', TTL in ms.
-- Replies the value before, or false. Without a new value it writes nothing.
local key = TAG .. 'conversation:' .. ARGV[1]
local former = redis.call('GET', key)
if ARGV[2] ~= '' then redis.call('SET', key, ARGV[2], 'PX', ARGV[3]) end
return former
