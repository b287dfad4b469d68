"""S8: what clients send, and what an upstream says of it, reaches no log, metric or neighbour, at debug level too."""

import asyncio
import json
from collections import Counter
from pathlib import Path

from support.client import Response, ask_once, inference_body
from support.processes import running_gateway
from support.stream_server import stream_server

POISON = "canary-poison"


async def quoting_upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An API that refuses a batch with the poison in it, and quotes all of its inputs while it does."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
        inputs = json.loads(await reader.readexactly(length))["inputs"]
        if POISON in inputs:
            status, body = "400 Bad", json.dumps({"error": f"canary-words: cannot read {inputs}"}).encode()
        else:
            status, body = "200 OK", json.dumps({"outputs": [text[::-1] for text in inputs]}).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def test_s8_canaries_stay_with_their_own_client(tmp_path: Path) -> None:
    headers = "Authorization: Bearer canary-key\r\n"
    innocents = [f"canary-input-{number}" for number in range(15)]
    flags = ("--log-level", "debug", "--policy", "fixed", "--slots", "4")
    async with (
        stream_server(quoting_upstream) as server,
        running_gateway(tmp_path, f"http://127.0.0.1:{server.port}/infer", *flags) as gateway,
    ):

        async def ask(text: str) -> Response:
            return await ask_once(gateway.port, "POST", "/v1/inference", inference_body(text), headers)

        answers = await asyncio.gather(*(ask(text) for text in [POISON, *innocents]))
        malformed = await ask_once(gateway.port, "POST", "/v1/inference", b'{"input": canary-broken}', headers)
        seen = gateway.log.read_text()
        for path in ("/metrics", "/internal/health", "/internal/fleet", "/internal/dead-letters"):
            seen += (await ask_once(gateway.admin_port, "GET", path)).body.decode()
    assert Counter(answer.status for answer in answers) == {422: 1, 200: 15}
    # Its own client may read the model's words; they were said when it was alone, so they quote nobody else.
    assert "canary-words" in answers[0].json["detail"]
    assert not any(text in answers[0].body.decode() for text in innocents)
    for text, answer in zip(innocents, answers[1:], strict=True):
        assert answer.json["output"] == text[::-1]
        assert "canary" not in answer.body.decode()  # the output is reversed
    assert (malformed.status, b"canary" in malformed.body) == (400, False)
    assert '"level": "debug"' in seen or "serving on" in seen
    # The list of dead letters shows the detail that the client was told; nothing else may.
    told = answers[0].json["detail"]
    assert "canary" not in seen.replace(json.dumps(told)[1:-1], "")
