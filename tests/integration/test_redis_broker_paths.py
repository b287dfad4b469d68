"""What the contract does not cover: real `carpool` processes whose endpoints, or whose Redis, fail them."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.client import Response, ask_once
from support.processes import GatewayProcess, until
from support.redis_fleet import WatchedUpstream, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

JSON = "Content-Type: application/json\r\n"
ASYNC_ONLY = "Prefer: respond-async\r\n"
ASYNC = JSON + ASYNC_ONLY
# A long poll: as long as one may be.
WAIT_MS = 30_000


@asynccontextmanager
async def own_namespace(server: RedisServer) -> AsyncIterator[str]:
    """A name that nobody else uses; nothing is left in it at the end."""
    namespace = f"paths-{secrets.token_hex(4)}"
    yield namespace
    async with server.client() as client:
        names = [name async for name in client.scan_iter(match=f"{namespace}:*", count=1000)]
        if names:
            await client.unlink(*names)


async def ask(gateway: GatewayProcess, text: str, headers: str = JSON, **fields: object) -> Response:
    body = json.dumps({"input": text, **fields}).encode()
    return await ask_once(gateway.port, "POST", "/v1/inference", body, headers)


async def submit(gateway: GatewayProcess, text: str) -> str:
    accepted = await ask(gateway, text, ASYNC)
    assert accepted.status == 202, accepted.body
    task_id: str = accepted.json["task_id"]
    return task_id


async def result(gateway: GatewayProcess, task_id: str, wait_ms: int = 0) -> Response:
    return await ask_once(gateway.port, "GET", f"/v1/result/{task_id}?wait_ms={wait_ms}")


def problem(response: Response) -> str:
    """The code of the error in a response."""
    code: str = response.json["type"].rpartition(":")[2]
    return code


# What operators see and do.


async def sees_slots(gateway: GatewayProcess, number: int) -> bool:
    """Whether a gateway has heard of so many that work."""
    healthy: int = (await gateway.health())["healthy_slots"]
    return healthy == number


async def test_endpoints_that_have_all_failed_are_tried_again_by_requests(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    gpu = WatchedUpstream()
    async with (
        own_namespace(redis_server) as namespace,
        fleet_over(tmp_path, redis_server.url, {"broker.namespace": namespace}) as fleet,
        scripted_upstream(gpu),
    ):
        gateway = (await fleet.add("gateway")).process
        await fleet.add("batcher", "--upstream", gpu.url)
        await fleet.wait_until_ready()
        assert (await ask(gateway, "abc")).json["output"] == "cba"
        gpu.behaviour = "garbage"

        async def is_told(code: str) -> bool:
            await asyncio.sleep(0.02)  # most of these are answered at once
            return problem(await ask(gateway, "abc")) == code

        await until(lambda: is_told("upstream-down"))
        seen = gpu.calls
        await until(lambda: is_told("upstream-protocol-fault"))  # by a try, which fails
        assert gpu.calls > seen
        await until(lambda: is_told("upstream-down"))

        async def is_ready() -> bool:  # some clients ask that before they send anything
            return (await ask_once(gateway.port, "GET", "/v1/models/default")).json["ready"] is True

        await until(is_ready)
        gpu.behaviour = "good"

        async def is_back() -> bool:
            await asyncio.sleep(0.02)
            return (await ask(gateway, "abc")).status == 200

        await until(is_back)
        # For all of them, not for one now and then.
        await until(lambda: sees_slots(gateway, 1))
        answers = await asyncio.gather(*(ask(gateway, "abc") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}


async def test_one_process_for_all_and_a_redis_that_fills_up(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path / "redis") as server,
        server.client() as client,
        fleet_over(tmp_path, server.url) as fleet,
    ):
        process = (await fleet.add("serve", "--upstream", "sim:?latency_ms=5&slots=2")).process
        await fleet.wait_until_ready()
        assert (await ask(process, "abc")).json["output"] == "cba"
        task_id = await submit(process, "def")
        assert (await result(process, task_id, WAIT_MS)).json["output"] == "fed"

        async def is_seen() -> bool:
            return {"gateways": 1, "batchers": 1, "healthy_slots": 2}.items() <= (await process.health()).items()

        await until(is_seen)

        async def statuses(*expected: int) -> bool:
            answers = [await ask(process, "x"), await ask(process, "x", ASYNC)]
            for answer in answers:
                if answer.status == 429:
                    assert (problem(answer), int(answer.headers["retry-after"]) >= 1) == ("broker-memory", True)
            return tuple(answer.status for answer in answers) == expected

        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", int(used / 0.85))
        await until(lambda: statuses(429, 429))
        assert (await result(process, task_id)).json["output"] == "fed"
        await client.config_set("maxmemory", 4 * used)
        await until(lambda: statuses(200, 202))
        assert fleet.errors() == []
