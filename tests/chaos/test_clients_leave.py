"""C1, C2: clients that hang up. Nothing of a request whose client left while it waited reaches the GPU, its place is
free at once, nothing leaks, and those who stay notice nothing.
"""

import asyncio
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, ask_once, inference_body
from support.processes import PATIENCE_S, GatewayProcess, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import running_redis
from support.upstreams import ScriptedUpstream, scripted_upstream

MAX_BATCH = 64
# Nobody is to be sent away by the clock in these tests.
PATIENT = {"broker.queue_timeout_s": 120, "broker.total_timeout_s": 120, "upstream.timeout_s": 120}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class HangUps(NamedTuple):
    """What C1 saw."""

    verdict: Verdict
    hung_up: int
    # Inputs of clients that left while they waited, and yet were sent.
    sent_after_leaving: int
    # For each wave, seconds from the last hang-up until nothing of it was queued.
    freed_s: list[float]
    # The gauges at the end; all must be 0.
    held: dict[str, float]
    resident_growth_bytes: int


class Wave:
    """Blocking sockets in place of streams, so that the moment of the last hang-up is known."""

    def __init__(self, port: int, texts: list[str]) -> None:
        self.sockets: list[socket.socket] = []
        for text in texts:
            connected = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            body = inference_body(text)
            head = f"POST /v1/inference HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
            connected.sendall(head.encode() + body)
            self.sockets.append(connected)

    def hang_up(self) -> float:
        """Every other one with FIN, the rest with RST; returns when that was done."""
        for number, connected in enumerate(self.sockets):
            if number % 2:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            connected.close()
        return time.monotonic()


# How many requests wait for a slot, wherever that is, while so many are sent.
Waiting = Callable[[int], Awaitable[int]]


async def wait_for_depth(waiting: Waiting, in_flight: int, depth: int) -> None:
    """Wait until so many requests are queued."""

    async def is_reached() -> bool:
        return await waiting(in_flight) == depth

    await until(is_reached)


async def hang_up_in_waves(directory: Path, waves: int, clients: int) -> HangUps:
    """In each wave the one slot is busy, so all but a batch of its clients wait when they hang up."""
    checker = Checker("C1")
    freed_s: list[float] = []
    sent_after_leaving = 0
    resident_first = 0
    async with scripted_upstream() as upstream:
        flags = ("--max-batch", str(MAX_BATCH), "--no-journal")
        async with running_gateway(directory, upstream.url, *flags, settings=PATIENT) as gateway:
            admin = await Connection.open(gateway.admin_port)

            async def waiting(_: int) -> int:
                return int((await admin.ask("GET", "/internal/health")).json["queue_depth"])

            for number in range(waves):
                seconds, sent = await one_wave(gateway, upstream, checker, clients, waiting)
                freed_s.append(seconds)
                sent_after_leaving += sent
                if number == waves // 5:
                    resident_first = gateway.resident_bytes()
            await admin.close()
            growth = gateway.resident_bytes() - resident_first
            held = await gauges_once_empty(gateway)
            assert gateway.log_messages("error") == []
    return HangUps(checker.verdict(upstream.seen), waves * clients, sent_after_leaving, freed_s, held, growth)


async def hang_up_over_redis(directory: Path, waves: int, clients: int) -> HangUps:
    """The same with Redis between: clients wait there, or with the batcher, whose one slot is busy."""
    checker, shards = Checker("C1-redis"), Keys().shards
    freed_s: list[float] = []
    sent_after_leaving = 0
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        client: Any = await stack.enter_async_context(server.client())
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, PATIENT))
        upstream = await stack.enter_async_context(scripted_upstream())
        batcher = (await fleet.add("batcher", "--upstream", upstream.url, "--max-batch", str(MAX_BATCH))).process
        gateway = (await fleet.add("gateway")).process
        await fleet.wait_until_ready()

        async def entries() -> int:
            return sum([int(await client.hget(shard.counts, "held") or 0) for shard in shards])

        async def waiting(in_flight: int) -> int:
            # Some of them wait with the batcher, which may forget them a moment later.
            return max(await entries() - in_flight, int(await batcher.metric("carpool_queue_depth")))

        resident_first = 0
        for _ in range(waves):
            seconds, sent = await one_wave(gateway, upstream, checker, clients, waiting)
            freed_s.append(seconds)
            sent_after_leaving += sent
            resident_first = resident_first or fleet.resident_bytes()
        growth = fleet.resident_bytes() - resident_first
        held = await gauges_once_empty(gateway)
        held["entries"] = await entries()
        assert fleet.errors() == []
    return HangUps(checker.verdict(upstream.seen), waves * clients, sent_after_leaving, freed_s, held, growth)


async def one_wave(
    gateway: GatewayProcess, upstream: ScriptedUpstream, checker: Checker, clients: int, waiting: Waiting
) -> tuple[float, int]:
    """Clients come, a batch of them is sent, all hang up; returns how long that took, and what was sent afterwards."""
    upstream.gate.clear()
    texts = [checker.new_input() for _ in range(clients)]
    wave = await asyncio.to_thread(Wave, gateway.port, texts)
    await until(lambda: upstream.in_flight > 0)
    in_flight = set(upstream.seen) & set(texts)
    await wait_for_depth(waiting, len(in_flight), clients - len(in_flight))
    hung_up_at = await asyncio.to_thread(wave.hang_up)
    await wait_for_depth(waiting, len(in_flight), 0)
    seconds = time.monotonic() - hung_up_at
    for text in texts:
        checker.left(text)
    upstream.gate.set()
    stayed = checker.new_input()
    checker.accepted(stayed)
    response = await ask_once(gateway.port, "POST", "/v1/inference", inference_body(stayed))
    checker.output(stayed, response.json["output"])
    return seconds, len(set(upstream.seen) & set(texts)) - len(in_flight)


