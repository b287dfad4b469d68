"""F6, F7 and C3 over Redis: entries that are there twice, claimers that race, calls longer than the lease, and
rolling restarts.
"""

import asyncio
import random
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis.asyncio
import redis.exceptions

from carpool.broker.redis.keys import GROUP, Keys
from support.checker import Checker, Verdict
from support.processes import GatewayProcess, running_role
from support.redis_fleet import LEASE_S, SETTINGS, Clients, fleet_over, queue_streams
from support.redis_servers import running_redis
from support.scenarios.drain import Fleet as KnownGateways
from support.upstreams import scripted_upstream

INTRUDER = "intruder"
# Of the entries that it sees: copied; claimed from the batcher that has them. Of the looks at a stream: the next entry
# taken; one claimed whose lease is over, in a race with the batchers.
COPIED_SHARE, STOLEN_SHARE = 0.1, 0.05
TAKEN_SHARE, RACED_SHARE = 0.03, 0.04
LOOK_S = 0.01
LEASE_MS = round(LEASE_S * 1000)
SWEEP_S_MAX = 8


class Intruder:
    """Copies entries of the queue; takes and claims others that it never answers."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._known: set[tuple[bytes, bytes]] = set()
        self.stopped = False
        self.copied = 0
        self.stolen = 0
        self.taken = 0
        self.raced = 0

    async def run(self) -> None:
        """Until stopped; to cancel a call to Redis is asking for trouble."""
        while not self.stopped:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        streams = await queue_streams(self._client, self._keys)
        asked = self._client.pipeline(transaction=False)
        for stream in streams:
            asked.xrange(stream, count=1000)
        found = await asked.execute(raise_on_error=False)
        for stream, entries in zip(streams, found, strict=True):
            for entry_id, fields in entries if isinstance(entries, list) else ():
                if (stream, entry_id) not in self._known:
                    self._known.add((stream, entry_id))
                    await self._interfere(stream, entry_id, fields)
        for stream in streams:
            if random.random() < TAKEN_SHARE:
                taken = await attempt(self._client.xreadgroup(GROUP.decode(), INTRUDER, {stream: ">"}, count=1))
                self.taken += bool(taken)
            if random.random() < RACED_SHARE:
                claimed = await attempt(
                    self._client.xautoclaim(stream, GROUP, INTRUDER, LEASE_MS, count=1, justid=True)
                )
                self.raced += bool(claimed)

    async def _interfere(self, stream: bytes, entry_id: bytes, fields: dict[Any, Any]) -> None:
        if random.random() < COPIED_SHARE:
            self.copied += bool(await attempt(self._client.xadd(stream, fields, nomkstream=True)))
        if random.random() < STOLEN_SHARE:
            # Entries that nobody took yet cannot be claimed: then there is no race either.
            self.stolen += bool(await attempt(self._client.xclaim(stream, GROUP, INTRUDER, 0, [entry_id], justid=True)))


async def attempt(command: Awaitable[Any]) -> Any:
    """The reply; None if the stream was dropped meanwhile."""
    try:
        return await command
    except redis.exceptions.ResponseError:
        return None


class Doubled(NamedTuple):
    """What was seen while entries were copied and claimed."""

    verdict: Verdict
    checker: Checker
    intruder: Intruder
    requests: int
    late_outcomes: float
    errors: list[str]


async def doubled_deliveries(directory: Path, seconds: float) -> Doubled:
    """F6: one entry in ten is there twice, others are taken or claimed by somebody who never answers."""
    checker = Checker("F6")
    # Who is claimed by the intruder again and again needs a lease more each time.
    patient = {"broker.total_timeout_s": 9}
    keys = Keys()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, patient))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.1
        await fleet.add("gateway")
        for _ in range(2):
            await fleet.add("batcher", "--upstream", upstream.url, "--slots", "4")
        await fleet.wait_until_ready()
        client = await stack.enter_async_context(server.client())
        intruder = Intruder(client, keys)
        intruding = asyncio.create_task(intruder.run())
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=100, tasks_per_s=100)
        await asyncio.sleep(seconds)
        await clients.stop()
        intruder.stopped = True
        await intruding
        # What was claimed last comes back when its lease is over: it must not change what was told.
        await asyncio.sleep(2 * LEASE_S)
        await clients.read_again()
        # The intruder tells nobody of its copies: the last one may be found by a sweep only.
        left = await entries_left(client, keys)
        for _ in range(SWEEP_S_MAX):
            if left:
                await asyncio.sleep(1.0)
                left = await entries_left(client, keys)
        late = await fleet.gateways[0].process.metric("carpool_late_outcomes_total")
        assert left == 0, f"{left} entries are still in the queue"
        return Doubled(
            checker.verdict(upstream.seen),
            checker,
            intruder,
            len(clients.answers) + len(clients.inputs),
            late,
            fleet.errors(),
        )


async def entries_left(client: redis.asyncio.Redis, keys: Keys) -> int:
    asked = client.pipeline(transaction=False)
    for stream in await queue_streams(client, keys):
        asked.xlen(stream)
    return sum(await asked.execute())


class LongCalls(NamedTuple):
    """What was seen of calls that outlast their leases."""

    verdict: Verdict
    checker: Checker
    claimed: float
    dead_letters: int
    seconds: float


async def calls_longer_than_the_lease(directory: Path, requests: int) -> LongCalls:
    """F7: one call takes three times as long as a lease."""
    checker = Checker("F7")
    patient = {"upstream.timeout_s": 20, "broker.queue_timeout_s": 20, "broker.total_timeout_s": 30}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, patient))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 3 * LEASE_S
        await fleet.add("gateway")
        for _ in range(2):
            await fleet.add("batcher", "--upstream", upstream.url, "--slots", "4")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        began = time.monotonic()
        work = [clients.ask() for _ in range(requests // 2)] + [clients.run_task() for _ in range(requests // 2)]
        await asyncio.gather(*work)
        seconds = time.monotonic() - began
        claimed = sum([await place.process.metric("carpool_entries_claimed_total") for place in fleet.batchers])
        letters = await fleet.gateways[0].process.dead_letters()
        return LongCalls(checker.verdict(upstream.seen), checker, claimed, letters, seconds)


class Rolled(NamedTuple):
    """What was seen while gateways and batchers were replaced."""

    verdict: Verdict
    checker: Checker
    slowest_exit_s: float
    errors: list[str]


async def rolling_restarts_over_redis(directory: Path, rounds: int, clients: int) -> Rolled:
    """C3: one process after the other gets a replacement and then SIGTERM; clients never repeat a request."""
    checker = Checker("C3-redis")
    known = KnownGateways(checker)
    exits: list[float] = []
    errors: list[str] = []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.03
        endpoint = ("--upstream", upstream.url, "--slots", "2")

        async def start(role: str) -> GatewayProcess:
            flags = ("--broker", server.url, *(endpoint if role == "batcher" else ()))
            return await stack.enter_async_context(running_role(directory / role, role, *flags, settings=SETTINGS))

        async def leave(process: GatewayProcess) -> None:
            began = time.monotonic()
            process.terminate()
            code = await process.exit_code()
            exits.append(time.monotonic() - began)
            assert code == 0, process.log.read_text()
            errors.extend(process.log_messages("error"))

        batchers = [await start("batcher") for _ in range(2)]
        gateways = [await start("gateway") for _ in range(2)]
        known.ports = [gateway.port for gateway in gateways]
        await asyncio.sleep(0.5)
        load = [asyncio.create_task(known.client()) for _ in range(clients)]
        for _ in range(rounds):
            batchers.append(await start("batcher"))
            await leave(batchers.pop(0))
            gateways.append(await start("gateway"))
            known.ports = [gateway.port for gateway in gateways]
            await leave(gateways.pop(0))
            known.ports = [gateway.port for gateway in gateways]
        known.stopped = True
        await asyncio.gather(*load)
        seen = list(upstream.seen)
    return Rolled(checker.verdict(seen), checker, max(exits), errors)


REQUESTS = 64
ROUNDS = 10


async def test_doubled_deliveries_are_not_noticed(tmp_path: Path) -> None:
    seen = await doubled_deliveries(tmp_path, seconds=10)
    intruder = seen.intruder
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and intruder.copied > 0.05 * seen.requests
        and intruder.stolen > 0.02 * seen.requests
        and intruder.taken > 0
        and intruder.raced > 0
        and seen.errors == []
    )
    what = (
        f"{seen.requests} requests; by an intruder {intruder.copied} entries copied, {intruder.taken} taken, "
        f"{intruder.stolen} claimed from their batcher, {intruder.raced} claimed before other batchers; "
        f"{seen.late_outcomes:g} outcomes came when nobody waited any more, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F6", what, passed=passed)
    assert passed, seen.errors


async def test_a_call_longer_than_the_lease_is_made_once(tmp_path: Path) -> None:
    seen = await calls_longer_than_the_lease(tmp_path, REQUESTS)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.checker.tally == {"ok": REQUESTS}
        and seen.claimed == 0
        and seen.dead_letters == 0
        and seen.seconds > 3 * LEASE_S
    )
    what = (
        f"calls of {3 * LEASE_S:g} s, lease {LEASE_S:g} s: {seen.claimed:g} claimed, {seen.dead_letters} dead letters"
    )
    seen.verdict.report("F7", what, passed=passed)
    assert passed


@pytest.mark.timeout(240)
async def test_rolling_restarts_over_redis_are_not_noticed(tmp_path: Path) -> None:
    seen = await rolling_restarts_over_redis(tmp_path, ROUNDS, clients=30)
    passed = seen.verdict.is_clean and seen.checker.tally.keys() == {"ok"} and seen.errors == []
    what = (
        f"{ROUNDS} x SIGTERM of a gateway and of a batcher over Redis, {dict(seen.checker.tally)}, slowest exit after "
        f"{seen.slowest_exit_s:.2f} s"
    )
    seen.verdict.report("C3", what, passed=passed)
    assert passed, seen.errors
