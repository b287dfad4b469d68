"""How tasks over a real Redis end: a refused one leaves nothing behind, an accepted one is counted once."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import from_url

from carpool.broker.redis import ended_tasks as ended_module
from carpool.broker.redis.batcher.leases import EntryLease, LeasedEntries
from carpool.broker.redis.batcher.sweeper import Sweeper
from carpool.broker.redis.client.link import Lost, OnReply
from carpool.broker.redis.client.nodes import Nodes, Script
from carpool.broker.redis.gateway import task_intake as intake_module
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.redis_ops import EndedTask, RedisOps
from carpool.broker.webhooks.deliverer import webhook_id_of
from carpool.core.errors import BrokerDown, CarpoolError, UnknownTask
from carpool.core.events import Events
from carpool.core.outcome import Output
from carpool.core.task import StoredTask
from carpool.testing import ANYBODY, make_output
from support.client import ask_once
from support.event_log import EventLog
from support.processes import running_role, until
from support.redis_nodes import connect
from support.redis_servers import RedisServer, running_redis
from support.redis_tasks import Office, Taken, letter_bounds
from support.tasks import told
from support.tracking import outcomes, rows
from support.webhooks import allowing, receiver, submit

OUTPUT = make_output(b'{"answer":42}')
URL = "https://example.com/hook"
SIM = "sim:?latency_ms=5&slots=8"


class OddNodes(Nodes):
    """Replies of scripts may be lost on their way, and those to WAIT come when a test says so."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # By name: how many more replies of a script are lost.
        self.losses: Counter[str] = Counter()
        self.waits: list[OnReply] = []

    def run(
        self, script: Script, slot: int, keys: Sequence[bytes], args: Sequence[bytes | int | str], on_reply: OnReply
    ) -> None:
        def replied(reply: Any) -> None:
            is_lost = self.losses[script.name] > 0
            self.losses[script.name] -= is_lost
            on_reply(Lost("as if the connection had broken") if is_lost else reply)

        super().run(script, slot, keys, args, replied)

    def send(self, slot: int, on_reply: OnReply, *command: bytes | int | str) -> None:
        if command[0] == b"WAIT":
            self.waits.append(on_reply)
        else:
            super().send(slot, on_reply, *command)


class Place(Office):
    """Where replies are lost, and replicas confirm nothing until a test says so."""

    nodes: OddNodes

    def unsure_gateway(self, **options: Any) -> Any:
        """One that waits for a replica."""
        return self.gateway(replicas=1, durable_nodes=self.nodes, **options)

    async def submit_unsure(self, tasks: Any, **options: Any) -> tuple[str, "asyncio.Future[CarpoolError | None]"]:
        """A task that Redis has, and what its submitter will be told."""
        request = self.request(**options)
        answer = asyncio.ensure_future(told(partial(tasks.submit, request)))
        await until(lambda: bool(self.nodes.waits))
        await self.nodes.ask(0, b"PING")  # it came before
        return request.id, answer

    async def keys_named(self, pattern: str) -> list[bytes]:
        found: list[bytes] = await self.nodes.ask(0, b"KEYS", f"{self.keys.namespace.decode()}:*:{pattern}")
        return found


@pytest.fixture
async def place(redis_server: RedisServer) -> AsyncIterator[Place]:
    nodes = await connect(redis_server.url, kind=OddNodes)
    place = Place(nodes, 4)
    try:
        yield place
    finally:
        await place.close()


class Finishing:
    """A batcher that gives a task its outcome, as long as that takes."""

    def __init__(
        self, place: Place, taken: Taken, outcome: Output | CarpoolError = OUTPUT, after_s: float = 0.0
    ) -> None:
        self.counted: Counter[str] = Counter()
        self.log = EventLog()
        events = Events()
        events.subscribe(self.log)
        self.writer = place.writer(outcomes=self.counted, events=events)
        request = place.request(owner=taken.record.owner)
        self._leased = LeasedEntries(taken.shard, taken.field, 0.0, 0.0, {taken.entry_id: request})
        request.id, request.waiter = taken.task_id, self.writer
        request.ticket = EntryLease(self._leased, taken.entry_id, taken.header)
        request.settle(outcome, request.arrived + after_s)

    @property
    def is_over(self) -> bool:
        return not self._leased.open

    async def is_put_off(self) -> None:
        """Until it came, and was told to come again."""
        before = self.writer.retries
        await until(lambda: self.writer.retries > before)
        assert not self.is_over


