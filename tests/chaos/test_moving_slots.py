"""R3: slots of a Cluster move to other nodes under load, each held open for seconds, its keys brought one by one."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.redis_fleet import Clients, fleet_over
from support.redis_servers import Move, RedisCluster, running_cluster
from support.upstreams import scripted_upstream

OPEN_S = (4.0, 6.0)
ASKS_PER_S, TASKS_PER_S = 30, 60


class Moves(NamedTuple):
    """What was seen."""

    verdict: Verdict
    accepted: int
    # Accepted tasks that Redis no longer knows.
    missing: int
    # What clients who wait, and those who submit, were told.
    statuses: Counter[int]
    task_statuses: Counter[int]
    errors: list[str]

    def __str__(self) -> str:
        return (
            f"{self.accepted} tasks accepted, {self.missing} of them gone; requests {dict(self.statuses)}, "
            f"submissions {dict(self.task_statuses)}"
        )


async def move_slowly(cluster: RedisCluster, slot: int, one_at_a_time: asyncio.Lock) -> None:
    """Some keys at a time, with `REPLACE`, as tools of operators do. Two nodes that bring keys to each other would wait
    for each other.
    """
    move: Move = await cluster.begin_to_move(slot)
    steps = 8
    for _ in range(steps):
        await asyncio.sleep(random.uniform(*OPEN_S) / steps)
        keys = list(await move.keys(move.source))
        async with one_at_a_time:
            await move.bring(*random.sample(keys, len(keys) // 4))
    async with one_at_a_time:
        await move.end()


async def slots_move(directory: Path, times: int) -> Moves:
    """Two at once, of shards that are in use."""
    checker = Checker("R3", {"": {503, 504}})
    slots = [shard.slot for shard in Keys().shards]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(directory / "redis", replicas=0))
        fleet = await stack.enter_async_context(fleet_over(directory, cluster.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.05
        await fleet.add("gateway")
        for _ in range(2):
            await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=ASKS_PER_S, tasks_per_s=TASKS_PER_S)
        await asyncio.sleep(1.0)
        one_at_a_time = asyncio.Lock()
        for number in range(times):
            pair = slots[2 * number % len(slots)], slots[(2 * number + 7) % len(slots)]
            await asyncio.gather(*(move_slowly(cluster, slot, one_at_a_time) for slot in pair))
        await asyncio.sleep(2.0)
        await clients.stop()
        await clients.read_again()
        return Moves(
            checker.verdict(upstream.seen),
            len(clients.inputs),
            len(clients.missing),
            Counter(answer.status for answer in clients.answers),
            Counter(answer.status for answer in clients.task_answers),
            fleet.errors(),
        )


TIMES = 6
REFUSED_SHARE_MAX = 0.01


@pytest.mark.timeout(240)
async def test_nothing_is_lost_when_slots_move(tmp_path: Path) -> None:
    seen = await slots_move(tmp_path, TIMES)
    refused = seen.task_statuses.total() - seen.task_statuses[202]
    passed = seen.verdict.is_clean and refused <= REFUSED_SHARE_MAX * seen.task_statuses.total() and seen.errors == []
    seen.verdict.report("R3", f"{2 * TIMES} slots moved, each held open 4 to 6 s: {seen}", passed=passed)
    assert passed, seen.errors[:10]
