-- wrk script: 2 KB inference requests that are all different, or all the same
--
--   wrk … -s bench/distinct.lua URL -- distinct   no two inputs are the same, over all runs
--   wrk … -s bench/distinct.lua URL -- same       all are
--
-- Both are put together for each request, so that the generator costs the same.
local INPUT = string.rep("x", 1970)
local HEADERS = { ["Content-Type"] = "application/json" }
local is_same, run, number = false, "", 0

function init(arguments)
  is_same = arguments[1] == "same"
  -- The address of a table differs from run to run, and so does the time.
  run = string.format("%d%s", os.time(), tostring({}):sub(-8))
end

function request()
  number = number + 1
  local name = is_same and "trending" or run .. number
  return wrk.format("POST", nil, HEADERS, '{"input":"' .. name .. INPUT .. '"}')
end
