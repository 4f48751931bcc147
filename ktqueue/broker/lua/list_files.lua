-- A part of a tenant's list of files.
-- ARGV: tenant, purpose ('' any), asc or desc, id of the file after which it begins ('' none), or the place after which
--        it begins ('' none), most files to look at.
-- Replies {list of {id, fields and values}, place of the last file that was looked at, or '' at the end of the list},
-- or false if there was no such file to begin after, in the last day. Files that have expired are left out. Writes nothing.
local list, purpose, place = TAG .. 'files:of:' .. ARGV[1], ARGV[2], ARGV[5]
if ARGV[4] ~= '' then
  place = redis.call('ZSCORE', list, ARGV[4]) or redis.call('ZSCORE', TAG .. 'files:deleted:' .. ARGV[1], ARGV[4])
  if not place then return false end
end
local from, looked = place == '' and '' or '(' .. place, nil
if ARGV[3] == 'asc' then
  looked = redis.call('ZRANGEBYSCORE', list, from == '' and '-inf' or from, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[6])
else
  looked = redis.call('ZREVRANGEBYSCORE', list, from == '' and '+inf' or from, '-inf', 'WITHSCORES', 'LIMIT', 0, ARGV[6])
end
local found, now = {}, now_us()
for index = 1, #looked, 2 do
  local file = TAG .. 'file:' .. looked[index]
  local expires, its_purpose = unpack(redis.call('HMGET', file, 'expires', 'purpose'))
  if (tonumber(expires or '') or 0) > now and (purpose == '' or its_purpose == purpose) then
    found[#found + 1] = { looked[index], redis.call('HGETALL', file) }
  end
end
return { found, #looked == 2 * ARGV[6] and looked[#looked] or '' }
