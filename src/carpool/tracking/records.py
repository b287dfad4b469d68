"""What is kept of requests and batches: one row each, at its end. Never what is in them. Pure.

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
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import msgspec

from carpool.core.batch import Batch
from carpool.core.outcome import CallFacts
from carpool.core.request import Request

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
