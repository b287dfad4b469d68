"""Tasks with a real journal: nothing is told before it is safe, and every task comes to an end."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import CarpoolError, JournalFailed, UnknownTask
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


async def test_a_journal_that_fails_accepts_no_task() -> None:
    office = Office()
    await office.journal.close()
    request = office.request()
    assert isinstance(await told(partial(office.tasks.submit, request)), JournalFailed)
    assert (office.broker.held, request.phase, repr(office.tasks)) == (0, DONE, "<Tasks live=0>")


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


async def test_a_task_that_cannot_be_deleted_goes_on() -> None:
    """The disk failed, so it is still accepted: it must come to its outcome."""
    office = Office()
    request = await office.submit()
    await office.journal.close()
    assert isinstance(await office.delete(), JournalFailed)
    assert office.take() == [request]
    assert repr(office.tasks) == "<Tasks live=1>"


# The next process.


async def leave_tasks(path: Path, *names: str, clock: FakeClock, **options: Any) -> None:
    """An earlier process, which accepted tasks and ended."""
    earlier = Office(path, clock=clock)
    for name in names:
        await earlier.submit(name, **options)
    await earlier.journal.close()


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
