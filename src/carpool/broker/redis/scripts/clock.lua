-- Redis's clock in ms; tests may say another time.
local function clock(given)
  if given ~= '' then
    return tonumber(given)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- At maxmemory Redis refuses a script's first write if that needs memory, and none after it. What frees memory, or
-- must not be lost, begins with this: it removes nothing.
local function write_also_without_memory(hash)
  redis.call('HDEL', hash, '')
end
