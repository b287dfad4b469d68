"""Rows in flight: the numbered rules of their recorder, and how SQLite knows whose writer is gone."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carpool.composition.tracking import look_up_ended
from carpool.core.batch import Batch
from carpool.core.errors import Draining
from carpool.core.events import Events
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import QUEUED, Request
from carpool.core.timeline import RequestState
from carpool.testing import Witness, make_request
from carpool.tracking import flights
from carpool.tracking.flights import FlightRecorder
from carpool.tracking.recorder import Recorder
from carpool.tracking.records import BadRowsError, FlightRow, RequestQuestion, StoreAwayError
from carpool.tracking.sqlite import SqliteStore
from support.flights import ended, flight, told
from support.processes import until

TIERS = ("gold", "free")
WALL = 1_700_000_000.0
CALL = CallFacts(4, 0.2, endpoint="http://gpu", attempts=1, batch_id="b1", gpu_s=0.05)


def store_at(path: Path) -> SqliteStore:
    return SqliteStore(path, retention_days=10_000, bytes_max=2**30)


@asynccontextmanager
async def recording(
    path: Path, *, buffer_max: int = 1000, are_tasks_kept: bool = True, are_tasks_seen: bool = True
) -> AsyncIterator[FlightRecorder]:
    """A recorder whose monotonic clock began at WALL, and stands at 11 s."""
    recorder = FlightRecorder(
        store_at(path),
        TIERS,
        buffer_max=buffer_max,
        are_tasks_kept=are_tasks_kept,
        are_tasks_seen=are_tasks_seen,
        clock=lambda: 11.0,
        wall=lambda: WALL + 11.0,
    )
    await recorder.start()
    try:
        yield recorder
    finally:
        await recorder.close()


def request_of(request_id: str, *, is_task: bool = False) -> Request:
    """It came at 10 s."""
    request = make_request(request_id, Witness(), now=10.0, owner="alice", tier=1, is_task=is_task)
    request.phase = QUEUED
    return request


async def states(path: Path, **question: object) -> list[tuple[str, str]]:
    store = store_at(path)
    found = await store.requests(RequestQuestion(**question))  # type: ignore[arg-type]
    await store.close()
    return [(each.id, each.status) for each in found]


def test_without_rows_in_flight_nobody_hears_of_what_comes() -> None:
    """That is what it costs then: nothing."""
    events = Events()
    events.subscribe(Recorder(store_at(Path("nowhere")), TIERS, buffer_max=1))
    assert not events.of_admitted


async def test_a_row_says_what_is_known_until_the_outcome_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with recording(path) as recorder:
        one, other = request_of("one"), request_of("other")
        recorder.admitted(one)
        recorder.admitted(other)
        await until(lambda: recorder.written["in_flight"] == 2)
        assert sorted(await states(path)) == [("one", "queued"), ("other", "queued")]
        one.taken, one.batch = 10.5, Batch("b1", "m", 3, "full", 10.5)
        recorder.sent([one], "http://gpu", 2, 10.6)
        await until(lambda: recorder.written["in_flight"] == 3)
        [found] = await recorder.store.requests(RequestQuestion(status="processing"))
        assert (found.id, found.owner, found.tier, found.model, found.error) == ("one", "alice", "free", "m", None)
        assert (found.batch_id, found.batch_size, found.endpoint, found.attempts) == ("b1", 3, "http://gpu", 2)
        assert (found.completed_at, found.queue_ms) == (None, 500.0)
        assert found.created_at == pytest.approx(WALL + 10)
        assert found.latency_ms > 1000
        assert (await states(path, status="queued")) == [("other", "queued")]
        assert await recorder.store.usage() == []
        output = Output(b"1", CALL)
        one.settle(output, 11.0)
        recorder.all_settled([one], [output])
        other.settle(Draining("no"), 11.0)
        recorder.settled(other, Draining("no"))
        await until(lambda: recorder.waiting == 0)
        assert sorted(await states(path)) == [("one", "completed"), ("other", "failed")]
        assert await states(path, status="failed") == [("other", "failed")]


async def test_what_ends_soon_costs_the_store_nothing(tmp_path: Path) -> None:
    async with recording(tmp_path / "t.db") as recorder:
        for number in range(100):
            request, output = request_of(f"r{number}"), Output(b"1", CALL)
            recorder.admitted(request)
            request.settle(output, 11.0)
            recorder.settled(request, output)
        assert recorder.waiting == 100
    assert (recorder.written["in_flight"], recorder.written["request"]) == (0, 100)


async def test_beyond_the_bound_rows_in_flight_are_dropped_and_outcomes_are_not(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with recording(path, buffer_max=10) as recorder:
        requests = [request_of(f"r{number}", is_task=number % 2 == 1) for number in range(15)]
        for request in requests:
            recorder.admitted(request)
        assert (recorder.dropped["in_flight"], recorder.waiting) == (5, 10)
        recorder.sent(requests, "http://gpu", 1, 10.5)  # those without a row get none by this
        assert recorder.waiting == 10
        await until(lambda: recorder.waiting == 0)
        assert len(await states(path)) == 10
        for request in requests[5:]:
            output = Output(b"1", CALL)
            request.settle(output, 11.0)
            recorder.settled(request, output)
        await until(lambda: recorder.waiting == 0)
        assert sorted({status for _, status in await states(path)}) == ["completed", "processing"]
        assert len(await states(path)) == 15


async def test_odd_ids_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with recording(path) as recorder:
        odd = [request_of(each) for each in ("nul \0", "half \ud800", "long " * 200, "plain")]
        for request in odd:
            recorder.admitted(request)
        await until(lambda: recorder.written["in_flight"] == 4)
        for request in odd:
            output = Output(b"1", CALL)
            request.settle(output, 11.0)
            recorder.settled(request, output)
        await until(lambda: recorder.waiting == 0)
        assert {status for _, status in await states(path)} == {"completed"}
        assert await recorder.store.ask("SELECT id FROM carpool_in_flight") == []


async def test_rows_that_cannot_be_written_are_dropped_and_what_is_over_is_told(tmp_path: Path) -> None:
    class Picky(SqliteStore):
        async def write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
            if any(row.id == "bad" for row in rows):
                raise BadRowsError("no")
            await super().write_flights(rows, over)

    store = Picky(tmp_path / "t.db", retention_days=10_000, bytes_max=2**30)
    recorder = FlightRecorder(store, TIERS, buffer_max=100, are_tasks_kept=True)
    await recorder.start()
    good = request_of("good")
    recorder.admitted(good)
    await until(lambda: recorder.written["in_flight"] == 1)
    recorder.admitted(request_of("bad"))
    good.settle(Draining("no"), 11.0)
    recorder.settled(good, Draining("no"))
    await until(lambda: recorder.waiting == 0)
    assert (recorder.dropped["in_flight"], await store.ask("SELECT id FROM carpool_in_flight")) == (1, [])
    await recorder.close()


async def test_tasks_of_a_process_without_a_journal_fail_with_it(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with recording(path, are_tasks_kept=False) as recorder:
        recorder.admitted(request_of("task", is_task=True))
        await until(lambda: recorder.waiting == 0)
    store = store_at(path)
    assert await told(store, "task") == [("queued", None)] * 2
    await store.fail_gone(WALL)
    assert await told(store, "task") == [("failed", "process-gone")] * 2
    await store.close()


async def test_a_task_outlives_its_process_but_not_its_time(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    await store.write_flights([flight("task", at=WALL, is_task=True)], [])
    await store.fail_gone(WALL + 60)
    assert await told(store, "task") == [("queued", None)] * 2
    await store.fail_gone(WALL + 62)
    assert await told(store, "task") == [("failed", "process-gone")] * 2
    await store.write([ended("task", WALL + 100, is_task=True)], [])  # late, but it has one
    assert await told(store, "task") == [("completed", None)] * 2
    await store.close()


async def test_a_task_that_a_drain_left_behind_is_in_flight_again(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    await store.write([ended("task", WALL, is_task=True, error="draining")], [])
    await store.write_flights([flight("task", at=WALL + 1, is_task=True)], [])
    found = await store.find("task")
    assert found is not None and found.status == "queued"
    await store.close()


async def test_only_what_a_process_that_is_gone_had_fails(tmp_path: Path) -> None:
    """A second process on the same file looks; the first one lives, then it is gone."""
    path = tmp_path / "t.db"
    one, other = store_at(path), store_at(path)
    await one.announce("one", [])
    await other.announce("other", [])
    await one.write_flights([flight("r1", "processing", at=WALL, writer="one")], [])
    await other.write_flights([flight("r2", at=WALL, writer="other"), flight("r3", at=WALL, writer="nobody")], [])
    await other.fail_gone(WALL + 1)
    assert sorted(await states(path)) == [("r1", "processing"), ("r2", "queued"), ("r3", "failed")]
    await one.close()  # the kernel gives up its lock
    await other.fail_gone(WALL + 2)
    assert sorted(await states(path)) == [("r1", "failed"), ("r2", "queued"), ("r3", "failed")]
    failed = await other.find("r1")
    assert failed is not None and failed.error == "process-gone" and failed.completed_at == pytest.approx(WALL + 2)
    assert (failed.batch_id, failed.endpoint, failed.gpu_seconds) == ("b1", "http://gpu", 0.0)
    [used] = await other.usage()
    assert (used.requests, used.failed) == (2, 2)
    await other.leave("other")
    await other.close()


async def test_a_request_whose_outcome_was_written_last_thing_does_not_fail(tmp_path: Path) -> None:
    """Its process was killed before it could tell that it is over."""
    store = store_at(tmp_path / "t.db")
    await store.write_flights([flight("r", at=WALL)], [])
    await store.write([ended("r", WALL + 0.5)], [])
    await store.fail_gone(WALL + 1)
    assert await told(store, "r") == [("completed", None)] * 2
    assert await store.ask("SELECT id FROM carpool_in_flight") == []
    await store.close()


async def test_retention_leaves_what_is_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    store = SqliteStore(path, retention_days=1, bytes_max=2**20)
    await store.announce("w", [])
    await store.write_flights([flight("r", at=WALL - 3 * 86400)], [])
    await store.write([ended("old", WALL - 3 * 86400), ended("new", WALL)], [])
    await store.tidy(WALL)
    assert sorted(await states(path)) == [("new", "completed"), ("r", "queued")]
    await store.close()


async def test_an_operator_is_told_of_a_request_that_another_process_has(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    await store.write_flights([flight("r", "processing", at=WALL)], [])
    answers: list[object] = []
    await look_up_ended(store, "r", None, answers.append)
    known = RequestState("completed", 1, None, None)
    await look_up_ended(store, "r", known, answers.append)  # what a process knows is newer
    [found, same] = answers
    assert isinstance(found, RequestState)
    assert (found.status, found.error, found.owner, found.kept) == ("processing", None, "alice", True)
    assert same is known
    await store.close()


async def test_a_batch_that_is_over_leaves_those_that_wait_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "t.db"
    async with recording(path) as recorder:
        requests = [request_of("one"), request_of("other")]
        batch = Batch("b1", "m", 2, "full", 10.5, ended=10.9)
        for request in requests:
            recorder.admitted(request)
        recorder.sent(requests, "http://gpu", 1, 10.6)
        await until(lambda: recorder.waiting == 0)
        assert {status for _, status in await states(path)} == {"processing"}
        requests[0].settle(Draining("no"), 10.9)
        recorder.settled(requests[0], Draining("no"))
        recorder.ended(batch, requests)
        await until(lambda: recorder.waiting == 0)
        assert sorted(await states(path)) == [("one", "failed"), ("other", "queued")]


async def test_tasks_that_other_processes_end_are_not_remembered(tmp_path: Path) -> None:
    async with recording(tmp_path / "t.db", buffer_max=1000) as recorder:
        for number in range(2000):
            recorder.admitted(request_of(f"t{number}", is_task=True))
            if number % 500 == 499:
                await until(lambda: recorder.waiting == 0)
        assert not recorder.stored


async def test_while_the_store_is_away_tasks_that_end_are_not_all_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tmp_path / "t.db", buffer_max=100) as recorder:

        async def away(*_: object) -> None:
            raise StoreAwayError("full")

        monkeypatch.setattr(recorder.store, "write", away)
        monkeypatch.setattr(recorder.store, "write_flights", away)
        for number in range(3000):
            task = request_of(f"t{number}", is_task=True)
            recorder.admitted(task)
            recorder.settled(task, Output(b"1", CALL))
        assert recorder.waiting <= 100 + 2 * 100
        assert recorder.dropped["in_flight"] > 0


async def test_where_no_process_sees_a_task_from_its_beginning_to_its_end_it_has_no_row(tmp_path: Path) -> None:
    async with recording(tmp_path / "t.db", are_tasks_seen=False) as recorder:
        task, other = request_of("task", is_task=True), request_of("other")
        for request in (task, other):
            recorder.admitted(request)
        recorder.sent([task, other], "http://gpu", 1, 10.5)
        await until(lambda: recorder.waiting == 0)
        assert await states(tmp_path / "t.db") == [("other", "processing")]
        recorder.settled(task, Output(b"1", CALL))
        recorder.settled(other, Output(b"1", CALL))
