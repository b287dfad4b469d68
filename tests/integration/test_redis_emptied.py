"""Redis loses what it had, or a part of it: somebody deletes a gateway's stream of replies, or everything; Redis is
started again without its data. Who waits is served all the same.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carpool.core.outcome import Output
from support.processes import until
from support.redis_halves import Batcher, Gateway, Halves, open_halves
from support.redis_servers import running_redis


@pytest.fixture
async def halves(tmp_path: Path) -> AsyncIterator[Halves]:
    """On a Redis of its own."""
    async with running_redis(tmp_path) as server, open_halves(server, shards=4) as halves:
        yield halves


def serve(batcher: Batcher) -> None:
    batcher.model.free = 100
    batcher.serve()
    batcher.consumer.notify()


async def all_are_served(gateway: Gateway, names: set[str]) -> None:
    outcomes = await gateway.until_told(len(names))
    assert outcomes.keys() == names
    assert all(isinstance(outcome, Output) for outcome in outcomes.values())


async def test_outcomes_for_a_stream_that_was_deleted_are_made_again(halves: Halves) -> None:
    gateway, batcher = await halves.gateway(), await halves.batcher()
    gateway.submit("runs", "too")
    await batcher.until_staged(2)
    batch = batcher.start_batch()
    await halves.client.delete(halves.keys.replies(b"g1"))
    batcher.answer(batch)
    await batcher.until_confirmed()  # nobody seems to wait
    serve(batcher)
    await all_are_served(gateway, {"runs", "too"})
    gateway.submit("next")
    await all_are_served(gateway, {"runs", "too", "next"})


async def test_what_waits_when_everything_is_deleted_is_queued_again(halves: Halves) -> None:
    gateway, batcher = await halves.gateway(), await halves.batcher(free=0)
    gateway.submit("one", "two")
    await halves.until_entries(2)
    await halves.client.flushall()
    await halves.until_entries(2)
    serve(batcher)
    await all_are_served(gateway, {"one", "two"})


async def test_what_waits_when_redis_comes_back_empty_is_queued_again(halves: Halves) -> None:
    gateway = await halves.gateway()
    gateway.submit("one", "two")
    await halves.until_entries(2)
    await until(lambda: all(gateway.queue.place_of(each) for each in gateway.queue.pending.requests()))
    halves.server.kill()
    await gateway.until_mode("down")
    halves.server.launch()
    await halves.server.wait_until_ready()
    await halves.until_entries(2)
    serve(await halves.batcher())
    await all_are_served(gateway, {"one", "two"})
