"""An OpenAI embeddings server with two slots of 50 ms that takes 64 inputs at once; its port is the argument.

The vector of a text begins with a number that no other text has. `/stats` tells calls and inputs.
"""

import asyncio
import json
import sys
from zlib import crc32

from aiohttp import web

slots = asyncio.Semaphore(2)
stats = {"calls": 0, "inputs": 0}
REST = [(number * 7919 % 2000 - 1000) / 9999 for number in range(1, 384)]


async def embed(request: web.Request) -> web.Response:
    body = await request.json()
    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
    if len(inputs) > 64:
        return web.json_response({"error": {"message": "too many inputs"}}, status=400)
    async with slots:
        await asyncio.sleep(0.05)
    stats["calls"] += 1
    stats["inputs"] += len(inputs)
    vectors = [[(crc32(json.dumps(text).encode()) & 0xFFFFFF) / 2**24, *REST] for text in inputs]
    data = [{"object": "embedding", "index": number, "embedding": each} for number, each in enumerate(vectors)]
    usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
    return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": usage})


async def tell(_: web.Request) -> web.Response:
    return web.json_response(stats)


app = web.Application()
app.router.add_post("/v1/embeddings", embed)
app.router.add_get("/stats", tell)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, shutdown_timeout=1)