async def look(place: Place, task_id: str) -> Any:
    return await told(lambda done: place.gateway().look(ANYBODY, task_id, 0.0, False, done))


# Refused tasks.


async def test_a_task_that_is_refused_while_its_batcher_has_the_outcome_leaves_nothing(place: Place) -> None:
    tasks = place.unsure_gateway()
    task_id, answer = await place.submit_unsure(tasks, callback_url=URL)
    (taken,) = await place.take()
    finishing = Finishing(place, taken)
    await finishing.is_put_off()
    assert (await look(place, task_id)).status == "PENDING"
    place.nodes.waits.pop()(0)
    assert isinstance(await answer, BrokerDown)
    await until(lambda: finishing.is_over)
    assert (finishing.counted, finishing.log.outcomes) == ({}, {})
    assert isinstance(await look(place, task_id), UnknownTask)
    for kind in ("task:*", "hook*", "unsure"):
        assert not await place.keys_named(kind)
    assert await place.counts() == (0, 0)


async def test_a_task_has_its_outcome_as_soon_as_it_is_accepted(place: Place) -> None:
    tasks = place.unsure_gateway()
    task_id, answer = await place.submit_unsure(tasks, callback_url=URL)
    (taken,) = await place.take()
    finishing = Finishing(place, taken)
    await finishing.is_put_off()
    place.nodes.waits.pop()(1)
    assert await answer is None
    await until(lambda: finishing.is_over)
    assert finishing.counted == {"ok": 1}
    assert (await look(place, task_id)).status == "SUCCESS"
    assert len(await place.keys_named("hook:*")) == 1
    assert not await place.keys_named("unsure")


async def test_the_task_of_a_gateway_that_died_has_its_outcome_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "UNSURE_S", 0.2)
    task_id, answer = await place.submit_unsure(place.unsure_gateway(replicas_timeout_ms=1))
    (taken,) = await place.take()
    finishing = Finishing(place, taken)
    await until(lambda: finishing.is_over)
    assert finishing.counted == {"ok": 1}
    assert (await look(place, task_id)).status == "SUCCESS"
    place.nodes.waits.pop()(1)
    assert await answer is None


async def test_a_server_that_takes_over_is_told_who_was_accepted(tmp_path: Path) -> None:
    """A failover may lose the word that a task is accepted: it had no outcome for half a minute then."""
    async with running_redis(tmp_path / "redis") as server, from_url(server.url) as client:

        async def is_sure() -> bool:
            return await client.zscore(unsure, task_id) is None

        async with running_role(tmp_path, "gateway", "--broker", server.url) as gateway:
            body, head = b'{"input":"x","mode":"async"}', "Content-Type: application/json\r\n"
            answer = await ask_once(gateway.port, "POST", "/v1/inference", body, head)
            assert answer.status == 202
            task_id = str(json.loads(answer.body)["task_id"])
            unsure = Keys("carpool", 16).shard_of_task(task_id).unsure
            await until(is_sure)
            await client.zadd(unsure, {task_id: (time.time() + 30) * 1000})  # as its replica still has it
            await client.client_kill_filter(_type="normal", skipme=True)
            await until(is_sure)


