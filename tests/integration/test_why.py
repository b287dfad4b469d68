"""One request's story from whole processes, from the queue to the end and afterwards, at any gateway; `carpool why`."""

import asyncio
import json
from pathlib import Path
from typing import Any

from support.client import Response
from support.processes import GatewayProcess, carpool, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer
from support.tracking import until_written
from support.upstreams import ScriptedUpstream, scripted_upstream

# Whoever waits here does so until the test lets it go on.
PATIENT = {"broker.queue_timeout_s": 60, "broker.total_timeout_s": 60, "upstream.timeout_s": 60}
ASYNC = "Prefer: respond-async\r\n"


async def ask(gateway: GatewayProcess, name: str, headers: str = "") -> Response:
    return await gateway.ask(name, f"X-Request-Id: {name}\r\n{headers}")


async def until_state(process: GatewayProcess, request_id: str, status: str) -> Any:
    async def is_in() -> bool:
        found = await process.state(request_id)
        return bool(found != 404 and found["status"] == status)

    await until(is_in)
    return await process.state(request_id)


async def why(process: GatewayProcess, request_id: str, *flags: str, cwd: Path) -> str:
    admin = f"http://127.0.0.1:{process.admin_port}"
    done = await asyncio.to_thread(carpool, "why", request_id, "--admin", admin, *flags, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def fill_the_slot(upstream: ScriptedUpstream, gateway: GatewayProcess) -> "asyncio.Future[Response]":
    """The one slot is busy until the gate opens."""
    upstream.gate.clear()
    first = asyncio.ensure_future(ask(gateway, "first"))
    await until(lambda: "first" in upstream.seen)
    return first


async def test_alone_from_the_queue_to_the_end(tmp_path: Path) -> None:
    async with scripted_upstream() as upstream, running_gateway(tmp_path, upstream.url, settings=PATIENT) as gateway:
        first = await fill_the_slot(upstream, gateway)
        others = []
        for name in ("second", "third"):
            others.append(asyncio.ensure_future(ask(gateway, name)))
            waiting = await until_state(gateway, name, "queued")
        assert (waiting["queue"]["place"], waiting["queue"]["waiting"]) == (2, 2)
        assert "place 2" in await why(gateway, "third", cwd=tmp_path)
        running = await gateway.state("first")
        assert (running["status"], running["batch"]["neighbours"]) == ("processing", 0)
        assert running["batch"]["endpoint"] == upstream.url and running["waits"][-1]["what"] == "model"
        upstream.gate.set()
        assert {answer.status for answer in [await first, *await asyncio.gather(*others)]} == {200}
        told = await gateway.state("third")
        assert (told["status"], told["batch"]["size"], told["batch"]["attempts"]) == ("completed", 2, 1)
        assert told["batch"] == (await gateway.state("second"))["batch"]
        assert "queue" not in told
        assert abs(sum(wait["ms"] for wait in told["waits"]) - told["latency_ms"]) < 1
        text = await why(gateway, "third", cwd=tmp_path)
        assert "with 1 other;" in text and upstream.url in text and "was completed" in text
        assert json.loads(await why(gateway, "third", "--json", cwd=tmp_path)) == told
        nobody = await asyncio.to_thread(
            carpool, "why", "nobody", "--admin", f"http://127.0.0.1:{gateway.admin_port}", cwd=tmp_path
        )
        assert (nobody.returncode, nobody.stdout) == (1, "")
        assert nobody.stderr.startswith("carpool why: no gateway knows this request")


def parts(told: Any) -> dict[str, float]:
    assert abs(sum(wait["ms"] for wait in told["waits"]) - told["latency_ms"]) < 1
    return {wait["what"]: wait["ms"] for wait in told["waits"]}


async def test_over_redis_any_gateway_tells_the_same(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.namespace": tmp_path.name, **PATIENT}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, settings) as fleet:
        upstream.poison = "bad"
        for _ in range(2):
            await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        here, there = (place.process for place in fleet.gateways)
        assert (await ask(here, "good")).status == 200
        bad = await ask(here, "bad")
        assert bad.status in (422, 502)
        for name in ("good", "bad"):
            told = await there.state(name)
            assert told == await here.state(name)
            assert told["batch"]["endpoint"] == upstream.url and told["batch"]["reason"]
            assert abs(sum(wait["ms"] for wait in told["waits"]) - told["latency_ms"]) < 1
        # One that waits, and a task that does.
        first = await fill_the_slot(upstream, here)
        second = asyncio.ensure_future(ask(here, "second"))
        assert "waiting" in (await until_state(there, "second", "queued"))["queue"]
        task_id = (await ask(here, "task", ASYNC)).json["task_id"]
        assert (await until_state(there, task_id, "queued"))["queue"]["place"] >= 1
        third = asyncio.ensure_future(ask(here, "third-is-bad"))
        await until_state(there, "third-is-bad", "queued")
        upstream.gate.set()
        assert [(await first).status, (await second).status, (await third).status] == [200, 200, 422]
        told = await there.state("third-is-bad")
        assert ("search" in parts(told)) is (told["batch"]["size"] > 1)


async def test_what_memory_has_lost_is_told_from_tracking(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.namespace": tmp_path.name, "tracking.store": "sqlite", "tasks.data_dir": str(tmp_path)}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, settings) as fleet:
        place = await fleet.add("gateway")
        batcher = await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        assert (await ask(place.process, "good")).status == 200
        task_id = (await ask(place.process, "task", ASYNC)).json["task_id"]
        await place.process.result(task_id)
        before = await place.process.state("good")
        await until_written(place.process, batcher.process)
        # The task's state is in Redis, which does not know of its batch.
        task = await place.process.state(task_id)
        assert (task["status"], task["batch"]["size"], task["kept"]) == ("completed", 1, True)
        await place.replace()
        await fleet.wait_until_ready()
        told = await place.process.state("good")
        assert (told["kept"], told["batch"]) == (True, before["batch"])
        assert abs(told["latency_ms"] - before["latency_ms"]) < 1
        assert "(from tracking)" in await why(place.process, "good", cwd=tmp_path)
        assert await place.process.state("nobody") == 404
