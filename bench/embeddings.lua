-- wrk script: one 2 KB text for a model that embeds
--
--   wrk … -s bench/embeddings.lua URL -- openai      of OpenAI's face, in base64, as SDKs ask for it
--   wrk … -s bench/embeddings.lua URL -- inference   of /v1/inference
local TEXT = string.rep("x", 2000)
local HEADERS = { ["Content-Type"] = "application/json" }
local made

function init(arguments)
  if arguments[1] == "openai" then
    made = wrk.format("POST", "/v1/embeddings", HEADERS, '{"input":"' .. TEXT .. '","encoding_format":"base64"}')
  else
    made = wrk.format("POST", "/v1/inference", HEADERS, '{"input":"' .. TEXT .. '"}')
  end
end

function request()
  return made
end
