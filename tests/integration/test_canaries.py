"""S8: what clients send, their credentials, and an upstream's words reach no log, metric or neighbour, at debug level.

Nor do keys and tokens reach `carpool config` or the disk.
"""

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path

from support.client import Response, ask_once, inference_body
from support.processes import carpool, running_gateway, until
from support.stream_server import stream_server
from support.tokens import token_of

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


async def test_s8_credentials_stay_where_they_are(tmp_path: Path) -> None:
    secret = tmp_path / "token-secret"
    secret.write_bytes(b"canary-secret-" * 4)
    data = tmp_path / "data"
    key = (await asyncio.to_thread(lambda: carpool("keys", "create", "alice", "--data-dir", str(data)))).stdout.strip()
    token = token_of(secret.read_bytes())
    settings = {
        "auth.mode": "both",
        "auth.jwt_file": secret,
        "auth.jwt_algorithms": "HS256",
        "service.token": "canary-service-new,canary-service-old",
        "limits.per_minute": 0,
    }
    service = ("canary-service-new", "canary-service-old")
    wrong = ("cp_" + "canary" * 7, token_of(b"canary-forged-" * 4), "canary-anything")
    async with running_gateway(data, "sim:?latency_ms=1", "--log-level", "debug", settings=settings) as gateway:
        bodies = b""
        for credential in (key, token, *wrong):
            for header in ("Authorization: Bearer ", "X-API-Key: "):
                lines = f"{header}{credential}\r\n"
                answer = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"), lines)
                bodies += answer.body
                assert answer.status == (200 if credential == key or (credential, header[0]) == (token, "A") else 401)
            later = f"Authorization: Bearer {credential}\r\nPrefer: respond-async\r\n"
            bodies += (await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"), later)).body
        for path in ("/metrics", "/internal/health", "/internal/fleet", "/internal/dead-letters"):
            for each in (*service, "canary-service-wrong"):
                answer = await ask_once(gateway.admin_port, "GET", path, b"", f"Authorization: Bearer {each}\r\n")
                assert answer.status == (200 if each in service else 401)
                bodies += answer.body
        gateway.reload()
        await until(lambda: "read the configuration again" in gateway.log.read_text())
        seen = gateway.log.read_text() + bodies.decode()
    environment = {f"CARPOOL_{name.upper().replace('.', '_')}": str(value) for name, value in settings.items()}
    for arguments in (["config"], ["keys", "list", "--data-dir", str(data)]):
        done = await asyncio.to_thread(partial(carpool, *arguments, cwd=None, **environment))
        assert done.returncode == 0
        seen += done.stdout + done.stderr
    for file in data.iterdir():
        seen += file.read_bytes().decode("latin-1")
    assert '"level": "debug"' in seen or "serving on" in seen
    for canary in ("canary", key, token, token.split(".")[2], *wrong):
        assert canary not in seen, canary


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
