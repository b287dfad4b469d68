"""A batcher's half of the queue where things go wrong: order between streams, bells that cross answers, a Redis without
memory, leases that end, draining in the wrong moment. Each test is a defect that once was there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.broker.redis.batcher import consumer as consumer_module
from carpool.broker.redis.batcher.consumer import LOOKS_A_LEASE
from carpool.broker.redis.batcher.leases import Leases
from carpool.broker.redis.batcher.replies import UNCONFIRMED_MAX
from carpool.broker.redis.batcher.shards import HEADS_KNOWN_MAX
from carpool.broker.redis.client.link import RedisFailure, ignore
from carpool.broker.redis.dead_letters import RedisDeadLetterBox
from carpool.broker.redis.formats import ENTRY_FORMAT, Header, encode_header, encode_record
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.keys import GROUP, Shard
from carpool.broker.redis.redis_ops import RedisOps, Swept
from carpool.broker.redis.types import Taken
from carpool.core.clock import monotonic
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    Draining,
    GivenBack,
    InputRefused,
    InternalError,
    QueueFull,
    UpstreamFailed,
)
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.core.timers import Every
from carpool.testing import ANYBODY, FakeClock, Witness, make_request
from support.processes import PATIENCE_S, until
from support.redis_halves import LINE_OFFSETS_MS, NEVER_MS, Batcher, Gateway, Halves, open_halves, until_seen
from support.redis_servers import RedisServer, running_redis
from support.redis_tasks import letter_bounds, task_board
from support.tasks import told

ENTERPRISE, FREE = 0, 2


@pytest.fixture
async def halves(redis_server: RedisServer) -> AsyncIterator[Halves]:
    async with open_halves(redis_server) as halves:
        yield halves


@pytest.fixture
async def own_halves(tmp_path: Path) -> AsyncIterator[Halves]:
    """On a Redis that the test may limit."""
    async with running_redis(tmp_path) as server, open_halves(server) as halves:
        yield halves


@pytest.fixture
def only_wakeups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard without entries is not asked again by itself; with a long lease, nor are all of them looked at."""
    monkeypatch.setattr(consumer_module, "ASK_AGAIN_S", 60.0)


def task_names(number: int) -> list[str]:
    return [f"{position:031x}0" for position in range(number)]


async def submit_tasks(halves: Halves, batcher: Batcher, names: list[str], value: bytes = b'"x"') -> RedisTasks:
    """Tasks that are accepted, over a batcher's connections."""
    tasks = task_board(RedisOps(batcher.nodes, halves.keys), b"g1", line_offsets_ms=LINE_OFFSETS_MS)
    gateway = await halves.gateway()
    for name in names:
        request = gateway.request(name, is_task=True, total_timeout_s=600.0, value=value)
        assert await told(partial(tasks.submit, request)) is None
    return tasks


async def look(tasks: RedisTasks, task_id: str) -> str:
    """A task's status."""
    found = await told(partial(tasks.look, ANYBODY, task_id, 0, False))
    assert not isinstance(found, CarpoolError), found
    status: str = found.status
    return status


