"""F11: strange entries in the streams of the queue. Whoever wrote them, requests go on around them."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis.asyncio

from carpool.broker.redis.formats import ENTRY_FORMAT, Header, encode_header
from carpool.broker.redis.keys import GROUP, Keys
from support.checker import Checker, Verdict
from support.client import ask_once
from support.processes import GatewayProcess, until
from support.redis_fleet import LEASE_S, Clients, fleet_over, queue_streams
from support.redis_servers import running_redis
from support.upstreams import scripted_upstream

# A stream and an entry's id.
Entry = tuple[bytes, Any]
HEADER = encode_header(Header(ENTRY_FORMAT, b"nobody", "default", b"", b"", 2, False, 2000))
UNREADABLE: tuple[dict[bytes, bytes], ...] = (
    {b"one": b"1", b"two": b"2"},
    {b"one": b"1", b"two": b"2", b"three": b"3"},
    {b"": b""},
    {b"\xc1 no header": b"value"},
    {msgspec.msgpack.encode([]): b"value"},
    {msgspec.msgpack.encode(["x"] * 9): b"value"},
    {HEADER: b"short"},
    {HEADER: bytes(8) + b"\xff\xff" + b"shorter than it says"},
    {HEADER: bytes(8) + b"\x01\x00" + b"\xff"},
)
NEWER: dict[bytes, bytes] = {msgspec.msgpack.encode([ENTRY_FORMAT + 1, "something", {"new": 1}]): b"value"}
ROUNDS, ROUND_S = 4, 1.0
LOOK_S = 0.1


class Strangers(NamedTuple):
    """What was seen while strange entries came."""

    verdict: Verdict
    checker: Checker
    unreadable: int
    dead_letters: int
    # Entries of a newer format: how many were added, how many are there at the end, and the most deliveries that any
    # has (a batcher that looks at one counts it for a moment: the least of many looks).
    newer: int
    newer_left: int
    deliveries: int
    # Of all looks at the batchers' readiness.
    not_ready: int
    # Calls that each batcher made after the last stranger had come.
    calls: list[int]


async def strange_entries(directory: Path) -> Strangers:
    """Entries that nobody can read, and others that only a newer Carpool can, in every stream that there is."""
    checker, keys = Checker("F11"), Keys()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstreams = [await stack.enter_async_context(scripted_upstream()) for _ in range(2)]
        for upstream in upstreams:
            upstream.latency_s = 0.03
            await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
        gateway = (await fleet.add("gateway")).process
        await fleet.wait_until_ready()
        client = await stack.enter_async_context(server.client())
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=60, tasks_per_s=20)
        watching = asyncio.create_task(count_not_ready([place.process for place in fleet.batchers]))
        unreadable, newer = 0, set[Entry]()
        for _ in range(ROUNDS):
            await asyncio.sleep(ROUND_S)
            for stream in await queue_streams(client, keys):
                for fields in UNREADABLE:
                    unreadable += bool(await client.xadd(stream, fields, nomkstream=True))  # type: ignore[arg-type]
                if entry_id := await client.xadd(stream, NEWER, nomkstream=True):  # type: ignore[arg-type]
                    newer.add((stream, entry_id))

        before = [upstream.calls for upstream in upstreams]

        async def all_are_set_aside() -> bool:
            return await gateway.dead_letters() >= unreadable

        await until(all_are_set_aside)
        await asyncio.sleep(4 * LEASE_S)  # who would take them for a dead batcher's has counted some deliveries by now
        looks = [await deliveries_of(client, newer) for _ in range(20)]
        await clients.stop()
        watching.cancel()
        seen = [text for upstream in upstreams for text in upstream.seen]
        return Strangers(
            checker.verdict(seen),
            checker,
            unreadable,
            await gateway.dead_letters(),
            len(newer),
            min(len(look) for look in looks),
            max(min(look.get(entry, 0) for look in looks) for entry in newer),
            await watching,
            [upstream.calls - early for upstream, early in zip(upstreams, before, strict=True)],
        )


async def deliveries_of(client: redis.asyncio.Redis, entries: set[Entry]) -> dict[Entry, int]:
    """How often each of these was delivered, of those that are still there."""
    await asyncio.sleep(LOOK_S)
    found = {}
    for stream, entry_id in entries:
        if await client.xrange(stream, entry_id, entry_id):
            pending = await client.xpending_range(stream, GROUP, entry_id, entry_id, 1)
            found[stream, entry_id] = int(pending[0]["times_delivered"]) if pending else 0
    return found


async def count_not_ready(batchers: list[GatewayProcess]) -> int:
    """Until cancelled, which ends it in peace: how often one of them was not ready."""
    not_ready = 0
    try:
        while True:
            for batcher in batchers:
                not_ready += (await ask_once(batcher.admin_port, "GET", "/internal/ready")).status != 200
            await asyncio.sleep(LOOK_S)
    except asyncio.CancelledError:
        return not_ready


async def test_strange_entries_stop_nobody(tmp_path: Path) -> None:
    seen = await strange_entries(tmp_path)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.dead_letters == seen.unreadable > 0
        and seen.newer_left == seen.newer > 0
        and seen.deliveries == 0
        and seen.not_ready == 0
        and min(seen.calls) > 0
    )
    what = (
        f"{seen.unreadable} entries that nobody can read: {seen.dead_letters} dead letters; {seen.newer} of a newer "
        f"format: {seen.newer_left} left alone, {seen.deliveries} deliveries counted; batchers not ready "
        f"{seen.not_ready} times, calls of each afterwards {seen.calls}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F11", what, passed=passed)
    assert passed
