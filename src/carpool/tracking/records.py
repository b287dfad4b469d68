"""What is kept of requests and batches: one row each, at its end, never what is in them; and what a store of them does.

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


Row = TypeVar("Row", RequestRow, BatchRow)


class RequestRecord(msgspec.Struct, frozen=True):
    """A request as commands show it: what a store finds has these columns, in this order."""

    id: str
    owner: str
    tier: str
    model: str
    is_task: bool
    status: str
    error: str | None
    # Unix time.
    created_at: float
    completed_at: float
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
    times = {name: found[name] / 1e6 for name in ("created_at", "completed_at")}
    return RequestRecord(**found | times | {name: bool(found[name]) for name in ("is_task", "cached")})


def state_of_record(record: RequestRecord, known: RequestState | None = None) -> RequestState:
    """The state of a request that has ended; `known` may add what a process still knows of it."""
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
    return RequestState(
        "completed" if record.error is None else "failed",
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
    is_failed: bool = False
    limit: int = 100


class Store(Protocol):
    """A store. Its methods raise the errors above, and no others."""

    async def open(self) -> None:
        """Get ready to write; raises StoreUnusableError."""

    async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Write these, all or none. After StoreAwayError the recorder gives the same rows once more."""

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
        found = await self.ask(
            f"SELECT {_RECORD}, b.reason FROM carpool_requests r LEFT JOIN carpool_batches b ON b.id = r.batch_id "
            "WHERE r.id = $1 ORDER BY r.completed_at DESC LIMIT 1",
            request_id,
        )
        return record_of(found[0]) if found else None

    async def requests(self, question: RequestQuestion) -> list[RequestRecord]:
        """Requests that ended since then, the newest first."""
        values: list[Any] = [microseconds(question.since)]
        wanted = ["r.completed_at >= $1"]
        for name in ("owner", "model", "tier", "batch_id", "error"):
            if (value := getattr(question, name)) is not None:
                values.append(value)
                wanted.append(f"r.{name} = ${len(values)}")
        if question.is_failed:
            wanted.append("r.error IS NOT NULL")
        values.append(question.limit)
        text = f"SELECT {_RECORD}, NULL FROM carpool_requests r WHERE {' AND '.join(wanted)}"
        return [
            record_of(row)
            for row in await self.ask(f"{text} ORDER BY r.completed_at DESC LIMIT ${len(values)}", *values)
        ]

    async def usage(self, since: float = 0.0, by: Literal["owner", "model", "tier"] = "owner") -> list[UsageRecord]:
        """Sums of requests, tokens and GPU seconds since then, the most GPU seconds first."""
        found = await self.ask(
            f"SELECT r.{by}, count(*), count(r.error), sum(CASE WHEN r.cached THEN 1 ELSE 0 END), "
            "CAST(coalesce(sum(r.tokens), 0) AS bigint), coalesce(sum(r.gpu_seconds), 0) "
            f"FROM carpool_requests r WHERE r.completed_at >= $1 GROUP BY r.{by} ORDER BY 6 DESC, 2 DESC, 1",
            microseconds(since),
        )
        return [UsageRecord(*row) for row in found]
