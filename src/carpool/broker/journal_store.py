"""The journal's file: tasks, results, dead letters and the uptime clock in SQLite. One thread uses a Store.

1. Whatever changes rows happens inside `transaction`, which is on the disk when it ends, or never was.
2. `counts` are those of the last commit; they change together with it, so they may be read from any thread.
3. A row with `expires` at or before the `now` given is not there, whether it has been purged yet or not.
4. Dead letters are numbered in order, and no number is used twice, also when the last ones were dropped. Beyond their
   bounds the oldest go.
5. Errors of SQLite leave this module as they are, but for those of opening; its texts name no values.
"""

import fcntl
import os
import sqlite3
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from carpool.broker.journal_records import (
    Bury,
    Counts,
    DeadLetter,
    JournalUnusable,
    TaskRecord,
    TaskResult,
    result_size_of,
    size_of,
)
from carpool.broker.journal_webhooks import SCHEMA as WEBHOOK_SCHEMA
from carpool.broker.journal_webhooks import STATUS_NAMES, WebhookRows
from carpool.core.dead_letter import DeadLetterSummary, StoredDeadLetter
from carpool.core.task import StoredTask

APPLICATION_ID = 0x43504C4A  # "CPLJ" in the file's header: tells a journal from other SQLite files
SCHEMA_VERSION = 3

# Three rows of 2 KB share a page of 8 KiB; each would fill one of the default 4 KiB alone, and an append
# would write half as much again. Larger ones are quicker still in a burst, but a lone append writes more.
PAGE_BYTES = 8192
# Pages in the log before it is copied into the file: 16 MiB. With less, a burst of appends stops more often
# for the sync of the file.
CHECKPOINT_PAGES = 2048
LOG_BYTES_KEPT = 64 * 1024 * 1024
# An operator with a sqlite3 shell on the file may hold its lock for a moment.
BUSY_S = 1.0
# Bytes alone would not bound the rows of a flood of empty inputs.
DEAD_LETTERS_MAX = 100_000

PENDING, SUCCESS, FAILED = 0, 1, 2

# The payloads come last in a row, so that its small fields are found without them. `bytes` is their length, of a task
# with that of its `client_id`; the indices hold all that counting, purging and finding pending rows need: no payload
# is read for it.
SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    "INSERT INTO meta VALUES ('uptime', 0.0)",
    """CREATE TABLE tasks (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, model TEXT NOT NULL,
        tier INTEGER NOT NULL, submitted REAL NOT NULL, deadline REAL NOT NULL,
        status INTEGER NOT NULL, finished REAL, expires REAL, bytes INTEGER NOT NULL,
        client_id TEXT NOT NULL DEFAULT '', callback_url TEXT NOT NULL DEFAULT '',
        parameters BLOB NOT NULL, input BLOB NOT NULL, output BLOB, error BLOB)""",
    "CREATE INDEX tasks_by_expiry ON tasks (expires, bytes)",
    """CREATE TABLE dead_letters (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL,
        tier INTEGER NOT NULL, submitted REAL NOT NULL, died REAL NOT NULL, cause TEXT NOT NULL,
        detail TEXT NOT NULL, sends INTEGER NOT NULL, expires REAL NOT NULL, bytes INTEGER NOT NULL,
        parameters BLOB NOT NULL, input BLOB NOT NULL)""",
    "CREATE INDEX dead_letters_by_expiry ON dead_letters (expires, bytes)",
    *WEBHOOK_SCHEMA,
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

# A TaskRecord, and its size.
APPEND = """INSERT INTO tasks
    (id, owner, model, parameters, input, tier, submitted, deadline, client_id, callback_url, bytes, status)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"""
# Pending rows are those that never expire; the list of their numbers comes from the index, in order.
PENDING_TASKS = """SELECT id, owner, model, parameters, input, tier, submitted, deadline, client_id, callback_url
    FROM tasks WHERE seq IN (SELECT seq FROM tasks WHERE expires IS NULL) ORDER BY seq"""