async def gauges_once_empty(gateway: GatewayProcess) -> dict[str, float]:
    """What the gateway still holds after everybody has left, once that is nothing or does not become so."""
    names = ("carpool_held_requests", "carpool_held_bytes", "carpool_connections", "carpool_queue_depth")
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        held = {name: await gateway.metric(name) for name in names}
        if not any(held.values()) or time.monotonic() > give_up_at:
            return held
        await asyncio.sleep(0.02)


class Cancellations(NamedTuple):
    """What C2 saw."""

    verdict: Verdict
    tally: dict[str, int]
    # The longest time without an answer to anybody.
    longest_pause_s: float
    held: dict[str, float]


async def half_of_all_cancel(directory: Path, clients: int, seconds: float) -> Cancellations:
    """Clients under load, each of whose requests is cancelled with probability one half, at a random moment."""
    checker = Checker("C2")
    stop_at = time.monotonic() + seconds
    answered_at: list[float] = [time.monotonic()]

    async def client(gateway: GatewayProcess) -> None:
        connection: Connection | None = None
        while time.monotonic() < stop_at:
            connection = connection or await Connection.open(gateway.port)
            text = checker.new_input(random.choice((0, 2000)))
            checker.accepted(text)
            connection.send("POST", "/v1/inference", inference_body(text))
            if random.random() < 0.5:
                await asyncio.sleep(random.uniform(0, 0.08))
                await connection.abort()
                connection = None
                checker.left(text)
                continue
            try:
                response = await connection.read()
            except ConnectionBrokenError:
                checker.broke_off(text)
                connection = None
                continue
            answered_at.append(time.monotonic())
            checker.answered(text, response)
        if connection is not None:
            await connection.close()

    async with scripted_upstream() as upstream:
        upstream.latency_s = 0.03
        flags = ("--slots", "2", "--max-batch", "16")
        async with running_gateway(directory, upstream.url, *flags, settings=PATIENT) as gateway:
            stop_at = time.monotonic() + seconds
            answered_at[0] = time.monotonic()
            await asyncio.gather(*(client(gateway) for _ in range(clients)))
            held = await gauges_once_empty(gateway)
            assert gateway.log_messages("error") == []
    pauses = (later - earlier for earlier, later in pairwise(answered_at))
    return Cancellations(checker.verdict(upstream.seen), dict(checker.tally), max(pauses), held)


MIB = 1024 * 1024


@pytest.mark.timeout(240)
async def test_ten_thousand_hang_ups_free_their_places_and_leak_nothing(tmp_path: Path) -> None:
    seen = await hang_up_in_waves(tmp_path, waves=50, clients=200)
    freed_ms = [seconds * 1000 for seconds in seen.freed_s]
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.sent_after_leaving == 0
        and median(freed_ms) < 100
        and not any(seen.held.values())
        and seen.resident_growth_bytes < 8 * MIB
    )
    what = (
        f"{seen.hung_up} hang-ups, {seen.sent_after_leaving} sent after leaving, queue empty after "
        f"{median(freed_ms):.0f} ms (median), {max(freed_ms):.0f} ms (worst), "
        f"resident {seen.resident_growth_bytes / MIB:+.1f} MiB"
    )
    seen.verdict.report("C1", what, passed=passed)
    assert passed


async def test_thousands_hang_up_at_once(tmp_path: Path) -> None:
    seen = await hang_up_in_waves(tmp_path, waves=2, clients=5000)
    passed = seen.verdict.is_clean and seen.sent_after_leaving == 0 and not any(seen.held.values())
    freed = " and ".join(f"{seconds * 1000:.0f}" for seconds in seen.freed_s)
    seen.verdict.report("C1", f"2 x 5000 hang-ups at once, queue empty after {freed} ms", passed=passed)
    assert passed


async def test_hang_ups_over_redis(tmp_path: Path) -> None:
    seen = await hang_up_over_redis(tmp_path, waves=10, clients=300)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.sent_after_leaving == 0
        and not any(seen.held.values())
        and seen.resident_growth_bytes < 8 * MIB
    )
    what = (
        f"{seen.hung_up} hang-ups over Redis, {seen.sent_after_leaving} sent after leaving, queue empty after "
        f"{median(seen.freed_s) * 1000:.0f} ms (median), resident {seen.resident_growth_bytes / MIB:+.1f} MiB"
    )
    seen.verdict.report("C1", what, passed=passed)
    assert passed, seen


async def test_half_of_all_clients_cancel(tmp_path: Path) -> None:
    seen = await half_of_all_cancel(tmp_path, clients=100, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.tally.keys() == {"ok", "left"}
        and seen.longest_pause_s < 1.0
        and not any(seen.held.values())
    )
    what = f"half of all cancel for 20 s: {seen.tally}, longest pause {seen.longest_pause_s * 1000:.0f} ms"
    seen.verdict.report("C2", what, passed=passed)
    assert passed
