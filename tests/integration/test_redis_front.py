"""A gateway's half of the queue where things go wrong: connections that break, a Redis without memory or with too much
to keep, clients that leave meanwhile. Each test is a defect that once was there.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from carpool.broker.redis.client.link import ignore
from carpool.broker.redis.formats import Reply, encode_reply
from carpool.core.clock import monotonic
from carpool.core.errors import (
    BrokerDown,
    BrokerMemoryFull,
    ClientLeft,
    DeadlineExceeded,
    InternalError,
    QueueFull,
    QueueTimeout,
    UpstreamFailed,
)
from carpool.core.outcome import CallFacts, Output
from support.processes import until
from support.redis_halves import Gateway, Halves, open_halves, until_seen
from support.redis_servers import RedisServer, running_redis

NAMES = [f"r{number}" for number in range(20)]
# By which Redis knows the connection that waits for replies.
READER = "xread"


@pytest.fixture
async def halves(redis_server: RedisServer) -> AsyncIterator[Halves]:
    async with open_halves(redis_server) as halves:
        yield halves


@pytest.fixture
async def own_halves(tmp_path: Path) -> AsyncIterator[Halves]:
    """On a Redis that the test may kill, stop, limit or cut off."""
    async with running_redis(tmp_path) as server, open_halves(server, shards=4) as halves:
        yield halves


def reply_to(number: int, value: bytes = b'"out"') -> Reply:
    return Reply(calls=[CallFacts(1, 0.1)], outputs=[(number, 0, 0.0, value, None)])


async def queued(halves: Halves, gateway: Gateway, *names: str, **options: Any) -> None:
    """Requests that are in Redis, and whose gateway knows it."""
    before = await halves.number_of_entries()
    gateway.submit(*names, **options)
    await halves.until_entries(before + len(names))
    await until(lambda: all(request.held_by.entry_ids for request in gateway.queue.pending.requests()))


class TestConnections:
    async def test_entries_outlive_a_short_loss(self, own_halves: Halves) -> None:
        """They were withdrawn when the connection was back, by a gateway that still waited for them."""
        gateway = await own_halves.gateway()
        await queued(own_halves, gateway, *NAMES)
        await own_halves.cut()
        await gateway.until_mode("down")
        assert gateway.outcomes() == {}
        await gateway.until_mode("redis")
        batcher = await own_halves.batcher()
        batcher.serve()
        told = await gateway.until_told(len(NAMES))
        assert all(isinstance(outcome, Output) for outcome in told.values())
        assert (gateway.queue.sent_again, gateway.queue.pending.late_outcomes, gateway.queue.pending.held) == (0, 0, 0)
        await own_halves.until_entries(0)

    async def test_what_is_handed_on_is_withdrawn(self, own_halves: Halves) -> None:
        """Only the reader of replies is lost: the entries would be done here and by a batcher."""
        gateway = await own_halves.gateway(with_upstream=True)
        await queued(own_halves, gateway, *NAMES)
        await own_halves.cut(READER)
        await gateway.until_mode("direct")
        assert gateway.local is not None and gateway.local.depth == len(NAMES)
        await gateway.until_mode("redis")
        await own_halves.until_entries(0)
        assert gateway.queue.to_withdraw == 0

    async def test_what_is_handed_on_while_it_is_under_way_is_withdrawn(self, own_halves: Halves) -> None:
        """Its entry's id is known only later."""
        gateway = await own_halves.informed_gateway(with_upstream=True)
        gateway.nodes.keep_replies()
        gateway.submit(*NAMES)
        await own_halves.until_entries(len(NAMES))
        await own_halves.cut(READER)
        await gateway.until_mode("direct")
        gateway.nodes.let_replies_come()
        await own_halves.until_entries(0)

    async def test_what_was_taken_in_time_is_not_late_when_it_is_handed_on(self, own_halves: Halves) -> None:
        """It had waited longer for its outcome than it may for a slot: it was told that no slot was free."""
        gateway, batcher = await own_halves.gateway(with_upstream=True), await own_halves.batcher()
        (request,) = gateway.submit("r", queue_timeout_s=0.05)
        await batcher.until_staged(1)
        await asyncio.sleep(0.06)
        gateway.queue.expire(monotonic())
        await until(lambda: gateway.nodes.runs["cancel"] == 1)
        await gateway.nodes.ask(0, b"PING")  # by now the gateway has heard that a batcher has it
        own_halves.server.kill()
        await gateway.until_mode("direct")
        local = gateway.local
        assert local is not None
        local.expire(monotonic())
        assert (gateway.outcomes(), local.depth) == ({}, 1)
        local.expire(request.deadline)
        assert isinstance(gateway.outcomes()["r"], DeadlineExceeded)

    async def test_a_client_that_leaves_while_its_shard_is_away(self, own_halves: Halves) -> None:
        gateway = await own_halves.gateway()
        await queued(own_halves, gateway, *NAMES)
        await own_halves.cut()
        await gateway.until_mode("down")
        leaver = gateway.queue.pending.requests()[0]
        gateway.queue.cancel(leaver)
        await gateway.until_mode("redis")
        await own_halves.until_entries(len(NAMES) - 1)
        assert leaver.id not in {entry.request_id for entry in await own_halves.entries()}

    async def test_who_leaves_or_is_late_after_it_was_handed_on(self, own_halves: Halves) -> None:
        gateway = await own_halves.gateway(with_upstream=True)
        await queued(own_halves, gateway, "leaves", "late", "stays")
        leaver, late, _ = gateway.queue.pending.requests()
        await own_halves.cut(READER)
        await gateway.until_mode("direct")
        local = gateway.local
        assert local is not None and local.depth == 3
        gateway.queue.cancel(leaver)
        gateway.queue.settle(late, DeadlineExceeded("its time is over"))
        await gateway.until_mode("redis")
        await own_halves.until_entries(0)
        assert [request.id for request in local.waiting_requests()] == ["stays"]
        gateway.queue.reply_came(reply_to(1))  # from a batcher that had it
        told = {name: type(outcome) for name, outcome in gateway.outcomes().items()}
        assert told == {"leaves": ClientLeft, "late": DeadlineExceeded}
        assert (local.held, gateway.queue.pending.held, gateway.queue.pending.late_outcomes) == (1, 0, 1)

    async def test_a_client_that_leaves_while_nothing_more_can_be_sent(self, own_halves: Halves) -> None:
        """Its entry was withdrawn when its node was back, which had never been away: it was sent all the same."""
        gateway = await own_halves.gateway(pending_bytes_max=200_000)
        await queued(own_halves, gateway, "leaves", "stays")
        own_halves.server.stop()
        while gateway.nodes.has_room(0, 100):
            gateway.nodes.send(0, ignore, b"ECHO", b"x" * 1000 if gateway.nodes.has_room(0, 1100) else b"x")
        leaver = gateway.queue.pending.requests()[0]
        gateway.queue.cancel(leaver)
        await until(lambda: gateway.nodes.runs["cancel"] == 1)
        await asyncio.sleep(0.01)
        own_halves.server.go_on()
        await own_halves.until_entries(1)
        assert (gateway.queue.mode, gateway.queue.pending.held) == ("redis", 1)

    async def test_a_reader_comes_back_without_memory(self, own_halves: Halves) -> None:
        """It could not say hello, and gave up although its stream was there."""
        gateway = await own_halves.gateway()
        await queued(own_halves, gateway, "r")
        batcher = await own_halves.batcher(started=False)
        await own_halves.fill_memory()
        await own_halves.cut(READER)
        await gateway.until_mode("down")
        await gateway.until_mode("redis")
        await until(lambda: batcher.nodes.is_up(0))
        batcher.serve()
        batcher.consumer.start()
        assert isinstance((await gateway.until_told(1))["r"], Output)


