"""F12: a flood of dead letters, and of tasks: bytes in Redis stay bounded, and nobody else is refused for them."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.broker.redis.keys import Keys
from support.addressed_clients import ADDRESSES, AddressedClients, Summary
from support.checker import Checker, Verdict
from support.redis_fleet import Clients, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.stage import gpus
from support.upstreams import scripted_upstream

POISON = "POISON"
LARGE_BYTES = 900_000
# Each of the others waits so long after an answer.
PAUSE_S = 0.1
# So many poisons are under way at once: what still waits is no letter, and may be refused for its memory.
AT_ONCE = 8
LOOK_S = 0.05


class Watched:
    """The most that was seen in Redis."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        # Of letters as they are stored, of the inputs of tasks as Carpool counts them, of everything.
        self.letter_bytes = 0
        self.input_bytes = 0
        self.used_bytes = 0

    async def during(self, work: asyncio.Future[None]) -> None:
        """Look again and again until the work is done."""
        async with self._server.client() as client:
            while not work.done():
                asked = client.pipeline(transaction=False)
                for shard in Keys().shards:
                    asked.memory_usage(shard.letter_bodies.decode(), 0)
                    asked.hget(shard.counts.decode(), "input_bytes")
                found = [int(each or 0) for each in await asked.execute()]
                self.letter_bytes = max(self.letter_bytes, sum(found[::2]))
                self.input_bytes = max(self.input_bytes, sum(found[1::2]))
                self.used_bytes = max(self.used_bytes, (await client.info("memory"))["used_memory"])
                await asyncio.wait([work], timeout=LOOK_S)
        await work


class LetterFlood(NamedTuple):
    """What was seen while one client's tasks all became dead letters."""

    verdict: Verdict
    # What poisons were answered with, and what came of them.
    accepted: Counter[int]
    outcomes: Counter[str]
    others: Summary
    letter_bytes: int
    used_bytes: int
    kept: int
    dropped: float


async def letters_without_end(directory: Path, letters: int, memory_max: int) -> LetterFlood:
    """One client's tasks are all poison, and together larger than Redis; others send ordinary requests."""
    checker, poisoned = Checker("F12"), Checker("F12-poison", {POISON: {422, 502}})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis", "--maxmemory", str(memory_max)))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        flags = stack.enter_context(gpus("sim", slots=4, latency_ms=20, poison=POISON))
        gateway, batcher = await fleet.add("gateway"), await fleet.add("batcher", *flags)
        await fleet.wait_until_ready()
        flood = await stack.enter_async_context(Clients(poisoned, fleet.ports))
        clients = await stack.enter_async_context(AddressedClients(gateway.port, checker))
        left = iter(range(letters))

        async def send_poison() -> None:
            for _ in left:
                if task_id := await flood.submit(poisoned.new_input(LARGE_BYTES) + POISON):
                    await flood.wait_for(task_id)

        async def send_all() -> None:
            await asyncio.gather(*(send_poison() for _ in range(AT_ONCE)))

        async def ask_on(address: str) -> None:
            while not flooding.done():
                await clients.ask(address)
                await asyncio.sleep(PAUSE_S)

        flooding, watched = asyncio.ensure_future(send_all()), Watched(server)
        await asyncio.gather(watched.during(flooding), *map(ask_on, ADDRESSES))
        return LetterFlood(
            checker.verdict(),
            Counter(answer.status for answer in flood.task_answers),
            poisoned.tally,
            Summary.of(clients.answers),
            watched.letter_bytes,
            watched.used_bytes,
            await gateway.process.dead_letters(),
            await batcher.process.metric("carpool_dead_letters_dropped_total"),
        )


class TaskFlood(NamedTuple):
    """What was seen of more tasks than there is room for."""

    verdict: Verdict
    checker: Checker
    # What they were answered with while nothing went on, and when all of those had their outcomes.
    statuses: Counter[int]
    statuses_later: Counter[int]
    input_bytes: int
    used_bytes: int


async def tasks_beyond_the_bound(directory: Path, tasks: int, bytes_max: int) -> TaskFlood:
    """Large tasks while the upstream stands still, more than `bytes_max`; then it goes on, and some more come."""
    checker = Checker("F12-tasks", {"": {503}})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, {"broker.bytes_max": bytes_max}))
        upstream = await stack.enter_async_context(scripted_upstream())
        await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))

        async def submit(number: int) -> None:
            for _ in range(number):
                await clients.submit(checker.new_input(LARGE_BYTES))

        upstream.gate.clear()
        watched = Watched(server)
        await watched.during(asyncio.ensure_future(submit(tasks)))
        upstream.gate.set()
        await clients.read_again()
        early = Counter(answer.status for answer in clients.task_answers)
        await submit(early[202] // 2)
        await clients.read_again()
        later = Counter(answer.status for answer in clients.task_answers) - early
        return TaskFlood(checker.verdict(upstream.seen), checker, early, later, watched.input_bytes, watched.used_bytes)


LETTERS, MEMORY_MAX = 300, 200_000_000
TASKS, BYTES_MAX = 60, 10_000_000
# What Redis needs for itself and its clients' buffers.
OWN_BYTES = 20_000_000


@pytest.mark.timeout(240)
async def test_a_flood_of_dead_letters_keeps_nobody_out(tmp_path: Path) -> None:
    seen = await letters_without_end(tmp_path, LETTERS, MEMORY_MAX)
    passed = (
        seen.verdict.is_clean
        and seen.others.statuses.keys() == {200}
        and seen.accepted == {202: LETTERS}
        # 502 for poisons that were in one batch with each other alone: the endpoint may have been at fault.
        and seen.outcomes.keys() <= {"422", "502"}
        and seen.outcomes.total() == LETTERS
        and seen.letter_bytes <= 0.5 * MEMORY_MAX
        and seen.dropped > 0
    )
    what = (
        f"{LETTERS} poison tasks of {LARGE_BYTES / 1e6:g} MB, maxmemory {MEMORY_MAX / 1e6:g} MB: others {seen.others}; "
        f"letters at most {seen.letter_bytes / 1e6:.0f} MB ({seen.used_bytes / 1e6:.0f} MB in use), {seen.kept} kept, "
        f"{seen.dropped:g} dropped; tasks {dict(seen.accepted)}, {dict(seen.outcomes)}"
    )
    seen.verdict.report("F12", what, passed=passed)
    assert passed


async def test_tasks_beyond_the_bound_are_refused_until_there_is_room(tmp_path: Path) -> None:
    seen = await tasks_beyond_the_bound(tmp_path, TASKS, BYTES_MAX)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.statuses.keys() == {202, 503}
        and seen.statuses[202] > 0.5 * BYTES_MAX / LARGE_BYTES
        and seen.input_bytes <= BYTES_MAX
        and seen.used_bytes <= 2 * BYTES_MAX + OWN_BYTES
        and seen.statuses_later.keys() == {202}
    )
    what = (
        f"{TASKS} tasks of {LARGE_BYTES / 1e6:g} MB, bytes_max {BYTES_MAX / 1e6:g} MB: {dict(seen.statuses)}, inputs "
        f"at most {seen.input_bytes / 1e6:.1f} MB ({seen.used_bytes / 1e6:.0f} MB in use), when drained "
        f"{dict(seen.statuses_later)}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F12", what, passed=passed)
    assert passed
