"""The state of one request, from its row. Pure."""

from msgspec import UNSET, UnsetType

from carpool.core.timeline import BatchShown, RequestState, Wait, make_batch, parts_of
from carpool.tracking.records import RequestRecord


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
