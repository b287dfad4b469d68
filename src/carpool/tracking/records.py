"""What is kept of requests and batches: one row each, at its end, never what is in them; and what a store of them does.

Where `tracking.in_flight` is on, there is also a row for each request that waits or runs, in a table of its own.

1. The rows of requests are those that `carpool_requests_total` counts: one for each that was admitted and got an
   outcome. A request that was refused on admission has no row: a flood of refusals must not become a flood of rows. A
   task may end twice (a drain left it to the next process, or a failover of Redis lost its outcome, and it ran again):
   the last row stays, and a store removes those before it.
2. GPU seconds are the seconds of the call that answered, shared by the requests that it answered. A failed call and a
   cached result add none to any request. So the sum over requests is that over the calls that were answered.
3. Times are kept in microseconds of Unix time. Monotonic times become such ones here: `offset_s` is what the wall clock
   shows beyond the monotonic one.
4. What no database takes (a NUL, half of a character, a number that is too large) can be cleaned. That costs more than
   the row itself: so it is done only where a write has failed.
5. Both stores get the same statements: parameters are `$1`, `$2`, …, which a store may write in its own way.
6. A row in flight has a writer: the process that took the request. If that process is gone, the request failed (GONE).
   A task that is in the journal or in Redis outlives its process: its row has no writer (NOBODY), any process may
   change it, the later change counts, and only after its deadline has passed without an outcome it failed.
7. An outcome beats a row in flight, whichever is written first: no question finds a row in flight whose request has an
   outcome. And it beats GONE, which a process may be called that only could not reach the database.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from carpool.core.batch import Batch
from carpool.core.outcome import CallFacts
from carpool.core.request import Request
from carpool.core.timeline import BatchShown, RequestState, Wait, make_batch, parts_of

# Rule 4: an index of PostgreSQL takes no text of more than some 2,700 bytes.
TEXT_CHARS_MAX = 512
NUMBER_MAX, SMALL_NUMBER_MAX = 2**63 - 1, 2**31 - 1
SMALL_NUMBERS = {"batch_size", "attempts", "request_count"}
# The error of a request whose process was gone before it had an outcome.
GONE = "process-gone"
# The writer of tasks that outlive their process.
NOBODY = ""
# Of two processes one clock may be so much behind: an outcome may seem to come before its task.
CLOCKS_DIFFER_US = 5_000_000
# An outcome may come so long after a task's deadline: whoever notices must write it.
LATE_US = 60_000_000


class RequestRow(NamedTuple):
    """A row of `carpool_requests`."""

    id: str
    owner: str
    tier: str
    model: str
    is_task: bool
    # The code of its error; None: it was completed.
    error: str | None
    created_at: int
    completed_at: int
    # Until it was taken into a batch; None: never, or not known in this process.
    queue_ms: float | None
    batch_id: str | None
    batch_size: int
    endpoint: str | None
    attempts: int
    upstream_ms: float | None
    cached: bool
    tokens: int | None
    gpu_seconds: float


class BatchRow(NamedTuple):
    """A row of `carpool_batches`."""

    id: str
    model: str
    request_count: int
    created_at: int
    # The last call; None: it was never sent.
    sent_to_gpu_at: int | None
    endpoint: str | None
    # From the beginning of the last call to the end of the batch.
    seconds: float
    attempts: int
    reason: str
    result: str


class FlightRow(NamedTuple):
    """A row of `carpool_in_flight`: a request that has no outcome yet."""

    writer: str
    id: str
    owner: str
    tier: str
    model: str
    is_task: bool
    # "queued" or "processing"; and since when.
    status: str
    created_at: int
    changed_at: int
    # An outcome of this id that is not older than this is its own.
    outcome_from: int
    # For NOBODY's: without an outcome until then it failed.
    outcome_until: int
    queue_ms: float | None
    batch_id: str | None
    batch_size: int
    endpoint: str | None
    attempts: int


Row = TypeVar("Row", RequestRow, BatchRow, FlightRow)


class RequestRecord(msgspec.Struct, frozen=True):
    """A request as commands show it: what a store finds has these columns, in this order."""

    id: str
    owner: str
    tier: str
    model: str
    is_task: bool
    status: str
    error: str | None
    # Unix time; None: it is in flight.
    created_at: float
    completed_at: float | None
    # So far, where it is in flight.
    latency_ms: float
    queue_ms: float | None
    batch_id: str | None
    batch_size: int
    endpoint: str | None
    attempts: int
    upstream_ms: float | None
    cached: bool
    tokens: int | None
    gpu_seconds: float
    # Why its batch left, if that batch is known.
    reason: str | None = None


class UsageRecord(msgspec.Struct, frozen=True):
    """What one owner, or one model, has used."""

    name: str
    requests: int
    failed: int
    cached: int
    tokens: int
    gpu_seconds: float


def request_row(
    request: Request, error: str | None, call: CallFacts, tokens: int | None, tiers: Sequence[str], offset_s: float
) -> RequestRow:
    """The row of a request that has ended. On the hot path: this is less than a microsecond, with calls it were two."""
    tier, arrived, taken = request.tier, request.arrived, request.taken
    return RequestRow._make(
        (
            request.id,
            request.owner,
            tiers[tier] if tier < len(tiers) else tiers[-1],
            request.model,
            request.is_task,
            error,
            int((arrived + offset_s) * 1e6),
            int((request.ended + offset_s) * 1e6),
            (taken - arrived) * 1000 if taken else None,
            call.batch_id or None,
            call.batch_size,
            call.endpoint or None,
            0 if call.cached else call.attempts,
            call.upstream_s * 1000 if call.upstream_s else None,
            call.cached,
            tokens,
            call.gpu_s,
        )
    )


def batch_row(batch: Batch, offset_s: float) -> BatchRow:
    """The row of a batch that is over."""
    return BatchRow(
        batch.id,
        batch.model,
        batch.size,
        microseconds(batch.taken + offset_s),
        microseconds(batch.sent + offset_s) if batch.sent else None,
        batch.endpoint or None,
        batch.ended - batch.sent if batch.sent else 0.0,
        batch.attempts,
        batch.reason,
        batch.result,
    )


def flight_row(
    writer: str, request: Request, sent_to: str | None, attempts: int, now: float, tiers: Sequence[str], offset_s: float
) -> FlightRow:
    """The row of a request that waits, or was sent to an endpoint."""
    created_at = int((request.arrived + offset_s) * 1e6)
    batch = None if sent_to is None else request.batch
    deadline = request.deadline if request.is_task and isfinite(request.deadline) else request.arrived
    return FlightRow(
        writer,
        plain_id(request.id),
        request.owner,
        tiers[min(request.tier, len(tiers) - 1)],
        request.model,
        request.is_task,
        "queued" if sent_to is None else "processing",
        created_at,
        int((now + offset_s) * 1e6),
        created_at - CLOCKS_DIFFER_US if request.is_task else created_at,
        int((deadline + offset_s) * 1e6) + LATE_US,
        (request.taken - request.arrived) * 1000 if sent_to is not None and request.taken else None,
        None if batch is None else batch.id,
        0 if batch is None else batch.size,
        sent_to or None,
        attempts,
    )


def plain_id(request_id: str) -> str:
    """An id by which every store finds a row again: cleaned (rule 4), where that is necessary."""
    is_plain = request_id.isascii() and request_id.isprintable() and len(request_id) <= TEXT_CHARS_MAX
    return request_id if is_plain else str(cleaned("id", request_id))


def microseconds(seconds: float) -> int:
    """A time as it is kept."""
    return int(seconds * 1e6)


def clean(row: Row) -> Row:
    """A row that can be written (rule 4), else the same."""
    return row._replace(**{name: cleaned(name, value) for name, value in row._asdict().items()})


def cleaned(name: str, value: Any) -> Any:
    """A value that databases take in this column."""
    if isinstance(value, str):
        return value[:TEXT_CHARS_MAX].replace("\0", "\ufffd").encode(errors="replace").decode()
    if isinstance(value, float):
        return value if isfinite(value) else 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, 0), SMALL_NUMBER_MAX if name in SMALL_NUMBERS else NUMBER_MAX)
    return value


def record_of(row: Sequence[Any]) -> RequestRecord:
    """A request that was found."""
    found = dict(zip(RequestRecord.__struct_fields__, row, strict=True))
    times = {name: found[name] / 1e6 for name in ("created_at", "completed_at") if found[name] is not None}
    return RequestRecord(**found | times | {name: bool(found[name]) for name in ("is_task", "cached")})


def state_of_record(record: RequestRecord, known: RequestState | None = None) -> RequestState:
    """The state of a request that was kept; `known` may add what a process still knows of it."""
    batch: BatchShown | UnsetType = UNSET
    waits: list[Wait] | UnsetType = UNSET
    if record.batch_id is not None:
        batch = make_batch(record.batch_id, record.batch_size, record.reason, record.endpoint, record.attempts)
        if record.queue_ms is not None:
            # How long earlier calls took is not in the row: it is part of the rest.
            call_s = None if record.upstream_ms is None else record.upstream_ms / 1000
            before_call_s = None if call_s is None else 0.0
            waits = parts_of(
                record.latency_ms / 1000, record.queue_ms / 1000, before_call_s, call_s, record.reason or "", 1
            )
    status: Literal["queued", "processing", "completed", "failed"] = "completed" if record.error is None else "failed"
    if record.completed_at is None:
        status = "processing" if record.status == "processing" else "queued"
        waits = UNSET  # what it waits for is not known
    return RequestState(
        status,
        round(record.latency_ms, 2),
        record.error,
        None if known is None else known.client_id,
        model=record.model,
        owner=record.owner,
        is_task=record.is_task,
        cached=True if record.cached else UNSET,
        batch=batch,
        waits=waits,
        kept=True,
    )


# All but `reason`, which is a column of batches.
_RECORD = ", ".join(f"r.{name}" for name in RequestRecord.__struct_fields__[:-1])
# Rule 7, for rows `f` of carpool_in_flight. A drain leaves a task to the next process: that is no outcome for good.
HAS_OUTCOME = (
    "EXISTS (SELECT 1 FROM carpool_requests r WHERE r.id = f.id AND r.is_task = f.is_task "
    "AND r.completed_at >= f.outcome_from AND coalesce(r.error, '') <> 'draining')"
)
# What a row in flight becomes: these columns of carpool_requests, where {now} says when.
GONE_COLUMNS = ", ".join(RequestRow._fields)
GONE_VALUES = (
    f"f.id, f.owner, f.tier, f.model, f.is_task, '{GONE}', f.created_at, {{now}}, f.queue_ms, f.batch_id, "
    "f.batch_size, f.endpoint, f.attempts, NULL, {no}, NULL, 0.0"
)


class StoreUnusableError(Exception):
    """The store must not be used as it is; the text says what to do."""


class StoreAwayError(Exception):
    """The store does not answer, or failed; it may work later."""


class BadRowsError(Exception):
    """These rows can never be written."""


class RequestQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to find; a field that is left out does not restrict them."""

    since: float = 0.0
    owner: str | None = None
    model: str | None = None
    tier: str | None = None
    batch_id: str | None = None
    error: str | None = None
    status: Literal["queued", "processing", "completed", "failed"] | None = None
    is_failed: bool = False
    limit: int = 100

    @property
    def is_of_flights(self) -> bool:
        """Whether requests in flight may be among them."""
        return self.error is None and not self.is_failed and self.status in (None, "queued", "processing")