# One JSON array as the only parameter: one prepared statement for any number of ids.
IDS = "id IN (SELECT value FROM json_each(?))"
# Of a task's bytes, those that stay with its result.
CLIENT_BYTES = "(length(CAST(client_id AS BLOB)) + length(callback_url))"
PENDING_SIZES = f"SELECT id, bytes, {CLIENT_BYTES}, callback_url FROM tasks WHERE {IDS} AND status = 0"
FINISH = """UPDATE tasks SET status = ?, finished = ?, expires = ?, bytes = ?, output = ?, error = ?,
    parameters = x'', input = x'' WHERE id = ?"""
BURY_TASK = f"""INSERT INTO dead_letters
    (seq, id, owner, model, tier, submitted, died, cause, detail, sends, expires, bytes, parameters, input)
    SELECT ?, id, owner, model, tier, submitted, ?, ?, ?, ?, ?, bytes - {CLIENT_BYTES}, parameters, input
    FROM tasks WHERE id = ?"""
BURY = """INSERT INTO dead_letters
    (seq, id, owner, model, tier, submitted, died, cause, detail, sends, expires, bytes, parameters, input)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
LAST_LETTER = """SELECT max(coalesce((SELECT max(seq) FROM dead_letters), 0),
    coalesce((SELECT value FROM meta WHERE key = 'last_dead_letter'), 0))"""
SAVE_LAST_LETTER = "INSERT OR REPLACE INTO meta VALUES ('last_dead_letter', ?)"
LETTERS = """SELECT seq, id, model, cause, detail, sends, died, bytes FROM dead_letters
    WHERE seq > ? AND expires > ? AND (? IS NULL OR cause = ?) ORDER BY seq LIMIT ?"""
LETTER = """SELECT seq, id, model, cause, detail, sends, died, bytes, owner, tier, parameters, input
    FROM dead_letters WHERE seq = ? AND expires > ?"""
FIND_LETTERS = """SELECT seq, bytes FROM dead_letters
    WHERE seq IN (SELECT value FROM json_each(?)) AND expires > ?"""
OLDEST_LETTERS = "SELECT seq, bytes FROM dead_letters ORDER BY seq"
READ = f"""SELECT id, owner, status, output, error, coalesce(finished, submitted), submitted, client_id FROM tasks
    WHERE {IDS} AND (expires IS NULL OR expires > ?)"""
FIND = f"SELECT seq, id, status, bytes FROM tasks WHERE {IDS} AND (expires IS NULL OR expires > ?)"
EXPIRED_TASKS = "SELECT seq, id, status, bytes FROM tasks WHERE expires <= ? LIMIT ?"
EXPIRED_DEAD = "SELECT seq, bytes FROM dead_letters WHERE expires <= ? LIMIT ?"
# The results that were read since the journal was opened: in memory, some 20 bytes each.
READ_TASKS = "CREATE TEMP TABLE read_tasks (seq INTEGER PRIMARY KEY, bytes INTEGER NOT NULL)"
WERE_READ = f"""INSERT OR IGNORE INTO read_tasks SELECT seq, bytes FROM tasks
    WHERE {IDS} AND expires IS NOT NULL RETURNING bytes"""
OLDEST_READ = """SELECT seq, id, status, tasks.bytes FROM (SELECT seq FROM read_tasks ORDER BY seq LIMIT ?)
    JOIN tasks USING (seq) ORDER BY seq"""
REMOVE_READ = "DELETE FROM read_tasks WHERE seq IN (SELECT value FROM json_each(?)) RETURNING bytes"
REMOVE_TASKS = "DELETE FROM tasks WHERE seq IN (SELECT value FROM json_each(?))"
REMOVE_DEAD = "DELETE FROM dead_letters WHERE seq IN (SELECT value FROM json_each(?))"


class Store:
    """One open journal file, or a database in memory with the same behaviour."""

    def __init__(
        self, path: Path | None, dead_letter_bytes_max: int = sys.maxsize, unread_bytes_max: int = sys.maxsize
    ) -> None:
        """Open or create the journal at `path`, and own it until `close`."""
        self.path = path
        # With more than that, results that were read go.
        self._unread_bytes_max = unread_bytes_max
        self._dead_letter_bytes_max = dead_letter_bytes_max
        self._lock = _lock(path) if path else None
        try:
            if path:
                _create(path)
            self._connection = sqlite3.connect(
                path or ":memory:",
                timeout=BUSY_S,
                isolation_level=None,  # transactions are begun by name only
                check_same_thread=False,  # opened by the loop's thread, then handed to the writer
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            self._unlock()
            raise JournalUnusable(
                f"{path}: cannot be used as a journal ({error}); move it away or use another --data-dir"
            ) from None
        except BaseException:
            self._unlock()
            raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        (application,) = execute("PRAGMA application_id").fetchone()
        (version,) = execute("PRAGMA user_version").fetchone()
        (objects,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        is_new = application == version == objects == 0
        if not is_new and application != APPLICATION_ID:
            raise JournalUnusable(f"{self.path}: not a journal of Carpool; use another --data-dir")
        if not is_new and version != SCHEMA_VERSION:
            raise JournalUnusable(
                f"{self.path}: written by another version of Carpool (its schema is {version}, "
                f"this version reads {SCHEMA_VERSION}); use that version or another --data-dir"
            )
        if self.path:
            # SQLite gives its -wal and -shm files the mode of the file; an operator may have loosened the three.
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.chmod(f"{self.path}{suffix}", 0o600)
        execute(f"PRAGMA page_size = {PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        execute(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")
        execute("PRAGMA cache_size = -16384")
        # Freed pages are reused, neither overwritten nor given back: the file grows to its high-water mark, which
        # `stored_bytes_max` and the dead letters' budget bound; and a user who may read it may read old payloads.
        execute("PRAGMA secure_delete = OFF")
        execute("PRAGMA temp_store = MEMORY")
        execute(READ_TASKS)
        self.counts = self._draft = Counts()
        self.webhooks = WebhookRows(self._connection, self._draft)
        if is_new:
            with self.transaction(None):
                for statement in SCHEMA:
                    execute(statement)
        (uptime,) = execute("SELECT value FROM meta WHERE key = 'uptime'").fetchone()
        self.uptime_at_open: float = uptime
        count = "SELECT count(expires), count(*), coalesce(sum(bytes), 0) FROM "
        results, tasks, task_bytes = execute(count + "tasks").fetchone()
        _, dead, dead_bytes = execute(count + "dead_letters").fetchone()
        self.counts = Counts(
            tasks_pending=tasks - results,
            results=results,
            dead_letters=dead,
            stored_bytes=task_bytes,
            dead_letter_bytes=dead_bytes,
        )
        (last_letter,) = execute(LAST_LETTER).fetchone()
        self.last_letter = int(last_letter)
        with self.transaction(None):
            self.webhooks.open()

    @contextmanager
    def transaction(self, now: float | None) -> Iterator[None]:
        """Commit what the body does, together with the uptime clock's reading, or undo all of it."""
        self._draft = msgspec.structs.replace(self.counts)
        self.webhooks.counts = self._draft
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            if now is not None:
                self._connection.execute("UPDATE meta SET value = ? WHERE key = 'uptime'", (now,))
            self._connection.execute("COMMIT")
        except BaseException:
            # Some errors (a full disk) have rolled back by themselves.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self.counts = self._draft

    def append(self, tasks: Sequence[TaskRecord]) -> None:
        """Add pending tasks."""
        rows = [(*msgspec.structs.astuple(task), size_of(task)) for task in tasks]
        self._connection.executemany(APPEND, rows)
        self._draft.tasks_pending += len(rows)
        self._draft.stored_bytes += sum(row[-1] for row in rows)

    def finish(
        self,
        results: Sequence[tuple[str, TaskResult, DeadLetter | None]],
        result_expires: float,
        dead_letter_expires: float,
        now: float = 0.0,
    ) -> list[bool]:
        """Give pending tasks their results; says for each whether it was stored. The first of a task wins.

        Those with a `callback_url` are to be sent from `now` on.
        """
        pending = self._connection.execute(PENDING_SIZES, (_json([task_id for task_id, _, _ in results]),))
        sizes = {task_id: found for task_id, *found in pending}
        to_send: list[tuple[str, str, int]] = []
        stored: list[bool] = []
        finished: list[tuple[object, ...]] = []
        buried: list[tuple[object, ...]] = []
        for task_id, result, dead_letter in results:
            stored.append(task_id in sizes)
            if task_id not in sizes:
                continue
            size_before, client_bytes, url = sizes.pop(task_id)
            if url:
                to_send.append((task_id, url, result_size_of(result)))
            size, input_bytes = result_size_of(result) + client_bytes, size_before - client_bytes
            status = SUCCESS if result.status == "SUCCESS" else FAILED
            finished.append((status, result.finished_wall, result_expires, size, result.output, result.error, task_id))
            self._draft.stored_bytes += size - size_before
            if dead_letter is not None and self._is_room_for_letter(input_bytes):
                reason = (result.finished_wall, *msgspec.structs.astuple(dead_letter))
                buried.append((self._next_letter(), *reason, dead_letter_expires, task_id))
                self._draft.dead_letter_bytes += input_bytes
        self._connection.executemany(BURY_TASK, buried)  # first: FINISH drops the input
        self._connection.executemany(FINISH, finished)
        self._draft.tasks_pending -= len(finished)
        self._draft.results += len(finished)
        if buried:
            self._letters_added(len(buried))
        for webhook in to_send:
            self.webhooks.add(*webhook, now)
        return stored

    def bury(self, burials: Sequence[Bury], expires: float) -> list[bool]:
        """Add dead letters of requests that were no tasks, and say which; the oldest letters make room."""
        rows: list[tuple[object, ...]] = []
        kept: list[bool] = []
        for burial in burials:
            record = burial.record
            size = size_of(record)
            kept.append(self._is_room_for_letter(size))
            if kept[-1]:
                identity = (record.id, record.owner, record.model, record.tier, record.submitted_wall)
                reason = (burial.buried_wall, *msgspec.structs.astuple(burial.dead_letter))
                rows.append((self._next_letter(), *identity, *reason, expires, size, record.parameters, record.input))
                self._draft.dead_letter_bytes += size
        if rows:
            self._connection.executemany(BURY, rows)
            self._letters_added(len(rows))
        return kept

    def letters(self, after: int, limit: int, cause: str | None, now: float) -> list[DeadLetterSummary]:
        """Dead letters with a number above `after`, the oldest first."""
        rows = self._connection.execute(LETTERS, (after, now, cause, cause, limit))
        return [DeadLetterSummary(*row) for row in rows]

    def letter(self, letter_id: int, now: float) -> StoredDeadLetter | None:
        """One dead letter, whole."""
        row = self._connection.execute(LETTER, (letter_id, now)).fetchone()
        return None if row is None else StoredDeadLetter(DeadLetterSummary(*row[:8]), *row[8:])

    def drop_letters(self, letter_ids: Collection[int], now: float) -> set[int]:
        """Remove dead letters; says which of them were there."""
        rows = self._connection.execute(FIND_LETTERS, (_json(letter_ids), now)).fetchall()
        self._remove_letters(rows)
        return {seq for seq, _ in rows}

    def drop_all_letters(self) -> int:
        """Remove every dead letter; says how many there were."""
        self._connection.execute("DELETE FROM dead_letters")
        count, self._draft.dead_letters, self._draft.dead_letter_bytes = self._draft.dead_letters, 0, 0
        return count

    def _is_room_for_letter(self, size: int) -> bool:
        """Whether a letter could be kept at all: one over the whole budget must not cost all the others."""
        if size <= self._dead_letter_bytes_max:
            return True
        self._draft.dead_letters_evicted += 1
        return False

    def _next_letter(self) -> int:
        """The number of a new dead letter; a transaction that fails leaves a gap."""
        self.last_letter += 1
        return self.last_letter

    def _letters_added(self, count: int) -> None:
        """Remember the last number given, and remove the oldest letters beyond the bounds."""
        self._draft.dead_letters += count
        self._connection.execute(SAVE_LAST_LETTER, (self.last_letter,))
        count, size = self._draft.dead_letters, self._draft.dead_letter_bytes
        if count <= DEAD_LETTERS_MAX and size <= self._dead_letter_bytes_max:
            return
        doomed: list[tuple[int, int]] = []
        for row in self._connection.execute(OLDEST_LETTERS):
            if count <= DEAD_LETTERS_MAX and size <= self._dead_letter_bytes_max:
                break
            doomed.append(row)
            count -= 1
            size -= row[1]
        self._remove_letters(doomed)
        self._draft.dead_letters_evicted += len(doomed)

    def _remove_letters(self, rows: Sequence[tuple[int, int]]) -> None:
        if rows:
            self._connection.execute(REMOVE_DEAD, (_json([seq for seq, _ in rows]),))
            self._draft.dead_letters -= len(rows)
            self._draft.dead_letter_bytes -= sum(size for _, size in rows)

    def read(self, task_ids: Collection[str], now: float) -> dict[str, StoredTask]:
        """The tasks with these ids that are there."""
        rows = self._connection.execute(READ, (_json(task_ids), now))
        return {row[0]: StoredTask(row[0], row[1], STATUS_NAMES[row[2]], *row[3:]) for row in rows}

    def were_read(self, task_ids: Collection[str]) -> None:
        """Clients have the results of these tasks."""
        read = self._connection.execute(WERE_READ, (_json(task_ids),)).fetchall()
        self._draft.read_bytes += sum(size for (size,) in read)

    def make_room(self, limit: int) -> None:
        """Where much is stored, remove results that were read, the oldest first, at most `limit` at once."""
        too_much = self._draft.stored_bytes - self._unread_bytes_max
        if too_much <= 0 or not self._draft.read_bytes:
            return
        doomed: list[tuple[int, str, int, int]] = []
        for row in self._connection.execute(OLDEST_READ, (limit,)).fetchall():
            if too_much <= 0:
                break
            doomed.append(row)
            too_much -= row[3]
        self._remove(doomed)

    def delete(self, task_ids: Collection[str], now: float) -> set[str]:
        """Remove tasks in any state; says which of them were there. Their dead letters stay."""
        rows = self._connection.execute(FIND, (_json(task_ids), now)).fetchall()
        self._remove(rows)
        return {row[1] for row in rows}

    def purge(self, now: float, limit: int) -> bool:
        """Remove expired rows, at most `limit` of each kind; says whether there may be more."""
        tasks = self._connection.execute(EXPIRED_TASKS, (now, limit)).fetchall()
        self._remove(tasks)
        dead = self._connection.execute(EXPIRED_DEAD, (now, limit)).fetchall()
        self._remove_letters(dead)
        return len(tasks) == limit or len(dead) == limit

    def _remove(self, rows: Sequence[tuple[int, str, int, int]]) -> None:
        if not rows:
            return
        numbers = _json([row[0] for row in rows])
        self._connection.execute(REMOVE_TASKS, (numbers,))
        if self._draft.read_bytes:
            read = self._connection.execute(REMOVE_READ, (numbers,)).fetchall()
            self._draft.read_bytes -= sum(size for (size,) in read)
        pending = sum(row[2] == PENDING for row in rows)
        self._draft.tasks_pending -= pending
        self._draft.results -= len(rows) - pending
        self._draft.stored_bytes -= sum(row[3] for row in rows)

    def pending(self) -> Iterator[TaskRecord]:
        """The pending tasks of the file as it is now, in order of submission. Any thread may ask."""
        if self.path is None:
            return  # a database in memory begins empty, and has no second connection
        # A connection of its own sees one snapshot, whatever the writer does meanwhile.
        connection = sqlite3.connect(self.path, timeout=BUSY_S)
        try:
            for row in connection.execute(PENDING_TASKS):
                yield TaskRecord(*row)
        finally:
            connection.close()

    def close(self, now: float) -> None:
        """Save the clock, bring the log into the file, and let go of it, also where it has to raise."""
        try:
            with self.transaction(now):
                pass
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._connection.close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _json(values: Collection[str] | Collection[int]) -> str:
    return msgspec.json.encode(values).decode()


def _lock(path: Path) -> int:
    """Take the lock file beside `path`; the kernel lets go of it when this process ends, however it ends."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
    except BlockingIOError:
        raise JournalUnusable(
            f"{path}: another carpool process owns this journal; stop it or use another --data-dir"
        ) from None
    except OSError as error:
        raise JournalUnusable(f"{path}: the journal cannot be opened ({error}); see --data-dir") from None
    return lock


def _create(path: Path) -> None:
    """Create the file before SQLite does: with a mode of its own, whatever the umask of the process is."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        # A power cut must not take the name of a file whose contents were synced.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
