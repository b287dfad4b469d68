"""Over a real Redis: one owner floods, another sends a request now and then; with strict order, a tier floods."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from carpool.broker.redis.keys import tier_of
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.request import Request
from support.processes import until
from support.redis_halves import LINE_OFFSETS_MS, Batcher, Halves, open_halves
from support.redis_servers import RedisServer
from support.redis_tasks import task_board
from support.tasks import told

BATCH, FLOOD = 32, 3200
# Longer than the test takes, on any machine.
LATE_MS = dict.fromkeys((b"o0", b"o1", b"o2"), 600_000)


@pytest.fixture
def shards() -> int:
    return 16


@pytest.fixture
async def halves(redis_server: RedisServer, shards: int) -> AsyncIterator[Halves]:
    async with open_halves(redis_server, shards=shards) as halves:
        yield halves


async def next_batch(batcher: Batcher) -> list[Request]:
    """What the one slot sends next."""
    batcher.model.free = 1
    batcher.consumer.notify()
    await until(lambda: batcher.broker.depth >= 1 and not batcher.consumer.unanswered)
    batcher.model.free = 0
    return batcher.start_batch()


async def test_a_flood_does_not_delay_who_sends_one(halves: Halves) -> None:
    gateway = await halves.gateway()
    batcher = await halves.batcher(free=0, largest=BATCH, late_ms=LATE_MS)
    gateway.submit("known", owner="b")
    batcher.answer(await next_batch(batcher))
    await gateway.until_told(1)
    for start in range(0, FLOOD, 100):
        gateway.submit(*(f"flood-{start + number}" for number in range(100)), owner="a")
        await halves.until_entries(start + 100)
    waits: list[int] = []
    for single in range(3):
        gateway.submit(f"single-{single}", owner="b")
        await halves.until_entries(gateway.queue.pending.held)
        batches = 0
        batch: list[Request] = []
        while not any(request.owner == "b" for request in batch):
            batch = await next_batch(batcher)
            batcher.answer(batch)
            batches += 1
        await batcher.until_confirmed()
        waits.append(batches)
    flood_batches = FLOOD // BATCH
    # Behind what the owner of the flood may have, and what was asked of other shards before.
    assert max(waits) <= flood_batches // 5
    assert sum(waits[1:]) <= flood_batches // 10


@pytest.mark.parametrize("shards", [1])  # of several, each fills the batch that it begins
async def test_with_strict_order_the_lowest_tier_gets_its_minimum_share(halves: Halves) -> None:
    """By line offsets the higher tier would always go first; every batcher sees to the lowest tier's share."""
    strict = {line: tier_of(line) * 10**13 for line in LINE_OFFSETS_MS}
    gateway = await halves.gateway(line_offsets_ms=strict)
    batcher = await halves.batcher(free=0, largest=BATCH, min_share=0.1)
    for start in range(0, 1600, 100):
        gateway.submit(*(f"free-{start + number}" for number in range(100)), tier=2)
        gateway.submit(*(f"enterprise-{start + number}" for number in range(100)), tier=0)
        await halves.until_entries(2 * start + 200)
    taken: list[Request] = []
    while len(taken) < 1200:
        batch = await next_batch(batcher)
        batcher.answer(batch)
        taken += batch
    free = sum(request.tier == 2 for request in taken)
    assert 0.1 * len(taken) - BATCH <= free <= 0.1 * len(taken) + BATCH


async def test_however_many_tasks_are_old_synchronous_requests_have_their_share(halves: Halves) -> None:
    offsets = {line: 0 if line.startswith(b"t") else 600_000 for line in LINE_OFFSETS_MS}
    gateway = await halves.gateway(line_offsets_ms=offsets)
    batcher = await halves.batcher(free=0, largest=BATCH)
    tasks = task_board(RedisOps(batcher.nodes, halves.keys), b"g1", line_offsets_ms=offsets)
    requests = [
        gateway.request(f"{number:031x}{number % len(halves.keys.shards):x}", is_task=True, tier=2)
        for number in range(800)
    ]
    submitted = await asyncio.gather(*(told(partial(tasks.submit, request)) for request in requests))
    assert set(submitted) == {None}
    gateway.submit(*(f"waits-{number}" for number in range(120)), tier=2)
    await halves.until_entries(920)
    taken = [request.is_task for _ in range(12) for request in await next_answered(batcher)]
    tasks.close()
    assert taken.count(False) == 120
    assert taken.count(True) >= BATCH


async def next_answered(batcher: Batcher) -> list[Request]:
    batch = await next_batch(batcher)
    batcher.answer(batch)
    return batch
