"""One request's story, for people: where it is, what it waited for, in which batch it was. Never what is in it. Pure.

What is not known is left out: over Redis a gateway knows of a call when its outcome is there, and of a batcher's work
under way only that there is some.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.batch import Batch
from carpool.core.histograms import split_seconds
from carpool.core.outcome import CallFacts
from carpool.core.request import DONE, RUNNING, Request, searched_since

# The longest wait for company that can be configured: a request that waited longer did so for a slot.
COMPANY_S_MAX = 0.1
# A timer comes a little late, and a batch is taken a little after it is due.
LATE_S = 0.005

# company: requests that would share its batch; slot: a slot that is free; retry: a call that failed, and what came
# before the next; search: for the input that made its batch fail; model: the call; rest: its way in and back.
WaitedFor = Literal["company", "slot", "retry", "search", "model", "rest"]


class Wait(msgspec.Struct, frozen=True):
    """A part of its time."""

    what: Annotated[
        WaitedFor,
        Meta(
            description="others who share its batch, a slot that is free, a call that failed and what came before the "
            "next one, a search for the input that made its batch fail, the call, its way in and back"
        ),
    ]
    ms: float


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The queue, for one that waits there."""

    place: Annotated[int, Meta(description="1 for the next; by the order of places")] | UnsetType = UNSET
    waiting: Annotated[int, Meta(description="requests that wait, of all")] | UnsetType = UNSET
    estimated_wait_ms: int | UnsetType = UNSET


