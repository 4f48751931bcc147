-- Takes a batch without a living owner.
-- ARGV: owner, lease in us, 1 if only of a caller without owned batches, else '', most attempts, trial in us.
-- Replies {id, fence, now in us, fields and values}, or false if there is none.
-- Of the first 1,024 such batches it takes one of the caller that has the fewest batches with an owner. Where there are
-- API keys, a tenant is one caller.
-- An owner that neither made progress nor gave the batch back died with it. A batch with two such owners is suspect: it
-- is on trial when the next owner begins it. A death on trial is a failure of that batch. Other deaths only count.
-- Promises: a batch has one owner at a time. Each owner has a larger fence than those before it. An owner has one batch
-- on trial at a time, and its death then counts for no other batch.
local MAX_FREE, MAX_OWNED = 1024, 256
local SUSPECT = 2 -- deaths of owners in a row without progress
local MOST = 10 * tonumber(ARGV[4]) -- such deaths, after which each further one is a failure, on trial or not
local DAY = 86400000 -- ms in which it is known whom an owner had on trial
local now, lease, live = now_us(), tonumber(ARGV[2]), TAG .. 'batches'
-- If the clock went back, no lease may last longer for it.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '(' .. digits(now + 2 * lease), '+inf', 'LIMIT', 0, MAX_FREE)) do
  redis.call('ZADD', live, now + lease, id)
end
-- Who has created a batch, or nil if its record was deleted by hand, or has another type.
local function caller_of(id)
  local tenant, caller = unpack(redis.pcall('HMGET', TAG .. 'batch:' .. id, 'tenant', 'caller'))
  return tenant and tenant .. ' ' .. (caller or '')
end

-- The batch that an owner had on trial at a time, or nil.
local function on_trial(owner, time)
  local id, last = string.match(redis.call('GET', TAG .. 'batches:trial:' .. owner) or '', '^(%S+) (%S+)$')
  return id and time <= tonumber(last) and id or nil
end

-- Failures and deaths of a batch's owners in a row without progress, with what became of the last one.
local function failures_of(id)
  local owner, fence, progress, failures, deaths = unpack(redis.call(
    'HMGET', TAG .. 'batch:' .. id, 'owner', 'fence', 'progress', 'failures', 'deaths'))
  failures, deaths = count_of(failures), count_of(deaths)
  if not owner or progress == fence then return failures, deaths end
  local tried = on_trial(owner, redis.call('ZSCORE', live, id) - lease) -- when the owner last renewed its lease
  if tried and tried ~= id then return failures, deaths end
  return failures + ((tried or deaths >= MOST) and 1 or 0), deaths + 1
end

-- Whether this owner runs a batch that is on trial now.
local function tries()
  local id = on_trial(ARGV[1], now)
  if not id or now >= tonumber(redis.call('ZSCORE', live, id) or 0) then return false end
  local owner, fence, progress = unpack(redis.call('HMGET', TAG .. 'batch:' .. id, 'owner', 'fence', 'progress'))
  return owner == ARGV[1] and progress ~= fence
end

local owned = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '(' .. digits(now), '+inf', 'LIMIT', 0, MAX_OWNED)) do
  local caller = caller_of(id)
  if caller then owned[caller] = (owned[caller] or 0) + 1 end
end
local most_deaths, chosen, fewest, failures, deaths = tries() and SUSPECT or math.huge
for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', digits(now), 'LIMIT', 0, MAX_FREE)) do
  local caller = caller_of(id)
  if not caller then
    redis.call('ZREM', live, id)
  elseif (owned[caller] or 0) < (fewest or (ARGV[3] ~= '' and 1 or math.huge)) then
    local its_failures, its_deaths = failures_of(id)
    if its_deaths < most_deaths then
      chosen, fewest, failures, deaths = id, owned[caller] or 0, its_failures, its_deaths
    end
  end
end
if not chosen then return false end
local batch = TAG .. 'batch:' .. chosen
redis.call('ZADD', live, now + lease, chosen)
-- The time, so that no two owners have the same one even if Redis lost its last second, in which the batch was taken.
local fence = math.max(now, count_of(redis.call('HGET', batch, 'fence')) + 1)
redis.call('HSET', batch, 'owner', ARGV[1], 'fence', digits(fence), 'failures', failures, 'deaths', deaths)
if deaths >= SUSPECT then
  redis.call('SET', TAG .. 'batches:trial:' .. ARGV[1], chosen .. ' ' .. digits(now + ARGV[5]), 'PX', DAY)
end
return { chosen, fence, digits(now), redis.call('HGETALL', batch) }
