-- A worker takes jobs of its model.
-- ARGV: worker id, lease in us, claim number, rows for any class, rows in all, batch share (one free row in so many),
--       expired event, job TTL in ms, journal TTL in ms.
-- Replies a list of {id, request, attempt, deadline or false, place in the order of its class, journal entries}.
-- Order: interactive before batch, but every so-manieth free row is batch's. Within a class: by arrival and priority.
-- A job takes a row for each of its choices; the last one may take more than are left, or it would never find its
-- moment. Rows beyond those for any class are taken from running batch jobs: an interactive job gets them if all of
-- its rows are there.
-- Promises: a job is with one worker only; asking again under the same claim number gives the same jobs again.
local worker, lease, number = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local free, most, share = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local job_ttl, journal_ttl = ARGV[8], ARGV[9]
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
  local rows, late = 0, 0
  while rows < most and late < 256 do -- the reaper and the next claim find the other late ones
    local queue, id = interactive, redis.call('ZRANGE', interactive, 0, 0)[1]
    if rows < free and (not id or slots % share == share - 1) then
      local other = redis.call('ZRANGE', batch, 0, 0)[1]
      if other then queue, id = batch, other end
    end
    if not id then break end
    local job = TAG .. 'job:' .. id
    local at = redis.call('HMGET', job, 'deadline', 'rows')
    local needed = tonumber(at[2] or 1)
    if at[1] and tonumber(at[1]) <= now then
      redis.call('ZREM', queue, id)
      finish(id, 'expired', ARGV[7], tail_of(id) + 1, now, job_ttl, journal_ttl)
      late = late + 1
    elseif rows >= free and rows + needed > most then
      break
    else
      redis.call('ZREM', queue, id)
      redis.call('HSET', job, 'state', 'running', 'worker', worker)
      count_waiting(id, -1)
      redis.call('HSETNX', job, 'started', digits(now))
      redis.call('HINCRBY', job, 'attempts', 1)
      redis.call('HSET', running, id, tail_of(id))
      taken[#taken + 1] = id
      if rows < free then slots = slots + 1 end
      rows = rows + needed
    end
  end
  redis.call('HSET', record, 'claim', number, 'claimed', table.concat(taken, ' '), 'slots', slots)
end
local reply = {}
for _, id in ipairs(taken) do
  local at = redis.call('HMGET', TAG .. 'job:' .. id, 'request', 'attempts', 'deadline', 'order', 'shift')
  local rank = digits(at[4] + (at[5] or 0))
  reply[#reply + 1] = { id, at[1], tonumber(at[2]), at[3], rank, redis.call('XRANGE', TAG .. 'journal:' .. id, '-', '+') }
end
return reply
