"""The journal: what it promises its callers, and what it does when the disk fails."""

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.broker import journal as journal_module
from carpool.broker import journal_store, journal_writer
from carpool.broker.journal import Journal
from carpool.broker.journal_records import DeadLetter, JournalUnusable, TaskRecord, TaskResult
from carpool.core.errors import JournalFailed, NotFound, QueueFull
from support.processes import PATIENCE_S, until
from support.tasks import open_journal

CANARY = b"canary-7f3a"


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Opener:
    """Opens journals at one path and closes what a test left open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.opened: list[Journal] = []

    def __call__(self, path: Path | None = None, **options: Any) -> Journal:
        journal = open_journal(path or self.path, **{"stored_bytes_max": 1 << 30, "clock": self.clock, **options})
        self.opened.append(journal)
        return journal


@pytest.fixture
async def opener(tmp_path: Path) -> AsyncIterator[Opener]:
    opener = Opener(tmp_path / "data" / "journal.db")
    yield opener
    for journal in opener.opened:
        await journal.close()


class TinyDisk:
    """Makes SQLite report a full disk, by its own limit on the pages that a connection may use."""

    def __init__(self) -> None:
        # The one that the journal opens.
        self.connection: sqlite3.Connection

    def fill(self) -> None:
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.connection.execute(f"PRAGMA max_page_count = {pages}")

    def empty(self) -> None:
        self.connection.execute("PRAGMA max_page_count = 1000000")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> TinyDisk:
    disk, connect = TinyDisk(), sqlite3.connect

    def connect_to_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        disk.connection = connect(*arguments, **options)
        return disk.connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_disk)
    return disk


def task(task_id: str, payload: bytes = b'"in"', deadline: float = 600.0) -> TaskRecord:
    return TaskRecord(task_id, "owner", "model", b"{}", payload, 1, 1.7e9, deadline)


def success(output: bytes = b'"out"') -> TaskResult:
    return TaskResult("SUCCESS", output, None, 1.7e9 + 1)


FAILURE = TaskResult("FAILED", None, b'{"status":502}', 1.7e9 + 2)
POISON = DeadLetter("upstream-failed", "given up", 3)


async def ask(method: Callable[..., None], *arguments: Any, **options: Any) -> Any:
    """Call a method of the journal and wait for its one answer."""
    return await asyncio.wait_for(asking(method, *arguments, **options), PATIENCE_S)


def asking(method: Callable[..., None], *arguments: Any, **options: Any) -> "asyncio.Future[Any]":
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    # set_result raises on a second answer, which `_answer` logs: see `no_callback_failed`.
    method(*arguments, answer.set_result, **options)
    return answer


@pytest.fixture(autouse=True)
def no_callback_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "a callback of the journal failed" not in caplog.text


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def counts(journal: Journal) -> tuple[int, int, int, int]:
    return journal.counts.tasks_pending, journal.counts.results, journal.counts.dead_letters, journal.stored_bytes


def commits(journal: Journal) -> int:
    return sum(journal.writer.commit_seconds.counts)


# A task's life.


async def test_first_result_wins(opener: Opener) -> None:
    journal = opener()
    await ask(journal.append, task("a"))
    same_group = [asking(journal.finish, "a", success(b"%d" % n)) for n in range(3)]
    assert [await answer for answer in same_group] == [True, False, False]
    assert await ask(journal.finish, "a", FAILURE) is False
    assert (await ask(journal.read, "a")).output == b"0"
    assert counts(journal) == (0, 1, 0, 1)


async def test_only_a_dead_letter_keeps_the_input(opener: Opener) -> None:
    journal = opener()
    await ask(journal.append, task("good", b'"one"'))
    await ask(journal.append, task("bad", b'"two"'))
    assert await ask(journal.finish, "good", success()) is True
    answer = asyncio.get_running_loop().create_future()
    journal.finish("bad", FAILURE, answer.set_result, POISON)
    assert await answer is True
    assert (await ask(journal.read, "bad")).error == FAILURE.error
    assert rows(opener.path, "SELECT input FROM tasks") == [(b"",), (b"",)]
    dead = rows(opener.path, "SELECT id, cause, detail, sends, parameters, input FROM dead_letters")
    assert dead == [("bad", "upstream-failed", "given up", 3, b"{}", b'"two"')]
    assert counts(journal) == (0, 2, 1, 5 + len(FAILURE.error or b""))


async def test_pending_tasks_come_back_whole_and_in_order(opener: Opener) -> None:
    journal = opener()
    ids = [f"{n:x}" for n in random.Random(1).sample(range(1 << 40), 50)]
    for task_id in ids:
        journal.append(task(task_id, b"%b" % task_id.encode() * 1000), lambda _: None)
    await ask(journal.finish, ids[7], success())
    await journal.close()
    again = opener()
    left = [task_id for task_id in ids if task_id != ids[7]]
    assert list(again.pending()) == [task(task_id, task_id.encode() * 1000) for task_id in left]


async def test_pending_may_be_answered_while_it_is_read(opener: Opener) -> None:
    journal = opener()
    for n in range(20):
        journal.append(task(str(n)), lambda _: None)
    await journal.close()
    journal = opener()
    answers = []
    for record in journal.pending():
        answers.append(asking(journal.finish, record.id, FAILURE))
        await asyncio.sleep(0.001)
    assert [await answer for answer in answers] == [True] * 20


async def test_random_operations_agree_with_a_dictionary(opener: Opener) -> None:
    chance = random.Random(7)
    journal = opener()
    model: dict[str, str] = {}
    for step in range(400):
        task_id = str(chance.randrange(40))
        match chance.randrange(4):
            case 0 if task_id not in model:
                assert await ask(journal.append, task(task_id, b"x" * chance.randrange(3000))) is None
                model[task_id] = "PENDING"
            case 1:
                expected = model.get(task_id) == "PENDING"
                assert await ask(journal.finish, task_id, success(b"%d" % step)) is expected
                if expected:
                    model[task_id] = "SUCCESS"
            case 2:
                assert await ask(journal.delete, task_id) is (model.pop(task_id, None) is not None)
            case _:
                found = await ask(journal.read, task_id)
                assert (found and found.status) == model.get(task_id)
    before = counts(journal)
    assert before[0] == list(model.values()).count("PENDING")
    await journal.close()
    assert counts(opener()) == before  # counted anew from the file


# Group commit.


async def test_one_commit_and_one_call_into_the_loop_for_a_group(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "GATHER_S", 0.2)  # for the whole turn, also if this thread is held up
    journal = opener()
    loop = asyncio.get_running_loop()
    calls: list[int] = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counting(callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        calls.append(1)
        return call_soon_threadsafe(callback, *arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    answers = [asking(journal.append, task(str(n))) for n in range(500)]
    assert [await answer for answer in answers] == [None] * 500
    assert len(calls) <= 5
    assert commits(journal) <= 6  # a tick may be among them


async def test_callback_that_raises_does_not_take_the_answers_of_others(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opener()

    def broken(_: object) -> None:
        raise RuntimeError

    journal.append(task("a"), broken)
    assert await ask(journal.append, task("b")) is None
    assert "a callback of the journal failed" in caplog.text
    caplog.clear()


async def test_operation_that_can_never_be_written_fails_alone(opener: Opener) -> None:
    journal = opener()
    await ask(journal.append, task("a"))
    answers = [asking(journal.append, task(name)) for name in ("b", "c", "a", "d", "\ud800", "e")]
    failed = [isinstance(await answer, JournalFailed) for answer in answers]
    assert failed == [False, False, True, False, True, False]
    assert isinstance(await ask(journal.read, "\ud800"), JournalFailed)
    assert journal.counts.tasks_pending == 5
    assert journal.writer.commit_failures == 0


# Bounds.


async def test_what_a_client_calls_itself_counts_as_long_as_it_is_kept(opener: Opener) -> None:
    """Tiny tasks with long names took many times the room that was counted."""
    named = [msgspec.structs.replace(task(name, b"1"), client_id="\N{GRINNING FACE}" * 100) for name in "abc"]
    journal = opener(stored_bytes_max=1000)  # of which each takes 400, its input and its parameters
    assert [await ask(journal.append, each) for each in named[:2]] == [None, None]
    assert isinstance(await ask(journal.append, named[2]), QueueFull)
    assert await ask(journal.finish, "a", success(b"r")) is True
    assert await ask(journal.finish, "b", FAILURE, dead_letter=POISON) is True
    assert (journal.stored_bytes, journal.counts.dead_letter_bytes) == (815, 3)
    await journal.close()
    journal = opener(stored_bytes_max=1000)
    assert (journal.stored_bytes, journal.counts.dead_letter_bytes) == (815, 3)
    assert isinstance(await ask(journal.append, named[2]), QueueFull)
    assert await ask(journal.delete, "a") is True
    assert journal.stored_bytes == 414


async def test_queue_is_bounded_but_results_always_enter(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opener()
    await ask(journal.append, task("a"))
    monkeypatch.setattr(journal_module, "QUEUED_OPERATIONS_MAX", 2)
    appends = [asking(journal.append, task(str(n))) for n in range(3)]
    read = asking(journal.read, "a")
    finish = asking(journal.finish, "a", success())
    assert [await appends[0], await appends[1]] == [None, None]
    assert isinstance(await appends[2], QueueFull)
    assert isinstance(await read, QueueFull)
    assert await finish is True
    monkeypatch.setattr(journal_module, "QUEUED_BYTES_MAX", 100)
    assert isinstance(await ask(journal.append, task("large", b"x" * 101)), QueueFull)
    assert await ask(journal.append, task("small")) is None


# Dead letters.


async def buried(journal: Journal, *names: str, payload: bytes = b'"in"', cause: str = "input-refused") -> None:
    """Bury requests that were no tasks, and wait until they are kept."""
    for name in names:
        journal.bury(task(name, payload), DeadLetter(cause, "why", 2))
    await ask(journal.delete, "nobody")  # of a later group, or of the same


async def letter_ids(journal: Journal, after: int = 0, limit: int = 1000, cause: str | None = None) -> list[int]:
    letters = await journal.look(lambda store, now: store.letters(after, limit, cause, now))
    return [letter.id for letter in letters]


async def test_the_number_of_a_letter_is_never_used_again(opener: Opener) -> None:
    journal = opener()
    await buried(journal, "a", "b")
    await journal.change(lambda store, _: store.drop_all_letters())
    await buried(journal, "c")
    assert await letter_ids(journal) == [3]
    await journal.change(lambda store, _: store.drop_all_letters())
    await journal.close()
    again = opener()
    assert again.last_letter == 3
    await buried(again, "d")
    assert await letter_ids(again) == [4]


async def test_a_replay_takes_the_letter_and_keeps_the_task_together_or_neither(opener: Opener) -> None:
    journal = opener()
    await buried(journal, "a")
    # Of one group: one of them wins, and a drop comes too late.
    replays = [asking(lambda t, done: journal.append(t, done, 1), task(name)) for name in ("r1", "r2")]
    dropped = asyncio.ensure_future(journal.change(lambda store, now: store.drop_letters([1], now)))
    first, second = [await replay for replay in replays]
    assert first is None
    assert isinstance(second, NotFound)
    assert await dropped == set()
    assert counts(journal) == (1, 0, 0, 6)
    assert [record.id for record in journal.pending()] == ["r1"]
    # A task that cannot be written leaves the letter where it is.
    await buried(journal, "b")
    failure = await ask(lambda t, done: journal.append(t, done, 2), task("r1"))
    assert isinstance(failure, JournalFailed)
    assert await letter_ids(journal) == [2]


async def test_a_full_disk_leaves_letter_and_task_as_they_were(opener: Opener, disk: TinyDisk) -> None:
    journal = opener()
    await buried(journal, "a", payload=b'"small"')
    disk.fill()
    failure = await ask(lambda t, done: journal.append(t, done, 1), task("large", LARGE))
    assert isinstance(failure, JournalFailed)
    journal.bury(task("lost", LARGE), POISON)  # and nobody waits for it
    assert await letter_ids(journal) == [1]
    disk.empty()
    assert await ask(lambda t, done: journal.append(t, done, 1), task("large", LARGE)) is None
    assert await letter_ids(journal) == []


async def test_the_oldest_letters_make_room_and_tasks_are_accepted_all_the_while(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opener(stored_bytes_max=4000)  # 1000 for letters
    await buried(journal, *map(str, range(20)), payload=b"x" * 298)
    assert await letter_ids(journal) == [18, 19, 20]
    assert (journal.counts.dead_letters, journal.counts.dead_letter_bytes, journal.stored_bytes) == (3, 900, 0)
    answers = [asking(journal.append, task(f"t{n}", b"x" * 398)) for n in range(10)]
    assert [await answer for answer in answers] == [None] * 10  # all 4000 of them
    # The letter of a failed task counts there too, and its result with the tasks.
    await ask(lambda result, done: journal.finish("t0", result, done, POISON), FAILURE)
    assert await letter_ids(journal) == [19, 20, 21]
    # One over the whole budget does not cost the others.
    await buried(journal, "huge", payload=b"x" * 1000)
    assert await letter_ids(journal) == [19, 20, 21]
    assert (journal.counts.dead_letters, journal.counts.dead_letter_bytes) == (3, 1000)
    assert caplog.text.count("old dead letters were dropped") == 1
    assert (journal.buried["input-refused"], journal.letters_lost) == (21, 1)


async def test_letters_are_bounded_in_number_too(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "DEAD_LETTERS_MAX", 5)
    journal = opener()
    await buried(journal, *map(str, range(8)), payload=b"")
    assert await letter_ids(journal) == [4, 5, 6, 7, 8]


async def test_letters_on_their_way_are_bounded_and_block_no_task(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BURYING_MAX", 3)
    journal = opener(stored_bytes_max=400_000)
    for n in range(10):
        journal.bury(task(str(n), b"x" * 9998), POISON)
    assert journal.stored_bytes == 0
    assert await ask(journal.append, task("t", b"x" * 399_998)) is None
    assert await letter_ids(journal) == [1, 2, 3]
    assert journal.buried["upstream-failed"] == 10  # an alert sees them all
    assert journal.letters_lost == 7
    monkeypatch.setattr(journal_module, "BURYING_BYTES_MAX", 100)
    journal.bury(task("large", b"x" * 99), POISON)
    await buried(journal, "small")
    assert await letter_ids(journal) == [1, 2, 3, 4]


async def test_every_cause_is_counted_from_the_start(opener: Opener) -> None:
    journal = opener()
    assert set(journal.buried.values()) == {0}
    assert {"input-refused", "upstream-failed"} <= set(journal.buried)
    assert not {"deadline-exceeded", "queue-timeout", "malformed"} & set(journal.buried)
    await ask(journal.append, task("a"))
    await ask(lambda result, done: journal.finish("a", result, done, POISON), FAILURE)
    assert journal.buried["upstream-failed"] == 1


async def test_a_closed_journal_takes_no_letters(opener: Opener) -> None:
    journal = opener()
    await journal.close()
    journal.bury(task("a"), POISON)
    with pytest.raises(JournalFailed):
        await letter_ids(journal)
    with pytest.raises(JournalFailed):
        await journal.change(lambda store, _: store.drop_all_letters())
    assert opener().counts.dead_letters == 0


# The uptime clock, and expiry.


async def test_uptime_counts_only_time_in_which_the_journal_was_open(opener: Opener) -> None:
    journal = opener()
    assert journal.now() == 0.0
    opener.clock.now += 30.0
    await ask(journal.append, task("a", deadline=journal.now() + 60.0))
    await journal.close()
    opener.clock.now += 86400.0  # nobody ran
    journal = opener()
    assert journal.now() == 30.0
    assert [record.deadline for record in journal.pending()] == [90.0]
    opener.clock.now += 5.0
    await journal.close()
    opener.clock.now = 3.0  # the machine was started anew, and its clock with it
    assert opener().now() == 35.0


async def test_uptime_of_the_last_commit_survives_a_crash(opener: Opener, tmp_path: Path) -> None:
    journal = opener()
    opener.clock.now += 42.0
    await ask(journal.append, task("a"))
    crashed = tmp_path / "crashed"
    shutil.copytree(opener.path.parent, crashed)  # as a kill would leave it, log and all
    opener.clock.now += 10.0
    copy = opener(crashed / "journal.db")
    assert copy.now() == 42.0
    assert [record.id for record in copy.pending()] == ["a"]


async def test_uptime_is_saved_while_something_is_stored_and_the_disk_left_alone_otherwise(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "TICK_S", 0.01)
    journal = opener()
    await asyncio.sleep(0.1)
    assert commits(journal) == 0
    await ask(journal.append, task("a"))
    opener.clock.now += 7.0
    await until(lambda: rows(opener.path, "SELECT value FROM meta WHERE key = 'uptime'") == [(7.0,)])
    await ask(journal.delete, "a")
    await asyncio.sleep(0.05)
    before = commits(journal)
    await asyncio.sleep(0.1)
    assert commits(journal) == before


async def test_expired_rows_are_purged_in_chunks_and_dead_letters_later(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "TICK_S", 0.02)
    monkeypatch.setattr(journal_writer, "SLOW_TICK_S", 0.02)
    monkeypatch.setattr(journal_writer, "PURGE_MAX", 3)
    journal = opener()
    for n in range(10):
        await ask(journal.append, task(str(n)))
        answer = asyncio.get_running_loop().create_future()
        journal.finish(str(n), FAILURE, answer.set_result, POISON if n < 5 else None)
        await answer
    await ask(journal.append, task("pending"))
    opener.clock.now += 601.0
    await until(lambda: journal.counts.results == 0)
    assert (journal.counts.tasks_pending, journal.counts.dead_letters) == (1, 5)
    await ask(journal.delete, "pending")
    opener.clock.now += 6000.0
    await until(lambda: journal.counts.dead_letters == 0)
    assert counts(journal) == (0, 0, 0, 0)
    assert rows(opener.path, "SELECT count(*) FROM tasks") == [(0,)]


# A disk that fails.


LARGE = CANARY * 20_000


async def test_full_disk_fails_appends_and_keeps_results_until_they_fit(
    opener: Opener, disk: TinyDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_LAST_S", 0.1)
    monkeypatch.setattr(journal_writer, "TICK_S", 3600.0)
    journal = opener()
    for name in ("a", "b", "c"):
        await ask(journal.append, task(name))
    before = counts(journal)
    disk.fill()

    append = asking(journal.append, task("large", LARGE))
    first = asking(journal.finish, "a", success(LARGE))
    failure = await append
    assert isinstance(failure, JournalFailed)
    second = asking(journal.finish, "b", success(LARGE))
    # What needs no room works on.
    assert (await ask(journal.read, "a")).status == "PENDING"
    assert await ask(journal.delete, "c") is True
    await until(lambda: journal.writer.commit_failures >= 2)
    assert not first.done()
    assert not second.done()
    assert await ask(journal.read, "large") is None

    disk.empty()
    assert [await asyncio.wait_for(each, PATIENCE_S) for each in (first, second)] == [True, True]
    assert (await ask(journal.read, "b")).output == LARGE
    assert await ask(journal.append, task("large", LARGE)) is None
    assert counts(journal) == (1, 2, 0, before[3] - 18 + 3 * len(LARGE) + 2)
    assert caplog.text.count("the journal cannot be written") == 1
    assert "can be written again" in caplog.text
    assert CANARY.decode() not in caplog.text + failure.detail
    after = counts(journal)
    await journal.close()
    assert counts(opener()) == after


async def test_result_that_does_not_fit_does_not_block_others(
    opener: Opener, disk: TinyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_LAST_S", 0.05)
    monkeypatch.setattr(journal_writer, "CLOSE_PATIENCE_S", 0.2)
    journal = opener()
    for n in range(20):
        await ask(journal.append, task(str(n), b"x" * 2000))
    disk.fill()
    large = asking(journal.finish, "0", success(LARGE))
    small = [asking(journal.finish, str(n), success()) for n in range(1, 20)]
    assert await asyncio.wait_for(asyncio.gather(*small), PATIENCE_S) == [True] * 19
    assert not large.done()
    await journal.close()
    assert isinstance(await large, JournalFailed)
    assert [record.id for record in opener().pending()] == ["0"]  # its task will run again


async def test_locked_file_fails_the_group_and_works_again(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "BUSY_S", 0.02)
    journal = opener()
    await ask(journal.append, task("a"))
    stranger = sqlite3.connect(opener.path, isolation_level=None)
    stranger.execute("BEGIN IMMEDIATE")
    finish = asking(journal.finish, "a", success())
    delete = asking(journal.delete, "a")
    assert isinstance(await ask(journal.append, task("b")), JournalFailed)
    assert isinstance(await delete, JournalFailed)
    assert (await ask(journal.read, "a")).status == "PENDING"
    stranger.execute("ROLLBACK")
    stranger.close()
    assert await asyncio.wait_for(finish, PATIENCE_S) is True
    assert await ask(journal.append, task("b")) is None


# Opening and closing.


async def test_close_commits_everything_queued(opener: Opener) -> None:
    journal = opener()
    answers = [asking(journal.append, task(str(n), b"x" * 100)) for n in range(3000)]
    answers += [asking(journal.finish, "5", success())]
    await journal.close()
    await journal.close()
    assert [answer.result() for answer in answers] == [None] * 3000 + [True]
    assert not os.access(f"{opener.path}-wal", os.F_OK)
    for late in (
        asking(journal.append, task("late")),
        asking(journal.finish, "1", success()),
        asking(journal.read, "1"),
        asking(journal.delete, "1"),
    ):
        assert isinstance(await late, JournalFailed)
    again = opener()
    assert (again.counts.tasks_pending, again.counts.results) == (2999, 1)


async def test_files_are_for_their_owner_only_whatever_the_umask(opener: Opener) -> None:
    umask = os.umask(0)
    try:
        journal = opener()
        await ask(journal.append, task("a"))
        names = {f.name: f.stat().st_mode & 0o777 for f in opener.path.parent.iterdir()}
        assert names == dict.fromkeys(("journal.db", "journal.db-wal", "journal.db-shm", "journal.db.lock"), 0o600)
        assert opener.path.parent.stat().st_mode & 0o777 == 0o700
        await journal.close()
        opener.path.chmod(0o644)
        opener()
        assert opener.path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


async def test_second_owner_is_refused(opener: Opener) -> None:
    journal = opener()
    with pytest.raises(JournalUnusable, match=r"another carpool process owns this journal.*--data-dir"):
        opener()
    child = (
        "import sys; from pathlib import Path; from carpool.broker.journal_store import Store\n"
        "try: Store(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    command = [sys.executable, "-c", child, str(opener.path)]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "another carpool process owns this journal" in other.stdout
    assert await ask(journal.append, task("a")) is None  # the owner has not noticed
    await journal.close()
    opener()


def text_file(path: Path) -> None:
    path.write_text("not a database, but long enough to have a header of one" * 100)


def foreign_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE somebody (elses INTEGER)")
    connection.commit()
    connection.close()


def future_schema(path: Path) -> None:
    journal_store.Store(path).close(0.0)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def torn_pages(path: Path) -> None:
    journal_store.Store(path).close(0.0)
    with path.open("r+b") as file:
        file.seek(journal_store.PAGE_BYTES)
        file.write(b"\xff" * 4 * journal_store.PAGE_BYTES)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (text_file, "file is not a database"),
        (foreign_database, "not a journal of Carpool"),
        (future_schema, "another version of Carpool"),
        (torn_pages, "malformed"),
        (Path.mkdir, "cannot be used"),
    ],
)
async def test_unusable_file_says_why_and_is_left_unlocked(
    opener: Opener, damage: Callable[[Path], None], text: str
) -> None:
    opener.path.parent.mkdir()
    damage(opener.path)
    with pytest.raises(JournalUnusable, match=text) as refusal:
        opener()
    assert str(opener.path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    if opener.path.is_dir():
        opener.path.rmdir()
    else:
        opener.path.unlink()
    opener()


async def test_directory_that_cannot_be_made(opener: Opener) -> None:
    opener.path.parent.write_text("a file")
    with pytest.raises(JournalUnusable, match=str(opener.path)):
        opener()


async def test_without_a_path_it_lives_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = open_journal()
    assert list(journal.pending()) == []
    assert await ask(journal.append, task("a")) is None
    assert await ask(journal.finish, "a", success()) is True
    assert (await ask(journal.read, "a")).output == b'"out"'
    assert await ask(journal.delete, "a") is True
    assert await ask(journal.read, "a") is None
    await journal.close()
    assert os.listdir(tmp_path) == []


# Results that were read go first.


async def finished(journal: Journal, *names: str, size: int = 100) -> None:
    """Tasks of which each has a result of so many bytes."""
    for name in names:
        assert await ask(journal.append, task(name)) is None
        assert await ask(journal.finish, name, success(b"r" * size)) is True


async def kept(journal: Journal, *names: str) -> list[bool]:
    return [await ask(journal.read, name) is not None for name in names]


async def test_nearly_full_the_oldest_results_that_were_read_go(opener: Opener) -> None:
    journal = opener(stored_bytes_max=1000)  # nearly full from 850 on
    names = "abcdefgh"
    await finished(journal, *names)
    for name in "fdbd":
        journal.was_read(name)
    assert await ask(journal.append, task("i", b"x" * 98)) is None  # 900 with this
    assert await kept(journal, *names) == [True, False, True, True, True, True, True, True]
    assert (journal.stored_bytes, journal.counts.read_bytes) == (800, 200)
    assert await ask(journal.append, task("j", b"x" * 198)) is None  # 1000 with this
    assert await kept(journal, *names) == [True, False, True, False, True, False, True, True]
    assert (journal.stored_bytes, journal.counts.read_bytes) == (800, 0)
    assert isinstance(await ask(journal.append, task("k", b"x" * 300)), QueueFull)  # nothing else is read


async def test_results_that_were_read_are_kept_while_there_is_room(opener: Opener) -> None:
    journal = opener(stored_bytes_max=1000)
    await finished(journal, *"abc")
    for name in "abc":
        journal.was_read(name)
    await finished(journal, "d")
    assert await kept(journal, *"abcd") == [True] * 4
    assert journal.counts.read_bytes == 300
    assert await ask(journal.delete, "a") is True
    assert journal.counts.read_bytes == 200
    opener.clock.now += 601.0
    await finished(journal, "e")
    await until(lambda: journal.counts.results == 1)
    assert (journal.counts.read_bytes, journal.stored_bytes) == (0, 100)


async def test_tasks_without_a_result_never_go(opener: Opener) -> None:
    journal = opener(stored_bytes_max=1000)
    assert await ask(journal.append, task("a", b"x" * 898)) is None
    journal.was_read("a")
    assert await ask(journal.append, task("b")) is None
    assert await kept(journal, "a", "b") == [True, True]
    assert journal.counts.read_bytes == 0


async def test_expired_letters_are_not_there(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "TICK_S", 3600.0)
    monkeypatch.setattr(journal_writer, "SLOW_TICK_S", 3600.0)
    journal = opener()
    await buried(journal, "a")
    opener.clock.now += 6001.0
    assert await letter_ids(journal) == []
    assert await journal.look(lambda store, now: store.letter(1, now)) is None
    assert await journal.change(lambda store, now: store.drop_letters([1], now)) == set()
    assert isinstance(await ask(lambda t, done: journal.append(t, done, 1), task("r")), NotFound)


async def test_expired_result_is_not_returned_even_before_it_is_purged(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "TICK_S", 3600.0)
    journal = opener()
    for name in ("a", "b", "pending"):
        await ask(journal.append, task(name))
    await ask(journal.finish, "a", success())
    await ask(journal.finish, "b", success())
    opener.clock.now += 599.0
    assert (await ask(journal.read, "a")).status == "SUCCESS"
    opener.clock.now += 2.0
    assert await ask(journal.read, "a") is None
    assert await ask(journal.read, "b") is None
    assert await ask(journal.delete, "b") is False
    assert (await ask(journal.read, "pending")).status == "PENDING"
    assert journal.counts.results == 2  # still there, but for nobody
