"""Tracking: the numbered rules of the recorder, and the file that it writes to."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.errors import Draining, QueueTimeout, UpstreamFailed
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.testing import Witness, make_request
from carpool.tracking import sqlite
from carpool.tracking.recorder import Recorder
from carpool.tracking.records import (
    BadRowsError,
    BatchRow,
    RequestQuestion,
    RequestRow,
    StoreAwayError,
    StoreUnusableError,
)
from carpool.tracking.sqlite import MIGRATIONS, SqliteStore
from support.processes import PATIENCE_S, until

TIERS = ("gold", "free")
WALL = 1_700_000_000.0
DAY_S = 86400.0
CALL = CallFacts(4, 0.2, endpoint="http://gpu", attempts=2, batch_id="b1", gpu_s=0.05)


def store_at(path: Path, **bounds: float) -> SqliteStore:
    limits = {"retention_days": 30, "bytes_max": 2**30} | bounds
    return SqliteStore(path, retention_days=limits["retention_days"], bytes_max=int(limits["bytes_max"]))


@asynccontextmanager
async def recording(path: Path, buffer_max: int = 1000) -> AsyncIterator[Recorder]:
    """A recorder that writes; its monotonic clock began at WALL."""
    recorder = Recorder(store_at(path), TIERS, buffer_max=buffer_max, clock=lambda: 0.0, wall=lambda: WALL)
    await recorder.start()
    try:
        yield recorder
    finally:
        await recorder.close()


def settle(
    recorder: Recorder,
    request_id: str,
    outcome: Outcome,
    tier: int = 0,
    batch: Batch | None = None,
    *,
    is_task: bool = False,
) -> None:
    """A request that arrived at 10 s, was taken at 10.5 s and ended at 11 s."""
    request = make_request(request_id, Witness(), now=10.0, owner="alice", tier=tier, is_task=is_task)
    request.taken, request.batch = (10.5, batch) if batch or isinstance(outcome, Output) else (0.0, None)
    request.settle(outcome, 11.0)
    recorder.settled(request, outcome)


def settle_many(recorder: Recorder, number: int) -> None:
    for each in range(number):
        settle(recorder, f"r{each}", Output(b"1", CALL))


def request_row(number: int, completed_s: float) -> RequestRow:
    at = int(completed_s * 1e6)
    return RequestRow(f"r{number}", "alice", "free", "m", False, None, at, at, 1.0, "b", 1, "e", 1, 1.0, False, 7, 0.5)


def batch_row(number: int, created_s: float) -> BatchRow:
    return BatchRow(f"b{number}", "m", 1, int(created_s * 1e6), None, None, 0.0, 0, "full", "ok")


async def rows_in(path: Path, **question: object) -> list[str]:
    store = store_at(path)
    found = await store.requests(RequestQuestion(limit=100_000, **question))  # type: ignore[arg-type]
    await store.close()
    return [record.id for record in found]


async def test_a_row_says_what_became_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "data" / "tracking.db"
    async with recording(path) as recorder:
        settle(recorder, "good", Output(b"secret", CALL, 12), tier=1)
        settle(recorder, "kept", Output(b"1", CallFacts(0, 0.0, cached=True)))
        settle(recorder, "late", QueueTimeout("no slot"))
        batch = Batch("b2", "m", 3, "full", 10.5, 10.6, "http://gpu", 4, 11.0, "upstream-failed")
        settle(recorder, "bad", UpstreamFailed("it failed"), batch=batch)
        recorder.ended(batch, [])
    store = store_at(path)
    good = await store.find("good")
    assert good is not None
    assert (good.owner, good.tier, good.model, good.is_task, good.status, good.error) == (
        "alice", "free", "m", False, "completed", None,
    )  # fmt: skip
    assert [good.created_at, good.completed_at] == pytest.approx([WALL + 10, WALL + 11])
    assert [good.latency_ms, good.queue_ms, good.upstream_ms] == pytest.approx([1000, 500, 200])
    assert (good.batch_id, good.batch_size, good.endpoint, good.attempts) == ("b1", 4, "http://gpu", 2)
    assert (good.cached, good.tokens, good.gpu_seconds) == (False, 12, 0.05)
    kept, late, bad = [await store.find(each) for each in ("kept", "late", "bad")]
    assert kept is not None and late is not None and bad is not None
    assert (kept.cached, kept.batch_id, kept.attempts, kept.gpu_seconds) == (True, None, 0, 0.0)
    assert (late.status, late.error, late.batch_id, late.queue_ms, late.attempts) == (
        "failed", "queue-timeout", None, None, 0,
    )  # fmt: skip
    assert (bad.error, bad.batch_id, bad.batch_size, bad.attempts, bad.gpu_seconds, bad.reason) == (
        "upstream-failed", "b2", 3, 4, 0.0, "full",
    )  # fmt: skip
    assert await store.find("nobody") is None
    await store.close()
    with sqlite3.connect(path) as connection:
        [row] = connection.execute("SELECT * FROM carpool_batches")
        [[status, latency]] = connection.execute("SELECT status, latency_ms FROM carpool_requests WHERE id = 'bad'")
    connection.close()
    times = int((WALL + 10.5) * 1e6), int((WALL + 10.6) * 1e6)
    assert row == ("b2", "m", 3, *times, "http://gpu", pytest.approx(0.4), 4, "full", "upstream-failed")
    assert (status, latency) == ("failed", pytest.approx(1000))
    assert b"secret" not in path.read_bytes()


async def test_a_store_that_is_away_costs_rows_and_nothing_else(tmp_path: Path) -> None:
    in_the_way = tmp_path / "data"
    in_the_way.write_text("a file where a directory should be")
    path = in_the_way / "tracking.db"
    async with recording(path, buffer_max=1000) as recorder:
        settle_many(recorder, 1200)
        assert (recorder.waiting, recorder.dropped["request"]) == (1000, 200)
        await until(lambda: recorder.failures >= 2)
        assert recorder.written["request"] == 0
        in_the_way.unlink()
        await until(lambda: recorder.waiting == 0)
        assert recorder.written["request"] == 1000
        settle(recorder, "later", Output(b"1", CALL))
    assert recorder.written["request"] == 1001
    found = await rows_in(path)
    assert sorted(found) == sorted([f"r{each}" for each in range(1000)] + ["later"])


async def test_what_could_not_be_written_until_the_end_counts_as_dropped(tmp_path: Path) -> None:
    in_the_way = tmp_path / "data"
    in_the_way.write_text("")
    async with recording(in_the_way / "tracking.db") as recorder:
        settle_many(recorder, 5)
        recorder.ended(Batch("b", "m", 1, "full", 0.0), [])
    assert (recorder.dropped, recorder.waiting) == ({"request": 5, "batch": 1}, 0)


async def test_the_rest_is_written_at_the_end(tmp_path: Path) -> None:
    async with recording(tmp_path / "t.db", buffer_max=5000) as recorder:
        await until(lambda: recorder.written == {"request": 0, "batch": 0})
        settle_many(recorder, 1234)
    assert (recorder.written["request"], recorder.waiting) == (1234, 0)
    assert len(await rows_in(tmp_path / "t.db")) == 1234


ODD_CALLS = [
    CallFacts(1, 0.1, gpu_s=nan),
    CallFacts(2**40, inf, attempts=2**70),
    CallFacts(1, 0.1, endpoint="http://\ud800/\0", batch_id="b\0"),
]


@pytest.mark.parametrize("call", ODD_CALLS)
@pytest.mark.parametrize("tokens", [None, 2**80])
async def test_an_odd_row_is_cleaned_and_costs_no_other(tmp_path: Path, call: CallFacts, tokens: int | None) -> None:
    async with recording(tmp_path / "t.db", buffer_max=5000) as recorder:
        settle_many(recorder, 700)
        settle(recorder, "odd \ud800", Output(b"1", call, tokens))
        settle(recorder, "plain", Output(b"1", CALL))
        await until(lambda: recorder.waiting == 0)
        assert (recorder.dropped, recorder.written["request"]) == ({"request": 0, "batch": 0}, 702)
    assert sorted(await rows_in(tmp_path / "t.db")) == sorted([*(f"r{each}" for each in range(700)), "odd ?", "plain"])


async def test_a_row_that_cannot_be_written_is_lost_alone(tmp_path: Path) -> None:
    class Picky(SqliteStore):
        """Refuses some requests, and a batch, whatever they look like."""

        async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
            if {"r3", "r699", "bad"} & {*(row.id for row in requests), *(row.id for row in batches)}:
                raise BadRowsError("no")
            await super().write(requests, batches)

    recorder = Recorder(Picky(tmp_path / "t.db", retention_days=30, bytes_max=2**30), TIERS, buffer_max=1000)
    await recorder.start()
    settle_many(recorder, 700)
    for batch_id in ("good", "bad", "fine"):
        recorder.ended(Batch(batch_id, "m", 1, "full", 1.0), [])
    await until(lambda: recorder.waiting == 0)
    assert (recorder.dropped, recorder.written) == ({"request": 2, "batch": 1}, {"request": 698, "batch": 2})
    await recorder.close()
    assert sorted(await rows_in(tmp_path / "t.db")) == sorted({f"r{each}" for each in range(700)} - {"r3", "r699"})


async def test_a_store_that_goes_away_in_the_middle_of_that_gets_the_rest_later(tmp_path: Path) -> None:
    class Leaving(SqliteStore):
        is_away = True

        async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
            if len(requests) > 10:
                raise BadRowsError("too many")
            if self.is_away and len(requests) < 10:
                raise StoreAwayError("gone")
            await super().write(requests, batches)

    store = Leaving(tmp_path / "t.db", retention_days=30, bytes_max=2**30)
    recorder = Recorder(store, TIERS, buffer_max=1000)
    await recorder.start()
    settle_many(recorder, 45)
    await until(lambda: recorder.failures > 0)
    store.is_away = False
    await until(lambda: recorder.waiting == 0)
    await recorder.close()
    assert sorted(await rows_in(tmp_path / "t.db")) == sorted(f"r{each}" for each in range(45))


async def test_what_is_being_written_at_the_end_is_written_once(tmp_path: Path) -> None:
    is_writing, may_go_on = asyncio.Event(), asyncio.Event()

    class Slow(SqliteStore):
        async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
            await super().write(requests, batches)
            is_writing.set()
            await may_go_on.wait()

    recorder = Recorder(Slow(tmp_path / "t.db", retention_days=30, bytes_max=2**30), TIERS, buffer_max=1000)
    await recorder.start()
    settle_many(recorder, 700)
    await asyncio.wait_for(is_writing.wait(), PATIENCE_S)
    closing = asyncio.create_task(recorder.close())
    await asyncio.sleep(0.05)
    may_go_on.set()
    await closing
    assert (recorder.written["request"], recorder.dropped["request"]) == (700, 0)
    assert len(await rows_in(tmp_path / "t.db")) == 700


async def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with recording(path, 5000) as one, recording(path, 5000) as other:
        for recorder in (one, other):
            settle_many(recorder, 2000)
    assert len(await rows_in(path)) == 4000
    assert one.failures == other.failures == 0


async def test_of_a_task_that_ended_twice_the_last_row_stays(tmp_path: Path) -> None:
    """After a failover of Redis some had two, and `usage` counted both. Clients may repeat the ids of requests."""
    path = tmp_path / "t.db"
    async with recording(path) as one:
        settle(one, "task", Draining("later"), is_task=True)
        settle(one, "other", Output(b"1", CALL), is_task=True)
        settle(one, "same", Output(b"1", CALL))
    async with recording(path) as other:
        settle(other, "task", Output(b"1", CALL), is_task=True)
        settle(other, "task", Output(b"1", CALL), is_task=True)
        settle(other, "same", Output(b"1", CALL))
    assert sorted(await rows_in(path)) == ["other", "same", "same", "task"]
    store = store_at(path)
    found = await store.find("task")
    assert found is not None and found.error is None
    [used] = await store.usage()
    assert (used.requests, used.failed) == (4, 0)
    await store.close()


async def test_two_processes_may_make_room_in_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, raced = tmp_path / "t.db", 0

    class Raced(sqlite3.Connection):
        """Where another process removes the oldest rows between two looks at them."""

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            nonlocal raced
            if statement.startswith("SELECT max(completed_at)"):
                raced += 1
                super().execute("DELETE FROM carpool_requests WHERE rowid < (SELECT max(rowid) FROM carpool_requests)")
            return super().execute(statement, *values)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Raced))
    store = store_at(path, bytes_max=2**20)
    for at in range(0, 20_000, 500):
        await store.write([request_row(each, WALL + each) for each in range(at, at + 500)], [])
    await store.close()
    assert raced
    assert (await rows_in(path))[:500] == [f"r{each}" for each in reversed(range(19_500, 20_000))]


# The file


async def test_old_rows_go(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db", retention_days=2)
    ages = [0.5, 1.9, 2.1, 40.0]
    requests = [request_row(each, WALL - age * DAY_S) for each, age in enumerate(ages)]
    await store.write(requests, [batch_row(each, WALL - age * DAY_S) for each, age in enumerate(ages)])
    await store.tidy(WALL)
    await store.close()
    assert sorted(await rows_in(tmp_path / "t.db")) == ["r0", "r1"]
    with sqlite3.connect(tmp_path / "t.db") as connection:
        assert connection.execute("SELECT count(*) FROM carpool_batches").fetchone() == (2,)
    connection.close()


async def test_the_file_keeps_its_size_and_the_oldest_rows_go_first(tmp_path: Path) -> None:
    path, bytes_max = tmp_path / "t.db", 2**20
    store = store_at(path, bytes_max=bytes_max)
    written = 0
    for _ in range(40):
        rows = [request_row(written + each, WALL + written + each) for each in range(500)]
        await store.write(rows, [])  # `tidy` comes so seldom that a million may be written before
        written += 500
    await store.close()
    assert path.stat().st_size <= 1.2 * bytes_max
    kept = await rows_in(path)
    assert 1000 < len(kept) < written / 2
    assert kept == [f"r{each}" for each in reversed(range(written - len(kept), written))]


@pytest.mark.parametrize("batch_size", [1, 50])
async def test_in_a_file_that_is_full_requests_keep_their_batches(
    tmp_path: Path, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of batches, which are fewer, a tenth went with each part of the requests: soon only the last ones were there."""
    monkeypatch.setattr(sqlite, "REMOVED_AT_ONCE", 50)  # as few of the file's rows as in one of its usual size
    store = store_at(tmp_path / "t.db", bytes_max=2**20)
    for at in range(0, 15_000, 500):
        requests = [request_row(each, WALL + each) for each in range(at, at + 500)]
        batches = [batch_row(each, WALL + each) for each in range(at, at + 500, batch_size)]
        await store.write(requests, batches)
    await store.close()
    connection = sqlite3.connect(tmp_path / "t.db")
    [[requests_kept, first]] = connection.execute("SELECT count(*), min(completed_at) FROM carpool_requests")
    [[batches_kept]] = connection.execute("SELECT count(*) FROM carpool_batches WHERE created_at >= ?", (first,))
    connection.close()
    assert 500 < requests_kept < 10_000
    assert batches_kept >= requests_kept // batch_size


