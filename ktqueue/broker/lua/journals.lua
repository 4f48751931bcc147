-- Prepended to every script, before `prelude.lua`: reads and writes the journals of jobs.
-- Events are opaque bytes.
-- Lua's own conversion keeps only 14 digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- Entries of a journal from `first` on. `...`: further words of the command.
local function journal_of(id, first, ...)
  return ignore_wrong_type(redis.pcall('XRANGE', TAG .. 'journal:' .. id, first, '+', ...), {})
end

-- The seq of a journal's last event, or 0 if there is none.
local function tail_of(id)
  local last = ignore_wrong_type(redis.pcall('XREVRANGE', TAG .. 'journal:' .. id, '+', '-', 'COUNT', 1), {})
  if #last == 0 then return 0 end
  return tonumber(string.match(last[1][1], '^%d+'))
end

-- Append first, then publish: no reader can see an event that is not in the journal. Returns the number of live readers
-- that this server knows of.
local function append(id, seq, event)
  local key = TAG .. 'journal:' .. id
  if not ignore_wrong_type(redis.pcall('XADD', key, digits(seq) .. '-0', 'e', event), nil) then
    redis.call('DEL', key) -- the events before this one are lost, which readers notice
    redis.call('XADD', key, digits(seq) .. '-0', 'e', event)
  end
  return redis.call('PUBLISH', key, digits(seq) .. ':' .. event)
end
