"""Tasks with a real journal: nothing is told before it is safe, and every task comes to an end."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.broker.polls import Poll
from carpool.core.errors import (
    CarpoolError,
    Draining,
    InputRefused,
    InternalError,
    JournalFailed,
    QueueFull,
    UnknownTask,
    UpstreamFailed,
    task_time_passed,
)
from carpool.core.ports import Caller
from carpool.core.request import DONE, QUEUED
from carpool.core.task import StoredTask
from carpool.testing import ANYBODY, FakeClock, make_output
from support.processes import until
from support.tasks import Office, open_office, told

# Longer than a test waits: what comes, comes for another reason.
NEVER_S = 600.0


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    async with open_office() as office:
        yield office


# Accepting.


async def test_a_task_is_accepted_and_queued_only_when_it_is_safe(office: Office) -> None:
    request = office.request()
    answers: list[CarpoolError | None] = []
    office.tasks.submit(request, answers.append)
    assert (answers, office.broker.depth, office.broker.held) == ([], 0, 1)
    await until(lambda: bool(answers))
    assert answers == [None]
    assert office.journal.counts.tasks_pending == 1
    assert request.phase == QUEUED
    assert repr(office.tasks) == "<Tasks live=1>"


async def test_a_full_broker_accepts_no_task(office: Office) -> None:
    request = office.request(value=b"x" * 1001)
    assert isinstance(await told(partial(office.tasks.submit, request)), QueueFull)
    assert (office.broker.held, office.journal.counts.tasks_pending) == (0, 0)


async def test_a_full_journal_accepts_no_task(office: Office) -> None:
    request = office.request(parameters=b"x" * 10_001)
    assert isinstance(await told(partial(office.tasks.submit, request)), QueueFull)
    assert (request.phase, office.broker.held) == (DONE, 0)
    assert isinstance(await office.look(request.id), UnknownTask)


async def test_a_journal_that_fails_accepts_no_task() -> None:
    office = Office()
    await office.journal.close()
    request = office.request()
    assert isinstance(await told(partial(office.tasks.submit, request)), JournalFailed)
    assert (office.broker.held, request.phase, repr(office.tasks)) == (0, DONE, "<Tasks live=0>")


# Outcomes.


async def test_a_result_is_told_only_when_it_is_safe(office: Office) -> None:
    request = await office.submit()
    answers: list[StoredTask | CarpoolError] = []
    office.tasks.look(ANYBODY, "t1", NEVER_S, False, answers.append)
    office.take()
    office.broker.settle(request, make_output(b'"out"'))
    assert answers == []
    assert (await office.look()).status == "PENDING"  # asked before the commit
    await until(lambda: bool(answers))
    (stored,) = answers
    assert isinstance(stored, StoredTask)
    assert (stored.id, stored.owner, stored.status, stored.output) == ("t1", "owner", "SUCCESS", b'"out"')
    assert office.journal.counts.results == 1
    assert repr(office.tasks) == "<Tasks live=0>"
    assert await office.look() == stored


async def test_the_first_result_wins(office: Office) -> None:
    request = await office.submit()
    await office.finish(request, make_output(b"1"))
    office.broker.settle(request, UpstreamFailed("too late"))
    office.tasks.settled(request, make_output(b"2"))
    await asyncio.sleep(0.02)
    assert (await office.look()).output == b"1"


@pytest.mark.parametrize(
    ("error", "dead_letters"),
    [
        (UpstreamFailed("down"), 1),
        (InputRefused("no"), 1),
        (task_time_passed(), 0),
        (InternalError("defect"), 0),
    ],
)
async def test_a_failure_is_kept_and_the_upstream_s_are_dead_letters(
    office: Office, error: CarpoolError, dead_letters: int
) -> None:
    request = await office.submit()
    await office.finish(request, error)
    stored = await office.look()
    assert (stored.status, stored.output) == ("FAILED", None)
    problem = json.loads(stored.error)
    assert (problem["status"], problem["detail"], problem["request_id"]) == (error.status, error.detail, "t1")
    assert office.journal.counts.dead_letters == dead_letters


async def test_a_task_has_an_outcome_by_its_deadline(office: Office) -> None:
    await office.submit(total_timeout_s=600.0)
    office.clock.advance(600.0)
    office.broker.expire(office.clock())
    await until(lambda: "live=0" in repr(office.tasks))  # the loop was told, too
    assert json.loads((await office.look()).error)["status"] == 504


async def test_unknown_tasks_are_all_told_the_same(office: Office) -> None:
    request = await office.submit()
    await office.finish(request, make_output(b"1"))
    assert await office.delete() is None
    deleted, never = await office.look(), await office.look("never")
    assert isinstance(deleted, UnknownTask)
    assert (type(never), never.detail) == (UnknownTask, deleted.detail)


async def test_forgotten_after_the_first_read(office: Office) -> None:
    request = await office.submit()
    assert (await office.look(forget=True)).status == "PENDING"  # not finished: kept
    await office.finish(request, make_output(b"1"))
    assert (await office.look(forget=True)).output == b"1"
    assert isinstance(await office.look(forget=True), UnknownTask)


# Long polls.


async def test_a_long_poll_ends_with_what_there_is(office: Office) -> None:
    await office.submit()
    stored = await office.look(wait_s=0.02)
    assert (stored.status, stored.timestamp_wall > 1.6e9) == ("PENDING", True)


async def test_all_polls_wake_and_then_it_is_forgotten(office: Office) -> None:
    request = await office.submit()
    polls = [asyncio.ensure_future(office.look(wait_s=NEVER_S, forget=True)) for _ in range(3)]
    await asyncio.sleep(0)
    office.broker.settle(request, make_output(b"1"))
    assert [answer.output for answer in await asyncio.gather(*polls)] == [b"1"] * 3
    assert isinstance(await office.look(forget=True), UnknownTask)


async def test_a_result_that_nobody_was_there_to_read_is_not_forgotten(office: Office) -> None:
    request = await office.submit()
    await office.finish(request, make_output(b"1"))
    read = asyncio.Event()

    def gone(_: Any) -> bool:
        read.set()
        return False

    office.tasks.look(ANYBODY, "t1", 0.0, True, gone)
    await read.wait()
    assert (await office.look(forget=True)).output == b"1"
    assert isinstance(await office.look(forget=True), UnknownTask)


async def test_tasks_leave_room_for_those_who_wait_on_the_line() -> None:
    office = Office(waiting_max=1)
    await office.submit()
    refusal = await told(partial(office.tasks.submit, office.request("t2")))
    assert isinstance(refusal, QueueFull)
    await office.journal.close()


async def test_a_poller_who_left_is_not_told(office: Office) -> None:
    request = await office.submit()
    answers: list[Any] = []
    poll = office.tasks.look(ANYBODY, "t1", NEVER_S, False, answers.append)
    assert isinstance(poll, Poll)
    office.tasks.leave(poll)
    office.tasks.leave(poll)  # once is enough, twice is no harm
    await office.finish(request, make_output(b"1"))
    office.tasks.leave(poll)
    await asyncio.sleep(0.01)
    assert answers == []


async def test_a_poller_may_leave_after_its_answer(office: Office) -> None:
    await office.submit()
    answers: list[Any] = []
    poll = office.tasks.look(ANYBODY, "t1", 0.001, False, answers.append)
    await until(lambda: bool(answers))
    office.tasks.leave(poll)
    assert len(answers) == 1


# Deleting, in each state.


async def test_deleting_a_waiting_task_cancels_it(office: Office) -> None:
    request = await office.submit()
    poll = asyncio.ensure_future(office.look(wait_s=NEVER_S))
    await asyncio.sleep(0)
    assert await office.delete() is None
    assert isinstance(await poll, UnknownTask)
    assert list(office.broker.lanes("m")) == []
    assert (request.phase, office.broker.held) == (DONE, 0)
    assert (office.journal.counts.tasks_pending, office.journal.counts.results) == (0, 0)
    assert isinstance(await office.delete(), UnknownTask)


async def test_deleting_a_running_task_discards_its_result(office: Office) -> None:
    await office.submit()
    (request,) = office.take()
    assert await office.delete() is None
    assert not office.broker.settle(request, make_output(b"1"))
    await asyncio.sleep(0.01)
    assert isinstance(await office.look(), UnknownTask)
    assert (office.journal.counts.tasks_pending, office.journal.counts.results, office.broker.held) == (0, 0, 0)


async def test_deleting_a_task_whose_result_is_on_its_way_to_the_disk(office: Office) -> None:
    request = await office.submit()
    poll = asyncio.ensure_future(office.look(wait_s=NEVER_S))
    await asyncio.sleep(0)
    office.broker.settle(request, make_output(b"1"))
    assert await office.delete() is None
    assert isinstance(await poll, UnknownTask | StoredTask)
    assert isinstance(await office.look(), UnknownTask)
    assert (office.journal.counts.results, repr(office.tasks)) == (0, "<Tasks live=0>")


async def test_a_result_that_comes_while_the_task_is_being_deleted(office: Office) -> None:
    request = await office.submit()
    deleting = asyncio.ensure_future(office.delete())
    await asyncio.sleep(0)
    office.broker.settle(request, make_output(b"1"))
    assert await deleting is None
    await asyncio.sleep(0.01)
    assert isinstance(await office.look(), UnknownTask)
    assert (office.journal.counts.results, repr(office.tasks), office.broker.held) == (0, "<Tasks live=0>", 0)


async def test_deleting_a_finished_task_forgets_it(office: Office) -> None:
    request = await office.submit()
    await office.finish(request, make_output(b"1"))
    assert await office.delete() is None
    assert isinstance(await office.look(), UnknownTask)
    assert isinstance(await office.delete(), UnknownTask)


async def test_a_task_that_cannot_be_deleted_goes_on() -> None:
    """The disk failed, so it is still accepted: it must come to its outcome."""
    office = Office()
    request = await office.submit()
    await office.journal.close()
    assert isinstance(await office.delete(), JournalFailed)
    assert office.take() == [request]
    assert repr(office.tasks) == "<Tasks live=1>"


# Draining.


async def test_draining_leaves_waiting_tasks_to_the_next_process(office: Office) -> None:
    await office.submit("runs")
    (runs,) = office.take()
    waits = await office.submit("waits")
    poll = asyncio.ensure_future(office.look("waits", wait_s=NEVER_S))
    await asyncio.sleep(0)
    office.tasks.drain()
    assert (await poll).status == "PENDING"
    assert (await office.look("runs", wait_s=NEVER_S)).status == "PENDING"  # nobody is kept waiting any more
    assert list(office.broker.lanes("m")) == []
    assert waits.phase == DONE
    office.broker.settle(runs, make_output(b"1"))  # a running one is finished
    await until(lambda: office.journal.counts.results == 1)
    assert (office.journal.counts.tasks_pending, office.broker.held) == (1, 0)


async def test_while_draining_tasks_are_accepted_for_the_next_process(office: Office) -> None:
    office.tasks.drain()
    await office.submit()
    assert (office.journal.counts.tasks_pending, office.broker.depth, office.broker.held) == (1, 0, 0)
    assert (await office.look(wait_s=NEVER_S)).status == "PENDING"
    assert await office.delete() is None
    assert (office.journal.counts.tasks_pending, office.broker.held) == (0, 0)


async def test_a_task_cut_off_by_the_end_of_a_drain_stays_for_the_next_process(office: Office) -> None:
    await office.submit()
    (request,) = office.take()
    office.tasks.drain()
    office.broker.settle(request, Draining("leaving"))
    await asyncio.sleep(0.01)
    assert (office.journal.counts.tasks_pending, office.journal.counts.results) == (1, 0)


# The next process.


async def leave_tasks(path: Path, *names: str, clock: FakeClock, **options: Any) -> None:
    """An earlier process, which accepted tasks and ended."""
    earlier = Office(path, clock=clock)
    for name in names:
        await earlier.submit(name, **options)
    await earlier.journal.close()


async def test_restored_tasks_run_in_order_and_downtime_does_not_count(tmp_path: Path) -> None:
    clock = FakeClock()
    await leave_tasks(tmp_path / "journal.db", "a", "b", clock=clock, parameters=b"{}", value=b'"in"')
    clock.advance(1e6)
    office = Office(tmp_path / "journal.db", clock=clock)
    assert office.restore() == 2
    assert (await office.look("a")).status == "PENDING"
    first, second = office.take()
    assert (first.id, second.id) == ("a", "b")
    assert (first.input, first.parameters, first.is_task, first.size) == (b'"in"', b"{}", True, 4)
    assert (first.owner, (await office.look("a")).owner) == ("owner", "owner")
    assert first.deadline - clock() == pytest.approx(600.0, abs=1.0)
    for request in (first, second):
        office.broker.settle(request, make_output(b"1"))
    await until(lambda: office.journal.counts.results == 2)
    assert office.broker.held == 0
    await office.journal.close()


async def test_a_restored_task_of_a_model_that_is_gone_fails(tmp_path: Path) -> None:
    clock = FakeClock()
    await leave_tasks(tmp_path / "journal.db", "a", clock=clock)
    office = Office(tmp_path / "journal.db", clock=clock)
    assert office.restore(models="n") == 1
    await until(lambda: repr(office.tasks) == "<Tasks live=0>")
    assert json.loads((await office.look("a")).error)["type"].endswith("unknown-model")
    assert office.broker.held == 0
    await office.journal.close()


async def test_a_restored_task_whose_time_is_over_fails(tmp_path: Path) -> None:
    clock = FakeClock()
    earlier = Office(tmp_path / "journal.db", clock=clock)
    await earlier.submit("a")
    clock.advance(599.9)
    await earlier.journal.close()
    office = Office(tmp_path / "journal.db", clock=clock)
    office.restore()
    clock.advance(0.2)
    office.broker.expire(clock())
    await until(lambda: "live=0" in repr(office.tasks))  # the loop was told, too
    assert json.loads((await office.look("a")).error)["status"] == 504
    await office.journal.close()


async def test_a_restored_task_of_a_tier_that_is_gone_joins_the_lowest(tmp_path: Path) -> None:
    clock = FakeClock()
    await leave_tasks(tmp_path / "journal.db", "a", clock=clock, tier=2)
    office = Office(tmp_path / "journal.db", tiers=1, clock=clock)
    assert office.restore() == 1
    assert [request.id for request in office.take()] == ["a"]
    await office.journal.close()


async def test_what_was_accepted_comes_in_over_the_bounds(tmp_path: Path) -> None:
    clock = FakeClock()
    await leave_tasks(tmp_path / "journal.db", *map(str, range(9)), clock=clock, value=b"x" * 100)
    office = Office(tmp_path / "journal.db", clock=clock)
    office.broker.waiting_max = 3
    assert office.restore() == 9
    assert office.broker.depth == 9
    assert isinstance(office.broker.submit(office.request("new")), QueueFull)
    await office.journal.close()


# Whose task it is


MINE = Caller("me", 0, is_anonymous=False)
THEIRS = Caller("owner", 0, is_anonymous=False)


async def test_somebody_elses_task_is_not_there(office: Office) -> None:
    request = await office.submit()
    assert isinstance(await office.look(caller=MINE), UnknownTask)
    assert isinstance(await office.look(caller=MINE, wait_s=NEVER_S), UnknownTask)  # at once
    assert isinstance(await office.delete(caller=MINE), UnknownTask)
    assert (await office.look(caller=THEIRS)).status == "PENDING"
    await office.finish(request, make_output(b"1"))
    assert isinstance(await office.look(caller=MINE, forget=True), UnknownTask)
    assert isinstance(await office.delete(caller=MINE), UnknownTask)
    assert (await office.look(caller=THEIRS)).output == b"1"
    assert await office.delete(caller=THEIRS) is None
    assert isinstance(await office.look(caller=THEIRS), UnknownTask)


async def test_what_was_restored_waits_until_it_is_let_go(tmp_path: Path) -> None:
    office = Office(tmp_path / "journal.db")
    await office.submit()
    await office.submit("t2")
    await office.journal.close()
    office = Office(tmp_path / "journal.db")
    assert office.tasks.restore(frozenset("m"), lambda tier, now: now) == 2
    assert list(office.broker.lanes("m")) == []
    assert await office.delete("t2") is None
    office.tasks.send_restored()
    assert [request.id for request in office.take()] == ["t1"]
    await office.journal.close()


async def test_what_the_client_calls_itself_stays_with_its_task(tmp_path: Path) -> None:
    office = Office(tmp_path / "journal.db")
    request = office.request()
    request.client_id = "nightly"
    assert await told(partial(office.tasks.submit, request)) is None
    await office.journal.close()
    office = Office(tmp_path / "journal.db")
    office.restore()
    assert (await office.state()).client_id == "nightly"
    (restored,) = office.take()
    await office.finish(restored, make_output(b"1"))
    state = await office.state()
    assert (state.status, state.client_id) == ("completed", "nightly")
    await office.journal.close()
