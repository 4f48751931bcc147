-- The job of a conversation.
-- ARGV: digest of tenant and conversation, what to remember from now on or '', TTL in ms.
-- Replies what was remembered before, or false. Writes nothing where it is given nothing.
local key = TAG .. 'conversation:' .. ARGV[1]
local former = redis.call('GET', key)
if ARGV[2] ~= '' then redis.call('SET', key, ARGV[2], 'PX', ARGV[3]) end
return former
