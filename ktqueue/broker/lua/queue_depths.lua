-- Numbers of waiting and running jobs.
-- Replies {model, class, waiting, running, us that the oldest has waited or false, callers with waiting jobs}* for
-- every class of every model that is known or has jobs. Writes nothing.
-- Jobs at the head of a queue among which the oldest is searched: with priorities the first need not be the oldest.
local LOOKED_AT = 100
local MAX_TENANTS = 64 -- whose callers are counted
local now = now_us()
local live = {}
for _, model in ipairs(redis.call('HKEYS', TAG .. 'models')) do live[model] = {} end
local backlog = redis.call('HGETALL', TAG .. 'backlog')
for i = 1, #backlog, 2 do
  local class, model = string.match(backlog[i], '^(%w+):(.*)$')
  if class then
    live[model] = live[model] or {}
    live[model][class] = tonumber(backlog[i + 1])
  end
end
local bound = {}
for _, queue in ipairs(bound_queues(MAX_BOUND)) do
  live[queue.model] = live[queue.model] or {}
  bound[queue.model] = bound[queue.model] or {}
  table.insert(bound[queue.model], queue.takers)
end
local reply = {}
for model, count in pairs(live) do
  for _, class in ipairs({ 'interactive', 'batch' }) do
    local queues = { TAG .. 'queue:' .. class .. ':' .. model }
    for _, takers in ipairs(bound[model] or {}) do queues[#queues + 1] = bound_key(class, takers, model) end
    local waiting, oldest = 0, false
    for _, queue in ipairs(queues) do
      waiting = waiting + redis.call('ZCARD', queue)
      for _, id in ipairs(redis.call('ZRANGE', queue, 0, LOOKED_AT - 1)) do
        local wait = math.max(0, now - (tonumber(redis.call('HGET', TAG .. 'job:' .. id, 'order') or '') or now))
        if not oldest or wait > oldest then oldest = wait end
      end
    end
    local callers = 0
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_of(class, model).turns, 0, MAX_TENANTS)) do
      local turns = callers_of(class, model, tenant).turns
      callers = callers + redis.call('ZCARD', turns) - (redis.call('ZSCORE', turns, CLOCK) and 1 or 0)
    end
    reply[#reply + 1] = { model, class, waiting, (count[class] or 0) - waiting, oldest, callers }
  end
end
return reply