class BatchShown(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch that it was in."""

    id: str
    size: int
    neighbours: Annotated[int, Meta(description="others who were in it")]
    reason: Annotated[str, Meta(description="why it left: full, waited, idle, expected-none, drain")] | UnsetType = (
        UNSET
    )
    endpoint: str | UnsetType = UNSET
    attempts: Annotated[int, Meta(description="calls with it, the last included")] | UnsetType = UNSET
    failure: Annotated[str, Meta(description="how its last call failed, if it did")] | UnsetType = UNSET


class RequestState(msgspec.Struct, frozen=True):
    """What an operator sees of a request at `/internal/requests/{id}`; never its input."""

    status: Literal["queued", "processing", "completed", "failed"]
    # A whole number for clients; processes of another version may send fractions.
    latency_ms: Annotated[float, Meta(extra_json_schema={"type": "integer"})]
    error: Annotated[str | None, Meta(description="the code of the error of one that failed")]
    client_id: Annotated[str | None, Meta(description="what its client calls itself")]
    model: str | UnsetType = UNSET
    owner: str | UnsetType = UNSET
    is_task: bool | UnsetType = UNSET
    cached: Annotated[bool, Meta(description="its result had been kept: it was in no batch")] | UnsetType = UNSET
    queue: Queue | UnsetType = UNSET
    batch: BatchShown | UnsetType = UNSET
    waits: Annotated[Sequence[Wait], Meta(description="what its time went to, in this order")] | UnsetType = UNSET
    kept: Annotated[bool, Meta(description="told from tracking: no process has it any more")] | UnsetType = UNSET

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "latency_ms", round(self.latency_ms))


def state_of(request: Request, now: float, company_s_max: float = COMPANY_S_MAX) -> RequestState:
    """The state of a request that this process has; company is waited for so long at most."""
    is_over = request.phase == DONE and bool(request.ended)  # in a drain a task is put aside, without an outcome
    until = request.ended if is_over else now
    status: Literal["queued", "processing", "completed", "failed"]
    if not is_over:
        status = "processing" if request.phase == RUNNING else "queued"
    else:
        status = "completed" if request.result_code == "ok" else "failed"
    call = request.call
    batch = None if status == "queued" else request.batch  # a request that was put back still has its last batch
    return RequestState(
        status,
        milliseconds(until - request.arrived),
        request.result_code if status == "failed" else None,
        request.client_id or None,
        model=request.model,
        owner=request.owner,
        is_task=request.is_task,
        cached=True if call is not None and call.cached else UNSET,
        batch=shown_batch(batch, call),
        waits=waits_of(request, batch, call, until, company_s_max),
    )


def shown_batch(batch: Batch | None, call: CallFacts | None) -> BatchShown | UnsetType:
    """What is known of a batch: by the process that sends it, or by the facts that came back."""
    if call is not None and call.batch_id:
        return make_batch(call.batch_id, call.batch_size, call.reason, call.endpoint, call.attempts, call.failure)
    if batch is not None:
        return make_batch(batch.id, batch.size, batch.reason, batch.endpoint, batch.attempts, batch.failure)
    return UNSET


def make_batch(
    batch_id: str, size: int, reason: str | None, endpoint: str | None, attempts: int, failure: str = ""
) -> BatchShown:
    """A batch of which some facts may not be known."""
    return BatchShown(
        id=batch_id,
        size=size,
        neighbours=max(0, size - 1),
        reason=reason or UNSET,
        endpoint=endpoint or UNSET,
        attempts=attempts or UNSET,
        failure=failure or UNSET,
    )


def waits_of(
    request: Request, batch: Batch | None, call: CallFacts | None, until: float, company_s_max: float
) -> list[Wait] | UnsetType:
    """What the time of a request went to so far."""
    if not request.taken:
        return UNSET
    before_call_s: float | None
    if call is not None and call.batch_id:
        call_s = call.upstream_s if request.result_code == "ok" else None
        before_call_s, reason, attempts = call.started_s, call.reason, call.attempts
        search_s, searched_s = call.search_s, call.searched_s
    elif batch is not None:
        call_s, reason, attempts = None, batch.reason, batch.attempts
        before_call_s = batch.sent - request.taken if batch.sent >= request.taken else None
        search_s, searched_s = searched_since(request, until), request.searched_s
        if search_s:
            before_call_s = until - request.taken
    else:
        return UNSET
    total_s, queue_s = until - request.arrived, request.taken - request.arrived
    times = total_s, queue_s, before_call_s, call_s
    return parts_of(*times, reason, attempts, company_s_max, search_s=search_s, searched_s=searched_s)


def parts_of(
    total_s: float,
    queue_s: float,
    before_call_s: float | None,
    # None: it is not known when the call ended: all that is left.
    call_s: float | None,
    reason: str,
    attempts: int,
    company_s_max: float = COMPANY_S_MAX,
    *,
    # Of `before_call_s`, and of `queue_s`, what a search took.
    search_s: float = 0.0,
    searched_s: float = 0.0,
) -> list[Wait]:
    """The time of a request that was taken into a batch, in parts that sum up to all of it."""
    # Before a first call there are only moments.
    is_later = before_call_s is not None and (attempts > 1 or search_s > 0.0)
    split = split_seconds(total_s, queue_s, before_call_s or 0.0 if is_later else 0.0, call_s)
    searched_s, search_s = min(searched_s, split.queue), min(search_s, split.dispatch)
    waited_s = split.queue - searched_s
    parts: list[tuple[WaitedFor, float]] = [
        (waited_for(waited_s, reason, company_s_max), waited_s),
        ("retry", split.dispatch - search_s),
        ("search", searched_s + search_s),
        ("model", 0.0 if before_call_s is None else split.upstream),
        ("rest", split.reply + (split.upstream if before_call_s is None else 0.0)),
    ]
    return [Wait(what, milliseconds(seconds)) for what, seconds in parts if milliseconds(seconds) > 0]


def waited_for(queue_s: float, reason: str, company_s_max: float) -> WaitedFor:
    """What a request waited for in the queue. While a slot is free, company is waited for no longer than that."""
    if queue_s > company_s_max + LATE_S or reason == "drain":
        return "slot"
    return "company"


def milliseconds(seconds: float) -> float:
    """A time as it is shown."""
    return round(max(0.0, seconds) * 1000, 2)