async def test_a_task_with_a_kept_result_that_is_refused_sends_no_webhook(place: Place) -> None:
    tasks = place.unsure_gateway()
    request = place.request(callback_url=URL)
    request.result = OUTPUT
    answer = asyncio.ensure_future(told(partial(tasks.submit, request)))
    await until(lambda: bool(place.nodes.waits))
    shard = place.keys.shard_of_task(request.id)
    assert await place.steps.claim_webhooks(shard, 10, 1000, 10, {}) == []
    place.nodes.waits.pop()(0)
    assert isinstance(await answer, BrokerDown)
    for kind in ("task:*", "hook*", "unsure"):
        assert not await place.keys_named(kind)
    counts = dict(zip(*[iter(await place.nodes.ask(0, b"HGETALL", shard.counts))] * 2, strict=True))
    assert (counts[b"hooks"], counts[b"hook_bytes"]) == (b"0", b"0")


async def test_a_submission_whose_reply_was_lost_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran, and its webhook was sent, before it was removed."""
    monkeypatch.setattr(intake_module, "RETRY_S", 0.1)
    place.nodes.losses["submit"] = 1
    tasks, request = place.gateway(), place.request(callback_url=URL)
    assert isinstance(await told(partial(tasks.submit, request)), BrokerDown)
    (taken,) = await place.take()
    finishing = Finishing(place, taken)
    await until(lambda: finishing.is_over)
    assert (finishing.counted, finishing.log.outcomes) == ({}, {})
    for kind in ("task:*", "hook*", "unsure"):
        assert not await place.keys_named(kind)


@pytest.mark.timeout(120)
async def test_refused_tasks_of_processes_have_no_row_and_no_webhook(tmp_path: Path) -> None:
    """Of 60 that were refused all were run, billed and told."""
    path, given = (
        tmp_path / "tracking.db",
        {"broker.replicas": 1},
    )
    async with running_redis(tmp_path / "redis") as redis, receiver() as hooks:
        settings = allowing(hooks) | given | {"tracking.store": "sqlite", "tasks.data_dir": str(tmp_path)}
        flags = ("--broker", redis.url, "--upstream", SIM)
        async with running_role(tmp_path, "serve", *flags, settings=settings) as process:
            answers = await asyncio.gather(*(submit(process.port, hooks.url, f"text {n}") for n in range(20)))
            assert {answer.status for answer in answers} == {503}
            await until(lambda: is_idle(redis))
            assert not await outcomes(process)
            process.terminate()
            assert await process.exit_code() == 0
        async with redis.client() as client:
            assert not [key for key in await client.keys("*") if b":task:" in key or b":hook" in key]
        assert hooks.came == []
    assert rows(path, "SELECT * FROM carpool_requests") == []


async def is_idle(redis: RedisServer) -> bool:
    """Whether no entry waits, and none is leased."""
    async with redis.client() as client:
        return not any([await client.xlen(key) for key in await client.keys("*:q:*")])


# Counting.


async def test_a_finisher_whose_reply_was_lost_counts_once(place: Place) -> None:
    """The task was not counted, and had no row."""
    task_id = await place.submit(place.gateway())
    (taken,) = await place.take()
    place.nodes.losses["finish"] = 2
    finishing = Finishing(place, taken)
    await until(lambda: finishing.is_over)
    assert (finishing.counted, list(finishing.log.outcomes)) == ({"ok": 1}, [task_id])


async def test_it_counts_also_if_the_result_was_read_and_deleted_meanwhile(place: Place) -> None:
    tasks = place.gateway()
    task_id = await place.submit(tasks)
    (taken,) = await place.take()
    place.nodes.losses["finish"] = 1
    finishing = Finishing(place, taken)
    await until(lambda: place.nodes.losses["finish"] == 0)
    assert await told(lambda done: tasks.delete(ANYBODY, task_id, done)) is None
    await until(lambda: finishing.is_over)
    assert finishing.counted == {"ok": 1}
    assert isinstance(await look(place, task_id), UnknownTask)


async def test_of_two_that_finish_a_task_the_first_counts(place: Place) -> None:
    await place.submit(place.gateway())
    (taken,) = await place.take()
    place.nodes.losses["finish"] = 1
    both = [Finishing(place, taken) for _ in range(2)]
    await until(lambda: all(each.is_over for each in both))
    assert [each.counted for each in both] == [{"ok": 1}, {}]


class Ends:
    """What a process counts of tasks that end in Redis."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ended_module, "RETRY_S", 0.05)
        self.counted: list[tuple[str, str, str]] = []

    def count(self, task: EndedTask, error: CarpoolError) -> None:
        self.counted.append((task.id, task.owner, error.code))

    async def are(self, place: Place, *expected: tuple[str, str, str]) -> None:
        """Until these are counted, and Redis has no more to tell of them."""
        await until(lambda: len(self.counted) >= len(expected))

        async def is_told() -> bool:
            return not await place.keys_named("ends:*")

        await until(is_told)
        await asyncio.sleep(4 * ended_module.RETRY_S)  # it is asked for more than once
        assert self.counted == list(expected)


