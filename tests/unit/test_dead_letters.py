"""Dead letters with a real journal: what becomes one, and that a replay neither loses nor repeats anything."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from carpool.broker import replays as replays_module
from carpool.broker.dead_letters import DeadLetterBox, DeadLetterDesk
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.dead_letter import dead_letter_causes, is_dead_letter
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    InputRefused,
    Malformed,
    QueueFull,
    QueueTimeout,
    UnknownModel,
    UpstreamFailed,
    all_errors,
)
from carpool.core.request import Request
from carpool.testing import FakeClock, Witness, make_request
from support.processes import until
from support.tasks import open_journal, told

TARGETS_S = (0.05, 0.5)
REFUSED = InputRefused("the model refused this input: too long")


class Office:
    """Broker, journal, tasks, and both sides of the dead letters."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.broker = MemoryBroker(waiting_max=1000, bytes_max=10**9, lanes_max=9, tiers=2, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.journal = open_journal(stored_bytes_max=10**9, clock=self.clock)
        self.tasks = Tasks(self.broker, self.journal, prepare=self.prepare, clock=self.clock)
        self.box = DeadLetterBox(self.journal, "all", clock=self.clock)
        self.desk = DeadLetterDesk(
            self.journal, self.tasks, {"m"}, tier_target_s=TARGETS_S, task_timeout_s=600.0, clock=self.clock
        )
        self.unacceptable = b""

    def prepare(self, request: Request) -> None:
        request.lane = b"prepared"
        if self.unacceptable and self.unacceptable in request.input:
            raise Malformed("not with this protocol")

    def request(self, name: str, value: bytes = b'"x"', **options: Any) -> Request:
        return make_request(name, Witness(), now=self.clock(), value=value, **options)

    async def bury(self, *names: str, error: CarpoolError = REFUSED, **options: Any) -> None:
        kept = self.journal.counts.dead_letters
        for name in names:
            self.box.bury(self.request(name, b'"%b"' % name.encode(), **options), error, 2)
        await until(lambda: self.journal.counts.dead_letters == kept + len(names))

    def queued(self) -> list[Request]:
        return self.broker.waiting_requests()


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    office = Office()
    yield office
    await office.journal.close()


def test_only_what_a_person_should_look_at() -> None:
    assert is_dead_letter(REFUSED)
    assert is_dead_letter(UpstreamFailed("down"))
    for error in (DeadlineExceeded("late"), QueueTimeout("late"), ClientLeft("left"), QueueFull("full")):
        assert not is_dead_letter(error)
    assert set(dead_letter_causes()) == {kind.code for kind in all_errors() if is_dead_letter(kind("detail"))}


async def test_a_tier_that_is_no_longer_configured_is_the_lowest(office: Office) -> None:
    await office.bury("r1", tier=7)
    await office.desk.replay(1)
    assert [request.tier for request in office.queued()] == [1]


async def test_replay_of_all_goes_on_past_a_letter_that_is_wrong(office: Office) -> None:
    await office.bury("r1")
    await office.bury("r2", model="gone")
    await office.bury("r3")
    report = await office.desk.replay_all(None)
    assert [task.id for task in report.tasks] == [1, 3]
    assert report.reason is not None and "no longer served" in report.reason
    with pytest.raises(UnknownModel):
        await office.desk.replay_all(None)  # nothing but that one is left


async def test_replay_of_all_holds_few_bytes_at_once(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_module, "PAGE_BYTES_MAX", 10)
    await office.bury(*(f"r{n}" for n in range(5)), "large" * 10)
    shown = 0
    at_once: list[int] = []
    show = office.desk.show

    async def counted(letter_id: int) -> Any:
        nonlocal shown
        shown += 1
        at_once.append(shown)
        try:
            return await show(letter_id)
        finally:
            shown -= 1

    monkeypatch.setattr(office.desk, "show", counted)
    assert len((await office.desk.replay_all(None)).tasks) == 6
    assert max(at_once) == 2


async def test_restored_tasks_are_prepared_too(tmp_path: Any) -> None:
    office = Office()
    await office.journal.close()
    path = tmp_path / "journal.db"
    for _ in range(2):
        office.journal = open_journal(path)
        office.tasks = Tasks(office.broker, office.journal, prepare=office.prepare)
        restored = office.tasks.restore(frozenset("m"), lambda tier, now: now)
        office.tasks.send_restored()
        if restored == 0:
            for name in (b'"good"', b'"bad"'):
                request = office.request(name.decode(), name, is_task=True)
                assert await told(partial(office.tasks.submit, request)) is None
            office.tasks.drain()
            office.unacceptable = b"bad"
            await office.journal.close()
    assert restored == 2
    assert [(request.input, request.lane) for request in office.queued()] == [(b'"good"', b"prepared")]
    await until(lambda: office.journal.counts.results == 1)
    await office.journal.close()


async def test_neither_a_task_nor_a_settled_request_is_buried_by_hand(office: Office) -> None:
    """A task is buried by its result; a settled request has no input any more."""
    office.box.bury(office.request("t", is_task=True), REFUSED, 1)
    left = office.request("r")
    left.settle(ClientLeft("left"), office.clock())
    office.box.bury(left, REFUSED, 1)
    await office.bury("r1")
    assert [letter.request_id for letter in await office.desk.page(0, 10)] == ["r1"]
    assert office.journal.buried["input-refused"] == 1


async def test_replay_of_all_stops_when_no_more_is_accepted(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_module, "PAGE_MAX", 4)
    await office.bury(*(f"r{n}" for n in range(20)))
    office.broker.waiting_max = 6
    report = await office.desk.replay_all(None)
    assert len(report.tasks) == 6
    assert report.reason == "the queue is full; try again soon"
    assert office.journal.counts.dead_letters == 14
    with pytest.raises(QueueFull):
        await office.desk.replay_all(None)
    office.broker.waiting_max = 1000
    assert len((await office.desk.replay_all(None)).tasks) == 14
    assert (await office.desk.replay_all(None)).tasks == []
