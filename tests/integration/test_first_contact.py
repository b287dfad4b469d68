"""Carpool in front of an API that never answers as it should: whole processes say so, blame nobody, and recover."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from carpool.upstream.client import HttpEndpoint, make_session
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall
from support.client import ask_once, inference_body
from support.processes import carpool, running_gateway, until
from support.redis_servers import RedisServer
from support.stage import Broker, stage
from support.upstreams import ScriptedUpstream, scripted_upstream, send

CANARY = "canary-of-the-api"
WORDS = json.dumps({"detail": CANARY}).encode()
FIELDS = {"type": "missing", "loc": ["body", "texts"], "msg": CANARY, "input": {"inputs": [CANARY]}}
LOOK_AT = {401: "upstream.token_file", 500: "own log", 422: "upstream.inputs_field"}


class Refusing(ScriptedUpstream):
    """Answers each call with one status, until that is 200."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        if self.status == 200:
            await super().answer(inputs, writer)
        else:
            await send(writer, json.dumps({"detail": [FIELDS]}).encode() if self.status == 422 else WORDS, self.status)


async def ask(port: int, name: str, headers: str = "") -> Any:
    return await ask_once(port, "POST", "/v1/inference", inference_body(name), f"X-Request-Id: {name}\r\n{headers}")


@pytest.mark.parametrize(("status", "broker"), [(401, "embedded"), (422, "embedded"), (500, "redis")])
async def test_what_the_api_does_is_said_and_nobody_is_blamed(
    tmp_path: Path, redis_server: RedisServer, status: int, broker: Broker
) -> None:
    async with (
        scripted_upstream(Refusing(status)) as upstream,
        stage(tmp_path, ["--upstream", upstream.url], broker, {"log.level": "debug"}, redis_server) as on,
    ):
        assert isinstance(upstream, Refusing)
        assert (await on.gateway.health())["status"] == "healthy"
        answers = [await ask(on.gateway.port, f"request-{number}") for number in range(12)]
        assert {answer.status for answer in answers} <= {422, 502, 503}
        assert "has answered no call well so far" in answers[0].json["detail"]
        assert not [answer for answer in answers if b"is down" in answer.body]

        async def is_degraded() -> bool:
            return bool((await on.gateway.health())["status"] == "degraded")

        await until(is_degraded)
        problem = (await on.gateway.health())["problem"]
        assert problem.startswith(upstream.url) and f"it answered {status}" in problem and LOOK_AT[status] in problem
        assert ("texts" in problem) == (status == 422)
        fleet = await on.gateway.fleet()
        assert fleet["endpoints"][0]["state"] != "healthy" and problem.endswith(fleet["endpoints"][0]["problem"])
        assert fleet["quarantined"] == [] and await on.gateway.dead_letters() == 0
        said = [line for line in on.batcher.log_messages("warning") if "no call well so far" in line]
        assert len(said) == 1 and said[0].startswith(upstream.url) and f"it answered {status}" in said[0]
        admin = ("--admin", f"http://127.0.0.1:{on.gateway.admin_port}")
        why = await asyncio.to_thread(carpool, "why", "request-0", *admin, cwd=tmp_path)
        assert f"status {status}" in why.stdout and upstream.url in why.stdout, why.stderr
        assert "the model at work" not in why.stdout
        top = await asyncio.to_thread(carpool, "top", "--once", *admin, cwd=tmp_path, COLUMNS="200")
        assert "degraded" in top.stdout and f"it answered {status}" in top.stdout

        # A task waits until it is well again.
        task = (await ask(on.gateway.port, "task", "Prefer: respond-async\r\n")).json["task_id"]
        await until(lambda: "task" in upstream.seen)
        assert (await ask_once(on.gateway.port, "GET", f"/v1/result/{task}")).json["status"] == "PENDING"
        upstream.status = 200
        ended = await ask_once(on.gateway.port, "GET", f"/v1/result/{task}?wait_ms=30000")
        assert (ended.json["status"], ended.json["output"]) == ("SUCCESS", "ksat")

        async def is_well() -> bool:
            status = (await on.gateway.health())["status"]
            return bool(status == "healthy" and (await ask(on.gateway.port, "last")).status == 200)

        await until(is_well)
        assert "problem" not in (await on.gateway.fleet())["endpoints"][0]
        for process in {on.gateway, on.batcher}:
            assert CANARY not in process.log.read_text()


