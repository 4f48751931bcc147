-- Turns of tenants: which waiting job of a class and model is next. Prepended to every script.
-- KEYS[1]: the hash tag at the beginning of every key of the shard ("{ktq:s0}").
-- This is start-time fair queueing in tokens. Tenants take turns by weight, and the callers of a tenant take equal
-- turns in it: without API keys everybody is one tenant, and each client address is a caller. `turns` has the tenants
-- with waiting jobs, and `callers` the callers of a tenant, by their virtual time: the tokens that they were charged,
-- over the weight. The lowest is next. A claimed job is charged an estimate, and the rest when it ends. The member
-- ' ' is the clock: the virtual time of the last turn. Who comes back starts at the clock, so a pause earns nothing.
-- `line` has the waiting jobs of a caller by arrival and priority, one line for each record format. `front` has jobs
-- that were charged already, because they lost their worker: they go first.
-- All this only orders the jobs that wait in `queue` and `bound`. Older versions use the queues alone. So a line may have
-- jobs that no longer wait, which are dropped when they are found; and `claim_jobs` enters jobs that are in no line.
local TAG = KEYS[1] .. ':'
local CLOCK = ' '
local FORMATS = 3 -- record formats, from 1, whose lines are known: those of this version and of the next
local MAX_ACCOUNTS = 1024 -- of a list; if there are more, all are forgotten, and those without waiting jobs owe nothing
local MAX_OTHERS = 64 -- tenants with earlier turns that count for a job's place
local ASSUMED = 256 -- tokens of an answer while the tenant's mean is not known

-- Let a key live as long as the models are known, from now.
local ttl, kept
local function keep(key)
  ttl, kept = ttl or math.max(1000, redis.call('PTTL', TAG .. 'models')), kept or {}
  if not kept[key] and redis.call('PEXPIRE', key, ttl) == 1 then kept[key] = true end
end

local function exact(number)
  return string.format('%.17g', number)
end

-- The tenants of a class and model: the keys of their turns and of their accounts.
local function tenants_of(class, model)
  local name = class .. ':' .. model
  return { turns = TAG .. 'turns:' .. name, accounts = TAG .. 'accounts:' .. name }
end

-- The callers of a tenant. The length of its name makes different pairs of tenant and model different keys.
local function callers_of(class, model, tenant)
  local name = class .. ':' .. #tenant .. ':' .. tenant .. ':' .. model
  return { turns = TAG .. 'callers:' .. name, accounts = TAG .. 'caller_accounts:' .. name }
end

