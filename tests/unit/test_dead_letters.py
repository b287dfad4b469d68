"""Dead letters with a real journal: what becomes one, and that a replay neither loses nor repeats anything."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from carpool.broker import replays as replays_module
from carpool.broker.dead_letters import DeadLetterBox, DeadLetterDesk
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.dead_letter import SynchronousKept, dead_letter_causes, is_dead_letter
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    InputRefused,
    Malformed,
    NotFound,
    QueueFull,
    QueueTimeout,
    UnknownModel,
    UpstreamFailed,
    UpstreamProtocolFault,
    all_errors,
)
from carpool.core.request import QUEUED, Request
from carpool.testing import ANYBODY, FakeClock, Witness, make_output, make_request
from support.processes import until
from support.tasks import open_journal, told

TARGETS_S = (0.05, 0.5)
REFUSED = InputRefused("the model refused this input: too long")
CAUSES = dead_letter_causes()


class Office:
    """Broker, journal, tasks, and both sides of the dead letters."""

    def __init__(self, waiting_max: int = 1000, kept: SynchronousKept = "all") -> None:
        self.clock = FakeClock()
        self.broker = MemoryBroker(waiting_max=waiting_max, bytes_max=10**9, lanes_max=9, tiers=2, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.journal = open_journal(stored_bytes_max=10**9, clock=self.clock)
        self.tasks = Tasks(self.broker, self.journal, prepare=self.prepare, clock=self.clock)
        self.box = DeadLetterBox(self.journal, kept, clock=self.clock)
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

    async def settle(self, request: Request, outcome: Any) -> None:
        live = int(repr(self.tasks).partition("live=")[2].rstrip(">"))
        self.broker.settle(request, outcome)
        await until(lambda: repr(self.tasks) == f"<Tasks live={live - 1}>")


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    office = Office()
    yield office
    await office.journal.close()


# What becomes one.


def test_only_what_a_person_should_look_at() -> None:
    assert is_dead_letter(REFUSED)
    assert is_dead_letter(UpstreamFailed("down"))
    for error in (DeadlineExceeded("late"), QueueTimeout("late"), ClientLeft("left"), QueueFull("full")):
        assert not is_dead_letter(error)
    assert set(dead_letter_causes()) == {kind.code for kind in all_errors() if is_dead_letter(kind("detail"))}


async def test_a_synchronous_request_is_kept_as_it_was(office: Office) -> None:
    office.clock.advance(5.0)
    await office.bury("r1", parameters=b'{"a":1}', tier=1, owner="192.0.2.1")
    (summary,) = await office.desk.page(0, 10)
    letter = await office.desk.show(summary.id)
    assert letter.summary == summary
    assert (summary.request_id, summary.model, summary.cause, summary.detail, summary.sends, summary.size) == (
        "r1",
        "m",
        "input-refused",
        REFUSED.detail,
        2,
        4 + 7,
    )
    assert (letter.owner, letter.input, letter.parameters, letter.tier) == ("192.0.2.1", b'"r1"', b'{"a":1}', 1)
    assert office.desk.total() == 1


PROTOCOL_FAULT = UpstreamProtocolFault("one output for two inputs")


@pytest.mark.parametrize(
    ("kept", "causes"),
    [
        ("poison", ["input-refused"]),
        ("all", ["input-refused", "upstream-failed", "upstream-protocol-fault"]),
        ("none", []),
    ],
)
async def test_which_synchronous_requests_are_kept(kept: SynchronousKept, causes: list[str]) -> None:
    office = Office(kept=kept)
    for error in (REFUSED, UpstreamFailed("down"), PROTOCOL_FAULT, DeadlineExceeded("late"), QueueFull("full")):
        office.box.bury(office.request(error.code), error, 4)
    await until(lambda: office.journal.counts.dead_letters == len(causes))
    letters = await office.desk.page(0, 10)
    assert [(letter.cause, letter.request_id, letter.sends) for letter in letters] == [(c, c, 4) for c in causes]
    assert [cause for cause, number in office.journal.buried.items() if number] == sorted(causes, key=CAUSES.index)
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


# Replay.


async def test_a_replay_is_a_new_task_that_comes_to_its_outcome(office: Office) -> None:
    await office.bury("r1", parameters=b'{"a":1}', tier=1, owner="192.0.2.1")
    replayed = await office.desk.replay(1)
    assert replayed.id == 1
    (request,) = office.queued()
    assert (request.id, request.is_task, request.phase) == (replayed.task_id, True, QUEUED)
    assert request.owner == "192.0.2.1"
    assert (request.input, request.parameters, request.tier) == (b'"r1"', b'{"a":1}', 1)
    assert (request.place, request.deadline) == (office.clock() + 0.5, office.clock() + 600.0)
    assert request.lane == b"prepared"
    assert (office.journal.counts.dead_letters, office.journal.counts.tasks_pending) == (0, 1)
    await office.settle(request, make_output(b'"done"'))
    found = await told(partial(office.tasks.look, ANYBODY, replayed.task_id, 0.0, False))
    assert found.output == b'"done"'
    assert office.journal.counts.dead_letters == 0


async def test_a_replay_that_fails_again_is_a_letter_again(office: Office) -> None:
    await office.bury("r1")
    replayed = await office.desk.replay(1)
    (request,) = office.queued()
    request.sends = 3
    await office.settle(request, UpstreamFailed("down"))
    (letter,) = await office.desk.page(0, 10)
    assert (letter.id, letter.request_id, letter.cause, letter.sends) == (2, replayed.task_id, "upstream-failed", 3)


async def test_of_two_replays_of_one_letter_one_wins(office: Office) -> None:
    await office.bury("r1")
    results = await asyncio.gather(*(office.desk.replay(1) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, NotFound) for result in results) == 4
    assert len(office.queued()) == office.broker.held == office.journal.counts.tasks_pending == 1


async def test_what_cannot_be_replayed_stays(office: Office) -> None:
    await office.bury("r1", model="gone")
    with pytest.raises(UnknownModel):
        await office.desk.replay(1)
    await office.bury("r2")
    office.unacceptable = b"r2"
    with pytest.raises(Malformed):
        await office.desk.replay(2)
    office.broker.waiting_max = 0
    await office.bury("r3")
    with pytest.raises(QueueFull):
        await office.desk.replay(3)
    with pytest.raises(NotFound):
        await office.desk.replay(4)
    assert (office.journal.counts.dead_letters, office.journal.counts.tasks_pending, office.broker.held) == (3, 0, 0)


async def test_a_tier_that_is_no_longer_configured_is_the_lowest(office: Office) -> None:
    await office.bury("r1", tier=7)
    await office.desk.replay(1)
    assert [request.tier for request in office.queued()] == [1]


async def test_replay_of_all_takes_those_there_were_in_their_order(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays_module, "PAGE_MAX", 7)
    names = [f"r{n}" for n in range(30)]
    await office.bury(*names)
    replaying = asyncio.ensure_future(office.desk.replay_all(None))
    while not replaying.done():
        for request in office.queued():
            request.sends = 1
            office.broker.settle(request, UpstreamFailed("still down"))  # a letter again, and not replayed again
        await asyncio.sleep(0)
    report = await replaying
    assert [task.id for task in report.tasks] == list(range(1, 31))
    assert report.reason is None
    for request in office.queued():
        office.broker.settle(request, UpstreamFailed("still down"))
    await until(lambda: office.journal.counts.dead_letters == 30)
    letters = await office.desk.page(0, 100)
    assert min(letter.id for letter in letters) > 30
    shown = [await office.desk.show(letter.id) for letter in letters]
    assert {letter.input for letter in shown} == {b'"%b"' % name.encode() for name in names}


async def test_replay_of_one_cause(office: Office) -> None:
    await office.bury("r1", "r2")
    await office.bury("u1", "u2", error=UpstreamFailed("down"))
    report = await office.desk.replay_all("upstream-failed")
    assert [task.id for task in report.tasks] == [3, 4]
    assert [letter.id for letter in await office.desk.page(0, 10)] == [1, 2]


async def test_replay_of_all_goes_on_past_a_letter_that_is_wrong(office: Office) -> None:
    await office.bury("r1")
    await office.bury("r2", model="gone")
    await office.bury("r3")
    report = await office.desk.replay_all(None)
    assert [task.id for task in report.tasks] == [1, 3]
    assert report.reason is not None and "no longer served" in report.reason
    with pytest.raises(UnknownModel):
        await office.desk.replay_all(None)  # nothing but that one is left


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


# Drop.


async def test_drop(office: Office) -> None:
    await office.bury("r1", "r2", "r3")
    await office.desk.drop(2)
    with pytest.raises(NotFound):
        await office.desk.drop(2)
    with pytest.raises(NotFound):
        await office.desk.show(2)
    assert await office.desk.drop_all() == 2
    assert await office.desk.drop_all() == 0


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
