"""A program that knows nothing of Carpool: httpx over one connection of HTTP/2 to the URL that it is given.

It checks every answer by value, and prints one line of JSON with what it found.
"""

import asyncio
import json
import sys

import httpx

URL = sys.argv[1]
IN_FLIGHT = 50


async def parts(body):
    """A body whose length nobody knows before its end.

    One with a known length may be answered before the frame that ends it is sent, which httpx takes for an error.
    """
    for start in range(0, len(body), 16_384):
        yield body[start : start + 16_384]


async def ask(client, text, found):
    body = parts(json.dumps({"input": text}, ensure_ascii=False).encode())
    answer = await client.post("/v1/inference", content=body, headers={"X-Request-Id": f"id-{len(text)}"})
    assert (answer.status_code, answer.http_version) == (200, "HTTP/2"), answer
    assert answer.json()["output"] == text[::-1], answer.json()
    assert answer.headers["x-request-id"] == f"id-{len(text)}", answer.headers
    found["right"] += 1


async def main():
    found = {"right": 0, "errors": 0}
    async with httpx.AsyncClient(base_url=URL, http1=False, http2=True, timeout=60) as client:
        texts = [f"№{number} naïve" for number in range(IN_FLIGHT)]
        await asyncio.gather(*(ask(client, text, found) for text in texts))
        long = "".join(f"№{number} " for number in range(50_000))
        await ask(client, long, found)
        for answer, status in (
            (await client.post("/v1/inference", content=parts(b"{")), 400),
            (await client.get("/v1/inferenz"), 404),
        ):
            assert (answer.status_code, answer.json()["status"]) == (status, status), answer.text
            found["errors"] += 1
    print(json.dumps(found))  # noqa: T201


asyncio.run(main())
