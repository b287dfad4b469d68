"""Rows in PostgreSQL: `COPY` in bulk, tables that are partitioned by day (UTC), old days dropped whole.

1. `init` makes the tables, and brings them up to date. Without it nothing is written: an operator runs it.
2. A write is a transaction. If the connection is lost during the commit, its outcome is unknown: the recorder gives the
   same rows again, and the store looks for them first.
3. Commits do not wait for the disk (`synchronous_commit = off`): a crash of the server may cost its last second, and
   tracking does not slow down other users of the database.
4. Times are `timestamptz` there, and whole microseconds of Unix time here.
5. Of a task that ended twice the last row stays, if not more than a day is between them: no index can span the days.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from carpool.core.batch import Batch
from carpool.tracking.copy_format import (
    BATCH_COLUMNS,
    EPOCH_US,
    HEADER,
    REQUEST_COLUMNS,
    TRAILER,
    pack_batches,
    pack_requests,
)
from carpool.tracking.questions import (
    RequestQuestion,
    Statement,
    UsageQuestion,
    find_statement,
    requests_statement,
    usage_statement,
)
from carpool.tracking.records import RecordFields, RequestRecord, UsageRecord, record_of, usage_of
from carpool.tracking.stores import BadRowsError, StoreAwayError, StoreUnusableError

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
)
# What each table is partitioned by.
TABLES = {"carpool_requests": "completed_at", "carpool_batches": "created_at"}
VERSION_TABLE = "carpool_tracking_version"
# Rule 5, for tasks of which there is more than one row.
REMOVE_FIRST_ENDS = """
    DELETE FROM carpool_requests first WHERE id = ANY($1) AND is_task AND EXISTS (
        SELECT FROM carpool_requests last WHERE last.id = first.id AND last.is_task
            AND last.completed_at > first.completed_at)"""
# Any number, the same for all processes: one at a time makes tables.
LOCK = 0x6361_7270
CONNECT_S, STATEMENT_S = 5.0, 10.0
# Dropping a day waits no longer for queries that read it; `tidy` comes again.
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '2s'"
DAY_S = 86400

T = TypeVar("T")


class Rows(NamedTuple):
    """Some rows for one table."""

    table: str
    columns: Sequence[str]
    data: bytes
    # Times of the first and the last row, for their days: rows come in order, but for moments.
    times: list[float]
    # The id of the first.
    first_id: str
    # The ids of tasks among them.
    task_ids: Sequence[str] = ()


class PostgresStore:
    """A database (tracking.stores.Store)."""

    def __init__(self, url: str, *, retention_days: float) -> None:
        self._url = url
        self._retention_s = retention_days * DAY_S
        self._connection: asyncpg.Connection | None = None
        # A connection does one thing at a time.
        self._turn = asyncio.Lock()
        # Days that have a partition, by table.
        self._days: set[tuple[str, int]] = set()
        # The first rows of a write that may or may not have been committed.
        self._in_doubt: Rows | None = None

    async def open(self) -> None:
        """Connect; raises StoreUnusableError if the tables are missing or of an older version."""
        await self._do(_nothing)

    async def init(self) -> str:
        """Make the tables, or bring them up to date."""
        return await self._do(self._init, is_checked=False)

    def pack(
        self, requests: Sequence[RecordFields], batches: Sequence[Batch], offset_s: float, tiers: Sequence[str]
    ) -> list[Rows]:
        """Their rows."""
        packed = []
        if requests:
            times = [entry[7] + offset_s for entry in (requests[0], requests[-1])]
            data = pack_requests(requests, offset_s, tiers)
            task_ids = [entry[0] for entry in requests if entry[8]]
            packed.append(Rows("carpool_requests", REQUEST_COLUMNS, data, times, requests[0][0], task_ids))
        if batches:
            times = [batch.taken + offset_s for batch in (batches[0], batches[-1])]
            packed.append(Rows("carpool_batches", BATCH_COLUMNS, pack_batches(batches, offset_s), times, batches[0].id))
        return packed

    async def write(self, packed: Sequence[list[Rows]]) -> None:
        """Keep these, all or none."""
        await self._do(lambda connection: self._write(connection, [rows for some in packed for rows in some]))

    async def tidy(self, now: float) -> None:
        """Have a place for rows of these days, and drop the days that are too old."""

        async def work(connection: "asyncpg.Connection") -> None:
            today = int(now // DAY_S)
            for table in TABLES:
                await self._make_days(connection, table, {today - 1, today, today + 1})
                await self._drop_days(connection, table, now - self._retention_s)

        await self._do(work)

    async def find(self, request_id: str) -> RequestRecord | None:
        """The last request with this id."""
        found = await self._ask(find_statement(request_id))
        return record_of(found[0]) if found else None

    async def requests(self, question: RequestQuestion) -> list[RequestRecord]:
        """Requests, the newest first."""
        return [record_of(row) for row in await self._ask(requests_statement(question))]

    async def usage(self, question: UsageQuestion) -> list[UsageRecord]:
        """Sums of requests, tokens and GPU seconds."""
        return [usage_of(row) for row in await self._ask(usage_statement(question))]

    async def close(self) -> None:
        """Leave."""
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
            except StoreUnusableError:
                await self.close()
                raise
            except (
                asyncpg.DataError,
                asyncpg.ProgramLimitExceededError,  # a text that is too long for an index
                asyncpg.IntegrityConstraintViolationError,  # a value is missing, or the day of a row
            ) as error:
                self._days.clear()
                raise BadRowsError(type(error).__name__) from None
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
                await self.close()
                raise StoreAwayError(str(error) or type(error).__name__) from None
            except BaseException:  # cancelled in the middle of something
                await self.close()
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
            "timestamptz", encoder=_to_timestamp, decoder=_from_timestamp, format="tuple", schema="pg_catalog"
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

    async def _ask(self, statement: Statement) -> list[Any]:
        text, values = statement
        return await self._do(lambda connection: connection.fetch(text, *values))

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
        self._days = {each for each in self._days if day_table(*each) >= too_old or each[0] != table}

    # Rows.

    async def _write(self, connection: "asyncpg.Connection", packed: list[Rows]) -> None:
        if self._in_doubt == packed[0] and await self._has(connection, packed[0]):
            self._in_doubt = None
            return
        self._in_doubt = None
        for rows in packed:
            await self._make_days(connection, rows.table, {int(time // DAY_S) for time in rows.times})
        async with connection.transaction():
            for table in TABLES:
                if own := [rows for rows in packed if rows.table == table]:
                    source = around(rows.data for rows in own)
                    await connection.copy_to_table(table, source=source, columns=own[0].columns, format="binary")
            if task_ids := [task_id for rows in packed for task_id in rows.task_ids]:
                await self._remove_first_ends(connection, task_ids, [time for rows in packed for time in rows.times])
            self._in_doubt = packed[0]
        self._in_doubt = None

    async def _remove_first_ends(
        self, connection: "asyncpg.Connection", task_ids: list[str], times: Iterable[float]
    ) -> None:
        """Rule 5, for tasks that were just written. Each is looked up in the index of its day, and of the day before: a
        new day has no statistics, without which PostgreSQL would look through all of it.
        """
        days = {int(time // DAY_S) - before for time in times for before in (0, 1)}
        tables = [day_table(*each) for each in self._days if each[0] == "carpool_requests" and each[1] in days]
        ends = " UNION ALL ".join(f"SELECT FROM {table} WHERE id = ended.id AND is_task" for table in tables)
        await connection.execute("SET LOCAL enable_seqscan = off")
        again = f"({ends} LIMIT 1 OFFSET 1) AS again"
        text = f"SELECT ended.id FROM unnest($1::text[]) AS ended(id) CROSS JOIN LATERAL {again}"
        found = await connection.fetch(text, task_ids)
        if found:
            await connection.execute(REMOVE_FIRST_ENDS, [task_id for (task_id,) in found])

    async def _has(self, connection: "asyncpg.Connection", rows: Rows) -> bool:
        """Whether the first of these is there."""
        text = f"SELECT EXISTS (SELECT FROM {rows.table} WHERE id = $1 AND {TABLES[rows.table]} = $2)"
        return bool(await connection.fetchval(text, rows.first_id, int(rows.times[0] * 1e6)))


async def around(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    """A whole COPY. (What asyncpg takes for a source without asking a thread to read it.)"""
    yield HEADER
    for each in data:
        yield each
    yield TRAILER


async def _nothing(connection: "asyncpg.Connection") -> None:
    """Do nothing: `open` only connects and checks the tables."""


def _to_timestamp(microseconds: int) -> tuple[int]:
    return (microseconds - EPOCH_US,)


def _from_timestamp(value: tuple[int]) -> int:
    return value[0] + EPOCH_US


def day_table(table: str, day: int) -> str:
    """The partition of a day."""
    return f"{table}_{day_text(day)[:10].replace('-', '')}"


def day_text(day: int) -> str:
    """When a day begins, as PostgreSQL reads it."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).isoformat()
