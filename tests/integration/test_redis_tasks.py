"""Tasks on a real Redis: any gateway answers for them, none is lost, and each has one result."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.gateway import task_intake as intake_module
from carpool.broker.redis.gateway import task_removals as removals_module
from carpool.broker.redis.gateway import tasks as tasks_module
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.redis_ops import EndedTask
from carpool.core.errors import (
    BrokerDown,
    BrokerMemoryFull,
    CarpoolError,
    InputRefused,
    InternalError,
    QueueFull,
    UnknownTask,
    UpstreamFailed,
)
from carpool.core.ports import Caller
from carpool.core.request import DONE, QUEUED
from carpool.core.task import StoredTask
from carpool.testing import ANYBODY, make_output
from support.processes import PATIENCE_S, until
from support.redis_nodes import connect
from support.redis_servers import RedisCluster, RedisServer, running_redis
from support.redis_tasks import RESULT_TTL_MS, Office, open_office
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


# Accepting.


async def test_a_task_is_in_the_queue_as_it_came(office: Office) -> None:
    tasks = office.gateway()
    request = office.request(b'{"secret": 1}', parameters=b'{"a":1}', total_timeout_s=600.0, owner="somebody")
    request.lane = b"shape"
    assert await told(lambda done: tasks.submit(request, done)) is None
    assert (request.phase, request.input) == (QUEUED, b"")  # Redis has it: this process keeps nothing
    assert await office.counts() == (1, 1)
    (taken,) = await office.take()
    assert (taken.task_id, taken.record.owner, taken.input) == (request.id, "somebody", b'{"secret": 1}')
    header = taken.header
    assert (header.gateway, header.is_task, header.model, header.parameters, header.lane, header.tier) == (
        b"",
        True,
        "m",
        b'{"a":1}',
        b"shape",
        1,
    )
    assert 590_000 < taken.record.remaining_ms <= 600_000
    task = await look(tasks, request.id)
    assert (task.id, task.owner, task.status, task.output, task.error) == (
        request.id,
        "somebody",
        "PENDING",
        None,
        None,
    )


async def test_the_tasks_of_one_turn_go_into_one_shard(office: Office) -> None:
    tasks = office.gateway()
    assert await submit_all(office, tasks, 20) == [None] * 20
    taken = await office.take()
    assert len({entry.shard.number for entry in taken}) == 1
    assert [entry.input for entry in taken] == [b"%d" % index for index in range(20)]
    for entry in taken:
        assert office.keys.shard_of_task(entry.task_id) is entry.shard
        assert (await look(tasks, entry.task_id)).status == "PENDING"


async def test_tasks_of_many_owners_lanes_and_tiers_keep_what_is_theirs(office: Office) -> None:
    tasks = office.gateway()
    kinds = [(owner, tier, lane) for owner in "ab" for tier in (0, 1) for lane in (b"", b'{"p":1}')]
    ids = await asyncio.gather(
        *(
            office.submit(tasks, json.dumps(str(kind)).encode(), kind[0], tier=kind[1], parameters=kind[2])
            for kind in kinds
        )
    )
    taken = {entry.task_id: entry for entry in await office.take()}
    assert len({entry.shard.number for entry in taken.values()}) == 1
    for task_id, kind in zip(ids, kinds, strict=True):
        entry = taken[task_id]
        assert (entry.record.owner, entry.input) == (kind[0], json.dumps(str(kind)).encode())
        assert (entry.header.tier, entry.header.parameters) == kind[1:]
        assert (await look(tasks, task_id)).owner == kind[0]


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


async def test_more_tasks_than_one_flush_takes(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "TASKS_A_FLUSH_MAX", 3)
    assert await submit_all(office, office.gateway(), 10) == [None] * 10
    assert len(await office.take()) == 10


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


async def test_a_full_shard_takes_as_many_as_it_has_room_for(office: Office) -> None:
    tasks = office.gateway(held_max=2)
    answers = await submit_all(office, tasks, 5)
    assert answers[:2] == [None, None]
    assert [type(answer) for answer in answers[2:]] == [QueueFull] * 3
    assert await office.counts() == (2, 2)


async def test_the_bytes_of_tasks_are_bounded_over_all_gateways(redis_server: RedisServer) -> None:
    async with open_office(redis_server.url, shards=4) as office:
        one, other = (office.gateway(name, input_bytes_max=20_000) for name in (b"g1", b"g2"))
        requests = [office.request(b'"%b"' % (b"x" * 1000)) for _ in range(200)]
        answers = [
            await told(partial(tasks.submit, request))
            for tasks, request in zip(cycle((one, other)), requests, strict=False)
        ]
        refused = [answer for answer in answers if answer is not None]
        assert {type(answer) for answer in refused} == {QueueFull}
        assert {answer.retry_after_s for answer in refused} == {1}
        taken = await office.take()
        # Each shard has room for fifteen of them.
        assert len(taken) == len(answers) - len(refused) == 4 * 15
        for entry in taken:
            await office.finish(entry, OUTPUT)
        await office.submit(one, b'"%b"' % (b"x" * 1000))


async def test_results_are_bounded_too(redis_server: RedisServer) -> None:
    async with open_office(redis_server.url, shards=1) as office:
        tasks = office.gateway(stored_bytes_max=10_000)
        task_id = await office.submit(tasks)
        (taken,) = await office.take()
        assert await office.finish(taken, make_output(b'"%b"' % (b"r" * 9800)))
        error = await told(partial(tasks.submit, office.request()))
        assert isinstance(error, QueueFull)
        assert (error.retry_after_s, "delete results you have read" in error.detail) == (10, True)
        assert await delete(tasks, task_id) is None
        await office.submit(tasks)


async def test_nearly_full_results_that_were_read_go_first(redis_server: RedisServer) -> None:
    """Not those that nobody was there to read."""
    async with open_office(redis_server.url, shards=1) as office:
        tasks = office.gateway(stored_bytes_max=10_000)
        ids = [await office.submit(tasks) for _ in range(3)]
        for taken in await office.take():
            assert await office.finish(taken, make_output(b'"%b"' % (b"r" * 2500)))
        read, unread, left = ids
        assert (await look(tasks, read)).status == "SUCCESS"
        was_told = asyncio.Event()

        def told_nobody(found: object) -> bool:
            was_told.set()
            return False

        tasks.look(ANYBODY, left, 0.0, False, told_nobody)
        await asyncio.wait_for(was_told.wait(), PATIENCE_S)

        async def is_known() -> bool:
            return b" read_bytes:" in (await office.hash_of(read))[b"b"]

        await until(is_known)
        await office.submit(tasks, b'"%b"' % (b"x" * 2000))
        found = [await look(tasks, task_id) for task_id in (read, unread, left)]
        assert [isinstance(each, UnknownTask) for each in found] == [True, False, False]


async def test_tasks_go_to_the_shards_that_are_for_them(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = office.gateway(shards_used=2)
    ids = [await office.submit(tasks) for _ in range(20)]
    assert {office.keys.shard_of_task(task_id).number for task_id in ids} == {0, 1}
    for_tasks = {shard.slot for shard in office.keys.shards[:2]}
    monkeypatch.setattr(office.nodes, "is_up", lambda slot: slot not in for_tasks)
    assert office.keys.shard_of_task(await office.submit(tasks)).number >= 2
    monkeypatch.undo()


async def test_a_flush_does_not_fill_one_shard(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "FLUSH_BYTES_MAX", 10)
    tasks, requests = office.gateway(), [office.request(b'"12345678"') for _ in range(20)]
    ids = [request.id for request in requests]
    answers = await asyncio.gather(*(told(partial(tasks.submit, request)) for request in requests))
    assert answers == [None] * 20
    assert [request.id for request in requests] == ids  # each in the shard that its id named


async def test_lanes_are_bounded_but_not_for_those_without_parameters(redis_server: RedisServer) -> None:
    async with open_office(redis_server.url, shards=1) as office:
        tasks = office.gateway(lanes_max=1)
        await office.submit(tasks, parameters=b'{"a":1}')
        refused = office.request(parameters=b'{"a":2}', owner="owner")
        error = await told(lambda done: tasks.submit(refused, done))
        assert isinstance(error, QueueFull)
        assert "different `parameters`" in error.detail
        assert (refused.phase, refused.input) == (DONE, b"")
        await office.submit(tasks)
        await office.submit(tasks, owner="another", parameters=b'{"a":2}')  # which has none yet


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


# Looking.


async def test_a_poll_at_another_gateway_is_told(office: Office, no_looking_again: None) -> None:
    here, there = office.gateway(b"here"), await office.told_gateway(b"there")
    task_id = await office.submit(here)
    poll = asyncio.ensure_future(look(there, task_id, NEVER_S))
    (taken,) = await office.take()
    assert repr(there) == "<RedisTasks <Polls 1>>"
    await until(lambda: is_awaited(office, task_id, 1))
    assert not poll.done()
    assert await office.finish(taken, OUTPUT)
    task = await poll
    assert (task.id, task.owner, task.status, task.output, task.error) == (
        task_id,
        "owner",
        "SUCCESS",
        b'{"answer":42}',
        None,
    )
    assert repr(there) == "<RedisTasks <Polls 0>>"
    kept = await office.hash_of(task_id)
    assert kept.pop(b"e").partition(b"-")[0] <= kept[b"t"]  # the id of its entry tells when it was submitted
    assert kept == {
        b"s": b"S",
        b"o": b"owner",
        b"r": b'{"answer":42}',
        b"t": b"%d" % round(task.timestamp_wall * 1000),
        b"b": ANY,
    }


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


async def test_polls_of_many_gateways_are_all_told(office: Office, no_looking_again: None) -> None:
    gateways = [await office.told_gateway(b"gateway-%d" % number) for number in range(4)]
    task_id = await office.submit(gateways[0])
    polls = [asyncio.ensure_future(look(tasks, task_id, NEVER_S)) for tasks in gateways * 2]
    await until(lambda: is_awaited(office, task_id, 4))
    (taken,) = await office.take()
    error = UpstreamFailed("every attempt failed")
    assert await office.finish(taken, error)
    for task in await asyncio.gather(*polls):
        assert (task.status, task.output) == ("FAILED", None)
        assert json.loads(task.error)["type"] == "urn:carpool:error:upstream-failed"
    names = await office.nodes.ask(office.keys.shards[0].slot, b"EXISTS", office.keys.replies(b"nobody"))
    assert names == 0


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


async def test_a_poll_ends_with_what_there_is(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    assert (await look(tasks, task_id, 0.05)).status == "PENDING"
    (taken,) = await office.take()
    poll = asyncio.ensure_future(look(tasks, task_id, 2.0))
    await until(lambda: is_awaited(office, task_id, 1))
    await office.finish(taken, OUTPUT)  # nobody tells
    assert not poll.done()
    assert (await poll).status == "SUCCESS"
    assert (await look(tasks, task_id, NEVER_S)).status == "SUCCESS"


async def test_who_left_is_not_answered(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    answers: list[StoredTask | CarpoolError] = []
    waiting = tasks.look(ANYBODY, task_id, 0.05, False, answers.append)
    asked = tasks.look(ANYBODY, task_id, 0.0, False, answers.append)
    tasks.leave(waiting)
    tasks.leave(asked)
    tasks.leave(asked)
    await asyncio.sleep(0.1)
    assert answers == []
    assert repr(tasks) == "<RedisTasks <Polls 0>>"


async def test_draining_answers_polls_at_once(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    poll = asyncio.ensure_future(look(tasks, task_id, NEVER_S))
    await asyncio.sleep(0.02)
    tasks.drain()
    assert (await poll).status == "PENDING"
    assert (await look(tasks, task_id, NEVER_S)).status == "PENDING"


async def test_unknown_tasks(office: Office, no_looking_again: None) -> None:
    tasks = office.gateway()
    for task_id in ("-", "", "0" * 32):
        assert isinstance(await look(tasks, task_id), UnknownTask)
        assert isinstance(await look(tasks, task_id, NEVER_S), UnknownTask)
        assert isinstance(await delete(tasks, task_id), UnknownTask)


async def test_forgotten_after_it_was_read(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    assert (await look(tasks, task_id, forget=True)).status == "PENDING"
    (taken,) = await office.take()
    await office.finish(taken, OUTPUT)
    heard: list[StoredTask | CarpoolError] = []

    def hung_up(task: StoredTask | CarpoolError) -> bool:
        heard.append(task)
        return False

    tasks.look(ANYBODY, task_id, 0.0, True, hung_up)
    await until(lambda: bool(heard))
    assert (await look(tasks, task_id, forget=True)).status == "SUCCESS"

    async def is_forgotten() -> (
        bool
    ):  # a script that Redis does not know yet is sent twice, the second time behind others
        return isinstance(await look(tasks, task_id), UnknownTask)

    await until(is_forgotten)


# Results.


async def test_the_first_written_result_wins(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    assert await office.finish(taken, OUTPUT)
    first = await look(tasks, task_id)
    assert await office.finish(taken, InputRefused("too late"))  # Redis says yes: there is nothing left to do
    assert await look(tasks, task_id) == first
    assert await office.counts() == (0, 0)
    assert office.buried == []


async def test_a_result_is_kept_for_a_time_from_the_outcome(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    shard = office.keys.shard_of_task(task_id)
    assert await office.nodes.ask(shard.slot, b"PTTL", shard.task(task_id)) > 2 * 600_000  # long after its time
    (taken,) = await office.take()
    await office.finish(taken, OUTPUT)
    assert 0 < await office.nodes.ask(shard.slot, b"PTTL", shard.task(task_id)) <= RESULT_TTL_MS

    office.replies = office.writer(result_ttl_ms=1000)
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    await office.finish(taken, OUTPUT)
    assert (await look(tasks, task_id)).status == "SUCCESS"

    async def is_forgotten() -> bool:
        return isinstance(await look(tasks, task_id), UnknownTask)

    await until(is_forgotten)


async def test_the_clock_may_be_given(office: Office) -> None:
    tasks = office.gateway(now_ms=lambda: b"1000000")
    office.replies = office.writer(now_ms=lambda: b"2000000", result_ttl_ms=1000)
    task_id = await office.submit(tasks)
    assert (await look(tasks, task_id)).timestamp_wall == 1000.0
    (taken,) = await office.take()
    await office.finish(taken, OUTPUT, after_s=2.5)
    # Of Redis's clock at the submission, and of the batcher's from there on.
    assert (await look(tasks, task_id)).timestamp_wall == 1002.5


async def test_a_task_that_no_batcher_ends_fails_when_its_time_is_over(office: Office) -> None:
    """It was PENDING for ever where no batcher served its model any more."""
    now = 1_000_000
    ended: list[tuple[EndedTask, str]] = []
    tasks = office.gateway(now_ms=lambda: b"%d" % now, ended=lambda task, error: ended.append((task, error.code)))
    task_id = await office.submit(tasks, tier=1)  # for ten minutes
    now += 599_000
    assert (await look(tasks, task_id)).status == "PENDING"
    now += 30_000
    task = await look(tasks, task_id)
    assert task.status == "FAILED"
    assert ended == [(EndedTask(task_id, "owner", "m", 629_000, 1), "deadline-exceeded")]
    assert b"deadline-exceeded" in (task.error or b"")
    assert await office.counts() == (0, 0)
    assert (await look(tasks, task_id)).status == "FAILED"
    assert len(ended) == 1


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


async def test_a_task_whose_time_is_over_is_not_ended_twice(office: Office) -> None:
    now = 1_000_000
    tasks = office.gateway(now_ms=lambda: b"%d" % now)
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    now += 700_000
    assert (await look(tasks, task_id)).status == "FAILED"
    await office.finish(taken, OUTPUT)
    assert (await look(tasks, task_id)).status == "FAILED"
    assert await office.counts() == (0, 0)


# Deleting.


async def test_deleting_a_waiting_task_takes_it_out_of_the_queue(office: Office, no_looking_again: None) -> None:
    ended: list[tuple[str, str, str]] = []
    here = office.gateway(b"here", ended=lambda task, error: ended.append((task.id, task.model, error.code)))
    there = await office.told_gateway(b"there")
    task_id, other = await office.submit(here), await office.submit(here)
    elsewhere = asyncio.ensure_future(look(there, task_id, NEVER_S))
    same = asyncio.ensure_future(look(here, task_id, NEVER_S))
    await until(lambda: is_awaited(office, task_id, 2))
    assert await delete(here, task_id) is None
    assert isinstance(await same, UnknownTask)
    assert isinstance(await elsewhere, UnknownTask)
    assert isinstance(await delete(here, task_id), UnknownTask)
    assert ended == [(task_id, "m", "client-left")]
    assert await office.counts() == (1, 1)
    assert [taken.task_id for taken in await office.take()] == [other]


async def test_deleting_a_running_task_discards_its_result(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    assert await delete(tasks, task_id) is None
    assert await office.counts() == (0, 0)  # and its batcher is told
    assert await office.finish(taken, InputRefused("for nobody"))
    assert await office.counts() == (0, 0)
    assert await office.hash_of(task_id) == {}
    shard = taken.shard
    assert await office.nodes.ask(shard.slot, b"EXISTS", shard.letters, shard.letter_bodies) == 0


async def test_deleting_a_finished_task_forgets_it(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    (taken,) = await office.take()
    await office.finish(taken, OUTPUT)
    assert await delete(tasks, task_id) is None
    assert isinstance(await look(tasks, task_id), UnknownTask)
    assert await office.counts() == (0, 0)


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


async def test_a_submission_that_was_lost_is_removed_when_redis_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals_module, "RETRY_S", 0.1)
    async with running_redis(tmp_path) as server, open_office(server.url, timeout_s=1.0) as office:
        tasks = office.gateway()
        kept = await office.submit(tasks)
        server.stop()
        answers = await submit_all(office, tasks, 3)
        assert [type(error) for error in answers] == [BrokerDown] * 3
        assert all(error is not None and "may or may not" in error.detail for error in answers)
        server.go_on()
        await until(lambda: office.nodes.is_up(0))
        await until(lambda: tasks.doubtful == 0)
        assert await office.counts() == (1, 1)
        assert [taken.task_id for taken in await office.take()] == [kept]


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


async def test_in_a_cluster(redis_cluster: RedisCluster, no_looking_again: None) -> None:
    async with open_office(redis_cluster.url) as office:
        durable = await connect(redis_cluster.url)
        try:
            here = office.gateway(b"here", replicas=1, replicas_timeout_ms=REPLICAS_MS, durable_nodes=durable)
            there = await office.told_gateway(b"there")
            ids = [await office.submit(here, b"%d" % number) for number in range(40)]
            polls = [asyncio.ensure_future(look(there, task_id, NEVER_S)) for task_id in ids]
            assert await delete(here, ids[0]) is None
            taken = await office.take()
            assert len({entry.shard.number for entry in taken}) > 3
            assert len(taken) == 39
            for entry in taken:
                assert await office.finish(entry, make_output(entry.input))
            found = await asyncio.gather(*polls)
            assert isinstance(found[0], UnknownTask)
            assert [task.output for task in found[1:]] == [b"%d" % number for number in range(1, 40)]
            assert await office.counts() == (0, 0)
        finally:
            await durable.close()


# Whose task it is


async def test_somebody_elses_task_is_not_there(office: Office) -> None:
    tasks = office.gateway()
    task_id = await office.submit(tasks)
    theirs = await look(tasks, task_id)
    stranger = Caller("a stranger", 0, is_anonymous=False)
    owner = Caller(theirs.owner, 0, is_anonymous=False)
    assert isinstance(await look(tasks, task_id, caller=stranger), UnknownTask)
    assert isinstance(await look(tasks, task_id, NEVER_S, caller=stranger), UnknownTask)  # at once
    assert isinstance(await delete(tasks, task_id, caller=stranger), UnknownTask)
    assert (await look(tasks, task_id, caller=owner)).status == "PENDING"
    assert await delete(tasks, task_id, caller=owner) is None
    assert isinstance(await look(tasks, task_id, caller=owner), UnknownTask)
