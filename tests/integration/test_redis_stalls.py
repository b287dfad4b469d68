"""Deadlines hold while Redis stands still: what lay in a socket is as old as it is, whatever its id says."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from carpool.broker.redis.formats import Reply
from carpool.core.clock import monotonic
from carpool.core.errors import DeadlineExceeded, QueueTimeout
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import Request
from support.processes import PATIENCE_S, until
from support.redis_halves import Halves, open_halves, until_seen
from support.redis_servers import RedisServer, running_redis

# Long enough that an entry which is taken for new is taken well before it would be over.
LIFE_S = 1.5


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """One that the test may stop."""
    async with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def goes_on(server: RedisServer, halves: Halves) -> Iterator[None]:
    """Also where a test failed: what is closed at its end waits for answers."""
    yield
    server.go_on()


@pytest.fixture
async def halves(server: RedisServer) -> AsyncIterator[Halves]:
    """The connections outlive a stall: what was sent is still executed in any case."""
    async with open_halves(server, timeout_s=PATIENCE_S) as halves:
        yield halves


async def until_over(request: Request) -> None:
    await asyncio.sleep(max(0.0, request.deadline - monotonic()) + 0.01)


@pytest.mark.parametrize("by_script", [False, True], ids=["plain", "script"])
async def test_what_lay_in_a_socket_is_late_when_it_arrives(
    halves: Halves, server: RedisServer, by_script: bool
) -> None:
    # One that knows nothing of a shard takes it for nearly full, and adds by the script.
    gateway = await (halves.gateway() if by_script else halves.informed_gateway())
    batcher = await halves.batcher()
    server.stop()
    (request,) = gateway.submit("late", total_timeout_s=LIFE_S)
    gateway.submit("patient")
    await until_over(request)
    server.go_on()
    await batcher.until_staged(1)
    await until(lambda: "late" in gateway.witness.told)
    assert isinstance(gateway.outcomes()["late"], DeadlineExceeded)
    assert [request.id for request in batcher.start_batch()] == ["patient"]


async def test_who_was_given_up_meanwhile_is_withdrawn(halves: Halves, server: RedisServer) -> None:
    gateway = await halves.informed_gateway()
    server.stop()
    (request,) = gateway.submit("late", own_timeout_s=0.01, total_timeout_s=0.01)
    gateway.submit("patient")
    await until_over(request)
    gateway.queue.expire(monotonic())
    assert isinstance(gateway.outcomes()["late"], DeadlineExceeded)
    server.go_on()
    await until_entries_are(halves, ["patient"])


async def until_entries_are(halves: Halves, names: list[str]) -> None:
    async def are_so() -> bool:
        return [entry.request_id for entry in await halves.entries()] == names

    await until_seen(are_so)


@pytest.mark.parametrize("script", ["take", "level"])
async def test_an_answer_that_lay_in_a_socket_brings_nothing_that_is_late(halves: Halves, script: str) -> None:
    gateway, batcher = await halves.gateway(), await halves.batcher(largest=1)
    # It knows by now that nothing is there.
    await until(lambda: batcher.nodes.runs["level"] > 0 and not batcher.consumer.unanswered)
    batcher.model.free = 0
    batcher.nodes.keep_replies(script)
    # Of two streams with room for one, a script finds out which is first.
    requests = [gateway.submit("late", total_timeout_s=LIFE_S, tier=0)[0]]
    if script == "take":
        requests += gateway.submit("too", total_timeout_s=LIFE_S, tier=1)
    await until(lambda: batcher.nodes.wakeups == len(requests))
    batcher.model.free = 1
    batcher.consumer.notify()
    await until(lambda: batcher.nodes.kept == 1)
    await until_over(requests[-1])
    batcher.nodes.let_replies_come()
    assert isinstance((await gateway.until_told(len(requests)))["late"], DeadlineExceeded)
    assert batcher.broker.depth == 0


@pytest.mark.parametrize("code", [DeadlineExceeded.code, QueueTimeout.code])
async def test_a_batcher_that_takes_a_request_for_late_is_not_believed(halves: Halves, code: str) -> None:
    """Redis's clock was set: this gateway's own says that there is time left."""
    gateway, batcher = await halves.gateway(), await halves.batcher(free=0)
    (request,) = gateway.submit("r")
    await halves.until_entries(1)
    gateway.queue.reply_came(late_reply(request, code))
    await halves.until_entries(2)  # the batcher has answered the first, and forgets it
    assert gateway.queue.sent_again == 1
    batcher.model.free = 1
    batcher.serve()
    batcher.consumer.notify()
    assert isinstance((await gateway.until_told(1))["r"], Output)


async def test_what_is_late_by_both_clocks_or_was_sent_is_over(halves: Halves) -> None:
    gateway = await halves.gateway()
    (late,) = gateway.submit("late", total_timeout_s=0.05)
    (sent,) = gateway.submit("sent")
    gateway.queue.reply_came(late_reply(late, DeadlineExceeded.code))
    facts = CallFacts(1, 0.01)
    error = (sent.number, DeadlineExceeded.code, "", None)
    gateway.queue.reply_came(Reply(calls=[facts], errors=[error], error_calls=[(0, 0.0)]))
    assert gateway.outcomes().keys() == {"late", "sent"}
    assert gateway.queue.sent_again == 0


def late_reply(request: Request, code: str) -> Reply:
    return Reply(errors=[(request.number, code, "", None)], error_calls=[(-1, 0.0)])
