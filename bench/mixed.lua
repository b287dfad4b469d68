-- wrk script: 2 KB inference requests, of one kind or of many
--
--   wrk … -s bench/mixed.lua URL -- single   one tier, one lane, no tasks: what floor/post.lua sends
--   wrk … -s bench/mixed.lua URL -- mixed    three tiers, tasks, eight lanes, in fixed shares
--
-- Both go through the same code here, so that the generator costs the same; requests are made before the load begins.
local TIER_SHARES = { 5, 25, 70 } -- per cent, the highest tier first, as in the configuration
local TASK_SHARE = 5 -- per cent, of every tier
local LANES = 8
local INPUT = string.rep("x", 2000)

-- Requests of every kind, each as often as its share says.
local function mixed()
  local requests = {}
  for lane = 1, LANES do
    local body = '{"input":"' .. INPUT .. '","parameters":{"lane":' .. lane .. "}}"
    for tier, share in ipairs(TIER_SHARES) do
      local headers = { ["Content-Type"] = "application/json", ["X-Bench-Tier"] = tostring(tier - 1) }
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

local function single()
  local body = '{"input":"' .. INPUT .. '","client_id":"c1"}'
  return { wrk.format("POST", nil, { ["Content-Type"] = "application/json" }, body) }
end

local requests, at = {}, 0

function init(arguments)
  requests = arguments[1] == "mixed" and mixed() or single()
end

function request()
  at = at % #requests + 1
  return requests[at]
end
