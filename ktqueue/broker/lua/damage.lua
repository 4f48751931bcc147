-- Prepended to every script, before `journals.lua`: reads and writes what may be damaged, by hand or by other programs.
-- The reply of `redis.pcall`, or `default` if the key has a type that none of ours has.
local function ignore_wrong_type(reply, default)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then return default end
  error(reply.err)
end

-- A count or sum, and 0 for one that is missing or damaged.
local function count_of(text)
  local count = tonumber(text or '')
  return count and count >= 0 and count < 2 ^ 53 and count or 0
end

-- The text under a key. Nil if there is none, or if the key has another type.
local function text_of(key)
  local text = redis.pcall('GET', key)
  return type(text) == 'string' and text or nil
end

-- The key of a hash or zset, which is deleted first if it has another type: no script can read it, and the scrub
-- restores what it says.
local function of_type(kind, key)
  local found = redis.pcall(kind == 'hash' and 'HGET' or 'ZSCORE', key, '')
  if ignore_wrong_type(found, nil) == nil then redis.call('DEL', key) end
  return key
end

-- Add to a count: under a key, or in a field of a hash. A damaged one begins anew, and the scrub restores it.
local function add_to(key, field, by)
  local count = field and redis.pcall('HINCRBY', key, field, by) or not field and redis.pcall('INCRBY', key, by)
  if type(count) == 'number' then return count end
  count = math.max(0, by)
  local text = string.format('%.0f', count)
  if field then redis.call('HSET', of_type('hash', key), field, text) else redis.call('SET', key, text) end
  return count
end

