"""What the contract does not cover: real `carpool` processes whose endpoints, or whose Redis, fail them."""

import asyncio
from pathlib import Path

from support.client import Response, ask_once
from support.processes import GatewayProcess, until
from support.redis_fleet import WatchedUpstream, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

ASYNC = "Prefer: respond-async\r\n"


def problem(response: Response) -> str:
    """The code of the error in a response."""
    code: str = response.json["type"].rpartition(":")[2]
    return code


async def sees_slots(gateway: GatewayProcess, number: int) -> bool:
    """Whether a gateway has heard of so many that work."""
    healthy: int = (await gateway.health())["healthy_slots"]
    return healthy == number


async def test_endpoints_that_have_all_failed_are_tried_again_by_requests(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    gpu = WatchedUpstream()
    async with (
        fleet_over(tmp_path, redis_server.url, {"broker.namespace": tmp_path.name}) as fleet,
        scripted_upstream(gpu),
    ):
        gateway = (await fleet.add("gateway")).process
        await fleet.add("batcher", "--upstream", gpu.url)
        await fleet.wait_until_ready()
        assert (await gateway.ask("abc")).json["output"] == "cba"
        gpu.behaviour = "garbage"

        async def is_told(code: str) -> bool:
            await asyncio.sleep(0.02)  # most of these are answered at once
            return problem(await gateway.ask("abc")) == code

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
            return (await gateway.ask("abc")).status == 200

        await until(is_back)
        # For all of them, not for one now and then.
        await until(lambda: sees_slots(gateway, 1))
        answers = await asyncio.gather(*(gateway.ask("abc") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}


async def test_one_process_for_all_and_a_redis_that_fills_up(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path / "redis") as server,
        server.client() as client,
        fleet_over(tmp_path, server.url) as fleet,
    ):
        process = (await fleet.add("serve", "--upstream", "sim:?latency_ms=5&slots=2")).process
        await fleet.wait_until_ready()
        assert (await process.ask("abc")).json["output"] == "cba"
        task_id = await process.submit("def")
        assert (await process.result(task_id))["output"] == "fed"

        async def is_seen() -> bool:
            return {"gateways": 1, "batchers": 1, "healthy_slots": 2}.items() <= (await process.health()).items()

        await until(is_seen)

        async def statuses(*expected: int) -> bool:
            answers = [await process.ask("x"), await process.ask("x", ASYNC)]
            for answer in answers:
                if answer.status == 429:
                    assert (problem(answer), int(answer.headers["retry-after"]) >= 1) == ("broker-memory", True)
            return tuple(answer.status for answer in answers) == expected

        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", int(used / 0.85))
        await until(lambda: statuses(429, 429))
        assert (await process.result(task_id))["output"] == "fed"
        await client.config_set("maxmemory", 4 * used)
        await until(lambda: statuses(200, 202))
        assert fleet.errors() == []