async def test_a_full_disk_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has rolled back by then, and to do that again is an error of its own."""
    connect = sqlite3.connect

    def connect_to_a_small_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 64")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_a_small_disk)
    store = store_at(tmp_path / "t.db")
    await store.write([request_row(0, WALL)], [])
    with pytest.raises(StoreAwayError, match="disk is full"):
        await store.write([request_row(each, WALL) for each in range(1, 5000)], [])
    await store.write([request_row(1, WALL)], [])  # it is of use again when there is room
    await store.close()


async def test_a_file_of_a_newer_version_is_used_as_it_is(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    await store.init()
    await store.close()
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 3}")
    connection.close()
    store = store_at(tmp_path / "t.db")
    await store.write([request_row(1, WALL)], [])
    await store.close()
    assert await rows_in(tmp_path / "t.db") == ["r1"]


async def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_text("something else, and long enough to be looked at " * 100)
    with pytest.raises(StoreUnusableError):
        async with recording(tmp_path / "t.db"):
            pass


async def test_a_write_is_all_or_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    odd = batch_row(1, WALL)._replace(seconds=nan)
    with pytest.raises(BadRowsError):
        await store.write([request_row(1, WALL)], [odd])
    await store.close()
    assert await rows_in(tmp_path / "t.db") == []


async def test_usage_by_owner_and_model(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    rows = [
        request_row(1, WALL),
        request_row(2, WALL)._replace(owner="bob", gpu_seconds=2.0, tokens=None),
        request_row(3, WALL)._replace(model="n", error="queue-timeout", gpu_seconds=0.0),
        request_row(4, WALL)._replace(cached=True, gpu_seconds=0.0),
        request_row(5, WALL - 100),
    ]
    await store.write(rows, [])
    by_owner = await store.usage(since=WALL - 1)
    assert [(each.name, each.requests, each.failed, each.cached, each.tokens) for each in by_owner] == [
        ("bob", 1, 0, 0, 0),
        ("alice", 3, 1, 1, 21),
    ]
    assert [each.gpu_seconds for each in by_owner] == [2.0, 0.5]
    by_model = await store.usage(by="model")
    assert {each.name: each.requests for each in by_model} == {"m": 4, "n": 1}
    await store.close()


async def test_a_cancelled_question_leaves_the_store_usable(tmp_path: Path) -> None:
    store = store_at(tmp_path / "t.db")
    await store.write([request_row(1, WALL)], [])
    question = asyncio.ensure_future(store.find("r1"))
    await asyncio.sleep(0)
    question.cancel()
    assert (await store.find("r1")) is not None
    await store.close()
