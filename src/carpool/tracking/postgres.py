"""Rows in PostgreSQL: `COPY` in bulk, tables that are partitioned by day (UTC), old days dropped whole.

1. `init` makes the tables, and brings them up to date. Without it nothing is written: an operator runs it.
2. A write is a transaction. If the connection is lost during the commit, its outcome is unknown: the recorder gives the
   same rows again, and the store looks for them first.
3. Commits do not wait for the disk (`synchronous_commit = off`): a crash of the server may cost its last second, and
   tracking does not slow down other users of the database.
4. Times are `timestamptz` there, and whole microseconds of Unix time here.
5. Of a task that ended twice the last row stays, if not more than a day is between them: no index can span the days.
6. A process that writes rows in flight says again and again that it lives, by the clock of the database. One that could
   not say so for GONE_S is taken for gone; when it is back, it takes back what was said of its requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from carpool.tracking.records import (
    GONE,
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

if TYPE_CHECKING:
    import asyncpg

# Each brings a database to the next version; never changed, only added to.
MIGRATIONS = (
    """
    CREATE TABLE carpool_requests (
        id text NOT NULL, owner text NOT NULL, tier text NOT NULL, model text NOT NULL, is_task boolean NOT NULL,
        error text, created_at timestamptz NOT NULL, completed_at timestamptz NOT NULL, queue_ms double precision,
        batch_id text, batch_size integer NOT NULL, endpoint text, attempts integer NOT NULL,
        upstream_ms double precision, cached boolean NOT NULL, tokens bigint, gpu_seconds double precision NOT NULL,
        status text GENERATED ALWAYS AS (CASE WHEN error IS NULL THEN 'completed' ELSE 'failed' END) STORED,
        latency_ms double precision
            GENERATED ALWAYS AS (extract(epoch FROM completed_at - created_at)::double precision * 1000) STORED
    ) PARTITION BY RANGE (completed_at);
    CREATE INDEX ON carpool_requests (id);
    CREATE INDEX ON carpool_requests (completed_at);
    CREATE INDEX ON carpool_requests (owner, completed_at);
    CREATE TABLE carpool_batches (
        id text NOT NULL, model text NOT NULL, request_count integer NOT NULL, created_at timestamptz NOT NULL,
        sent_to_gpu_at timestamptz, endpoint text, seconds double precision NOT NULL, attempts integer NOT NULL,
        reason text NOT NULL, result text NOT NULL
    ) PARTITION BY RANGE (created_at);
    CREATE INDEX ON carpool_batches (id);
    CREATE INDEX ON carpool_batches (created_at);
    """,
    """
    CREATE TABLE carpool_in_flight (
        writer text NOT NULL, id text NOT NULL, owner text NOT NULL, tier text NOT NULL, model text NOT NULL,
        is_task boolean NOT NULL, status text NOT NULL,
        created_at timestamptz NOT NULL, changed_at timestamptz NOT NULL,
        outcome_from timestamptz NOT NULL, outcome_until timestamptz NOT NULL, queue_ms double precision, batch_id text,
        batch_size integer NOT NULL, endpoint text, attempts integer NOT NULL,
        PRIMARY KEY (id, writer)
    );
    CREATE INDEX ON carpool_in_flight (writer);
    CREATE TABLE carpool_writers (id text PRIMARY KEY, seen_at timestamptz NOT NULL);
    """,
)
# What each table is partitioned by.
TABLES = {"carpool_requests": "completed_at", "carpool_batches": "created_at"}
VERSION_TABLE = "carpool_tracking_version"
# Rule 5, for tasks of which there is more than one row.
REMOVE_FIRST_ENDS = """
    DELETE FROM carpool_requests first WHERE id = ANY($1) AND is_task AND EXISTS (
        SELECT FROM carpool_requests last WHERE last.id = first.id AND last.is_task
            AND (last.completed_at > first.completed_at OR first.error = 'process-gone')
            AND coalesce(last.error, '') <> 'process-gone')"""
# Rows in flight, given by their columns: the later change counts.
FLIGHT_TYPES = {
    **dict.fromkeys(("is_task",), "boolean"),
    **dict.fromkeys(("created_at", "changed_at", "outcome_from", "outcome_until"), "timestamptz"),
    **dict.fromkeys(("batch_size", "attempts"), "integer"),
    "queue_ms": "double precision",
}
WRITE_FLIGHTS = (
    f"INSERT INTO carpool_in_flight ({', '.join(FlightRow._fields)}) SELECT * FROM unnest("
    + ", ".join(f"${number}::{FLIGHT_TYPES.get(name, 'text')}[]" for number, name in enumerate(FlightRow._fields, 1))
    + ") ON CONFLICT (id, writer) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in FlightRow._fields if name not in ("id", "writer"))
    + " WHERE excluded.changed_at >= carpool_in_flight.changed_at"
)
REMOVE_FLIGHTS = (
    "DELETE FROM carpool_in_flight f USING unnest($1::text[], $2::text[]) AS done(writer, id) "
    "WHERE f.id = done.id AND f.writer = done.writer"
)
# Those of tasks that have an outcome already; the time bounds the days that are looked into.
REMOVE_LATE_FLIGHTS = "DELETE FROM carpool_in_flight f WHERE f.id = ANY($1) AND f.is_task AND " + HAS_OUTCOME.replace(
    "r.is_task = f.is_task", "r.is_task AND r.completed_at >= $2"
)
# A process that said nothing for so long is gone.
GONE_S = 30.0
ANNOUNCE = (
    "INSERT INTO carpool_writers (id, seen_at) VALUES ($1, now()) "
    "ON CONFLICT (id) DO UPDATE SET seen_at = now() RETURNING xmax = 0"
)
FORGET_WRITERS = "DELETE FROM carpool_writers WHERE seen_at < now() - make_interval(secs => $1)"
# Who removes a row makes the failed one of it: one process does, of many that look.
FAIL_FLIGHTS = (
    "WITH f AS (DELETE FROM carpool_in_flight each WHERE each.writer = '' AND each.outcome_until < $1 OR "
    "each.writer <> '' AND NOT EXISTS (SELECT FROM carpool_writers w WHERE w.id = each.writer) RETURNING each.*) "
    f"INSERT INTO carpool_requests ({GONE_COLUMNS}) SELECT {GONE_VALUES.format(now='$1::timestamptz', no='false')} "
    f"FROM f WHERE NOT {HAS_OUTCOME}"
)
# What a process that was taken for gone takes back. It did not know for as long as the database was away.
TAKE_BACK = f"DELETE FROM carpool_requests WHERE id = ANY($1) AND error = '{GONE}'"
# Any number, the same for all processes: one at a time makes tables.
LOCK = 0x6361_7270
CONNECT_S, STATEMENT_S = 5.0, 10.0
# Dropping a day waits no longer for queries that read it; `tidy` comes again.
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '2s'"
# Rows that are encoded at once, about a millisecond of the event loop.
CHUNK = 500
DAY_S = 86400
DAY_US = DAY_S * 1_000_000
# PostgreSQL counts from 2000.
EPOCH_US = 946_684_800_000_000

T = TypeVar("T")


class PostgresStore(Store):
    """A database (tracking.stores.Store)."""

    age_ms = "extract(epoch FROM now() - f.created_at)::double precision * 1000"

    def __init__(self, url: str, *, retention_days: float) -> None:
        self._url = url
        self._retention_s = retention_days * DAY_S
        self._connection: asyncpg.Connection | None = None
        # A connection does one thing at a time.
        self._turn = asyncio.Lock()
        # Days that have a partition, by table.
        self._days: set[tuple[str, int]] = set()
        # The rows of a write that may or may not have been committed.
        self._in_doubt: tuple[Sequence[RequestRow], Sequence[BatchRow]] | None = None

    async def open(self) -> None:
        """Connect; raises StoreUnusableError if the tables are missing or of an older version."""
        await self.ask("SELECT 1")

    async def init(self) -> str:
        """Make the tables, or bring them up to date."""
        return await self._do(self._init, is_checked=False)

    async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Keep these, all or none."""
        await self._do(lambda connection: self._write(connection, requests, batches))

    async def write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
        """Keep these, and remove those that are over."""
        await self._do(lambda connection: self._write_flights(connection, rows, over))

    async def announce(self, writer: str, ids: Sequence[str]) -> None:
        """This writer lives."""

        async def work(connection: "asyncpg.Connection") -> None:
            if await connection.fetchval(ANNOUNCE, writer) and ids:
                await connection.execute(TAKE_BACK, ids)

        await self._do(work)

    async def leave(self, writer: str) -> None:
        """This writer has nothing more to write."""
        await self._do(lambda connection: connection.execute("DELETE FROM carpool_writers WHERE id = $1", writer))

    async def fail_gone(self, now: float) -> None:
        """Rows in flight whose writers are gone become failed ones, of this day."""

        async def work(connection: "asyncpg.Connection") -> None:
            await self._make_days(connection, "carpool_requests", {int(now // DAY_S)})
            async with connection.transaction():
                await connection.execute(FORGET_WRITERS, GONE_S)
                await connection.execute(FAIL_FLIGHTS, microseconds(now))

        await self._do(work)

    async def tidy(self, now: float) -> None:
        """Have a place for rows of these days, and drop the days that are too old."""
        await self.fail_gone(now)

        async def work(connection: "asyncpg.Connection") -> None:
            today = int(now // DAY_S)
            for table in TABLES:
                await self._drop_days(connection, table, now - self._retention_s)
                await self._make_days(connection, table, {today - 1, today, today + 1})

        await self._do(work)

    async def ask(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement finds."""
        return await self._do(lambda connection: connection.fetch(statement, *values))

    async def close(self) -> None:
        """Leave."""
        self._days.clear()
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    # The connection.

    async def _do(self, work: Callable[["asyncpg.Connection"], Awaitable[T]], *, is_checked: bool = True) -> T:
        """Do something with the connection, which is made anew after it failed."""
        import asyncpg  # here: only this store needs it installed

        async with self._turn:
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                    if is_checked:
                        await self._check(self._connection)
                return await work(self._connection)
            except BaseException as error:
                await self.close()  # it may have been in the middle of something
                bad_rows = (
                    asyncpg.DataError,
                    asyncpg.ProgramLimitExceededError,  # a text that is too long for an index
                    asyncpg.IntegrityConstraintViolationError,  # a value is missing, or the day of a row
                    OverflowError,  # these two are asyncpg's own, of values that it cannot encode
                    UnicodeError,
                )
                if isinstance(error, bad_rows):
                    raise BadRowsError(type(error).__name__) from None
                if isinstance(error, (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)):
                    raise StoreAwayError(str(error) or type(error).__name__) from None
                raise

    async def _connect(self) -> "asyncpg.Connection":
        import asyncpg

        connection = await asyncpg.connect(
            self._url,
            timeout=CONNECT_S,
            command_timeout=STATEMENT_S,
            server_settings={"application_name": "carpool", "synchronous_commit": "off", "timezone": "UTC"},
        )
        await connection.set_type_codec(
            "timestamptz",
            encoder=lambda microseconds: (microseconds - EPOCH_US,),
            decoder=lambda value: value[0] + EPOCH_US,
            format="tuple",
            schema="pg_catalog",
        )
        return connection

    async def _check(self, connection: "asyncpg.Connection") -> None:
        version = await self._version(connection)
        if version is None:
            raise StoreUnusableError("the database has no tables for tracking: run `carpool tracking init` once")
        if version < len(MIGRATIONS):
            raise StoreUnusableError(
                f"the tables for tracking are of version {version}, and this program wants {len(MIGRATIONS)}: "
                "run `carpool tracking init`"
            )
        # A newer one has what this program knows too: migrations only add.

    async def _version(self, connection: "asyncpg.Connection") -> int | None:
        if await connection.fetchval("SELECT to_regclass($1)", VERSION_TABLE) is None:
            return None
        version: int | None = await connection.fetchval(f"SELECT max(version) FROM {VERSION_TABLE}")
        return version

    # Tables.

    async def _init(self, connection: "asyncpg.Connection") -> str:
        async with connection.transaction():
            await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {VERSION_TABLE} "
                "(version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            before = await self._version(connection) or 0
            for number, statements in enumerate(MIGRATIONS[before:], before + 1):
                await connection.execute(statements)
                await connection.execute(f"INSERT INTO {VERSION_TABLE} (version) VALUES ({number})")
        if before >= len(MIGRATIONS):
            return f"nothing to do: the tables are of version {before}"
        return f"the tables are of version {len(MIGRATIONS)} now" + (f", were of {before}" if before else "")

    async def _make_days(self, connection: "asyncpg.Connection", table: str, days: set[int]) -> None:
        for day in sorted(days):
            if (table, day) in self._days:
                continue
            name = day_table(table, day)
            if await connection.fetchval("SELECT to_regclass($1)", name) is None:
                async with connection.transaction():
                    await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
                    await connection.execute(
                        f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF {table} "
                        f"FOR VALUES FROM ('{day_text(day)}') TO ('{day_text(day + 1)}')"
                    )
            self._days.add((table, day))

    async def _drop_days(self, connection: "asyncpg.Connection", table: str, before: float) -> None:
        found = await connection.fetch(
            "SELECT child.relname FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = to_regclass($1)",
            table,
        )
        too_old = day_table(table, int(before // DAY_S))  # names have the order of their days
        for (name,) in found:
            if name < too_old and name.removeprefix(f"{table}_").isdigit():
                async with connection.transaction():
                    await connection.execute(LOCK_TIMEOUT)
                    await connection.execute(f"DROP TABLE IF EXISTS {name}")
        self._days.clear()

    # Rows.

    async def _write(
        self, connection: "asyncpg.Connection", requests: Sequence[RequestRow], batches: Sequence[BatchRow]
    ) -> None:
        was_in_doubt, self._in_doubt = self._in_doubt == (requests, batches), None
        if was_in_doubt and await self._has(connection, requests, batches):
            return
        for table, rows in zip(TABLES, (requests, batches), strict=True):
            await self._make_days(connection, table, {getattr(row, TABLES[table]) // DAY_US for row in rows})
        async with connection.transaction():
            for table, columns, rows in (
                ("carpool_requests", RequestRow._fields, requests),
                ("carpool_batches", BatchRow._fields, batches),
            ):
                for first in range(0, len(rows), CHUNK):
                    # As plain tuples, which asyncpg encodes twice as fast.
                    records = map(tuple, rows[first : first + CHUNK])
                    await connection.copy_records_to_table(table, records=records, columns=columns)
            if tasks := [row for row in requests if row.is_task]:
                await self._remove_first_ends(connection, tasks)
            self._in_doubt = requests, batches
        self._in_doubt = None

    async def _write_flights(
        self, connection: "asyncpg.Connection", rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]
    ) -> None:
        rows, over = sorted(rows), sorted(over)  # so that two processes do not wait for one another
        async with connection.transaction():
            for first in range(0, len(rows), CHUNK):
                await connection.execute(WRITE_FLIGHTS, *zip(*rows[first : first + CHUNK], strict=True))
            if over:
                await connection.execute(REMOVE_FLIGHTS, *zip(*over, strict=True))
            if tasks := [row for row in rows if row.is_task]:
                since = min(row.outcome_from for row in tasks)
                await connection.execute(REMOVE_LATE_FLIGHTS, [row.id for row in tasks], since)

    async def _remove_first_ends(self, connection: "asyncpg.Connection", tasks: Sequence[RequestRow]) -> None:
        """Rule 5, for tasks that were just written. Each is looked up in the index of its day, and of the day before: a
        new day has no statistics, without which PostgreSQL would look through all of it.
        """
        days = {row.completed_at // DAY_US for row in tasks}
        days |= {day - 1 for day in days}
        tables = [day_table(*each) for each in self._days if each[0] == "carpool_requests" and each[1] in days]
        ends = " UNION ALL ".join(f"SELECT FROM {table} WHERE id = ended.id AND is_task" for table in tables)
        await connection.execute("SET LOCAL enable_seqscan = off")
        again = f"({ends} LIMIT 1 OFFSET 1) AS again"
        text = f"SELECT ended.id FROM unnest($1::text[]) AS ended(id) CROSS JOIN LATERAL {again}"
        found = await connection.fetch(text, [row.id for row in tasks])
        if found:
            await connection.execute(REMOVE_FIRST_ENDS, [task_id for (task_id,) in found])

    async def _has(
        self, connection: "asyncpg.Connection", requests: Sequence[RequestRow], batches: Sequence[BatchRow]
    ) -> bool:
        """Whether the last of these is there: an earlier one may be the first end of a task."""
        table, row = ("carpool_requests", requests[-1]) if requests else ("carpool_batches", batches[-1])
        text = f"SELECT EXISTS (SELECT FROM {table} WHERE id = $1 AND {TABLES[table]} = $2)"
        return bool(await connection.fetchval(text, row.id, getattr(row, TABLES[table])))


def day_table(table: str, day: int) -> str:
    """The partition of a day."""
    return f"{table}_{day_text(day)[:10].replace('-', '')}"


def day_text(day: int) -> str:
    """When a day begins, as PostgreSQL reads it."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).isoformat()