-- The key without the tag.
local function line_of(class, format, model, tenant, caller)
  return table.concat({ 'line', class, format, #tenant, tenant, #caller, caller, model }, ':')
end

local function front_of(class, format, model)
  return table.concat({ 'front', class, format, model }, ':')
end

local weights = {} -- that were read
local function weight_of(tenant)
  weights[tenant] = weights[tenant] or tonumber(redis.call('HGET', TAG .. 'weights', tenant) or 1)
  return weights[tenant]
end

-- A job's owner as workers read it (JSON).
local function owner_of(tenant, caller)
  return cjson.encode({ tenant, caller, weight_of(tenant) })
end

-- Virtual time of an account, the time before which no return of tokens may set it, and the mean tokens of an answer
-- (0: not known). Nil without an account.
local function account_of(list, name)
  local time, floor, mean = string.match(redis.call('HGET', list.accounts, name) or '', '^(%S+) (%S+) (%S+)$')
  return tonumber(time), tonumber(floor), tonumber(mean) or 0
end

local function write_account(list, name, time, floor, mean)
  local is_new = redis.call('HSET', list.accounts, name, exact(time) .. ' ' .. exact(floor) .. ' ' .. exact(mean)) == 1
  if is_new and redis.call('HLEN', list.accounts) > MAX_ACCOUNTS then redis.call('DEL', list.accounts) end
  if is_new then keep(list.accounts) end
  redis.call('ZADD', list.turns, 'XX', exact(time), name)
end

-- The account with which a tenant or caller without waiting jobs comes back. A fraction of a token keeps those who come
-- back at the same time in the order of their arrival.
local function returning(list, name, now)
  local start = math.floor(redis.call('ZSCORE', list.turns, CLOCK) or 0) + now % 1e9 / 1e9
  local time, floor, mean = account_of(list, name)
  if not time or time < start then time, floor = start, start end
  return time, floor, mean
end

-- Give a tenant or caller a turn, unless it has one. Returns whether it had none.
local function enter(list, name, now)
  local is_new = not redis.call('ZSCORE', list.turns, name)
  if is_new then
    local time, floor, mean = returning(list, name, now)
    redis.call('ZADD', list.turns, exact(time), name)
    write_account(list, name, time, floor, mean)
    keep(list.turns)
  end
  return is_new
end

-- Put a waiting job into the line of its caller. Returns whether nothing of this caller waited.
local function join_line(id, class, format, model, tenant, caller, place, now)
  local line = line_of(class, format, model, tenant, caller)
  redis.call('ZADD', TAG .. line, place, id)
  keep(TAG .. line)
  redis.call('HSET', TAG .. 'job:' .. id, 'line', line)
  enter(tenants_of(class, model), tenant, now)
  return enter(callers_of(class, model, tenant), caller, now)
end

local function join_front(id, class, format, model, place)
  local front = front_of(class, format, model)
  redis.call('ZADD', TAG .. front, place, id)
  keep(TAG .. front)
  redis.call('HSET', TAG .. 'job:' .. id, 'line', front)
end

-- End the turns of a caller, and of its tenant, that have no waiting jobs.
local function end_turn(class, model, tenant, caller)
  local lines = {}
  for format = 1, FORMATS do lines[format] = TAG .. line_of(class, format, model, tenant, caller) end
  if redis.call('EXISTS', unpack(lines)) > 0 then return end
  local callers = callers_of(class, model, tenant)
  redis.call('ZREM', callers.turns, caller)
  if redis.call('ZCARD', callers.turns) - (redis.call('ZSCORE', callers.turns, CLOCK) and 1 or 0) <= 0 then
    redis.call('ZREM', tenants_of(class, model).turns, tenant)
  end
end

-- Take a job out of its line or the front. The field `line` stays, and has no meaning until the job waits again.
local function leave_line(id, class, model, line, tenant, caller)
  redis.call('ZREM', TAG .. line, id)
  if string.sub(line, 1, 5) == 'line:' then end_turn(class, model, tenant, caller or '') end
end

-- Charge tokens to a tenant or caller that takes its turn. `clock`: the virtual time of the turn, by default its own.
local function charge(list, name, tokens, now, clock)
  local time, floor, mean = account_of(list, name)
  local waits = redis.call('ZSCORE', list.turns, name)
  if not waits then -- this was its last job
    time, floor, mean = returning(list, name, now)
  elseif not time then
    time, floor = tonumber(waits), tonumber(waits)
  end
  redis.call('ZADD', list.turns, 'GT', exact(clock or time), CLOCK)
  write_account(list, name, time + tokens, floor, mean)
  keep(list.turns)
  keep(list.accounts)
end

-- Correct what a job was charged, now that the tokens that it used are known. Tokens that are returned give no credit
-- for the time before the last pause. `answer`: tokens of the answer, from which the mean is learnt, or nil.
local function settle(list, name, tokens, answer)
  local time, floor, mean = account_of(list, name)
  if not time then return end
  if answer then mean = mean == 0 and answer or mean + (answer - mean) / 8 end
  write_account(list, name, math.max(floor, time + tokens), floor, mean)
end

-- Estimates of a job: tokens of its prompt, and the most tokens of its answers. `cost` is 'PROMPT MOST'; jobs of older
-- versions have none.
local function tokens_of(cost, id)
  local prompt, most = string.match(cost or '', '^(%d+) (%d+)$')
  return tonumber(prompt or redis.call('HSTRLEN', TAG .. 'job:' .. id, 'request') / 4), tonumber(most or 1e9)
end

-- What a job is charged when it is claimed. `mean`: of its tenant's answers.
local function estimate(prompt, most, rows, mean)
  return math.max(1, prompt + math.min(most, mean > 0 and mean or ASSUMED * rows))
end

-- Number of jobs before a place in the sets with these names, for all formats. Without a place: of all jobs.
local function count_before(name_of, place)
  local count, keys = 0, {}
  for format = 1, FORMATS do keys[format] = TAG .. name_of(format) end
  if redis.call('EXISTS', unpack(keys)) == 0 then return 0 end
  for format = 1, FORMATS do
    count = count + redis.call('ZCOUNT', keys[format], '-inf', place and '(' .. place or '+inf')
  end
  return count
end

-- How many others have turns, and how many of them before `name`.
local function others_of(list, name)
  local clock = redis.call('ZSCORE', list.turns, CLOCK)
  local others = redis.call('ZCARD', list.turns) - (clock and 2 or 1)
  local mine = others > 0 and redis.call('ZSCORE', list.turns, name)
  if not mine then return 0, 0 end
  local ahead = redis.call('ZCOUNT', list.turns, '-inf', '(' .. mine)
  if clock and tonumber(clock) < tonumber(mine) then ahead = ahead - 1 end
  return others, ahead
end

-- The tenants with the earliest turns, of which `most` jobs go before a job of another tenant. Read once, since a list of
-- jobs needs it for each of them.
local standings = {}
local function standing_of(class, model)
  local list = tenants_of(class, model)
  if standings[list.turns] then return standings[list.turns] end
  local found, members = {}, redis.call('ZRANGE', list.turns, 0, MAX_OTHERS, 'WITHSCORES')
  for i = 1, #members, 2 do
    if members[i] ~= CLOCK then
      local known, most = redis.call('ZRANGE', callers_of(class, model, members[i]).turns, 0, 2), math.huge
      if #known <= 2 then -- a clock and one caller
        local only = known[1] ~= CLOCK and known[1] or known[2] or ''
        most = count_before(function(format) return line_of(class, format, model, members[i], only) end)
      end
      found[#found + 1] = { name = members[i], time = tonumber(members[i + 1]), most = most }
    end
  end
  standings[list.turns] = found
  return found
end

-- How many jobs go before a waiting job if all need the same number of tokens: those before it in its line, as many of
-- each other caller, and of other tenants as many as their weights allow. Nil if the job is in no line.
-- `waiting`: the number of jobs in its queue.
local function place_in_turns(id, class, model, tenant, caller, line, waiting)
  local place = redis.call('ZSCORE', TAG .. line, id)
  if not place then return end
  local function own_line(format) return line_of(class, format, model, tenant, caller) end
  local function front(format) return front_of(class, format, model) end
  local rank = count_before(own_line, place)
  if string.sub(line, 1, 6) == 'front:' then return rank + count_before(front, place) end
  local callers, callers_ahead = others_of(callers_of(class, model, tenant), caller)
  local tenants, mine = standing_of(class, model), 0
  if callers == 0 and #tenants <= 1 then return rank + count_before(front, place) end
  for _, one in ipairs(tenants) do
    if one.name == tenant then mine = one.time end
  end
  local before, weight = rank + rank * callers + callers_ahead, weight_of(tenant)
  local all = before
  for _, one in ipairs(tenants) do
    local ahead = one.time < mine and 1 or 0
    if one.name ~= tenant then
      all = all + math.min(one.most, math.floor((before + ahead) * weight_of(one.name) / weight))
    end
  end
  return math.min(all + count_before(front), math.max(rank, rank + waiting - count_before(own_line)))
end
