-- One engine step of a worker: appends and publishes its events, and ends the jobs whose last event is among them.
-- ARGV: worker id, lease in us, step number, job TTLs (see `finish`), journal TTL in ms, then (job id, seq,
--        event, end)*. An end is '', or a state, then the tokens that the job used if known, then 'final' for a failure
--        that a retry would meet too: 'failed 42 final'.
-- Replies {ids of jobs that the worker must stop: cancelled, expired, or no longer its own; ids of jobs with new events
-- that somebody reads live}. In a cluster, readers on other nodes are not seen.
-- Promises: all or nothing; only under a valid lease; each seq once and in order; a repeated step number changes
-- nothing; a cancelled job is reported until it has ended and the worker has received the reply.
local worker, lease, step = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_us()
if not lease_lives(worker, now, lease) then return lease_lost(worker) end
local record, running, cancels = TAG .. 'worker:' .. worker, TAG .. 'running:' .. worker, TAG .. 'cancels:' .. worker
local done = tonumber(redis.call('HGET', record, 'step') or -1)
local stop, followed = {}, {}
if done ~= step then
  -- A gap in the step numbers: the server has lost an acknowledged step.
  if done ~= step - 1 then return lease_lost(worker) end
  local ids, index = {}, {}
  for i = 6, #ARGV, 4 do
    if not index[ARGV[i]] then
      ids[#ids + 1] = ARGV[i]
      index[ARGV[i]] = #ids
    end
  end
  local tails = {}
  if #ids > 0 then tails = redis.call('HMGET', running, unpack(ids)) end
  local next_seq = {}
  for i = 6, #ARGV, 4 do
    local id = ARGV[i]
    local tail = tails[index[id]]
    if tail then
      next_seq[id] = (next_seq[id] or tonumber(tail) + 1)
      if tonumber(ARGV[i + 1]) ~= next_seq[id] then
        return redis.error_reply('SEQUENCE ' .. id .. ' wants ' .. next_seq[id] .. ', got ' .. ARGV[i + 1])
      end
      next_seq[id] = next_seq[id] + 1
    else
      stop[id] = true
    end
  end
  local written, ended = {}, {}
  for i = 6, #ARGV, 4 do
    local id, seq, event, state = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
    if not stop[id] and not ended[id] then
      if state ~= '' then
        local word, used, final = string.match(state, '^(%a+) ?(%d*) ?(%a*)$')
        finish(id, word, event, seq, now, ARGV[4], ARGV[5], tonumber(used), final == 'final')
        redis.call('HDEL', running, id)
        redis.call('HDEL', cancels, id)
        ended[id], followed[id] = true, nil
      else
        if append(id, seq, event) > 0 then followed[id] = true end
        written[id] = seq
      end
    end
  end
  local flat = {}
  for id, seq in pairs(written) do
    if not ended[id] then
      flat[#flat + 1] = id
      flat[#flat + 1] = seq
    end
  end
  if #flat > 0 then redis.call('HSET', running, unpack(flat)) end
  redis.call('HSET', record, 'step', step, 'stepped', digits(now))
end
local cancelled = redis.call('HGETALL', cancels)
for i = 1, #cancelled, 2 do
  local id, reported = cancelled[i], tonumber(cancelled[i + 1])
  if reported > 0 and reported < step and redis.call('HEXISTS', running, id) == 0 then
    redis.call('HDEL', cancels, id) -- ended, and the worker has received the reply that said so
  else
    redis.call('HSET', cancels, id, step)
    stop[id] = true
  end
end
local stopped, read = {}, {}
for id in pairs(stop) do stopped[#stopped + 1] = id end
for id in pairs(followed) do
  if not stop[id] then read[#read + 1] = id end
end
return { stopped, read }