class TestOrder:
    async def next_ids(self, batcher: Batcher) -> list[str]:
        """What a slot that frees gets."""
        before = batcher.consumer.taken
        batcher.model.free = 1
        batcher.consumer.notify()
        await until(lambda: batcher.consumer.taken > before)
        await until(lambda: batcher.broker.depth > 0)
        batcher.model.free = 0
        return [request.id for request in batcher.start_batch()]

    @pytest.mark.usefixtures("only_wakeups")
    async def test_a_second_stream_is_seen_at_once(self, halves: Halves) -> None:
        """A batcher that knew of one stream went on reading it, and after it slept while the other one waited."""
        gateway = await halves.gateway()
        batcher = await halves.batcher(free=0, largest=2)
        gateway.submit("free-0", "free-1", tier=FREE)
        await halves.until_entries(2)
        order = [await self.next_ids(batcher)]
        gateway.submit(*(f"free-{number}" for number in range(2, 8)), tier=FREE)
        gateway.submit(*(f"paying-{number}" for number in range(4)), tier=ENTERPRISE)
        await halves.until_entries(12)
        await until(lambda: batcher.nodes.wakeups == 3)  # one for each stream that was empty
        order += [await self.next_ids(batcher) for _ in range(5)]
        assert order == [
            ["free-0", "free-1"],
            ["paying-0", "paying-1"],
            ["paying-2", "paying-3"],
            ["free-2", "free-3"],
            ["free-4", "free-5"],
            ["free-6", "free-7"],
        ]

    @pytest.mark.usefixtures("only_wakeups")
    async def test_streams_that_take_turns(self, halves: Halves) -> None:
        """What was taken last says nothing about which stream is the next."""
        gateway = await halves.gateway()
        batcher = await halves.batcher(free=0, largest=1)
        names = [f"{kind}-{turn}" for turn in range(4) for kind in ("plain", "special")]
        for number, name in enumerate(names):
            gateway.submit(name, parameters=b'{"t":1}' if name.startswith("special") else b"")
            await halves.until_entries(number + 1)
            await asyncio.sleep(0.002)  # the next one is younger, also in milliseconds
        await until(lambda: batcher.nodes.wakeups == 2)
        assert [await self.next_ids(batcher) for _ in names] == [[name] for name in names]

    @pytest.mark.usefixtures("only_wakeups")
    async def test_a_stream_of_which_no_bell_was_heard(self, halves: Halves) -> None:
        """The one that was known gave nothing: that was taken for the whole shard."""
        gateway, batcher = await halves.gateway(), await halves.batcher(started=False)
        for number, tier in enumerate((FREE, ENTERPRISE), start=1):
            gateway.submit(f"r{number}", tier=tier)
            await halves.until_entries(number)
            await gateway.nodes.ask(0, b"PING")
            batcher.consumer.look_at_all()  # something is there; nobody says in which stream
            await batcher.until_staged(number)

    async def test_shards_share_a_batch(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """What one shard gives waits for company from those that are known to have more."""
        monkeypatch.setattr(consumer_module, "COMPANY_S_MAX", 60.0)  # as long as it takes to ask them all
        async with open_halves(redis_server, shards=4) as halves:
            gateway, batcher = await halves.gateway(), await halves.batcher(free=0, largest=64)
            for turn in range(4):
                gateway.submit(*(f"{turn}-{number}" for number in range(16)))
                await halves.until_entries(16 * (turn + 1))
            assert len({entry.shard for entry in await halves.entries()}) == 4
            await until(lambda: batcher.nodes.wakeups == 4)
            assert len(await self.next_ids(batcher)) == 64


class TestWakeups:
    @pytest.mark.usefixtures("only_wakeups")
    @pytest.mark.parametrize("gone", [0, 1, 2], ids=["look", "read", "one of two streams"])
    async def test_a_bell_that_crosses_an_answer(self, halves: Halves, gone: int) -> None:
        """The answer, which was older, said that nothing was there: nobody asked again for a while."""
        gateway, batcher = await halves.gateway(), await halves.batcher(largest=1)
        await until_quiet(batcher)
        batcher.model.free = 0
        other = await halves.batcher(b"quicker", started=False)
        for tier in range(gone):  # each in a stream of its own: with two, the order must be found out
            gateway.submit(f"gone-{tier}", tier=tier)
        await until(lambda: batcher.nodes.wakeups == gone)
        other.consumer.notify()
        await other.until_staged(gone)
        other.consumer.drain()
        batcher.nodes.keep_replies("level")
        batcher.model.free = 1
        if not gone:
            batcher.consumer.look_at_all()
        batcher.consumer.notify()
        await until(lambda: batcher.nodes.kept == 1)
        gateway.submit("r")
        await until(lambda: batcher.nodes.wakeups == gone + 1)
        batcher.nodes.let_replies_come()
        await batcher.until_staged(1)

    @pytest.mark.usefixtures("only_wakeups")
    async def test_a_bell_causes_one_question(self, redis_server: RedisServer) -> None:
        """One that was heard while another shard was asked counted again after its own shard had answered."""
        async with open_halves(redis_server, shards=2) as halves:
            gateway, batcher = await halves.gateway(), await halves.batcher()
            await until_quiet(batcher)
            batcher.nodes.keep_replies()
            already, before = batcher.consumer.taken, questions(batcher)
            gateway.submit("in one shard")
            await until(lambda: batcher.nodes.kept == 1)
            gateway.submit("in the other")
            await until(lambda: batcher.consumer.unread("m") == 2)
            batcher.nodes.let_replies_come()
            await until(lambda: batcher.consumer.taken == already + 2)
            await until_quiet(batcher)
            assert questions(batcher) - before == 2

    async def test_many_streams_that_it_had_no_slot_for(self, halves: Halves) -> None:
        """Every bell was remembered until a slot was free; what is not remembered must be found all the same."""
        gateway, batcher = await halves.gateway(lanes_max=10_000), await halves.batcher(largest=1)
        await until_quiet(batcher)
        batcher.model.free = 0
        lanes = 3 * HEADS_KNOWN_MAX
        for number in range(lanes):
            gateway.submit(f"r{number}", parameters=b'{"t":%d}' % number)
        await until(lambda: batcher.nodes.wakeups == lanes)
        assert batcher.consumer.unread("m") == HEADS_KNOWN_MAX
        batcher.model.free = lanes
        batcher.consumer.notify()
        await batcher.until_staged(lanes)

    @pytest.mark.usefixtures("only_wakeups")
    async def test_what_came_before_it_listened(self, own_halves: Halves) -> None:
        """Shards were asked when the subscription was sent, which may be before Redis has it."""
        gateway, batcher = await own_halves.gateway(), await own_halves.batcher()
        await until_quiet(batcher)
        batcher.nodes.keep_wakeups()
        await own_halves.cut("ssubscribe")
        await until(lambda: batcher.nodes.kept_wakeups == 1)  # the subscription is made, but not heard of
        await until_quiet(batcher)
        gateway.submit("r")
        await until(lambda: batcher.nodes.kept_wakeups == 2)
        assert batcher.consumer.taken == 0
        batcher.nodes.let_one_wakeup_come()
        await batcher.until_staged(1)

    @pytest.mark.usefixtures("only_wakeups")
    async def test_a_stream_that_was_deleted_comes_back(self, halves: Halves) -> None:
        """It was registered, so nobody made its group: it was never read again."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        gateway.submit("a")
        await batcher.until_staged(1)
        (entry,) = await halves.entries()
        await halves.client.delete(entry.shard.stream(entry.field))  # evicted, or an operator's mistake
        gateway.submit("b")
        await batcher.until_staged(2)

    async def test_while_memory_is_short_a_sweep_drops_letters(self, halves: Halves) -> None:
        is_short = False
        bounds = letter_bounds(is_memory_short=lambda: is_short)
        batcher = await halves.batcher(started=False)
        box = RedisDeadLetterBox(RedisOps(batcher.nodes, halves.keys), bounds=bounds)
        for number in range(2 * len(halves.keys.shards)):
            request = make_request(f"r{number}", Witness(), now=monotonic())
            box.bury(request, InputRefused("no"), 1)

        async def number_of_letters() -> int:
            return sum([await halves.client.zcard(shard.letters) for shard in halves.keys.shards])

        async def are_there() -> bool:
            return await number_of_letters() == 2 * len(halves.keys.shards)

        await until_seen(are_there)
        is_short = True
        halves.sweeper(batcher, bounds).sweep_all()
        await until(lambda: bounds.dropped == len(halves.keys.shards))
        assert await number_of_letters() == len(halves.keys.shards)

    async def test_a_sweep_mends_a_stream_without_its_group(self, halves: Halves) -> None:
        """Nothing more comes for it, so nobody makes its group."""
        gateway, batcher = await halves.gateway(), await halves.batcher(started=False)
        gateway.submit("a", "b")
        await halves.until_entries(2)
        (entry, _) = await halves.entries()
        stream = entry.shard.stream(entry.field)
        await halves.client.xgroup_destroy(stream, "batchers")

        async def is_mended() -> bool:
            return len(await halves.client.xinfo_groups(stream)) == 1

        halves.sweeper(batcher).sweep_all()
        await until_seen(is_mended)
        batcher.consumer.notify()
        await batcher.until_staged(2)


class TestSweeps:
    @pytest.fixture
    async def halves(self, redis_server: RedisServer) -> AsyncIterator[Halves]:
        async with open_halves(redis_server, shards=4) as halves:
            yield halves

    async def test_shards_are_swept_one_after_the_other(self, halves: Halves) -> None:
        """All went in one pipeline, and Redis did nothing else meanwhile."""
        batcher = await halves.batcher(started=False)
        sweeper = halves.sweeper(batcher)
        batcher.nodes.keep_replies()
        sweeper.sweep_all()
        await until(lambda: batcher.nodes.kept == 1)
        assert await batcher.nodes.ask(0, b"PING") == b"PONG"
        assert batcher.nodes.runs["sweep"] == 1
        sweeper.sweep_all()  # the last one is not over
        batcher.nodes.let_replies_come()
        await until(lambda: batcher.nodes.runs["sweep"] == 8)
        await asyncio.sleep(0.05)
        assert batcher.nodes.runs["sweep"] == 8

    async def test_one_with_much_to_do_keeps_no_other_from_the_next_sweep(
        self, halves: Halves, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swept: list[int] = []

        def sweep(steps: RedisOps, shard: Shard, *given: Any) -> None:
            swept.append(shard.number)
            given[-1](Swept(b"", 0, [], int(shard.number == 0)))

        monkeypatch.setattr(RedisOps, "sweep", sweep)
        sweeper = halves.sweeper(await halves.batcher(started=False))
        sweeper.sweep_all()
        await until(lambda: swept.count(0) > 3)
        sweeper.sweep_all()
        await until(lambda: swept.count(1) == 2)

    async def test_what_one_part_leaves_is_done_soon(self, halves: Halves) -> None:
        """The rest waited for the next sweep, 64 at a time."""
        batcher = await halves.batcher(started=False)
        field, number = b"ff:t0", 300
        header = encode_header(Header(ENTRY_FORMAT, b"", "other", b"", b"", 0, True, 0))
        streams = [shard.stream(field) for shard in halves.keys.shards]
        for shard, stream in zip(halves.keys.shards, streams, strict=True):
            for position in range(number):
                value = encode_record(0, f"t{position}", "", 1000)
                await halves.client.xadd(stream, {header: value}, id=f"1000-{position + 1}")
            await halves.client.hset(shard.lanes, field, "0 - other")

        async def are_ended() -> bool:
            return not sum([await halves.client.xlen(stream) for stream in streams])

        halves.sweeper(batcher).sweep_all()  # once; there is no timer
        await until_seen(are_ended)


class TestWithoutMemory:
    async def test_a_plain_read_loses_nothing(self, own_halves: Halves) -> None:
        """The step after it was refused, and what had been read waited for the end of its lease."""
        gateway, batcher = await own_halves.gateway(), await own_halves.batcher()
        await until_quiet(batcher)
        batcher.model.free = 0
        gateway.submit(*(f"r{number}" for number in range(20)))
        await own_halves.until_entries(20)
        await until(lambda: batcher.consumer.unread("m") > 0)
        await own_halves.fill_memory()
        batcher.model.free = 100
        batcher.consumer.notify()
        await batcher.until_staged(20)
        assert (batcher.consumer.taken, batcher.consumer.claimed) == (20, 0)

    async def test_outcomes_are_written(self, own_halves: Halves) -> None:
        """Results and replies were refused, and tried again and again."""
        batcher = await own_halves.batcher(started=False)
        names = task_names(20)
        tasks = await submit_tasks(own_halves, batcher, names, b'"' + 2000 * b"x" + b'"')
        gateway = await own_halves.gateway(b"g2")
        gateway.submit("r")
        await own_halves.until_entries(21)
        await own_halves.fill_memory()
        batcher.serve()
        batcher.consumer.start()
        assert isinstance((await gateway.until_told(1))["r"], Output)
        await own_halves.until_entries(0)
        await batcher.until_confirmed()
        assert {await look(tasks, name) for name in names} == {"SUCCESS"}
        assert batcher.replies.retries == 0
        tasks.close()

    async def test_no_work_is_begun_whose_outcome_has_no_place(self, halves: Halves) -> None:
        """Outcomes that Redis does not take stay in memory."""
        gateway, batcher = await halves.gateway(), await halves.batcher(lease_ms=1500)  # by which it looks by itself
        batcher.replies.unconfirmed = UNCONFIRMED_MAX + 1
        gateway.submit("r")
        await halves.until_entries(1)
        await asyncio.sleep(0.1)
        assert batcher.consumer.taken == 0
        batcher.replies.unconfirmed = 0
        await batcher.until_staged(1)


class TestStrangeEntries:
    async def test_what_nobody_can_read_is_set_aside(self, halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
        """One such entry stopped every batcher for good."""
        gateway, batcher = await halves.gateway(), await halves.batcher(free=0)
        gateway.submit("before")
        await halves.until_entries(1)
        (entry,) = await halves.entries()
        (_, fields), *_ = await halves.client.xrange(entry.shard.stream(entry.field))
        (header,) = fields
        strange: list[dict[bytes, bytes]] = [
            {b"f1": b"v1", b"f2": b"v2"},
            {b"no header": b"value"},
            {msgspec.msgpack.encode([]): b"value"},
            {msgspec.msgpack.encode(["x"] * 9): b"value"},
            {header: b""},
            {header: b"short"},
            {header: b"\x03\xff\xff" + b"too short"},
            {header: b"\x03\x00\x01\xff" + b"no record"},
            {header: b"\x04\x00\x01\x90" + b"not what the header says"},
            {header: bytes(8) + b"\xff\xff" + b"x"},
            {header: bytes(8) + b"\x01\x00" + b"\xff"},
        ]
        for each in strange:
            await halves.client.xadd(entry.shard.stream(entry.field), each)
        gateway.submit("behind")
        await until_seen(lambda: is_length(halves, len(strange) + 2))
        batcher.model.free = 1
        with caplog.at_level(logging.CRITICAL, "carpool.broker"):
            batcher.consumer.look_at_all()
            await batcher.until_staged(2)
            batcher.answer(batcher.start_batch())
            assert len(await gateway.until_told(2)) == 2
            await batcher.until_confirmed()
        assert batcher.consumer.unreadable == len(strange)
        await until_seen(lambda: is_length(halves, 0))
        await until_seen(lambda: are_letters(halves, len(strange)))

    async def test_entries_of_a_newer_format_are_left_to_others(
        self, halves: Halves, caplog: pytest.LogCaptureFixture
    ) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher(free=0)
        gateway.submit("r")
        await halves.until_entries(1)
        (entry,) = await halves.entries()
        header = msgspec.msgpack.encode([ENTRY_FORMAT + 1, "something", {"new": 1}])
        await halves.client.xadd(entry.shard.stream(entry.field), {header: b"new"})
        batcher.model.free = 1
        with caplog.at_level(logging.CRITICAL, "carpool.broker"):
            batcher.consumer.look_at_all()
            await batcher.until_staged(1)
            batcher.answer(batcher.start_batch())
            assert len(await gateway.until_told(1)) == 1
            await batcher.until_confirmed()
        assert batcher.consumer.unreadable == 0
        (left,) = await halves.client.xpending_range(entry.shard.stream(entry.field), "batchers", "-", "+", 9)
        assert left["times_delivered"] == 0  # nobody died over it


class TestReadiness:
    async def test_a_batcher_that_does_not_look_at_the_queue_says_so(
        self, halves: Halves, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batcher = await halves.batcher(free=1, lease_ms=600)
        assert batcher.consumer.why_no_work() is None
        monkeypatch.setattr(consumer_module, "SILENT_S_MAX", 0.5)
        batcher.nodes.keep_replies()  # its question has no answer
        batcher.consumer.look_at_all()
        await until(lambda: "has not been looked at" in (batcher.consumer.why_no_work() or ""))
        batcher.nodes.let_replies_come()
        await until(lambda: batcher.consumer.why_no_work() is None)

    async def test_one_without_a_free_slot_is_well(self, halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
        batcher = await halves.batcher(free=0, lease_ms=600)
        monkeypatch.setattr(consumer_module, "SILENT_S_MAX", 0.0)
        await asyncio.sleep(0.3)  # nobody asks
        assert batcher.consumer.why_no_work() is None

    async def test_one_whose_outcomes_are_not_taken_says_so(
        self, halves: Halves, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batcher = await halves.batcher(free=1, lease_ms=600)
        monkeypatch.setattr(consumer_module, "UNCONFIRMED_MAX", 0)
        batcher.replies.unconfirmed += 1
        assert "outcomes" in (batcher.consumer.why_no_work() or "")
        batcher.replies.unconfirmed -= 1
        assert batcher.consumer.why_no_work() is None


async def is_length(halves: Halves, number: int) -> bool:
    (field,) = await halves.client.hkeys(halves.keys.shards[0].lanes)
    return bool(await halves.client.xlen(halves.keys.shards[0].stream(field)) == number)


async def are_letters(halves: Halves, number: int) -> bool:
    return bool(await halves.client.zcard(halves.keys.shards[0].letters) == number)


class TestOutcomes:
    async def test_results_that_are_refused_are_no_storm(self, halves: Halves) -> None:
        batcher = await halves.batcher()
        (name,) = task_names(1)
        tasks = await submit_tasks(halves, batcher, [name])
        await batcher.until_staged(1)
        key = halves.keys.shard_of_task(name).task(name)
        await halves.client.rename(key, key + b":aside")
        await halves.client.set(key, "no hash")
        began = monotonic()
        batcher.answer(batcher.start_batch())
        await until(lambda: batcher.replies.retries == 4)
        assert monotonic() - began >= 0.65  # after 0.1, 0.3 and 0.7 s
        await halves.client.rename(key + b":aside", key)
        await batcher.until_confirmed()
        assert await look(tasks, name) == "SUCCESS"
        tasks.close()

    async def test_one_that_cannot_be_written(self, halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
        """Nobody in that turn got an outcome, and the batcher kept them all for ever."""
        one, other = await halves.gateway(b"g1"), await halves.gateway(b"g2")
        batcher = await halves.batcher(free=0)
        one.submit("a", "b")
        other.submit("c")
        await halves.until_entries(3)
        batcher.model.free = 1
        batcher.consumer.notify()
        await batcher.until_staged(3)
        batch = batcher.start_batch()
        with caplog.at_level(logging.CRITICAL, "carpool.broker"):
            batcher.answer(batch, [10**24 if request.id == "a" else 1 for request in batch])
            harmed = await one.until_told(2)
        assert all(isinstance(outcome, InternalError) for outcome in harmed.values())
        assert isinstance((await other.until_told(1))["c"], Output)
        await batcher.until_confirmed()
        assert await halves.number_of_entries() == batcher.replies.unconfirmed == 0


class TestLeases:
    async def test_its_own_at_the_third_delivery(self, halves: Halves) -> None:
        """A batcher that stood still claimed what it was running, took it for a suspect and gave it away."""
        gateway, batcher = await halves.gateway(), await halves.batcher(started=False)
        gateway.submit("r")
        await halves.stand_still(batcher, 1, deliveries=2)
        batch = batcher.start_batch()
        batcher.consumer.look_at_all()
        await until(lambda: batcher.nodes.runs["claim"] > 0 and not batcher.consumer.unanswered)
        await batcher.nodes.ask(0, b"PING")
        (entry,) = await halves.entries()
        assert (entry.owner, entry.deliveries) == (b"b1", 2)  # nobody died over it: this one does not count
        assert entry.idle_ms < NEVER_MS
        assert batcher.broker.depth == 0
        batcher.answer(batch)
        assert isinstance((await gateway.until_told(1))["r"], Output)

    @pytest.mark.parametrize(("deaths", "together"), [(2, 16), (3, 4), (4, 1), (5, 1)])
    async def test_whoever_was_with_one_that_died_rides_with_fewer_each_time(
        self, halves: Halves, deaths: int, together: int
    ) -> None:
        """They had a batcher for themselves alone, so everybody else waited; and were given up after three deaths."""
        gateway = await halves.gateway()
        gateway.submit(*(f"r{number}" for number in range(100)))
        await halves.orphan(100, deliveries=deaths)
        batcher = await halves.batcher(started=False, largest=64, free=4)
        batcher.consumer.look_at_all()
        await batcher.until_staged(together)
        gateway.submit("fresh")
        await halves.until_entries(101)
        batcher.consumer.look_at_all()
        await batcher.until_staged(together + 1)
        assert sorted(lane.waiting for lane in batcher.broker.lanes("m")) == sorted([1, together])
        waiting = [entry for entry in await halves.entries() if entry.owner == b"dead" or entry.idle_ms > NEVER_MS]
        assert {entry.deliveries for entry in waiting} <= {deaths}  # those that were given back: uncounted
        told = together + 1
        batcher.answer(batcher.start_batch())
        await batcher.until_confirmed()
        while told < 101:  # the others come, as many at a time
            batcher.consumer.look_at_all()
            await until(lambda: batcher.broker.depth > 0)
            batch = batcher.start_batch()
            assert len(batch) <= together
            told += len(batch)
            batcher.answer(batch)
            await batcher.until_confirmed()
        assert {type(outcome) for outcome in (await gateway.until_told(101)).values()} == {Output}

    async def test_after_one_death_all_come_again_at_once(self, halves: Halves) -> None:
        """They came one company after the other, from one shard at a time, and many ran out of time."""
        gateway = await halves.gateway()
        gateway.submit(*(f"r{number}" for number in range(200)))
        await halves.orphan(200, deliveries=1)
        batcher = await halves.batcher(started=False, largest=64, free=4)
        batcher.consumer.look_at_all()
        await batcher.until_staged(200)

    async def test_who_was_never_sent_does_not_wait_for_suspects(self, halves: Halves) -> None:
        """While one of them ran, nothing was claimed: not even what a batcher that left had given back."""
        gateway, leaving = await halves.gateway(), await halves.batcher(b"leaving", started=False)
        batcher = await halves.batcher(started=False, free=4)
        gateway.submit("suspect")
        await halves.stand_still(leaving, 1, deliveries=3)
        batcher.consumer.look_at_all()
        await batcher.until_staged(1)
        batcher.start_batch()  # and it runs on
        gateway.submit("innocent")
        await halves.until_entries(2)
        leaving.consumer.look_at_all()
        await until(lambda: leaving.consumer.taken == 2)
        leaving.consumer.drain()
        for request in leaving.broker.waiting_requests():
            if request.id == "innocent":
                leaving.broker.settle(request, Draining("it leaves"))
        await leaving.until_confirmed()
        looking = Every(0.1, batcher.consumer.look_at_all)  # as its timer does
        looking.start_now()
        await batcher.until_staged(1)
        looking.stop()
        assert [request.id for request in batcher.broker.waiting_requests()] == ["innocent"]

    async def test_after_suspects_the_next_ones_come_at_once(self, halves: Halves) -> None:
        gateway = await halves.gateway()
        gateway.submit("a", "b", "c")
        await halves.orphan(3, deliveries=5)
        batcher = await halves.batcher(started=False)
        batcher.consumer.look_at_all()  # once; there is no timer
        for _ in range(3):
            await batcher.until_staged(1)
            batcher.answer(batcher.start_batch())
        assert len(await gateway.until_told(3)) == 3

    async def test_after_six_it_is_given_up(self, halves: Halves) -> None:
        gateway = await halves.gateway()
        gateway.submit("r")
        await halves.orphan(1, deliveries=6)
        batcher = await halves.batcher(started=False)
        batcher.consumer.look_at_all()
        outcome = (await gateway.until_told(1))["r"]
        assert isinstance(outcome, UpstreamFailed) and "6 batchers" in outcome.detail

    async def test_an_outcome_after_it_was_given_up(self, halves: Halves) -> None:
        """Its batcher stood still, and comes back with an outcome that nobody waits for."""
        gateway, slow = await halves.gateway(), await halves.batcher(started=False)
        gateway.submit("r")
        await halves.stand_still(slow, 1, deliveries=6)
        batch = slow.start_batch()
        other = await halves.batcher(b"b2", started=False)
        other.consumer.look_at_all()
        await gateway.until_told(1)
        await other.until_confirmed()
        slow.answer(batch)
        await until(lambda: gateway.queue.pending.late_outcomes == 1)
        await slow.until_confirmed()
        assert isinstance(gateway.outcomes()["r"], UpstreamFailed)
        assert await halves.number_of_entries() == await halves.counted_entries() == 0

    async def test_what_came_lately_is_not_stuck(self, halves: Halves) -> None:
        """A model that had no slot twice in a row lost what was staged for the slot that it had in between."""
        clock = FakeClock(monotonic())
        gateway, batcher = await halves.gateway(), await halves.batcher(clock=clock)
        consumer, model = batcher.consumer, batcher.model
        model.elsewhere = True
        tick_s = NEVER_MS / 1000 / LOOKS_A_LEASE

        async def stage(name: str) -> None:
            """A slot is free just long enough."""
            model.free = 1
            gateway.submit(name)
            await batcher.until_staged(1)
            model.free = 0

        await stage("old")
        consumer.look_at_all()  # the first time without a slot
        batcher.start_batch()
        clock.advance(tick_s * 0.9)
        await stage("new")
        clock.advance(tick_s * 0.1)
        consumer.look_at_all()
        assert [request.id for request in batcher.broker.waiting_requests()] == ["new"]
        clock.advance(tick_s)
        consumer.look_at_all()
        assert batcher.broker.depth == 0
        other = await halves.batcher(b"b2")
        await other.until_staged(1)
        assert [request.id for request in other.start_batch()] == ["new"]

    async def test_what_was_fetched_ahead_is_stuck_later(self, halves: Halves) -> None:
        clock = FakeClock(monotonic())
        gateway, batcher = await halves.gateway(), await halves.batcher(clock=clock)
        model, tick_s = batcher.model, NEVER_MS / 1000 / LOOKS_A_LEASE
        model.elsewhere, model.patience_s = True, 2 * tick_s
        gateway.submit("ahead")
        await batcher.until_staged(1)
        model.free = 0
        for _ in range(3):
            batcher.consumer.look_at_all()
            clock.advance(tick_s)
        assert batcher.broker.depth == 1
        clock.advance(tick_s)
        batcher.consumer.look_at_all()
        assert batcher.broker.depth == 0

    async def test_tasks_that_are_not_taken_up_now_are_left_until_their_lease_is_over(self, halves: Halves) -> None:
        """Those of a client whose inputs fail were released, and claimed again at once, before those of the dead."""
        gateway, batcher = await halves.gateway(b"g2"), await halves.batcher(started=False)
        gateway.submit("r")
        await halves.until_entries(1)
        tasks = await submit_tasks(halves, batcher, names := task_names(3))
        batcher.model.refusal = QueueFull("many of your inputs were refused")
        batcher.consumer.look_at_all()
        assert isinstance((await gateway.until_told(1))["r"], QueueFull)  # somebody waits on the line for this one
        await halves.until_entries(3)
        await until_quiet(batcher)
        await batcher.nodes.ask(0, b"PING")  # what it has sent is done
        left = await halves.entries()
        assert [(entry.owner, entry.deliveries) for entry in left] == [(b"b1", 0)] * 3  # nobody died over them
        assert max(entry.idle_ms for entry in left) < NEVER_MS
        assert (batcher.broker.held, batcher.consumer.claimed) == (0, 0)

        batcher.model.refusal = None
        for entry in left:
            await halves.let_lapse(entry, entry.deliveries)
        batcher.consumer.look_at_all()
        await batcher.until_staged(3)
        batcher.answer(batcher.start_batch())
        await batcher.until_confirmed()
        assert {await look(tasks, name) for name in names} == {"SUCCESS"}
        tasks.close()


class TestOrphansInAllShards:
    """What a dead batcher had lies in all shards."""

    @pytest.fixture
    async def halves(self, redis_server: RedisServer) -> AsyncIterator[Halves]:
        async with open_halves(redis_server, shards=16) as halves:
            yield halves

    async def orphans(self, halves: Halves, gateway: Gateway, a_shard: int) -> None:
        """So many in each shard."""
        for turn in range(16):
            gateway.submit(*(f"{turn}-{number}" for number in range(a_shard)))
            await halves.until_entries(a_shard * (turn + 1))
        await halves.orphan(16 * a_shard)

    async def test_a_slot_is_spent_once(self, halves: Halves) -> None:
        """Each of eight shards was asked for what one slot can send; others with free slots got nothing."""
        await self.orphans(halves, await halves.gateway(), 1)
        for number in range(1, 17):
            batcher = await halves.batcher(b"b%d" % number, started=False, free=1, largest=1)
            batcher.consumer.look_at_all()
            await batcher.until_staged(1)
            await batcher.consumer.finish_asking(PATIENCE_S)
            assert batcher.consumer.claimed == 1

    async def test_they_ride_together_in_one_slot(self, halves: Halves) -> None:
        await self.orphans(halves, await halves.gateway(), 3)
        batcher = await halves.batcher(started=False, free=1, largest=64)
        batcher.consumer.look_at_all()
        await batcher.until_staged(48)
        assert [lane.waiting for lane in batcher.broker.lanes("m")] == [48]

    async def test_what_was_given_back_goes_before_what_came_later(self, halves: Halves) -> None:
        """That of one shard came first, and new requests took the rest of the slot: some waited for seconds."""
        gateway, sick = await halves.gateway(), await halves.batcher(b"sick", started=False, free=1, largest=64)
        for turn in range(16):
            gateway.submit(*(f"old {turn}-{number}" for number in range(4)))
            await halves.until_entries(4 * (turn + 1))
        sick.consumer.look_at_all()
        await sick.until_staged(64)
        gateway.submit(*(f"new {number}" for number in range(64)))
        await halves.until_entries(128)
        for request in sick.start_batch():
            sick.broker.settle(request, GivenBack("another batcher serves it"))
        await sick.until_confirmed()
        batcher = await halves.batcher(started=False, free=1, largest=64)
        batcher.consumer.look_at_all()
        await batcher.until_staged(64)
        assert {request.id.partition(" ")[0] for request in batcher.broker.waiting_requests()} == {"old"}

    async def test_what_is_not_taken_up_now_holds_nobody_up(self, halves: Halves) -> None:
        """Tasks of a quarantined client were claimed again and again, and nobody else's requests were read."""
        gateway, batcher = await halves.gateway(b"g2"), await halves.batcher(started=False, free=1, largest=1)
        tasks = await submit_tasks(halves, batcher, task_names(32))
        await halves.orphan(32)
        batcher.model.refusal = QueueFull("many of your inputs were refused")
        gateway.submit("r")
        await halves.until_entries(33)
        batcher.consumer.look_at_all()
        await gateway.until_told(1)
        assert batcher.nodes.runs["claim"] < 8
        tasks.close()

    async def test_shards_take_turns(self, halves: Halves) -> None:
        """Those that were asked last had more, and were asked first again, while others waited."""
        await self.orphans(halves, gateway := await halves.gateway(), 2)
        batcher = await halves.batcher(started=False, free=1, largest=1)
        batcher.consumer.look_at_all()
        for _ in range(16):
            batcher.consumer.notify()
            await batcher.until_staged(1)
            batcher.answer(batcher.start_batch())
        told = await gateway.until_told(16)
        assert {name.partition("-")[0] for name in told} == {str(turn) for turn in range(16)}

    async def test_a_suspect_does_not_wait_for_what_nobody_here_can_claim(self, halves: Halves) -> None:
        """One of eight shards was asked for suspects, whether it had any or not."""
        field, header = b"ff:t0", encode_header(Header(ENTRY_FORMAT, b"", "other", b"", b"", 0, True, 0))
        for shard in halves.keys.shards:  # leases of a model that is not served here
            await halves.client.xgroup_create(shard.stream(field), "batchers", id="0", mkstream=True)
            await halves.client.xadd(shard.stream(field), {header: encode_record(0, "t", "", NEVER_MS)}, id="1-1")
            await halves.client.xreadgroup("batchers", "dead", {shard.stream(field): ">"})
            await halves.client.xclaim(shard.stream(field), "batchers", "dead", 0, ["1-1"], idle=2 * NEVER_MS)
            await halves.client.hset(shard.lanes, field, "0 - other")
            await halves.client.zadd(shard.prefix + b"leased", {field: 0})
        gateway, batcher = await halves.gateway(), await halves.batcher(started=False)
        for name in ("a", "b", "c", "d"):
            gateway.submit(name)
            batcher.consumer.look_at_all()
            await batcher.until_staged(1)
            (entry,) = [entry for entry in await halves.entries() if entry.request_id == name]
            await halves.let_lapse(entry, deliveries=3)
            other = await halves.batcher(b"after-" + name.encode(), started=False)
            other.consumer.look_at_all()  # once; there is no timer
            await other.until_staged(1)
            other.answer(other.start_batch())
            await other.until_confirmed()
            batcher.start_batch()

    async def test_an_answer_that_cannot_be_dealt_with_is_not_the_last(
        self, halves: Halves, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The batcher never asked again."""
        await self.orphans(halves, await halves.gateway(), 1)
        batcher = await halves.batcher(started=False)
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "open_ids", lambda *_: 1 / 0)
            batcher.consumer.look_at_all()
            await until(lambda: batcher.nodes.runs["claim"] >= 16)
            await batcher.nodes.ask(0, b"PING")
        for entry in await halves.entries():
            await halves.let_lapse(entry, 1)
        batcher.consumer.look_at_all()
        await batcher.until_staged(16)


class TestNoRoom:
    async def test_what_is_read_is_told(self, halves: Halves) -> None:
        """There was room for the reads but not for the script behind them: what they brought was nobody's."""
        gateway = await halves.gateway()
        gateway.submit("r")
        await halves.until_entries(1)
        (entry,) = await halves.entries()
        stream = entry.shard.stream(entry.field)
        nodes = await halves.nodes(pending_bytes_max=100_000)
        steps, brought = RedisOps(nodes, halves.keys), 0
        for room in (*range(50, 1500, 50), 90_000):
            answers: list[Taken | RedisFailure] = []
            nodes.send(0, ignore, b"ECHO", b"x" * (99_970 - room))
            steps.read(entry.shard, b"b1", ["m"], [(entry.field, 1)], answers.append)
            await until(partial(bool, answers))
            await nodes.ask(0, b"PING")  # whatever was read is here
            (entry,) = await halves.entries()
            was_told = isinstance(answers[0], Taken) and bool(answers[0].streams)
            assert (entry.owner == b"b1") is was_told, room
            brought += was_told
            await halves.client.xack(stream, GROUP, entry.id)
            await halves.client.xgroup_setid(stream, GROUP, "0")
        assert brought >= 1


class TestWhoLeaves:
    async def test_after_it_was_taken_it_is_not_sent(self, halves: Halves) -> None:
        gateway, batcher, other = await halves.gateway(), await halves.batcher(), await halves.batcher(b"b2", free=0)
        leaves, stays = gateway.submit("leaves", "stays")
        await batcher.until_staged(2)
        gateway.queue.cancel(leaves)
        await until(lambda: batcher.broker.depth == 1)
        batch = batcher.start_batch()
        assert [request.id for request in batch] == ["stays"]
        batcher.answer(batch)
        told = await gateway.until_told(2)
        assert [type(told[name]) for name in ("leaves", "stays")] == [ClientLeft, Output]
        await batcher.until_confirmed()
        await halves.until_entries(0)
        assert other.broker.held == batcher.broker.held == 0
        assert stays.phase == leaves.phase

    async def test_before_the_answer_that_brings_it(self, halves: Halves) -> None:
        """Bells are on another connection, and may be quicker."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        await until_quiet(batcher)
        batcher.nodes.keep_replies("level")
        leaves, _ = gateway.submit("leaves", "stays")
        await until(lambda: batcher.nodes.kept == 1)
        heard = batcher.nodes.wakeups
        gateway.queue.cancel(leaves)
        await until(lambda: batcher.nodes.wakeups == heard + 1)
        batcher.nodes.let_replies_come()
        await batcher.until_staged(1)
        batcher.answer(batcher.start_batch())
        told = await gateway.until_told(2)
        assert [type(told[name]) for name in ("leaves", "stays")] == [ClientLeft, Output]
        await batcher.until_confirmed()
        assert await halves.number_of_entries() == await halves.counted_entries() == batcher.broker.held == 0

    @pytest.mark.parametrize("reason", ["long ago", "too many"])
    async def test_what_is_remembered_of_them_is_bounded(self, halves: Halves, reason: str) -> None:
        """An entry of which it was forgotten is done for nobody, and nothing worse."""
        clock = FakeClock(monotonic())
        gateway, batcher = await halves.gateway(), await halves.batcher(clock=clock)
        await until_quiet(batcher)
        batcher.nodes.keep_replies("level")
        gateway.submit("r")
        await until(lambda: batcher.nodes.kept == 1)
        (entry,) = await halves.entries()
        heard = batcher.nodes.wakeups
        if reason == "too many":
            others = b" ".join(b"%b %d-1" % (entry.field, number) for number in range(consumer_module.LEFT_EARLY_MAX))
            await halves.client.spublish(entry.shard.wakeup, b"left b1 " + others)
            heard += 1
        await halves.client.spublish(entry.shard.wakeup, b"left b1 %b %b" % (entry.field, entry.id))
        await until(lambda: batcher.nodes.wakeups == heard + 1)
        if reason == "long ago":
            clock.advance(consumer_module.LEFT_EARLY_S)
            batcher.consumer.look_at_all()
        batcher.nodes.let_replies_come()
        await batcher.until_staged(1)

    async def test_one_that_another_batcher_has(self, halves: Halves) -> None:
        """Every batcher hears every bell."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        gateway.submit("r")
        await batcher.until_staged(1)
        (entry,) = await halves.entries()
        heard = batcher.nodes.wakeups
        await halves.client.spublish(entry.shard.wakeup, b"left b2 %b %b" % (entry.field, entry.id))
        await until(lambda: batcher.nodes.wakeups == heard + 1)
        assert batcher.broker.depth == 1

    async def test_a_suspect_makes_room_for_the_next(self, halves: Halves) -> None:
        gateway = await halves.gateway()
        requests = gateway.submit("a", "b")
        await halves.orphan(2, deliveries=5)
        batcher = await halves.batcher()
        batcher.consumer.look_at_all()  # once: the timer comes much later
        await batcher.until_staged(1)
        (first,) = batcher.start_batch()
        gateway.queue.cancel(next(request for request in requests if request.id == first.id))
        await batcher.until_staged(1)
        (second,) = batcher.start_batch()
        assert {first.id, second.id} == {"a", "b"}
        batcher.answer([second])
        told = await gateway.until_told(2)
        assert [type(told[request.id]) for request in (first, second)] == [ClientLeft, Output]

    async def test_while_it_runs_it_is_not_sent_again(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        (leaves,) = gateway.submit("leaves")
        await batcher.until_staged(1)
        (running,) = batcher.start_batch()
        gateway.queue.cancel(leaves)
        await until(lambda: running.phase == leaves.phase)  # DONE: a retry would drop it
        batcher.answer([running])
        await batcher.until_confirmed()
        await halves.until_entries(0)
        assert len(await gateway.until_told(1)) == 1

    async def test_whose_time_in_the_queue_is_over_still_waits_if_it_was_taken(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        (request,) = gateway.submit("r", queue_timeout_s=0.05)
        await batcher.until_staged(1)
        await asyncio.sleep(0.06)
        gateway.queue.expire(monotonic())
        await gateway.nodes.ask(0, b"PING")
        await batcher.nodes.ask(0, b"PING")
        batcher.answer(batcher.start_batch())
        assert isinstance((await gateway.until_told(1))["r"], Output)
        assert request.result_code == "ok"


class TestLanding:
    """What was taken waits a moment for the answers of other shards."""

    @pytest.fixture
    async def halves(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Halves]:
        monkeypatch.setattr(consumer_module, "COMPANY_S_MAX", 60.0)
        async with open_halves(redis_server, shards=2) as halves:
            yield halves

    async def land_one(self, halves: Halves, gateway: Gateway, batcher: Batcher) -> list[Request]:
        """Two requests are taken from two shards; one of these has answered."""
        await until_quiet(batcher)
        batcher.model.free = 0
        requests = gateway.submit("a")
        await halves.until_entries(1)
        requests += gateway.submit("b")
        await until(lambda: batcher.nodes.wakeups == 2)
        batcher.nodes.keep_replies("level")
        batcher.model.free = 1
        batcher.consumer.notify()
        await until(lambda: batcher.nodes.kept == 2)
        batcher.nodes.let_one_reply_come()
        assert (batcher.broker.held, batcher.broker.depth) == (1, 0)
        return requests

    async def test_clients_that_leave(self, halves: Halves) -> None:
        gateway, batcher = await halves.gateway(), await halves.batcher()
        for request in await self.land_one(halves, gateway, batcher):
            gateway.queue.cancel(request)
        await until(lambda: batcher.broker.held == 0 and batcher.nodes.wakeups == 4)
        batcher.nodes.let_replies_come()
        await until_quiet(batcher)
        await batcher.until_confirmed()
        assert batcher.broker.depth == batcher.broker.held == await halves.counted_entries() == 0
        assert {type(outcome) for outcome in gateway.outcomes().values()} == {ClientLeft}

    async def test_leases_that_are_lost(self, halves: Halves) -> None:
        """Others have them, and are done with them."""
        gateway, batcher = await halves.gateway(), await halves.batcher(lease_ms=1500)
        await self.land_one(halves, gateway, batcher)
        for entry in await halves.entries():
            stream = entry.shard.stream(entry.field)
            await halves.client.xack(stream, GROUP, entry.id)
            await halves.client.xdel(stream, entry.id)
        await until(lambda: batcher.consumer.leases_lost == 1)
        assert batcher.broker.held == 0
        batcher.nodes.let_replies_come()
        await until(lambda: batcher.consumer.leases_lost == 2)
        assert batcher.broker.depth == batcher.broker.held == 0

    async def test_one_that_it_claims_again(self, halves: Halves) -> None:
        """Its lease is over while it waits for company. What is claimed next brings it once more; it is sent once."""
        gateway = await halves.gateway()
        for number, name in enumerate(("b", "a", "c", "suspect"), 1):  # shards take turns
            gateway.submit(name)
            await halves.until_entries(number)
        await halves.orphan(4)
        entries = {entry.request_id: entry for entry in await halves.entries()}
        await halves.let_lapse(entries["suspect"], deliveries=3)
        batcher = await halves.batcher(started=False, free=1)
        batcher.nodes.keep_replies("claim")
        batcher.consumer.start()
        await until(lambda: batcher.nodes.kept == 1)
        await halves.let_lapse(msgspec.structs.replace(entries["a"], owner=b"b1"), deliveries=1)
        batcher.nodes.let_one_reply_come()
        assert (batcher.broker.held, batcher.broker.depth) == (1, 0)
        await until(lambda: batcher.nodes.kept == 2)
        (entry,) = [entry for entry in await halves.entries() if entry.request_id == "a"]
        assert (entry.owner, entry.deliveries) == (b"b1", 2) and entry.idle_ms < NEVER_MS
        batcher.nodes.let_replies_come()
        await batcher.until_staged(3)
        batch = batcher.start_batch()
        assert sorted(request.id for request in batch) == ["a", "b", "c"]
        batcher.answer(batch)
        assert {type(outcome) for outcome in (await gateway.until_told(3)).values()} == {Output}
        await batcher.until_confirmed()
        assert [entry.request_id for entry in await halves.entries()] == ["suspect"]

    async def test_one_that_redis_forgot_was_taken(self, halves: Halves) -> None:
        """It comes once more while it is here, as after a failover. Who left was found once, and sent all the same."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        leaver, _ = await self.land_one(halves, gateway, batcher)
        (entry,) = [entry for entry in await halves.entries() if entry.request_id == leaver.id]
        stream = entry.shard.stream(entry.field)
        await halves.client.xgroup_destroy(stream, GROUP)
        await halves.client.xgroup_create(stream, GROUP, "0")
        gateway.submit("c")  # into the same shard
        await until(lambda: batcher.nodes.wakeups == 3)
        batcher.nodes.let_replies_come()
        await until(lambda: batcher.broker.held == 4)
        gateway.queue.cancel(leaver)
        await until(lambda: batcher.nodes.wakeups == 4)
        batch = batcher.start_batch()
        assert sorted(request.id for request in batch) == ["b", "c"]
        batcher.answer(batch)
        told = await gateway.until_told(3)
        assert [type(told[name]) for name in "abc"] == [ClientLeft, Output, Output]
        await batcher.until_confirmed()
        assert batcher.broker.held == await halves.counted_entries() == 0

    async def test_draining(self, halves: Halves) -> None:
        """What is here is sent; what comes is for others."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        await self.land_one(halves, gateway, batcher)
        batcher.consumer.drain()
        assert batcher.broker.depth == 1
        batcher.nodes.let_replies_come()
        await batcher.until_confirmed()
        assert batcher.broker.depth == 1
        batcher.answer(batcher.start_batch())
        other = await halves.batcher(b"b2")
        await other.until_staged(1)
        other.answer(other.start_batch())
        assert {type(outcome) for outcome in (await gateway.until_told(2)).values()} == {Output}


class TestDrain:
    async def test_while_a_question_is_out(self, halves: Halves) -> None:
        """What it brought was staged after the drain, and left to its lease."""
        gateway, batcher = await halves.gateway(), await halves.batcher()
        await until_quiet(batcher)
        batcher.nodes.keep_replies()
        gateway.submit("r")
        await until(lambda: batcher.nodes.kept == 1)
        batcher.consumer.drain()
        asyncio.get_running_loop().call_later(0.02, batcher.nodes.let_replies_come)
        await batcher.consumer.finish_asking(PATIENCE_S)
        assert not batcher.consumer.unanswered
        await batcher.until_confirmed()
        assert batcher.broker.depth == 0
        other = await halves.batcher(b"b2")
        await other.until_staged(1)
        (entry,) = await halves.entries()
        assert (entry.owner, entry.deliveries) == (b"b2", 1)

    async def test_while_it_claims_what_it_runs(self, halves: Halves) -> None:
        """What runs here finishes here, also if the question that is out brings it once more."""
        gateway, batcher = await halves.gateway(), await halves.batcher(started=False)
        gateway.submit("r")
        await halves.stand_still(batcher, 1, deliveries=1)
        batch = batcher.start_batch()
        batcher.nodes.keep_replies("claim")
        batcher.consumer.look_at_all()
        await until(lambda: batcher.nodes.kept == 1)
        batcher.consumer.drain()
        batcher.nodes.let_replies_come()
        await batcher.until_confirmed()
        await batcher.nodes.ask(0, b"PING")
        (entry,) = await halves.entries()
        assert entry.owner == b"b1" and entry.idle_ms < NEVER_MS
        batcher.answer(batch)
        assert isinstance((await gateway.until_told(1))["r"], Output)


def questions(batcher: Batcher) -> int:
    return batcher.nodes.runs["level"]


async def until_quiet(batcher: Batcher) -> None:
    """Until one with free slots knows of nothing to take, and asks nothing."""
    consumer = batcher.consumer
    await until(lambda: not consumer.unanswered and not consumer.turn.is_due and consumer.unread("m") == 0)
