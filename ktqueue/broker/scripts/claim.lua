-- A worker takes jobs of its model.
-- ARGV: worker id, lease in us, claim number, most jobs, ageing in us, batch share (one slot in so many),
--       expired event, job TTL in ms, journal TTL in ms.
-- Replies a list of {id, request, attempt, deadline or false, journal entries}.
-- Order: interactive before batch; but every so-manieth slot is batch's, and a batch job that has waited longer
-- than the ageing time ranks by its arrival among the interactive ones. Within a class: by arrival.
-- Promises: a job is with one worker only; asking again under the same claim number gives the same jobs again.
local worker, lease, number, limit = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local ageing, share, job_ttl, journal_ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[8], ARGV[9]
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
local record, running = TAG .. 'worker:' .. worker, TAG .. 'running:' .. worker
local field = redis.call('HMGET', record, 'model', 'claim', 'claimed', 'slots')
if not field[1] then return lease_lost(worker) end
local taken = {}
if field[2] == number then
  for id in string.gmatch(field[3], '%S+') do
    if redis.call('HEXISTS', running, id) == 1 then taken[#taken + 1] = id end
  end
else
  local interactive, batch = TAG .. 'queue:interactive:' .. field[1], TAG .. 'queue:batch:' .. field[1]
  local slots = tonumber(field[4])
  local late = 0
  while #taken < limit and late < 256 do -- the reaper and the next claim find the other late ones
    local first = redis.call('ZRANGE', interactive, 0, 0, 'WITHSCORES')
    local second = redis.call('ZRANGE', batch, 0, 0, 'WITHSCORES')
    if #first == 0 and #second == 0 then break end
    local queue, id = interactive, first[1]
    if #second > 0 then
      local arrival = tonumber(second[2])
      if #first == 0 or slots % share == share - 1
        or (now - arrival > ageing and arrival < tonumber(first[2])) then
        queue, id = batch, second[1]
      end
    end
    redis.call('ZREM', queue, id)
    local job = TAG .. 'job:' .. id
    local deadline = redis.call('HGET', job, 'deadline')
    if deadline and tonumber(deadline) <= now then
      finish(id, 'expired', ARGV[7], tail_of(id) + 1, now, job_ttl, journal_ttl)
      late = late + 1
    else
      redis.call('HSET', job, 'state', 'running', 'worker', worker)
      redis.call('HSETNX', job, 'started', digits(now))
      redis.call('HINCRBY', job, 'attempts', 1)
      redis.call('HSET', running, id, tail_of(id))
      taken[#taken + 1] = id
      slots = slots + 1
    end
  end
  redis.call('HSET', record, 'claim', number, 'claimed', table.concat(taken, ' '), 'slots', slots)
end
local reply = {}
for _, id in ipairs(taken) do
  local at = redis.call('HMGET', TAG .. 'job:' .. id, 'request', 'attempts', 'deadline')
  reply[#reply + 1] = { id, at[1], tonumber(at[2]), at[3], redis.call('XRANGE', TAG .. 'journal:' .. id, '-', '+') }
end
return reply
