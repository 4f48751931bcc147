-- Whose store it is. ARGV: the installation that the store names, or '', and a name for this installation if it has none.
-- Replies the name of this installation; '' if it has none, and the store names another one.
local key = TAG .. 'installation'
local name = redis.call('GET', key)
if not name and ARGV[1] == '' then
  name = ARGV[2]
  redis.call('SET', key, name)
end
return name or ''
