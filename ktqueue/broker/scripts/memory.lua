-- The server's memory: {bytes used, bytes allowed, 0 for no limit}. Writes nothing.
local told = redis.call('INFO', 'memory')
return { tonumber(string.match(told, 'used_memory:(%d+)')), tonumber(string.match(told, 'maxmemory:(%d+)') or 0) }
