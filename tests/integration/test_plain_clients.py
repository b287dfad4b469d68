"""Clients that were written from a plain description of such a gateway, unchanged and all at one gateway.

Each knows a few sentences: where to post, what comes back, that its key goes into a header. They run against one
gateway process over Redis, with an upstream that has field names of its own.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

from support.client import Response, ask_once
from support.grpc_client import grpc_client, message
from support.processes import (
    CLEAN_ENVIRONMENT,
    PATIENCE_S,
    GatewayProcess,
    running_role,
    until,
    variable,
)
from support.redis_servers import RedisServer
from support.upstreams import ScriptedUpstream, scripted_upstream, send

FORM = "Content-Type: application/x-www-form-urlencoded\r\n"
# Keys that clients have had for years, none of Carpool's own form; the first is imported, the others are configured.
KEYS = {
    "imported": "sk-live-ABCdef.123/456+789==",
    "plain": "9f86d081884c7d659a2feaa0c55ad015",
    "tasks": "Zm9vYmFyYmF6cXV4cXV1eA",
    "paid": "550e8400-e29b-41d4-a716-446655440000",
    "paid-waits": "tok:waits-for-its-answer!",
}

CONFIGURATION = """
model = "words"

[gateway]
request_ids = "uuid"
grpc_port = 0

[auth]
mode = "keys"

[limits]
per_minute = 0

[upstream]
endpoints = ["{json}"]
inputs_field = "texts"
outputs_field = "results"
tokens_field = "usage"
version_field = "rev"

[[tiers]]
name = "paid"
target_ms = 50
default_mode = "async"

[[tiers]]
name = "free"
target_ms = 100

[models.words]
[models.later]
default_mode = "async"
[models.now]
default_mode = "sync"
[models.letters]
bytes_as = "text"
[models.facts]
bytes_as = "json"
[models.pixels]
bytes_as = "base64"
[models.story]
protocol = "openai_completions"
endpoints = ["{completions}"]
completion_output = "text"

