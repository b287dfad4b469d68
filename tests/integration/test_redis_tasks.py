"""Tasks on a real Redis: any gateway answers for them, none is lost, and each has one result."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.gateway import task_intake as intake_module
from carpool.broker.redis.gateway import tasks as tasks_module
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.core.errors import (
    BrokerDown,
    BrokerMemoryFull,
    CarpoolError,
    InternalError,
    QueueFull,
)
from carpool.core.ports import Caller
from carpool.core.task import StoredTask
from carpool.testing import ANYBODY, make_output
from support.processes import PATIENCE_S, until
from support.redis_nodes import connect
from support.redis_servers import RedisServer, running_redis
from support.redis_tasks import Office, open_office
from support.tasks import told

OUTPUT = make_output(b'{"answer":42}')
# Longer than `told` waits: what comes, comes for another reason.
NEVER_S = 600.0
# For a replica that confirms: half of what its connection is patient for.
REPLICAS_MS = int(PATIENCE_S * 500)


@pytest.fixture
async def office(redis_server: RedisServer) -> AsyncIterator[Office]:
    async with open_office(redis_server.url) as office:
        yield office


@pytest.fixture
def no_looking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the net under lost tellings."""
    monkeypatch.setattr(tasks_module, "LOOK_AGAIN_S", NEVER_S)


async def look(
    tasks: RedisTasks, task_id: str, wait_s: float = 0.0, *, forget: bool = False, caller: Caller = ANYBODY
) -> Any:
    return await told(lambda done: tasks.look(caller, task_id, wait_s, forget, done))


async def delete(tasks: RedisTasks, task_id: str, caller: Caller = ANYBODY) -> Any:
    return await told(lambda done: tasks.delete(caller, task_id, done))


async def is_awaited(office: Office, task_id: str, gateways: int) -> bool:
    """Have so many gateways said that somebody waits for the task?"""
    return len((await office.hash_of(task_id)).get(b"w", b"").split()) == gateways


async def submit_all(office: Office, tasks: RedisTasks, number: int, **options: Any) -> list[CarpoolError | None]:
    """What the submitters of one turn are told, in their order."""
    requests = [office.request(b"%d" % index, **options) for index in range(number)]
    return list(await asyncio.gather(*(told(partial(tasks.submit, request)) for request in requests)))


@pytest.mark.parametrize("replicas", [0, -1])
async def test_one_that_cannot_be_queued_refuses_itself_alone(
    office: Office, redis_server: RedisServer, replicas: int
) -> None:
    """The others of its turn were refused too, and ran all the same."""
    durable = await connect(redis_server.url) if replicas else None
    tasks = office.gateway(replicas=replicas, durable_nodes=durable)
    odd = office.request(parameters=b'{"p":1}')
    odd.number = -1  # does not fit into a record
    requests = [office.request(), odd, office.request(parameters=b'{"p":2}')]
    answers = await asyncio.gather(*(told(partial(tasks.submit, request)) for request in requests))
    assert [type(answer) for answer in answers] == [type(None), InternalError, type(None)]
    assert sorted(taken.task_id for taken in await office.take()) == sorted([requests[0].id, requests[2].id])
    if durable is not None:
        await durable.close()


