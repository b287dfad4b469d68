"""Events (`core/events.py`): the numbered rules, on the way of a request through one process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.broker.journal import Journal
from carpool.broker.memory import MemoryBroker
from carpool.broker.pending import PendingRequests
from carpool.broker.tasks import Tasks
from carpool.core.batch import Batch
from carpool.core.errors import CarpoolError, ClientLeft, QueueFull
from carpool.core.events import Events
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.request import Request
from carpool.testing import AttemptFailedError, FakeClock, FakeUpstream, Witness, echo, make_output, make_request
from support.event_log import EventLog
from support.tasks import open_journal
from support.virtual_gateway import SERVICE_S, Stand


class Failing:
    """A subscriber with a defect."""

    def admitted(self, request: Request) -> None:
        raise RuntimeError("a defect")

    def taken(self, batch: Sequence[Request]) -> None:
        raise RuntimeError("a defect")

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        raise RuntimeError("a defect")

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        raise RuntimeError("a defect")

    def settled(self, request: Request, outcome: Outcome) -> None:
        raise RuntimeError("a defect")


def send_two(stand: Stand) -> list[Request]:
    """Two requests that fill a batch; their ids are "1" and "2"."""
    requests: list[Request] = []

    async def main() -> None:
        requests.extend(stand.send(b"in", "owner") for _ in range(2))

    stand.run(main)
    return requests


def call_of(outcome: Outcome | None) -> Any:
    assert isinstance(outcome, Output)
    return outcome.call


def test_a_batch_is_admitted_taken_sent_and_settled_in_this_order() -> None:
    """The second fills the batch, which is taken at once: even then it was admitted before."""
    stand, log = Stand(FakeUpstream("gpu").then(echo, delay_s=SERVICE_S), max_batch=2), EventLog()
    stand.events.subscribe(log)
    requests = send_two(stand)
    assert log.told == [
        ("admitted", "1"),
        ("admitted", "2"),
        ("taken", ["1", "2"]),
        ("sent", ["1", "2"], "gpu", 1, requests[0].taken),
        ("settled", "1"),
        ("settled", "2"),
    ]
    assert log.outcomes == {request.id: stand.witness.outcome(request) for request in requests}
    [(batch, ids)] = log.batches
    assert ids == ["1", "2"]
    assert (batch.size, batch.reason, batch.endpoint, batch.attempts, batch.result) == (2, "full", "gpu", 1, "ok")
    assert (batch.taken, batch.sent) == (requests[0].taken, requests[0].taken)
    assert batch.ended == batch.sent + SERVICE_S
    assert requests[0].batch is batch
    assert call_of(log.outcomes["1"]).batch_id == batch.id


def test_every_attempt_is_sent_and_the_facts_are_of_the_one_that_brought_it() -> None:
    gpu = FakeUpstream("gpu").then(AttemptFailedError("gone"), delay_s=SERVICE_S).then(AttemptFailedError("gone"))
    stand, log = Stand(gpu, max_batch=2), EventLog()
    stand.events.subscribe(log)
    first, second = send_two(stand)
    sent = [each for each in log.told if each[0] == "sent"]
    assert [each[1:4] for each in sent] == [(["1", "2"], "gpu", attempt) for attempt in (1, 2, 3)]
    call = call_of(stand.witness.outcome(first))
    assert (call.endpoint, call.attempts, call.cached) == ("gpu", 3, False)
    assert call.started_s == sent[-1][-1] - first.taken
    assert call.started_s > SERVICE_S, "the first attempt, and the pauses, are in it"
    assert call is call_of(stand.witness.outcome(second)), "one object for all"
    [(batch, _)] = log.batches
    assert (batch.attempts, batch.result, batch.sent) == (3, "ok", sent[-1][-1])
    assert batch.id == call.batch_id


def test_who_leaves_is_settled_once() -> None:
    stand, log = Stand(FakeUpstream().then(echo, delay_s=1.0)), EventLog()
    stand.events.subscribe(log)

    async def main() -> None:
        waiting = stand.send(b"in", "owner")
        stand.broker.cancel(waiting)
        running = stand.send(b"in", "owner")
        await asyncio.sleep(0.5)
        stand.broker.cancel(running)

    stand.run(main)
    assert log.kinds() == ["admitted", "settled", "admitted", "taken", "sent", "settled"]
    assert all(isinstance(outcome, ClientLeft) for outcome in log.outcomes.values())


def test_what_another_broker_holds_is_settled_there() -> None:
    clock, log = FakeClock(), EventLog()
    broker = MemoryBroker(waiting_max=9, bytes_max=1000, lanes_max=9, tiers=1, clock=clock)
    broker.when_work_arrives("m", lambda lane: None)
    broker.events.subscribe(log)
    requests = [make_request(name, Witness(), now=clock()) for name in ("a", "b")]
    for request in requests:
        request.held_by = "another"
        broker.hold(request)
        broker.enqueue(request)
    (lane,) = broker.lanes("m")
    first, second = broker.take(lane, 2, clock())
    broker.settle(first, make_output(b"1"))
    broker.settle_batch([second], [make_output(b"2")])
    assert log.told == [("taken", ["a", "b"])]


def test_what_is_parked_at_a_gateway_is_told_of_by_it() -> None:
    clock, events, log = FakeClock(), Events(), EventLog()
    pending = PendingRequests(waiting_max=2, bytes_max=1000, models=["m"], events=events, clock=clock)
    events.subscribe(log)
    requests = [make_request(name, Witness(), now=clock()) for name in ("a", "b", "out")]
    assert [pending.park(request) is None for request in requests] == [True, True, False]
    call = CallFacts(1, 0.1, endpoint="gpu")
    for _ in range(2):  # the second time nobody waits any more
        pending.settle_all([(requests[0].number, 0, 0.1, b'"out"', None)], [call])
        pending.fail(requests[1].number, ClientLeft("the client left"))
    assert log.told == [("admitted", "a"), ("admitted", "b"), ("settled", "a"), ("settled", "b")]
    assert call_of(log.outcomes["a"]) is call
    assert isinstance(log.outcomes["b"], ClientLeft)


def test_a_subscriber_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    stand, log = Stand(FakeUpstream("gpu"), max_batch=2), EventLog()
    stand.events.subscribe(Failing())
    stand.events.subscribe(log)
    with caplog.at_level(logging.ERROR, "carpool"):
        requests = send_two(stand)
    assert all(isinstance(stand.witness.outcome(request), Output) for request in requests)
    assert log.kinds() == ["admitted", "admitted", "taken", "sent", "settled", "settled"]
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == ["1", "2", "4"], "fewer and fewer lines"
    assert all(record.exc_info for record in caplog.records)


def test_whoever_unsubscribes_is_told_no_more() -> None:
    events, log, other = Events(), EventLog(), EventLog()

    class Once(EventLog):
        def admitted(self, request: Request) -> None:
            super().admitted(request)
            events.unsubscribe(self)

    once = Once()
    for each in (log, once, other):
        events.subscribe(each)
    for name in ("a", "b"):
        events.admitted(make_request(name, Witness(), now=0.0))
    assert log.told == other.told == [("admitted", "a"), ("admitted", "b")]
    assert once.told == [("admitted", "a")]


# Tasks


@pytest.fixture
async def journal() -> AsyncIterator[Journal]:
    journal = open_journal()
    yield journal
    await journal.close()


async def test_a_task_that_was_restored_is_admitted_too(tmp_path: Path) -> None:
    clock, log = FakeClock(), EventLog()

    def open_journal() -> Journal:
        return Journal(
            tmp_path / "journal.db",
            asyncio.get_running_loop(),
            result_ttl_s=60.0,
            dead_letter_ttl_s=60.0,
            stored_bytes_max=10_000,
            clock=clock,
        )

    def make_broker() -> MemoryBroker:
        broker = MemoryBroker(waiting_max=9, bytes_max=1000, lanes_max=9, tiers=1, clock=clock)
        broker.when_work_arrives("m", lambda lane: None)
        return broker

    journal = open_journal()
    accepted: asyncio.Future[CarpoolError | None] = asyncio.get_running_loop().create_future()
    request = make_request("t", Witness(), now=clock(), is_task=True, total_timeout_s=60.0)
    Tasks(make_broker(), journal, clock=clock).submit(request, accepted.set_result)
    assert await accepted is None
    await journal.close()

    journal, broker = open_journal(), make_broker()
    broker.events.subscribe(log)
    tasks = Tasks(broker, journal, clock=clock)
    assert tasks.restore(frozenset("m"), lambda tier, now: now) == 1
    tasks.send_restored()
    (lane,) = broker.lanes("m")
    broker.settle_batch(broker.take(lane, 1, clock()), [make_output(b"1")])
    assert log.kinds() == ["admitted", "taken", "settled"]
    await journal.close()


async def test_a_task_is_admitted_before_its_batch_is_taken(journal: Journal) -> None:
    clock, log = FakeClock(), EventLog()
    broker = MemoryBroker(waiting_max=1, bytes_max=1000, lanes_max=9, tiers=1, clock=clock)
    broker.when_work_arrives("m", lambda lane: broker.settle_batch(broker.take(lane, 1, clock()), [make_output(b"1")]))
    broker.events.subscribe(log)
    tasks = Tasks(broker, journal, clock=clock)
    accepted: list[asyncio.Future[CarpoolError | None]] = []
    for name in ("in", "out"):  # there is room for one
        accepted.append(asyncio.get_running_loop().create_future())
        request = make_request(name, Witness(), now=clock(), is_task=True, total_timeout_s=60.0)
        tasks.submit(request, accepted[-1].set_result)
    assert await accepted[0] is None
    assert isinstance(await accepted[1], QueueFull)
    assert log.told == [("admitted", "in"), ("taken", ["in"]), ("settled", "in")]
