-- wrk script: one 2 KB inference request of clients with API keys, in an order without a pattern
--
--   wrk … -s bench/keyed.lua URL -- FILE   the keys, a line each
--
-- Requests are made before the load begins: keys cost the generator nothing. They are drawn: in turns, a server that
-- answers in order of arrival would see the same key on a connection each time, and one with tiers would not.
local requests = {}

function init(arguments)
  local body = '{"input":"' .. string.rep("x", 2000) .. '","client_id":"c1"}'
  for key in io.lines(arguments[1]) do
    local headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key }
    requests[#requests + 1] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  return requests[math.random(#requests)]
end
