"""What the contract of a broker does not cover: real `carpool` processes that meet in a real Redis.

Most tests share a fleet of two gateways and one batcher, whose only slot is an upstream that the test holds and
releases. They leave it idle. All run in one event loop, because that upstream lives in it.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from carpool.broker.redis.keys import Keys
from carpool.broker.redis.scripts import AUDIT
from carpool.tools.doctor_checks import parse_audit
from support.client import Response, ask_once
from support.processes import GatewayProcess, until
from support.redis_fleet import Fleet, WatchedUpstream, fleet_over, held_by
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("workshop")]

JSON = "Content-Type: application/json\r\n"
ASYNC_ONLY = "Prefer: respond-async\r\n"
ASYNC = JSON + ASYNC_ONLY
MAX_BATCH = 64
# Longer than a test waits for anything.
NEVER_S = 600
# A long poll: as long as one may be.
WAIT_MS = 30_000


class Workshop:
    """Two gateways, one batcher with one slot, and what they keep in Redis."""

    def __init__(self, fleet: Fleet, gpu: WatchedUpstream, server: RedisServer, keys: Keys) -> None:
        self.fleet = fleet
        self.gpu = gpu
        self.server = server
        self.keys = keys
        self.client = server.client()
        self.one, self.other = (place.process for place in fleet.gateways)
        self.batcher = fleet.batchers[0].process

    async def entries(self) -> tuple[int, int]:
        """Entries in the queue, and those of them that a batcher has; and that the shards count right.

        Entries come by plain commands and are counted by a script right behind these: in between they do not.
        """
        found: list[tuple[int, int]] = []

        async def are_counted() -> bool:
            found[:] = await self._counted_entries()
            return bool(found)

        await until(are_counted)
        return found[0]

    async def _counted_entries(self) -> list[tuple[int, int]]:
        held = taken = 0
        for shard in self.keys.shards:
            reply: Any = await self.client.eval(AUDIT.source, 1, shard.counts)  # type: ignore[arg-type]
            facts = parse_audit(shard.number, b"", reply)
            if facts.held_counted != facts.held:
                return []
            held += facts.held
            taken += facts.held - facts.unread
        return [(held, taken)]

    async def holds(self, held: int, taken: int) -> bool:
        return await self.entries() == (held, taken)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workshop(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> AsyncIterator[Workshop]:
    settings: dict[str, object] = {
        "broker.queue_timeout_s": NEVER_S,
        "broker.total_timeout_s": NEVER_S,
        "upstream.timeout_s": NEVER_S,
        "batching.max_batch": MAX_BATCH,
        "upstream.attempts": 1,
        "shedding.mode": "off",  # on a busy machine the GPU seems slow, and a door would refuse those who are to wait
    }
    gpu = WatchedUpstream()
    async with (
        own_namespace(redis_server) as namespace,
        scripted_upstream(gpu),
        fleet_over(
            tmp_path_factory.mktemp("workshop"), redis_server.url, settings | {"broker.namespace": namespace}
        ) as fleet,
    ):
        await asyncio.gather(
            fleet.add("gateway"), fleet.add("gateway"), fleet.add("batcher", "--upstream", gpu.url, "--slots", "1")
        )
        await fleet.wait_until_ready()
        workshop = Workshop(fleet, gpu, redis_server, Keys(namespace))
        async with workshop.client:
            yield workshop
        assert fleet.errors() == []


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


# Outcomes find those who wait for them.


# What is taken, and in which order.


async def test_a_batcher_takes_no_more_than_its_slots_can_use(workshop: Workshop) -> None:
    requests: list[asyncio.Task[Response]] = []
    most = 0

    async def look() -> None:
        """What it has beyond what was answered: an outcome takes a moment to be acknowledged."""
        nonlocal most
        held = await held_by(workshop.client, workshop.batcher.name, workshop.keys)
        most = max(most, len(held - workshop.gpu.answered))

    workshop.gpu.begin_anew()
    workshop.gpu.gate.clear()
    for number in range(500):
        gateway = workshop.one if number % 2 else workshop.other
        requests.append(asyncio.create_task(ask(gateway, f"hoard-{number}")))

    async def all_wait() -> bool:
        await look()
        return most > 0 and (await workshop.entries())[0] == len(requests)

    try:
        await until(all_wait)
        for _ in range(10):
            await look()
    finally:
        workshop.gpu.gate.set()
    while not all(request.done() for request in requests):
        await look()
    answers = await asyncio.gather(*requests)
    assert [answer.json.get("output") for answer in answers] == [f"hoard-{number}"[::-1] for number in range(500)]
    assert 0 < most <= MAX_BATCH
    await until(lambda: workshop.holds(0, 0))


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
        await fleet.add("batcher", "--upstream", gpu.url, settings={"upstream.breaker_pause_s": 0.3})
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