class TestQueueing:
    async def test_one_turn_is_one_step_whatever_its_lanes_and_tiers(self, own_halves: Halves) -> None:
        """Each lane and tier went its own way, into a shard of its own: with many of both, Redis had far more to do."""
        gateway = await own_halves.informed_gateway()
        kinds = [(b'{"lane":%d}' % lane, tier) for lane in range(4) for tier in range(3)]
        for turn in (1, 2):
            for parameters, tier in kinds:
                gateway.submit(f"{turn} {parameters!r} {tier}", parameters=parameters, tier=tier)
            await own_halves.until_entries(turn * len(kinds))
        assert (gateway.nodes.runs["arrived"], gateway.nodes.runs["submit"]) == (2, 0)
        shards = Counter(entry.shard.number for entry in await own_halves.entries())
        assert list(shards.values()) == [len(kinds), len(kinds)]
        (await own_halves.batcher()).serve()
        told = await gateway.until_told(2 * len(kinds))
        assert all(isinstance(outcome, Output) for outcome in told.values())

    async def test_an_outcome_that_comes_while_it_is_queued_again(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its input was gone by the end of the turn: an entry without one was queued."""
        async with open_halves(redis_server, shards=2) as halves:
            gateway = await halves.gateway()
            await queued(halves, gateway, "r")
            (entry,), (request,) = await halves.entries(), gateway.queue.pending.requests()
            monkeypatch.setattr(gateway.nodes, "is_up", lambda slot: slot != entry.shard.slot)
            gateway.queue.nodes_changed()
            gateway.queue.reply_came(reply_to(request.number))
            assert gateway.queue.sent_again == 1
            await gateway.nodes.ask(0, b"PING")  # whatever was sent in that turn has been done
            assert [(left.shard, left.input) for left in await halves.entries()] == [(entry.shard, b'"x"')]
            assert isinstance(gateway.outcomes()["r"], Output)

    async def test_entries_that_batchers_may_not_know_of_are_withdrawn(self, halves: Halves) -> None:
        """They were added, but could not be counted and announced."""
        gateway = await halves.informed_gateway()
        await halves.client.set(halves.keys.shards[0].lanes, "no hash")
        gateway.submit(*NAMES)
        told = await gateway.until_told(len(NAMES))
        assert all(isinstance(outcome, BrokerDown) for outcome in told.values())
        await halves.until_entries(0)

    async def test_a_defect_leaves_no_entries(self, halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
        """What had been sent before it stayed in the queue, and was done for nobody."""
        gateway = await halves.gateway(waiting_max=3)  # so near the bound each stream has a step of its own
        with caplog.at_level(logging.CRITICAL, "carpool.broker"):
            gateway.submit("is sent", tier=0)
            gateway.submit("\ud800 cannot be", tier=1)
            told = await gateway.until_told(2)
        assert {type(outcome) for outcome in told.values()} == {InternalError}
        await until(lambda: gateway.nodes.runs["cancel"] == 1)
        await halves.until_entries(0)

    @pytest.mark.parametrize("pending_bytes_max", range(50_000, 400_000, 50_000))
    async def test_what_there_is_no_room_for_is_refused_as_a_whole(
        self, halves: Halves, pending_bytes_max: int
    ) -> None:
        """Entries that never came were counted, others came and were never withdrawn, and all were tried again in every
        turn.
        """
        gateway = await halves.informed_gateway(pending_bytes_max=pending_bytes_max)
        for tier in range(3):
            names = (f"r{tier}-{number}" for number in range(100))
            gateway.submit(*names, tier=tier, value=b'"' + 1000 * b"x" + b'"')

        async def are_all_somewhere() -> bool:
            return await halves.number_of_entries() + len(gateway.outcomes()) >= 300

        await until_seen(are_all_somewhere)
        refused, entries = gateway.outcomes(), await halves.number_of_entries()
        assert {type(outcome) for outcome in refused.values()} <= {QueueFull}
        assert (entries + len(refused), await halves.counted_entries()) == (300, entries)
        assert gateway.queue.sent_again == 0
        batcher = await halves.batcher()
        batcher.serve()
        await gateway.until_told(300)

    async def test_what_redis_refuses_does_not_count(self, own_halves: Halves) -> None:
        """The script behind the plain commands counted what had been refused before it."""
        gateway = await own_halves.informed_gateway()
        await own_halves.fill_memory()
        gateway.submit("a", "b")
        told = await gateway.until_told(2)
        assert {type(outcome) for outcome in told.values()} == {BrokerMemoryFull}
        await gateway.nodes.ask(0, b"PING")  # what followed is done
        assert await own_halves.counted_entries() == 0

    async def test_the_bound_holds_in_an_overload(self, halves: Halves) -> None:
        """A gateway that was told that the queue is full forgot how much was in it, and added without asking."""
        bound = 50
        crowd, gateway = await halves.gateway(), await halves.informed_gateway(b"g2", waiting_max=bound)
        await queued(halves, crowd, *(f"crowd-{number}" for number in range(bound)))
        for turn in range(10):
            gateway.submit(f"r{turn}-0", f"r{turn}-1")
            await gateway.nodes.ask(0, b"PING")
        # The first ones were added by a gateway that knew nothing of the others.
        assert await halves.number_of_entries() == bound + 2
        refused = await gateway.until_told(18)
        assert all(isinstance(outcome, QueueFull) for outcome in refused.values())


class TestWhoLeaves:
    async def test_before_the_id_of_its_entry_is_known(self, halves: Halves) -> None:
        gateway = await halves.informed_gateway()
        gateway.nodes.keep_replies("arrived")
        leaves, _ = gateway.submit("leaves", "stays")
        await until(lambda: gateway.nodes.kept == 1)
        gateway.queue.cancel(leaves)
        assert isinstance(gateway.outcomes()["leaves"], ClientLeft)
        gateway.nodes.let_replies_come()
        await halves.until_entries(1)
        assert [entry.request_id for entry in await halves.entries()] == ["stays"]
        assert gateway.queue.pending.held == 1

    async def test_its_time_in_the_queue_is_over_before_the_id_is_known(self, halves: Halves) -> None:
        gateway = await halves.informed_gateway()
        gateway.nodes.keep_replies("arrived")
        gateway.submit("late", queue_timeout_s=0.01)
        gateway.submit("stays")
        await until(lambda: gateway.nodes.kept == 1)
        await asyncio.sleep(0.02)
        gateway.queue.expire(monotonic())
        assert {name: type(outcome) for name, outcome in gateway.outcomes().items()} == {"late": QueueTimeout}
        gateway.nodes.let_replies_come()
        await halves.until_entries(1)
        assert [entry.request_id for entry in await halves.entries()] == ["stays"]

    async def test_while_its_outcome_is_on_the_way(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        (leaves,) = gateway.submit("leaves")
        await batcher.until_staged(1)
        batcher.answer(batcher.start_batch())
        gateway.queue.cancel(leaves)
        await until(lambda: gateway.queue.pending.late_outcomes == 1)
        assert isinstance((await gateway.until_told(1))["leaves"], ClientLeft)
        await batcher.until_confirmed()
        await halves.until_entries(0)
        assert await halves.counted_entries() == batcher.broker.held == gateway.queue.pending.held == 0


class TestReplies:
    async def test_an_outcome_before_the_id_of_its_entry_is_known(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        gateway.nodes.keep_replies("arrived")
        gateway.submit("r")
        await batcher.until_staged(1)
        batcher.answer(batcher.start_batch())
        assert isinstance((await gateway.until_told(1))["r"], Output)
        await batcher.until_confirmed()
        gateway.nodes.let_replies_come()
        await gateway.nodes.ask(0, b"PING")
        assert gateway.nodes.runs["cancel"] == 0  # nothing is left to withdraw
        assert await halves.number_of_entries() == gateway.queue.pending.held == 0

    async def test_what_comes_twice_or_late_is_counted_and_dropped(self, halves: Halves) -> None:
        gateway = await halves.gateway()
        (first, second) = gateway.submit("first", "second")
        for _ in range(2):
            gateway.queue.reply_came(reply_to(first.number))
        error = (second.number, UpstreamFailed.code, "it failed", None)
        for _ in range(2):
            gateway.queue.reply_came(Reply(errors=[error]))
        gateway.queue.reply_came(reply_to(second.number))
        told = gateway.outcomes()
        assert [type(told[name]) for name in ("first", "second")] == [Output, UpstreamFailed]
        assert (gateway.queue.pending.late_outcomes, gateway.queue.pending.held) == (3, 0)
        assert gateway.queue.pending.outcomes == {"ok": 1, UpstreamFailed.code: 1}

    async def test_an_outcome_that_redis_does_not_take_is_given_up_when_nobody_can_wait(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        (request,) = gateway.submit("r", total_timeout_s=0.5)
        await batcher.until_staged(1)
        await halves.client.set(halves.keys.replies(b"g1"), "no stream")
        batcher.answer(batcher.start_batch())
        await batcher.until_confirmed()
        assert batcher.replies.retries > 0
        assert monotonic() >= request.deadline
        await halves.until_entries(0)

    async def test_a_fault_in_taking_a_reply_makes_nobody_deaf(self, halves: Halves) -> None:
        """No further replies were asked for."""
        faults: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context["exception"])))

        def refuse(task_id: str) -> None:
            raise RuntimeError(task_id)

        gateway = await halves.gateway(task_finished=refuse)
        await queued(halves, gateway, "r")
        (request,) = gateway.queue.pending.requests()
        stream = halves.keys.replies(b"g1")
        finished = Reply(finished=["task"])
        async with halves.client.pipeline() as together:  # both are read at once
            for reply in (finished, reply_to(request.number)):
                together.xadd(stream, {"r": encode_reply(reply)})
            await together.execute()
        assert isinstance((await gateway.until_told(1))["r"], Output)
        assert faults == ["task"]