async def test_a_task_that_nobody_answers_in_its_time_is_a_letter(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"tasks.timeout_s": 6}
    async with (
        scripted_upstream(Refusing(404)) as upstream,
        stage(tmp_path, ["--upstream", upstream.url], "redis", settings, redis_server) as on,
    ):
        task = (await ask(on.gateway.port, "task", "Prefer: respond-async\r\n")).json["task_id"]
        await until(lambda: upstream.calls >= 2)
        assert await on.gateway.dead_letters() == 0
        ended = await ask_once(on.gateway.port, "GET", f"/v1/result/{task}?wait_ms=30000")
        assert (ended.json["status"], ended.json["error"]["status"]) == ("FAILED", 502)

        async def is_letter() -> bool:
            return await on.gateway.dead_letters() == 1

        await until(is_letter)


async def test_with_an_input_of_its_own_readiness_waits_for_an_answer(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    settings = {"upstream.probe_input": '"probe me"'}
    async with (
        scripted_upstream(Refusing(404)) as upstream,
        stage(tmp_path, ["--upstream", upstream.url], "redis", settings, redis_server) as on,
    ):
        assert isinstance(upstream, Refusing)

        async def ready() -> Any:
            return await ask_once(on.batcher.admin_port, "GET", "/internal/ready")

        await until(lambda: "probe me" in upstream.seen)
        waiting = await ready()
        assert waiting.status == 503 and b"probe_input" in waiting.body
        upstream.status = 200

        async def is_ready() -> bool:
            return bool((await ready()).status == 200)

        await until(is_ready)
        assert await on.batcher.metric("carpool_requests_total") == 0
        assert await on.batcher.dead_letters() == 0

        async def is_well() -> bool:
            return bool((await on.batcher.health())["status"] == "healthy")

        await until(is_well)
        on.batcher.terminate()
        assert await on.batcher.exit_code() == 0


async def test_a_process_that_never_got_an_answer_leaves_in_time_all_the_same(tmp_path: Path) -> None:
    settings = {"upstream.probe_input": '"probe me"', "gateway.drain_grace_s": 0.1}
    async with (
        scripted_upstream(Refusing(500)) as upstream,
        running_gateway(tmp_path, upstream.url, settings=settings) as gateway,
    ):
        task = (await ask(gateway.port, "task", "Prefer: respond-async\r\n")).json["task_id"]
        await until(lambda: {"task", "probe me"} <= set(upstream.seen))
        gateway.terminate()
        assert await gateway.exit_code() == 0
        assert isinstance(upstream, Refusing)
        upstream.status = 200
        async with running_gateway(tmp_path, upstream.url) as another:
            ended = await ask_once(another.port, "GET", f"/v1/result/{task}?wait_ms=30000")
            assert (ended.json["status"], ended.json["output"]) == ("SUCCESS", "ksat")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1/infer", "no connection: Connection refused"),
        ("http://no-such-host.invalid:9000/infer", "the name of its host does not resolve"),
        ("https://127.0.0.1:PLAIN/infer", "the server there may be a plain one, http://"),
        ("unix:/nowhere/model.sock:/infer", "no connection: No such file or directory"),
    ],
)
async def test_why_there_is_no_answer_is_said_in_words(url: str, says: str) -> None:
    async def bad_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await send(writer, b"", 400)
        writer.close()

    plain = await asyncio.start_server(bad_request, "127.0.0.1", 0)
    async with plain, make_session() as session:
        made = HttpEndpoint(session, url.replace("PLAIN", str(plain.sockets[0].getsockname()[1])), 1, 1024)
        try:
            with pytest.raises(AttemptFailedError) as failed:
                await made.post(UpstreamCall(b'{"inputs":["x"]}'), 30.0)
        finally:
            await made.close()
        assert says in str(failed.value)
