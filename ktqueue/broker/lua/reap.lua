-- The housekeeping that every worker and gateway does.
-- ARGV: lease in us, most attempts, cancelled event, expired event, poison event, job TTLs (see `finish`),
--        journal TTL in ms, model TTL in ms.
-- Replies {jobs taken from dead workers, jobs expired}.
-- A worker is dead if its lease has expired. It is also dead if it missed a renewal and the connection that it had at
-- its last renewal is closed, while this server has run all the time: that is what the death of a process looks like
-- here.
-- Of a dead worker's jobs, those whose journals have not grown count the death; if one of these is on trial, only that
-- one. None counts it if the process that saw the worker's end says so.
-- Promises: a live worker's jobs are changed only by their deadlines; after an outage, every lease that was valid when
-- it began gets one more lease time; a key of another type than ours goes; if the clock went back, no lease ends later
-- than a lease time from now; at most 256 deadlines per call.
local SILENCE = 0.375 -- lease times without a renewal; a worker renews four times per lease time
local SINGLE = { -- types of keys that every script may use
  live = 'zset', ended = 'zset', deadlines = 'zset', held = 'zset', failed = 'zset', bound = 'zset', webhooks = 'zset',
  leases = 'zset', ['models:seen'] = 'zset', models = 'hash', ['models:more'] = 'hash', backlog = 'hash',
  stored = 'hash', weights = 'hash', scrub = 'hash',
}
local MAX_HELD = 2000 -- entries of each list that one call removes
local lease, max_attempts = tonumber(ARGV[1]), tonumber(ARGV[2])
local events = { cancelled = ARGV[3], expired = ARGV[4], poison = ARGV[5] }
local now = now_us()
for name, kind in pairs(SINGLE) do of_type(kind, TAG .. name) end
tick(now, lease, ARGV[8])
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '(' .. digits(now + lease), '+inf')) do
  redis.call('ZADD', TAG .. 'leases', now + lease, worker)
end
local orphans, expired = 0, 0
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', digits(now), digits(now + lease * (1 - SILENCE)))) do
  local home = redis.call('HGET', TAG .. 'worker:' .. worker, 'home')
  if home and home ~= '' and home_of(worker) == '' and run_id() == home then
    redis.call('ZADD', TAG .. 'leases', 'XX', now, worker)
  end
end
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'leases', '-inf', digits(now))) do
  local running = redis.call('HGETALL', of_type('hash', TAG .. 'running:' .. worker))
  local field = redis.call('HMGET', TAG .. 'worker:' .. worker, 'trial', 'blameless')
  local trial, on_trial = field[1], false
  for i = 1, #running, 2 do
    on_trial = on_trial or running[i] == trial and not has_grown(trial, tonumber(running[i + 1]))
  end
  for i = 1, #running, 2 do
    local id, seq = running[i], tonumber(running[i + 1])
    local how = 'suspect'
    if field[2] or on_trial and id ~= trial or has_grown(id, seq) then how = 'blameless' end
    give_back(id, seq, now, how, max_attempts, events, ARGV[6], ARGV[7])
    orphans = orphans + 1
  end
  delete_worker(worker)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'deadlines', '-inf', digits(now), 'LIMIT', 0, 256)) do
  local field = redis.call('HMGET', TAG .. 'job:' .. id, 'state', 'class', 'model', 'worker')
  if field[1] == 'queued' then
    dequeue(id, field[2], field[3])
  elseif field[4] then
    redis.call('HDEL', TAG .. 'running:' .. field[4], id)
    redis.call('HSET', TAG .. 'cancels:' .. field[4], id, 0)
  end
  finish(id, 'expired', events.expired, tail_of(id) + 1, now, ARGV[6], ARGV[7])
  expired = expired + 1
end
redis.call('ZREMRANGEBYSCORE', TAG .. 'ended', '-inf', digits(now))
for _, model in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'models:seen', '-inf', digits(now))) do
  redis.call('ZREM', TAG .. 'models:seen', model)
  redis.call('HDEL', TAG .. 'models', model)
  redis.call('HDEL', TAG .. 'models:more', model)
end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'held', '-inf', digits(now), 'LIMIT', 0, MAX_HELD)) do
  local bytes, tenant = string.match(entry, '^(%d+) %S+ (.*)$')
  add_stored(tenant, -bytes)
  redis.call('ZREM', TAG .. 'held', entry)
end
local failed_ttl = string.match(ARGV[6], '^%d+ (%d+)')
local forgotten = '(' .. digits(now - failed_ttl * 1000)
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', TAG .. 'failed', '-inf', forgotten, 'LIMIT', 0, MAX_HELD)) do
  add_to(TAG .. 'failed:bytes', nil, -string.match(entry, '^%d+'))
  redis.call('ZREM', TAG .. 'failed', entry)
end
if redis.call('EXISTS', TAG .. 'failed') == 0 then redis.call('DEL', TAG .. 'failed:bytes') end
local used, most = memory()
if most > 0 then
  redis.call('SET', TAG .. 'memory', digits(used) .. ' ' .. digits(most), 'PX', math.ceil(lease * 5 / 1000))
else
  redis.call('DEL', TAG .. 'memory')
end
return { orphans, expired }