[keys.plain]
sha256 = "{plain}"
[keys.tasks]
sha256 = "{tasks}"
default_mode = "async"
[keys.paid]
sha256 = "{paid}"
tier = "paid"
[keys.paid-waits]
sha256 = "{paid-waits}"
tier = "paid"
default_mode = "sync"
"""


class OwnNames(ScriptedUpstream):
    """An API with field names of its own, which tells tokens for each input, and one version for all."""

    inputs_field = "texts"

    async def answer(self, inputs: list[Any], writer: asyncio.StreamWriter) -> None:
        """Texts with their case swapped; anything else as it is."""
        results = [value.swapcase() if isinstance(value, str) else value for value in inputs]
        usage = [len(json.dumps(value)) for value in inputs]
        await send(writer, json.dumps({"results": results, "usage": usage, "rev": "2026-11"}).encode())


class Completions(ScriptedUpstream):
    """Speaks `openai_completions`."""

    inputs_field = "prompt"

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        choices = [
            {"index": index, "text": f"{text} … and so on", "finish_reason": "stop"}
            for index, text in enumerate(inputs)
        ]
        usage = {"prompt_tokens": 3 * len(inputs), "completion_tokens": 4 * len(inputs)}
        await send(writer, json.dumps({"choices": choices, "usage": usage}).encode())


@asynccontextmanager
async def configured(directory: Path) -> AsyncIterator[Path]:
    """A directory with the configuration, while its upstreams run."""
    digests = {name: sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    async with scripted_upstream(OwnNames()) as own, scripted_upstream(Completions()) as completions:
        at = {"json": own.url, "completions": completions.url.removesuffix("/infer")}
        (directory / "carpool.toml").write_text(CONFIGURATION.format(**at, **digests))
        yield directory


async def take_key(directory: Path, settings: dict[str, str]) -> str:
    """`carpool keys import`; returns all that it prints."""
    environment = CLEAN_ENVIRONMENT | {variable(name): value for name, value in settings.items()}

    def run() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "carpool", "keys", "import", "imported"]
        return subprocess.run(
            command, input=KEYS["imported"] + "\n", cwd=directory, env=environment, capture_output=True,
            text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done
    return done.stdout + done.stderr


async def curl(gateway: GatewayProcess, body: str, *headers: str, path: str = "/v1/inference") -> Response:
    """What `curl -d` gets, without a word of the content type; without curl, what it would send."""
    lines = [f"X-API-Key: {KEYS['plain']}", *headers]
    if (program := shutil.which("curl")) is None:
        return await ask_once(
            gateway.port, "POST", path, body.encode(), FORM + "".join(f"{line}\r\n" for line in lines)
        )
    flags = [part for line in lines for part in ("-H", line)]
    url = f"http://127.0.0.1:{gateway.port}{path}"
    command = [program, "-s", "--noproxy", "*", "-w", "\n%{http_code}", *flags, "-d", body, url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=PATIENCE_S, check=True)
    answer, _, status = done.stdout.rpartition(b"\n")
    return Response(int(status), {}, answer)


async def post(
    gateway: GatewayProcess, key: str, body: object, path: str = "/v1/inference", more: str = ""
) -> Response:
    headers = f"Authorization: Bearer {KEYS[key]}\r\nContent-Type: application/json\r\n{more}"
    return await ask_once(gateway.port, "POST", path, json.dumps(body).encode(), headers)


async def result(gateway: GatewayProcess, key: str, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_there() -> bool:
        target = f"/v1/result/{task_id}"
        answer = await ask_once(gateway.port, "GET", target, headers=f"X-API-Key: {KEYS[key]}\r\n")
        assert answer.status == 200
        found.update(answer.json)
        return bool(found["status"] != "PENDING")

    await until(is_there)
    return found


async def with_curl(gateway: GatewayProcess) -> None:
    answer = await curl(gateway, ' {"input": "Hello"}')
    assert (answer.status, answer.json["output"]) == (200, "hELLO")
    predicted = await curl(gateway, '{"model_id": "words", "input_data": "Hello"}', path="/v1/predict")
    assert (predicted.status, predicted.json["output"]) == (200, "hELLO")
    completed = await curl(gateway, '{"model": "story", "prompt": "Once"}', path="/v1/completions")
    assert (completed.status, completed.json["choices"][0]["text"]) == (200, "Once … and so on")
    # A page of another site can send a form without asking, and a browser says that it is one.
    for header in ("Origin: https://elsewhere.example", "Origin: null", "Sec-Fetch-Site: cross-site"):
        for path in ("/v1/inference", "/v1/predict", "/v1/completions"):
            assert (await curl(gateway, '{"input": "Hello"}', header, path=path)).status == 415, header
            # Nor may it say nothing at all of the type, as a page can too.
            lines = f"X-API-Key: {KEYS['plain']}\r\n{header}\r\n"
            assert (await ask_once(gateway.port, "POST", path, b'{"input": "Hello"}', lines)).status == 415, header
    without = await ask_once(
        gateway.port, "POST", "/v1/inference", b'{"input": "Hello"}', f"X-API-Key: {KEYS['plain']}\r\n"
    )
    assert without.status == 200
    refused = await curl(gateway, "input=Hello")
    assert refused.status == 415 and "Content-Type: application/json" in refused.json["detail"]
    assert (await curl(gateway, '{"input": ')).status == 400
    assert (await curl(gateway, '{"input": 1}', "Content-Type: text/plain")).status == 415


async def who_submits_and_polls(gateway: GatewayProcess) -> None:
    """Its own word, then that of its key, its model, its tier, the gateway."""
    asynchronous, synchronous = {"mode": "async"}, {"mode": "sync"}
    for key, model, own, more, wanted in (
        ("plain", "words", {}, "", 200),  # the gateway's
        ("plain", "words", asynchronous, "", 202),
        ("plain", "words", {}, "Prefer: respond-async\r\n", 202),
        ("plain", "later", {}, "", 202),  # the model's
        ("plain", "later", synchronous, "", 200),
        ("tasks", "words", {}, "", 202),  # the key's
        ("tasks", "now", {}, "", 202),
        ("tasks", "words", synchronous, "", 200),
        ("paid", "words", {}, "", 202),  # the tier's
        ("paid", "now", {}, "", 200),
        ("paid", "words", synchronous, "", 200),
        ("paid-waits", "words", {}, "", 200),
        ("paid-waits", "later", {}, "", 200),
    ):
        answer = await post(gateway, key, {"input": "Hello", "model": model, **own}, more=more)
        assert answer.status == wanted, (key, model, own, more)
        if wanted == 200:
            assert answer.json["output"] == "hELLO"
            continue
        assert set(answer.json) == {"task_id", "status"} and answer.json["status"] == "PENDING"
        done = await result(gateway, key, answer.json["task_id"])
        assert (done["status"], done["output"]) == ("SUCCESS", "hELLO")


async def who_reads_metadata(gateway: GatewayProcess) -> None:
    answers = await asyncio.gather(*(post(gateway, "plain", {"input": "x" * size}) for size in range(20)))
    for size, answer in enumerate(answers):
        told = answer.json["metadata"]
        assert type(told["latency_ms"]) is int
        assert (told["tokens_used"], told["model_version"]) == (size + 2, "2026-11")
    request_id = answers[0].json["request_id"]
    UUID(request_id)
    state = (await ask_once(gateway.admin_port, "GET", f"/internal/requests/{request_id}")).json
    assert (state["status"], type(state["latency_ms"])) == ("completed", int)


async def who_completes(gateway: GatewayProcess) -> None:
    answer = (await post(gateway, "plain", {"input": "Once", "model": "story"})).json
    assert (answer["output"], answer["metadata"]["tokens_used"]) == ("Once … and so on", 7)
    openai = (await post(gateway, "plain", {"prompt": "Once", "model": "story"}, path="/v1/completions")).json
    assert openai["choices"][0]["text"] == "Once … and so on"


async def who_has_a_key(gateway: GatewayProcess) -> None:
    for key in KEYS.values():
        for header in (f"Authorization: Bearer {key}\r\n", f"X-API-Key: {key}\r\n"):
            body = b'{"input": "Hello", "mode": "sync"}'
            assert (await ask_once(gateway.port, "POST", "/v1/inference", body, header)).status == 200, key
            wrong = header.replace(key, key[:-1] + "?")
            assert (await ask_once(gateway.port, "POST", "/v1/inference", body, wrong)).status == 401, key


async def who_predicts(gateway: GatewayProcess) -> None:
    """Base64 in and out; the ids are UUIDs."""
    pixels = bytes(range(252))
    for model, given, wanted in (
        ("letters", "Grüße".encode(), "gRÜSSE".encode()),
        ("facts", b'{"Ab": [1, 2.50]}', b'{"Ab": [1, 2.5]}'),
        ("pixels", pixels, b64decode(b64encode(pixels).swapcase())),
    ):
        answer = await post(
            gateway, "plain", {"model_id": model, "input_data": b64encode(given).decode()}, "/v1/predict"
        )
        assert answer.status == 200, answer
        assert b64decode(answer.json["output"], validate=True) == wanted
        assert UUID(answer.json["request_id"]).version == 4
        assert type(answer.json["latency_ms"]) is int
        raw = f"X-API-Key: {KEYS['plain']}\r\nContent-Type: application/octet-stream\r\n"
        target, accept = f"/v1/predict?model_id={model}", "Accept: application/octet-stream\r\n"
        assert (await ask_once(gateway.port, "POST", target, given, raw + accept)).body == wanted
        assert b64decode((await ask_once(gateway.port, "POST", target, given, raw)).json["output"]) == wanted
    for wrong in ("no base64!", 5, ""):
        assert (await post(gateway, "plain", {"model_id": "letters", "input_data": wrong}, "/v1/predict")).status == 400
    for model in ("letters", "facts"):  # no UTF-8, no JSON
        body = {"model_id": model, "input_data": b64encode(b"\xff{").decode()}
        assert (await post(gateway, "plain", body, "/v1/predict")).status == 400
    untouched = await post(gateway, "plain", {"model_id": "words", "input_data": "Aa=="}, "/v1/predict")
    assert untouched.json["output"] == "aA=="


async def who_speaks_grpc(gateway: GatewayProcess) -> None:
    def predict(model: str, data: bytes) -> Any:
        with grpc_client(gateway.grpc_port) as client:
            asked = message("PredictRequest")(model_id=model, input_data=data)
            return client.method("Predict")(asked, timeout=PATIENCE_S, metadata=[("x-api-key", KEYS["imported"])])

    letters = await asyncio.to_thread(predict, "letters", "Grüße".encode())
    assert letters.output == "gRÜSSE".encode()
    assert (letters.metadata.model_version, letters.metadata.tokens_used) == ("2026-11", len(json.dumps("Grüße")))
    UUID(letters.request_id)
    assert (await asyncio.to_thread(predict, "pixels", b"abc")).output == b64decode(b64encode(b"abc").swapcase())
    assert (await asyncio.to_thread(predict, "words", b"abc")).output == b'"%b"' % b64encode(b"abc").swapcase()


async def all_clients(gateway: GatewayProcess, taken: str) -> None:
    for client in (
        with_curl,
        who_has_a_key,
        who_submits_and_polls,
        who_reads_metadata,
        who_completes,
        who_predicts,
        who_speaks_grpc,
    ):
        await client(gateway)
    told = gateway.log.read_text() + taken
    assert not [name for name, key in KEYS.items() if key in told]


async def test_all_clients_over_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.url": redis_server.url, "broker.namespace": tmp_path.name}
    async with configured(tmp_path):
        taken = await take_key(tmp_path, settings)
        async with (
            running_role(tmp_path, "batcher", settings=settings),
            running_role(tmp_path, "gateway", settings=settings) as gateway,
        ):
            await gateway.until_ready()
            await all_clients(gateway, taken)