class Store(Protocol):
    """A store. Its methods raise the errors above, and no others."""

    # How long a row `f` of carpool_in_flight is in flight, in this store's SQL.
    age_ms: str

    async def open(self) -> None:
        """Get ready to write; raises StoreUnusableError."""

    async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Write these, all or none. After StoreAwayError the recorder gives the same rows once more."""

    async def write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
        """Write rows in flight, each key once, and remove those that are over, by writer and id. It may come again."""

    async def announce(self, writer: str, ids: Sequence[str]) -> None:
        """This writer lives, which it says again and again. If it was taken for gone, its requests `ids` are not."""

    async def leave(self, writer: str) -> None:
        """This writer has nothing more to write."""

    async def fail_gone(self, now: float) -> None:
        """Rows in flight whose writers are gone become failed ones (rule 6)."""

    async def tidy(self, now: float) -> None:
        """Remove rows that are too old at this Unix time, or too many."""

    async def init(self) -> str:
        """Make the tables, or bring them up to date; returns what was done."""

    async def ask(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """The rows that a statement finds."""

    async def close(self) -> None:
        """Use it no more."""

    async def find(self, request_id: str) -> RequestRecord | None:
        """The last request with this id: clients choose ids, and may repeat them."""
        found = await self._flights("f.id = $1", [request_id, 1]) or await self.ask(
            f"SELECT {_RECORD}, b.reason FROM carpool_requests r LEFT JOIN carpool_batches b ON b.id = r.batch_id "
            "WHERE r.id = $1 ORDER BY r.completed_at DESC LIMIT 1",
            request_id,
        )
        return record_of(found[0]) if found else None

    async def requests(self, question: RequestQuestion) -> list[RequestRecord]:
        """Requests that are in flight, and then those that ended since then; of both the newest first."""
        names = [
            name for name in ("owner", "model", "tier", "batch_id", "error") if getattr(question, name) is not None
        ]
        found: list[Sequence[Any]] = []
        if question.is_of_flights:
            names_asked = [*names, "status"] if question.status else names
            wanted = [f"f.{name} = ${number}" for number, name in enumerate(names_asked, 1)]
            values = [getattr(question, name) for name in names_asked]
            found += await self._flights(" AND ".join(wanted) or "1 = 1", [*values, question.limit])
        if question.status not in ("queued", "processing") and len(found) < question.limit:
            wanted = ["r.completed_at >= $1", *(f"r.{name} = ${number}" for number, name in enumerate(names, 2))]
            if question.is_failed or question.status == "failed":
                wanted.append("r.error IS NOT NULL")
            if question.status == "completed":
                wanted.append("r.error IS NULL")
            values = [microseconds(question.since), *(getattr(question, name) for name in names)]
            found += await self.ask(
                f"SELECT {_RECORD}, NULL FROM carpool_requests r WHERE {' AND '.join(wanted)} "
                f"ORDER BY r.completed_at DESC LIMIT ${len(values) + 1}",
                *values,
                question.limit - len(found),
            )
        return [record_of(row) for row in found]

    async def _flights(self, wanted: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Requests in flight that are wanted, as records; the last value says how many at most."""
        return await self.ask(
            "SELECT f.id, f.owner, f.tier, f.model, f.is_task, f.status, NULL, f.created_at, NULL, "
            f"{self.age_ms}, f.queue_ms, f.batch_id, f.batch_size, f.endpoint, f.attempts, NULL, NULL, NULL, 0.0, NULL "
            f"FROM carpool_in_flight f WHERE {wanted} AND NOT {HAS_OUTCOME} "
            f"ORDER BY f.created_at DESC LIMIT ${len(values)}",
            *values,
        )

    async def usage(self, since: float = 0.0, by: Literal["owner", "model", "tier"] = "owner") -> list[UsageRecord]:
        """Sums of requests, tokens and GPU seconds since then, the most GPU seconds first."""
        found = await self.ask(
            f"SELECT r.{by}, count(*), count(r.error), sum(CASE WHEN r.cached THEN 1 ELSE 0 END), "
            "CAST(coalesce(sum(r.tokens), 0) AS bigint), coalesce(sum(r.gpu_seconds), 0) "
            f"FROM carpool_requests r WHERE r.completed_at >= $1 GROUP BY r.{by} ORDER BY 6 DESC, 2 DESC, 1",
            microseconds(since),
        )
        return [UsageRecord(*row) for row in found]
