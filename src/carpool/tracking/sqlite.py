"""Rows in a file of SQLite: bounded by age and by size. Several processes of one machine may share it.

All of it is done by one thread of its own. Many rows are one statement: SQLite works without the interpreter's lock
then, and the event loop goes on meanwhile.

A process that writes rows in flight holds the lock of a file of its own, beside the database: the kernel gives the lock
up when the process is gone, however it went.
"""

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from carpool.tracking.records import (
    GONE_COLUMNS,
    GONE_VALUES,
    HAS_OUTCOME,
    BadRowsError,
    BatchRow,
    FlightRow,
    RequestRow,
    Store,
    StoreAwayError,
    StoreUnusableError,
    microseconds,
)

# Each brings a file to the next version; never changed, only added to.
MIGRATIONS = (
    """
    CREATE TABLE carpool_requests (
        id TEXT NOT NULL, owner TEXT NOT NULL, tier TEXT NOT NULL, model TEXT NOT NULL, is_task INTEGER NOT NULL,
        error TEXT, created_at INTEGER NOT NULL, completed_at INTEGER NOT NULL, queue_ms REAL, batch_id TEXT,
        batch_size INTEGER NOT NULL, endpoint TEXT, attempts INTEGER NOT NULL, upstream_ms REAL,
        cached INTEGER NOT NULL, tokens INTEGER, gpu_seconds REAL NOT NULL,
        status TEXT AS (CASE WHEN error IS NULL THEN 'completed' ELSE 'failed' END) VIRTUAL,
        latency_ms REAL AS ((completed_at - created_at) / 1000.0) VIRTUAL
    );
    CREATE INDEX carpool_requests_id ON carpool_requests (id);
    CREATE INDEX carpool_requests_completed ON carpool_requests (completed_at);
    CREATE TABLE carpool_batches (
        id TEXT NOT NULL, model TEXT NOT NULL, request_count INTEGER NOT NULL, created_at INTEGER NOT NULL,
        sent_to_gpu_at INTEGER, endpoint TEXT, seconds REAL NOT NULL, attempts INTEGER NOT NULL, reason TEXT NOT NULL,
        result TEXT NOT NULL
    );
    CREATE INDEX carpool_batches_id ON carpool_batches (id);
    CREATE INDEX carpool_batches_created ON carpool_batches (created_at);
    """,
    """
    CREATE TABLE carpool_in_flight (
        writer TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, tier TEXT NOT NULL, model TEXT NOT NULL,
        is_task INTEGER NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL, changed_at INTEGER NOT NULL,
        outcome_from INTEGER NOT NULL, outcome_until INTEGER NOT NULL, queue_ms REAL, batch_id TEXT,
        batch_size INTEGER NOT NULL, endpoint TEXT, attempts INTEGER NOT NULL,
        PRIMARY KEY (id, writer)
    );
    """,
)
# The time of a row in each table: the oldest rows are removed first.
TIMES = {"carpool_requests": "completed_at", "carpool_batches": "created_at"}
# Rule 1 of records.py, for the tasks that were just written.
REMOVE_FIRST_ENDS = """
    DELETE FROM carpool_requests WHERE rowid IN (
        SELECT first.rowid FROM json_each(?)
        CROSS JOIN carpool_requests first ON first.id = value AND first.is_task
        CROSS JOIN carpool_requests last ON last.id = value AND last.is_task AND last.rowid > first.rowid
    )"""
# A row in flight: the later change counts.
ON_CONFLICT = (
    "ON CONFLICT (id, writer) DO UPDATE SET {} WHERE excluded.changed_at >= carpool_in_flight.changed_at".format(
        ", ".join(f"{name} = excluded.{name}" for name in FlightRow._fields if name not in ("id", "writer"))
    )
)
# Rows by their keys, and those of tasks that have an outcome already.
REMOVE_FLIGHTS = """
    DELETE FROM carpool_in_flight WHERE rowid IN (
        SELECT f.rowid FROM json_each(?) done CROSS JOIN carpool_in_flight f
            ON f.writer = json_extract(done.value, '$[0]') AND f.id = json_extract(done.value, '$[1]')
    )"""
REMOVE_LATE_FLIGHTS = f"""
    DELETE FROM carpool_in_flight WHERE rowid IN (
        SELECT f.rowid FROM json_each(?) CROSS JOIN carpool_in_flight f ON f.id = value
        WHERE f.is_task AND {HAS_OUTCOME}
    )"""