async def test_a_deletion_whose_reply_was_lost_counts_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    tasks = place.gateway(ended=ends.count)
    first, second = [await place.submit(tasks) for _ in range(2)]
    place.nodes.losses["forget"] = 1
    assert isinstance(await told(lambda done: tasks.delete(ANYBODY, first, done)), BrokerDown)
    await ends.are(place, (first, "owner", "client-left"))
    assert await told(lambda done: tasks.delete(ANYBODY, second, done)) is None
    await ends.are(place, (first, "owner", "client-left"), (second, "owner", "client-left"))


async def test_a_look_that_ends_a_task_and_is_lost_counts_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, now = Ends(monkeypatch), 1_000_000
    tasks = place.gateway(ended=ends.count, now_ms=lambda: b"%d" % now)
    task_id = await place.submit(tasks, total_timeout_s=10.0)
    now += 100_000
    place.nodes.losses["look"] = 1
    for kind in (BrokerDown, StoredTask):
        assert isinstance(await told(lambda done: tasks.look(ANYBODY, task_id, 0.0, False, done)), kind)
    await ends.are(place, (task_id, "owner", "deadline-exceeded"))


async def test_a_sweep_that_ends_tasks_and_is_lost_counts_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, now = Ends(monkeypatch), 1_000_000
    steps = RedisOps(place.nodes, place.keys, lambda: b"%d" % now)
    tasks = place.gateway(now_ms=lambda: b"%d" % now)
    task_id = await place.submit(tasks, total_timeout_s=10.0)
    now += 100_000
    sweeper = Sweeper(steps, letter_bounds(), 60_000, ends.count)
    place.nodes.losses["sweep"] = 100
    sweeper.sweep_all()
    await ends.are(place, (task_id, "owner", "deadline-exceeded"))
    place.nodes.losses["sweep"] = 0
    sweeper.sweep_all()
    await ends.are(place, (task_id, "owner", "deadline-exceeded"))
    sweeper.close()


# Webhooks.


async def test_what_a_failover_has_lost_is_told_in_the_same_words(place: Place) -> None:
    """A webhook that had been sent was sent once more, with the same id and another time in its body."""
    task_id = await place.submit(place.gateway(), callback_url=URL)
    shard = place.keys.shard_of_task(task_id)
    (taken,) = await place.take()
    before = await place.nodes.ask(shard.slot, b"DUMP", shard.task(task_id))
    place.nodes.losses["finish"] = 1
    finishing = Finishing(place, taken)
    await until(lambda: place.nodes.losses["finish"] == 0)
    sent = await place.steps.read_webhook(shard, task_id)
    assert sent is not None
    await place.nodes.ask(shard.slot, b"DEL", shard.hook(task_id))
    await place.nodes.ask(shard.slot, b"RESTORE", shard.task(task_id), 0, before, b"REPLACE")
    await until(lambda: finishing.is_over)
    assert await place.steps.read_webhook(shard, task_id) == sent
    # Where another batcher has run it again, that is another webhook.
    await place.nodes.ask(shard.slot, b"RESTORE", shard.task(task_id), 0, before, b"REPLACE")
    again = Finishing(place, taken, make_output(b'{"answer":43}'), after_s=0.5)
    await until(lambda: again.is_over)
    told_again = await place.steps.read_webhook(shard, task_id)
    assert told_again is not None and webhook_id_of(told_again) != webhook_id_of(sent)
