"""Over a real Redis: one owner floods, another sends a request now and then; with strict order, a tier floods."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from carpool.broker.redis.keys import tier_of
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import monotonic
from carpool.core.request import Request
from support.processes import until
from support.redis_halves import LINE_OFFSETS_MS, MODEL, Batcher, Halves, SlotsModel, open_halves
from support.redis_servers import RedisServer
from support.redis_tasks import task_board
from support.tasks import told

BATCH, FLOOD = 32, 3200
# Longer than the test takes, on any machine.
LATE_MS = dict.fromkeys((b"o0", b"o1", b"o2"), 600_000)


@pytest.fixture
async def halves(redis_server: RedisServer) -> AsyncIterator[Halves]:
    async with open_halves(redis_server, shards=16) as halves:
        yield halves


async def next_batch(batcher: Batcher) -> list[Request]:
    """What the one slot sends next."""
    batcher.model.free = 1
    batcher.consumer.notify()
    await until(lambda: batcher.broker.depth >= 1 and not batcher.consumer.unanswered)
    batcher.model.free = 0
    return batcher.start_batch()


@pytest.mark.parametrize("late_ms", [LATE_MS, {}], ids=["shared", "in order of arrival"])
async def test_a_flood_does_not_delay_who_sends_one(halves: Halves, late_ms: dict[bytes, int]) -> None:
    gateway = await halves.gateway()
    batcher = await halves.batcher(free=0, largest=BATCH, late_ms=late_ms)
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
        if not late_ms:
            break
    flood_batches = FLOOD // BATCH
    if late_ms:
        # Behind what the owner of the flood may have, and what was asked of other shards before.
        assert max(waits) <= flood_batches // 5
        assert sum(waits[1:]) <= flood_batches // 10
    else:
        # The test shows something: it waits longer than it may above. How long is a matter of its shard.
        assert waits[0] > flood_batches // 5


async def test_with_strict_order_the_lowest_tier_gets_its_minimum_share(redis_server: RedisServer) -> None:
    """By line offsets the higher tier would always go first; every batcher sees to the lowest tier's share."""
    async with open_halves(redis_server, shards=1) as halves:  # of several, each fills the batch that it begins
        await serve_two_tiers(halves)


async def serve_two_tiers(halves: Halves) -> None:
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


@pytest.mark.parametrize("shards", [1, 16])
async def test_however_many_tasks_are_old_synchronous_requests_have_their_share(
    redis_server: RedisServer, shards: int
) -> None:
    async with open_halves(redis_server, shards=shards) as halves:
        await serve_beside_tasks(halves)


async def serve_beside_tasks(halves: Halves) -> None:
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


async def test_tasks_of_a_model_do_not_wait_for_the_requests_of_another(redis_server: RedisServer) -> None:
    """They have slots of their own: what is due to synchronous requests is due beside tasks of their model."""
    async with open_halves(redis_server, shards=1) as halves:
        offsets = {line: 0 if line.startswith(b"t") else 600_000 for line in LINE_OFFSETS_MS}
        gateway = await halves.gateway(line_offsets_ms=offsets)
        other = SlotsModel(0, BATCH, "other")
        batcher = await halves.batcher(free=0, largest=1000, others=[other])
        batcher.broker.when_work_arrives("other", lambda lane: None)
        tasks = task_board(RedisOps(batcher.nodes, halves.keys), b"g1", line_offsets_ms=offsets)
        requests = [gateway.request(f"{number:032x}", is_task=True, model="other") for number in range(10 * BATCH)]
        submitted = await asyncio.gather(*(told(partial(tasks.submit, request)) for request in requests))
        assert set(submitted) == {None}
        gateway.submit("waits-0")
        await halves.until_entries(10 * BATCH + 1)
        for _ in range(3):  # while a request of the first model waits
            other.free = 1
            batcher.consumer.notify()
            await until(lambda: batcher.broker.depth == BATCH and not batcher.consumer.unanswered)
            other.free = 0
            for lane in list(batcher.broker.lanes("other")):
                batcher.answer(batcher.broker.take(lane, lane.waiting, monotonic()))
        other.free = batcher.model.free = 1
        batcher.nodes.keep_replies("level")
        batcher.consumer.notify()
        await until(lambda: batcher.nodes.kept + batcher.broker.depth > 0)
        assert batcher.broker.depth == 0  # both are asked for at once
        batcher.nodes.let_replies_come()
        await until(lambda: batcher.broker.depth > 0 and not batcher.consumer.unanswered)
        staged = {request.model for request in batcher.broker.waiting_requests()}
        tasks.close()
    assert staged == {MODEL, "other"}