# Of NOBODY, or of those who are gone (rule 6 of records.py).
ARE_GONE = "(f.writer = '' AND f.outcome_until < ? OR f.writer IN (SELECT value FROM json_each(?)))"
FAIL_FLIGHTS = (
    f"INSERT INTO carpool_requests ({GONE_COLUMNS}) SELECT {GONE_VALUES.format(now='?', no='0')} "
    f"FROM carpool_in_flight f WHERE {ARE_GONE} AND NOT {HAS_OUTCOME}"
)
BUSY_S = 5.0
# Rows in one statement, as far as SQLite's bound on parameters allows.
ROWS_A_STATEMENT = 100
# Rows removed in one transaction; other processes may write in between.
REMOVED_AT_ONCE = 5000
# When the file is near `bytes_max`, this share of the oldest rows is removed.
SHARE_REMOVED = 0.1
DAY_S = 86400.0

T = TypeVar("T")


class SqliteStore(Store):
    """A file (tracking.stores.Store)."""

    age_ms = "(julianday('now') - 2440587.5) * 86400000.0 - f.created_at / 1000.0"

    def __init__(self, path: Path, *, retention_days: float, bytes_max: int) -> None:
        self._path = path
        self._retention_s = retention_days * DAY_S
        self._bytes_max = bytes_max
        self._thread = ThreadPoolExecutor(1, "carpool-tracking")
        self._connection: sqlite3.Connection | None = None
        # The lock that says that this writer lives.
        self._writer, self._lock = "", -1

    async def open(self) -> None:
        """Make the file, or bring it up to date."""
        await self._do(self._connected)

    async def init(self) -> str:
        """Make the tables, or bring them up to date."""
        await self._do(self._connected)
        return f"{self._path} is ready"

    async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Keep these, all or none."""
        await self._do(lambda: self._write(requests, batches))

    async def write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
        """Keep these, and remove those that are over."""
        await self._do(lambda: self._write_flights(rows, over))

    async def announce(self, writer: str, ids: Sequence[str]) -> None:
        """This writer lives. It holds a lock: nobody takes it for gone."""
        await self._do(lambda: self._take_lock(writer))

    async def leave(self, writer: str) -> None:
        """This writer has nothing more to write."""
        await self._do(self._give_up_lock)

    async def fail_gone(self, now: float) -> None:
        """Rows in flight whose writers are gone become failed ones."""
        await self._do(lambda: self._fail_gone(microseconds(now)))

    async def tidy(self, now: float) -> None:
        """Remove rows that are too old, or too many for the file."""
        await self.fail_gone(now)
        too_old = microseconds(now - self._retention_s)
        while await self._do(lambda: self._remove_old(too_old)) >= REMOVED_AT_ONCE:
            pass
        while await self._do(self._remove_oldest):
            pass

    async def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement finds."""
        return await self._do(lambda: self._connected().execute(statement.replace("$", "?"), values).fetchall())

    async def close(self) -> None:
        """Close the file."""
        await self._do(self._close)
        self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: translated(work))

    # The thread's own.

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                # A crash of the machine may cost the last rows, never the file.
                connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
                migrate(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        connection = self._connected()
        while self._remove_oldest():  # first: what fails here is tried again, and nothing was written twice
            pass
        connection.execute("BEGIN IMMEDIATE")
        try:
            insert(connection, "carpool_requests", RequestRow._fields, requests)
            insert(connection, "carpool_batches", BatchRow._fields, batches)
            if tasks := [row.id for row in requests if row.is_task]:
                connection.execute(REMOVE_FIRST_ENDS, (json.dumps(tasks),))
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()  # nothing, where SQLite has done that itself (a full disk): its own error counts
            raise

    def _write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE")
        try:
            insert(connection, "carpool_in_flight", FlightRow._fields, rows, ON_CONFLICT)
            connection.execute(REMOVE_FLIGHTS, (json.dumps(over),))
            connection.execute(REMOVE_LATE_FLIGHTS, (json.dumps([row.id for row in rows if row.is_task]),))
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise

    def _fail_gone(self, now: int) -> None:
        connection = self._connected()
        writers = {writer for (writer,) in connection.execute("SELECT DISTINCT writer FROM carpool_in_flight")}
        gone = now, json.dumps(sorted(writers - {"", *self._living()}))
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(FAIL_FLIGHTS, (now, *gone))
            connection.execute(f"DELETE FROM carpool_in_flight AS f WHERE {ARE_GONE}", gone)
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise

    # The locks of writers.

    def _lock_path(self, writer: str) -> Path:
        return self._path.with_name(f"{self._path.stem}-{writer}.lock")

    def _take_lock(self, writer: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._lock < 0:
            lock = os.open(path := self._lock_path(writer), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have locked and removed it in between (`_living`).
                is_there = os.path.samestat(path.stat(), os.fstat(lock))
            except (BlockingIOError, FileNotFoundError):
                is_there = False
            if is_there:
                self._writer, self._lock = writer, lock
            else:
                os.close(lock)

    def _give_up_lock(self) -> None:
        if self._lock >= 0:
            self._lock_path(self._writer).unlink(missing_ok=True)
            os.close(self._lock)
            self._writer, self._lock = "", -1

    def _living(self) -> set[str]:
        """Writers whose locks are held; the files of others are removed."""
        living = {self._writer}
        for path in self._path.parent.glob(f"{self._path.stem}-*.lock"):
            writer = path.stem.removeprefix(f"{self._path.stem}-")
            if writer in living:
                continue
            try:
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                living.add(writer)
            finally:
                os.close(lock)
        return living

    def _remove_old(self, too_old: int) -> int:
        """Remove rows from before, REMOVED_AT_ONCE of each table at most; returns the larger of both numbers."""
        connection = self._connected()
        removed = 0
        for table, column in TIMES.items():
            some = f"SELECT rowid FROM {table} WHERE {column} < ? ORDER BY {column} LIMIT ?"
            done = connection.execute(f"DELETE FROM {table} WHERE rowid IN ({some})", (too_old, REMOVED_AT_ONCE))
            removed = max(removed, done.rowcount)
        return removed

    def _remove_oldest(self) -> bool:
        """Where the file is too large, remove the oldest; pages that are free then are used again."""
        connection = self._connected()

        def pragma(name: str) -> int:
            return int(connection.execute(f"PRAGMA {name}").fetchone()[0])

        used = (pragma("page_count") - pragma("freelist_count")) * pragma("page_size")
        if used <= self._bytes_max * (1 - SHARE_REMOVED):
            return False
        found = []
        for table in TIMES:
            first, last = connection.execute(f"SELECT min(rowid), max(rowid) FROM {table}").fetchone()
            if first is not None:
                found.append((last - first + 1, first, table))
        if not found:
            return False
        # The larger table says how old is too old, for both: requests keep the batches that they were in.
        number, first, table = max(found)
        share = max(1, min(int(number * SHARE_REMOVED), REMOVED_AT_ONCE))
        select = f"SELECT max({TIMES[table]}) FROM {table} WHERE rowid < ?"
        [latest] = connection.execute(select, (first + share,)).fetchone()
        # None: another process has removed them just now. It may be enough.
        return latest is None or self._remove_old(latest + 1) > 0

    def _close(self) -> None:
        self._give_up_lock()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to this version. A file of a newer version is used as it is: migrations only add."""
    connection.execute("BEGIN IMMEDIATE")  # other processes may migrate too
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    try:
        for statements in MIGRATIONS[version:]:
            for statement in statements.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {max(version, len(MIGRATIONS))}")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def insert(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    on_conflict: str = "",
) -> None:
    """Insert rows, many by one statement."""
    head = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "
    one = f"({', '.join('?' * len(columns))})"
    for first in range(0, len(rows), ROWS_A_STATEMENT):
        some = rows[first : first + ROWS_A_STATEMENT]
        statement = f"{head}{', '.join([one] * len(some))} {on_conflict}"
        connection.execute(statement, [value for row in some for value in row])


def translated(work: Callable[[], T]) -> T:
    """Do the work; an error of SQLite becomes an error of a store."""
    try:
        return work()
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreAwayError(str(error)) from None
    except sqlite3.DatabaseError as error:
        if type(error) is sqlite3.DatabaseError:  # not a database, or a broken one
            raise StoreUnusableError(f"the tracking file cannot be used: {error}") from None
        raise BadRowsError(str(error)) from None
    except (ValueError, OverflowError) as error:  # of values that SQLite has no room for
        raise BadRowsError(type(error).__name__) from None
