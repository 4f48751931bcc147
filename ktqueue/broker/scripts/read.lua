-- A page of a journal.
-- ARGV: id, last seq seen, most entries.
-- Replies {state of the job or false, seq of the last event, entries after the one seen}. Writes nothing.
local id = ARGV[1]
local state = redis.call('HGET', TAG .. 'job:' .. id, 'state')
local entries = redis.call('XRANGE', TAG .. 'journal:' .. id, '(' .. ARGV[2] .. '-0', '+', 'COUNT', ARGV[3])
return { state, tail_of(id), entries }
