"""What is kept of requests and batches: one row each, at its end. Never what is in them. Pure.

1. The rows of requests are those that `carpool_requests_total` counts: one for each that was admitted and got an
   outcome. A request that was refused on admission has no row: a flood of refusals must not become a flood of rows. A
   task may end twice (a drain left it to the next process, or a failover of Redis lost its outcome, and it ran again):
   the last row stays, and a store removes those before it.
2. GPU seconds are the seconds of the call that answered, shared by the requests that it answered. A failed call and a
   cached result add none to any request. So the sum over requests is that over the calls that were answered.
3. Times are kept in microseconds of Unix time. Monotonic times become such ones here, when they are written.
4. What no database takes (a NUL, half of a character, a number that is too large) can be cleaned. That costs more than
   the row itself: so it is done only where a write has failed.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from carpool.core.batch import Batch
from carpool.core.outcome import CallFacts

OK = "ok"
# Rule 4: an index of PostgreSQL takes no text of more than some 2,700 bytes.
TEXT_CHARS_MAX = 512
NUMBER_MAX, SMALL_NUMBER_MAX = 2**63 - 1, 2**31 - 1


class RequestEntry(NamedTuple):
    """A request as it waits to be written: what costs least to take down."""

    id: str
    owner: str
    tier: int
    model: str
    code: str
    arrived: float
    taken: float
    ended: float
    is_task: bool
    call: CallFacts
    tokens: int | None


# The same without the cost of making one.
RecordFields = tuple[str, str, int, str, str, float, float, float, bool, CallFacts, int | None]


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


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request as commands show it."""

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


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one owner, or one model, has used."""

    name: str
    requests: int
    failed: int
    cached: int
    tokens: int
    gpu_seconds: float


def request_rows(entries: Sequence[RecordFields], offset_s: float, tiers: Sequence[str]) -> list[RequestRow]:
    """The rows of these; `offset_s` is what the wall clock shows beyond the monotonic one."""
    make, last, rows = RequestRow._make, len(tiers) - 1, []
    for id_, owner, tier, model, code, arrived, taken, ended, is_task, call, tokens in entries:
        batch_id = call.batch_id or None
        rows.append(
            make(
                (
                    id_,
                    owner,
                    tiers[min(tier, last)],
                    model,
                    is_task,
                    None if code == OK else code,
                    int((arrived + offset_s) * 1e6),
                    int((ended + offset_s) * 1e6),
                    (taken - arrived) * 1000 if taken else None,
                    batch_id,
                    call.batch_size,
                    call.endpoint or None,
                    0 if call.cached else call.attempts,
                    call.upstream_s * 1000 if call.upstream_s else None,
                    call.cached,
                    tokens,
                    call.gpu_s,
                )
            )
        )
    return rows


def batch_rows(batches: Sequence[Batch], offset_s: float) -> list[BatchRow]:
    """The rows of these."""
    return [
        BatchRow(
            batch.id,
            batch.model,
            batch.size,
            int((batch.taken + offset_s) * 1e6),
            int((batch.sent + offset_s) * 1e6) if batch.sent else None,
            batch.endpoint or None,
            batch.ended - batch.sent if batch.sent else 0.0,
            batch.attempts,
            batch.reason,
            batch.result,
        )
        for batch in batches
    ]


def clean_entry(entry: RecordFields) -> RecordFields:
    """A request that can be written (rule 4), else the same."""
    id_, owner, tier, model, code, arrived, taken, ended, is_task, call, tokens = map(cleaned, entry)
    call = CallFacts(**{name: small(cleaned(value)) for name, value in asdict(call).items()})
    return id_, owner, max(0, tier), model, code, arrived, taken, ended, is_task, call, tokens


def clean_batch(batch: Batch) -> Batch:
    """A batch that can be written (rule 4), else the same."""
    return Batch(**{name: small(cleaned(value)) for name, value in asdict(batch).items()})


def cleaned(value: Any) -> Any:
    """A value that databases take."""
    if isinstance(value, str):
        return value[:TEXT_CHARS_MAX].replace("\0", "\ufffd").encode(errors="replace").decode()
    if isinstance(value, float):
        return value if isfinite(value) else 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, 0), NUMBER_MAX)
    return value


def small(value: Any) -> Any:
    """The same for a column of smaller numbers."""
    return min(value, SMALL_NUMBER_MAX) if isinstance(value, int) and not isinstance(value, bool) else value


def record_of(row: Sequence[Any]) -> RequestRecord:
    """A request that was found."""
    (id_, owner, tier, model, is_task, error, created, completed, queue_ms, batch_id, size, *rest) = row
    endpoint, attempts, upstream_ms, cached, tokens, gpu_seconds, reason = rest
    return RequestRecord(
        id=id_,
        owner=owner,
        tier=tier,
        model=model,
        is_task=bool(is_task),
        status="completed" if error is None else "failed",
        error=error,
        created_at=created / 1e6,
        completed_at=completed / 1e6,
        latency_ms=(completed - created) / 1000,
        queue_ms=queue_ms,
        batch_id=batch_id,
        batch_size=size,
        endpoint=endpoint,
        attempts=attempts,
        upstream_ms=upstream_ms,
        cached=bool(cached),
        tokens=tokens,
        gpu_seconds=gpu_seconds,
        reason=reason,
    )


def usage_of(row: Sequence[Any]) -> UsageRecord:
    """A sum that was found."""
    name, requests, failed, cached, tokens, gpu_seconds = row
    return UsageRecord(
        name=name, requests=requests, failed=failed, cached=cached, tokens=tokens, gpu_seconds=gpu_seconds
    )
