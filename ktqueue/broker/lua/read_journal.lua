-- Reads a page of a journal.
-- ARGV: id, last seq seen, most entries, most bytes of them. Two entries are returned however big they are, so that a
--       reader that repeats its last entry still makes progress.
-- Replies {state of the job or false, seq of the last event, entries after the last seq seen}. Writes nothing.
local FETCHED = 32 -- entries at once
local id, limit, room = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local state = redis.call('HGET', TAG .. 'job:' .. id, 'state')
local entries, from = {}, ARGV[2] .. '-0'
repeat
  local some = journal_of(id, '(' .. from, 'COUNT', math.min(FETCHED, limit - #entries))
  for _, entry in ipairs(some) do
    from, room = entry[1], room - #entry[2][2]
    if room < 0 and #entries >= 2 then break end
    entries[#entries + 1] = entry
  end
until room < 0 or #some < FETCHED or #entries >= limit
return { state, tail_of(id), entries }
