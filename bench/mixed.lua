-- wrk script: 2 KB inference requests, of one kind or of many
--
--   wrk … -s bench/mixed.lua URL -- single KEYS   one tier, one lane, no tasks
--   wrk … -s bench/mixed.lua URL -- mixed KEYS    three tiers, tasks, eight lanes, in fixed shares
--
-- KEYS are files with an API key each, the highest tier's first.
-- Both go through the same code here, so that the generator costs the same; requests are made before the load begins.
local TIER_SHARES = { 5, 25, 70 } -- per cent, the highest tier first, as in the configuration
local TASK_SHARE = 5 -- per cent, of every tier
local LANES = 8
local INPUT = string.rep("x", 2000)

local function headers_of(file)
  return { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. io.open(file):read() }
end

-- Requests of every kind, each as often as its share says.
local function mixed(key_files)
  local requests = {}
  for lane = 1, LANES do
    local body = '{"input":"' .. INPUT .. '","parameters":{"lane":' .. lane .. "}}"
    for tier, share in ipairs(TIER_SHARES) do
      local headers = headers_of(key_files[tier])
      local request = wrk.format("POST", nil, headers, body)
      headers["Prefer"] = "respond-async"
      local task = wrk.format("POST", nil, headers, body)
      local count = share * 20 -- so many that the tasks among them are a whole number
      for number = 1, count do
        requests[#requests + 1] = number <= count * TASK_SHARE / 100 and task or request
      end
    end
  end
  -- Shuffled, the same way each time: no two runs differ, and no kind comes in a row.
  math.randomseed(7)
  for last = #requests, 2, -1 do
    local other = math.random(last)
    requests[last], requests[other] = requests[other], requests[last]
  end
  return requests
end

local function single(key_files)
  local body = '{"input":"' .. INPUT .. '","client_id":"c1"}'
  return { wrk.format("POST", nil, headers_of(key_files[#TIER_SHARES]), body) }
end

local requests, at = {}, 0

function init(arguments)
  local kind = table.remove(arguments, 1)
  requests = kind == "mixed" and mixed(arguments) or single(arguments)
end

function request()
  at = at % #requests + 1
  return requests[at]
end
