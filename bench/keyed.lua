-- wrk script: one 2 KB inference request of clients with API keys, who take turns
--
--   wrk … -s bench/keyed.lua URL -- FILE   the keys, a line each
--
-- Requests are made before the load begins: keys cost the generator nothing.
local requests, at = {}, 0

function init(arguments)
  local body = '{"input":"' .. string.rep("x", 2000) .. '","client_id":"c1"}'
  for key in io.lines(arguments[1]) do
    local headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key }
    requests[#requests + 1] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end
