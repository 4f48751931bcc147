-- Which records are missing. ARGV: names such as file:ID and batch:ID. Replies those without a record. Writes nothing.
local missing = {}
for _, name in ipairs(ARGV) do
  if redis.call('EXISTS', TAG .. name) == 0 then missing[#missing + 1] = name end
end
return missing