async def test_another_shard_takes_the_task_of_one_that_is_down(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = office.gateway()
    request = office.request()
    request.id = request.id[:-1] + "0"
    only = office.keys.shards[5]
    monkeypatch.setattr(office.nodes, "is_up", lambda slot: slot == only.slot)
    before = request.id
    assert await told(lambda done: tasks.submit(request, done)) is None
    assert request.id == before[:-1] + "5"
    assert (await look(tasks, request.id)).status == "PENDING"
    monkeypatch.setattr(office.nodes, "is_up", lambda slot: False)
    assert isinstance(await told(lambda done: tasks.submit(office.request(), done)), BrokerDown)
    monkeypatch.undo()


async def test_tasks_go_to_the_shards_that_are_for_them(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = office.gateway(shards_used=2)
    ids = [await office.submit(tasks) for _ in range(20)]
    assert {office.keys.shard_of_task(task_id).number for task_id in ids} == {0, 1}
    for_tasks = {shard.slot for shard in office.keys.shards[:2]}
    monkeypatch.setattr(office.nodes, "is_up", lambda slot: slot not in for_tasks)
    assert office.keys.shard_of_task(await office.submit(tasks)).number >= 2
    monkeypatch.undo()


async def test_what_collects_is_bounded(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "COLLECTED_MAX", 3)
    answers = await submit_all(office, office.gateway(), 5)
    assert answers[:3] == [None] * 3
    assert [type(answer) for answer in answers[3:]] == [QueueFull] * 2
    monkeypatch.setattr(intake_module, "COLLECTED_BYTES_MAX", 2)
    assert isinstance((await submit_all(office, office.gateway(), 3))[2], QueueFull)


async def test_nearly_full_memory_takes_no_task(office: Office) -> None:
    tasks = office.gateway(is_memory_full=lambda: True)
    assert [type(answer) for answer in await submit_all(office, tasks, 1)] == [BrokerMemoryFull]
    assert await office.counts() == (0, 0)


async def test_what_is_told_twice_is_answered_once(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    answers: list[StoredTask | CarpoolError] = []
    tasks.look(ANYBODY, task_id, NEVER_S, False, answers.append)
    await until(lambda: is_awaited(office, task_id, 1))
    (taken,) = await office.take()
    assert await office.finish(taken, OUTPUT)
    tasks.finished(task_id)
    tasks.finished(task_id)
    await until(lambda: bool(answers))
    tasks.finished(task_id)
    await office.nodes.ask(office.keys.shards[0].slot, b"PING")  # whatever was asked is answered
    assert [answer.status for answer in answers if isinstance(answer, StoredTask)] == ["SUCCESS"]
    assert len(answers) == 1
    assert repr(tasks) == "<RedisTasks <Polls 0>>"


async def test_a_lost_telling_costs_a_moment(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_AGAIN_S", 0.05)
    tasks = office.gateway(b"deaf")
    task_id = await office.submit(tasks)
    poll = asyncio.ensure_future(look(tasks, task_id, NEVER_S))
    (taken,) = await office.take()
    await asyncio.sleep(0.1)
    assert not poll.done()
    assert await office.finish(taken, OUTPUT)
    assert (await poll).status == "SUCCESS"


async def test_a_telling_before_the_first_answer_is_not_lost(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    poll = asyncio.ensure_future(look(tasks, task_id, NEVER_S))
    await asyncio.sleep(0)  # asked, not answered
    finished = asyncio.ensure_future(office.finish(taken, OUTPUT))
    await asyncio.sleep(0)
    tasks.finished(task_id)
    assert await finished
    assert (await poll).status == "SUCCESS"


# When Redis has no memory, no replicas, or is gone.


async def test_without_memory_nothing_is_accepted_and_what_was_is_finished(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, open_office(server.url) as office:
        tasks = office.gateway()
        task_id = await office.submit(tasks)
        (taken,) = await office.take()
        await office.nodes.ask(0, b"CONFIG", b"SET", b"maxmemory", b"1")
        before = await office.nodes.ask(0, b"DBSIZE")
        error = await told(lambda done: tasks.submit(office.request(), done))
        assert isinstance(error, BrokerMemoryFull)
        assert error.retry_after_s == 1
        assert await office.nodes.ask(0, b"DBSIZE") == before
        assert await office.finish(taken, OUTPUT)  # in place of the input: this is how memory gets free
        assert (await look(tasks, task_id)).status == "SUCCESS"
        assert await office.counts() == (0, 0)


async def test_tasks_wait_for_replicas(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary:
        follow = ("--replicaof", f"127.0.0.1 {primary.port}")
        async with running_redis(tmp_path / "replica", *follow) as replica, open_office(primary.url) as office:
            durable = await connect(primary.url)
            try:
                await until(lambda: is_in_step(primary))
                patient = office.gateway(replicas=1, replicas_timeout_ms=REPLICAS_MS, durable_nodes=durable)
                assert await submit_all(office, patient, 5) == [None] * 5
                assert len(await office.take()) == 5
                replica.stop()
                tasks = office.gateway(replicas=1, replicas_timeout_ms=400, durable_nodes=durable)
                first = asyncio.ensure_future(submit_all(office, tasks, 3))
                await asyncio.sleep(0.02)
                later = asyncio.ensure_future(submit_all(office, tasks, 2))  # collects while the first wait
                for error in (*await first, *await later):
                    assert isinstance(error, BrokerDown)
                    assert "replicas" in error.detail
                assert await office.counts() == (5, 0)
                assert len(await office.nodes.ask(0, b"KEYS", b"*:task:*")) == 5
                replica.go_on()

                assert await submit_all(office, patient, 1) == [None]
            finally:
                await durable.close()


async def is_in_step(primary: RedisServer) -> bool:
    """Does the replica confirm what is written? One that was just attached may take a second before it does."""
    async with primary.client(single_connection_client=True) as client:
        await client.set("in-step", "?")
        return bool(await client.wait(1, 100) == 1)


class SlowAnswers(Nodes):
    """As if another node had answered: replies to submissions come after the one to WAIT."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept: list[Callable[[], None]] = []

    def send(self, slot: int, on_reply: Any, *command: bytes | int | str) -> None:
        def keep(reply: Any) -> None:
            self._kept.append(partial(on_reply, reply))

        def tell(reply: Any) -> None:
            on_reply(reply)
            while command[0] == b"WAIT" and self._kept:
                self._kept.pop()()

        super().send(slot, keep if command[0] == b"EVAL" else tell, *command)


async def test_a_task_behind_the_wait_is_not_covered_by_it(office: Office, redis_server: RedisServer) -> None:
    durable = await connect(redis_server.url, kind=SlowAnswers)
    try:
        # WAIT is content with any number here; what it did not cover is refused all the same.
        tasks = office.gateway(replicas=-1, replicas_timeout_ms=1, durable_nodes=durable)
        (error,) = await submit_all(office, tasks, 1)
        assert isinstance(error, BrokerDown)
        assert await office.counts() == (0, 0)
    finally:
        await durable.close()


async def test_without_redis_everybody_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_AGAIN_S", 0.05)
    saves = ("--appendonly", "yes", "--appendfsync", "always")
    async with running_redis(tmp_path, *saves) as server, open_office(server.url) as office:
        tasks = office.gateway()
        task_id = await office.submit(tasks)
        short = asyncio.ensure_future(look(tasks, task_id, 3.0))
        long = asyncio.ensure_future(look(tasks, task_id, NEVER_S))
        (taken,) = await office.take()
        server.kill()
        await until(lambda: not office.nodes.is_up(0))
        assert [type(error) for error in await submit_all(office, tasks, 2)] == [BrokerDown] * 2
        assert isinstance(await look(tasks, task_id), BrokerDown)
        assert isinstance(await look(tasks, task_id, NEVER_S), BrokerDown)
        assert isinstance(await delete(tasks, task_id), BrokerDown)
        assert not await office.finish(taken, OUTPUT)
        assert isinstance(await short, BrokerDown)
        server.launch()
        await server.wait_until_ready()
        await until(lambda: office.nodes.is_up(0))
        assert not long.done()  # who waits long outlives it
        assert await office.finish(taken, OUTPUT)
        assert (await long).status == "SUCCESS"


async def test_a_task_ends_at_its_own_deadline_whoever_came_with_it(office: Office) -> None:
    """The deadlines that a client chooses do not decide what is written together."""
    now = 1_000_000
    tasks = office.gateway(now_ms=lambda: b"%d" % now)
    requests = [office.request(own_timeout_s=own_s) for own_s in (0.0, 2.0, 60.0)]
    for request in requests[1:]:  # into the same shard
        request.id = request.id[:-1] + requests[0].id[-1]
    refusals = [told(partial(tasks.submit, request)) for request in requests]
    assert await asyncio.gather(*refusals) == [None] * 3

    async def states() -> list[str]:
        return [(await look(tasks, request.id)).status for request in requests]

    now += 1900
    assert await states() == ["PENDING", "PENDING", "PENDING"]
    now += 200
    assert await states() == ["PENDING", "FAILED", "PENDING"]
    assert await office.counts() == (2, 2)
    now += 60_000
    assert await states() == ["PENDING", "FAILED", "FAILED"]
    assert [taken.task_id for taken in await office.take()] == [requests[0].id]
