"""One client's input and everything Carpool must remember of it until it has an outcome.

A request is in exactly one phase. Only `settle` ends it, and only once, from any phase:

    ADMITTED ──enqueue──► QUEUED ──take──► RUNNING ──settle──► DONE

`Request.settle` is called by the broker, which keeps the counts, or by the stage that refuses a request that the broker
never held; all other code calls the broker's `settle`.
"""

import logging
from typing import Any, Protocol

import msgspec

from carpool.core.batch import Batch
from carpool.core.errors import (
    CarpoolError,
    DeadlineExceeded,
    own_deadline_passed,
    task_time_passed,
    total_time_passed,
    without_frames,
)
from carpool.core.outcome import CallFacts, Outcome
from carpool.core.trace import Trace

logger = logging.getLogger("carpool")

ADMITTED, QUEUED, RUNNING, DONE = 0, 1, 2, 3
# The end of the lane keys of quarantined owners: no parameters, and no lane of a codec, end like this.
APART = b"\0\0apart"
# The end of the lanes of requests delivered before: this, and how often (they share batches), or an id (sent alone).
AGAIN = b"\0again"


class Waiter(Protocol):
    """What waits for an outcome: a parked connection, a task, a Python future."""

    def settled(self, request: "Request", outcome: Outcome) -> None:
        """Take the outcome of `request`; called exactly once for each request."""


class Permit(Protocol):
    """A place among the requests that an owner may have at once."""

    def give_back(self) -> None:
        """The place is free again; called exactly once for each request that has one."""


class Request(msgspec.Struct, eq=False):
    """One client's input, with its id, model, parameters, tier and deadline. Times are monotonic seconds."""

    id: str
    model: str
    # Canonical JSON of the parameters, b"" for none. Same model and same parameters: same lane.
    parameters: bytes
    # The client's own JSON bytes (for the library: any object). Dropped when settled, so that a result
    # waiting for a slow reader does not keep the input alive.
    input: Any
    # What `input` counts against the broker's bound.
    size: int
    # Index into the configured tiers; 0 is the highest.
    tier: int
    arrived: float
    # The virtual deadline, arrived + the tier's target: the smallest of all waiting goes first.
    place: float
    # A synchronous request must have left the queue so long after its arrival, or its outcome is a 504.
    queue_timeout_s: float
    # After this the request is not sent, and its waiter does not wait any more.
    deadline: float
    waiter: Waiter
    # The waiter's own reference (for a parked connection: its exchange). No other code touches it.
    ticket: Any = None
    # The owner that it counts for, in at most 64 ASCII characters; "" if that is not known. Admission sets it.
    owner: str = ""
    # What the client calls itself, for people who look for its requests; "" if it does not say.
    client_id: str = ""
    # For protocols that look into inputs: what the codec made of it, and what else must be equal to share a batch.
    prepared: Any = None
    lane: bytes = b""
    # The broker's own references: where it is kept, and its number there. No other code touches them.
    held_by: Any = None
    number: int = 0
    # A task outlives its client and this process; a synchronous request does not.
    is_task: bool = False
    # It stands for several clients' requests, which are counted in its place (broker/coalescer.py).
    is_shared: bool = False
    # The call that it is part of was let in as a whole: it is not refused for load any more.
    is_judged: bool = False
    # For models whose results are kept: the key of a task's result; the result that was found before it is let in.
    result_key: Any = None
    result: Any = None
    # Its owner is quarantined: it shares a batch with quarantined owners only. Kept by the broker.
    is_quarantined: bool = False
    # More than its owner's share waits already: it waits behind others of its tier. Kept by the broker (Redis).
    is_over: bool = False
    # It was let in with a burst (admission/shedding.py): it waits behind others of its tier, and of higher ones.
    is_late: bool = False
    # It was put back, and waits before the others of its line. Kept by the broker.
    is_back: bool = False
    phase: int = ADMITTED
    # When it was taken into a batch; 0.0 before. And the last one it was in; over Redis a batcher knows that.
    taken: float = 0.0
    batch: Batch | None = None
    # How often it was sent to an upstream without success.
    sends: int = 0
    # Of its time in the queue: how long it was in batches that were refused, and in the searches after that.
    searched_s: float = 0.0
    # How long its client wants to wait, where that is less than the setting allows; 0.0 if it does not say.
    own_timeout_s: float = 0.0
    # The end, for /internal/requests/{id}: when it was settled, and the error's code if it was with one.
    ended: float = 0.0
    result_code: str = "ok"
    # And of the call that answered it, or failed, what is known.
    call: CallFacts | None = None
    # Where its owner may have a limited number of requests at once: given back when it is settled.
    permit: Permit | None = None
    # Where it stands in a trace that is kept; None where tracing is off, and for most where it is on.
    trace: Trace | None = None
    # Of a task: where its outcome is sent; "" if nowhere.
    callback_url: str = ""

    @property
    def lane_key(self) -> bytes:
        """Requests of one model with the same lane key may share a batch."""
        return self.common_key + APART if self.is_quarantined else self.common_key

    @property
    def common_key(self) -> bytes:
        """The lane key that it would have if no owner were quarantined."""
        return self.parameters + b"\0" + self.lane if self.lane else self.parameters

    @property
    def plain_key(self) -> bytes:
        """The lane key that it would have if it had not been sent before."""
        key, again, _ = self.common_key.partition(AGAIN)
        return key.removesuffix(b"\0") if again else key

    def settle(self, outcome: Outcome, now: float) -> bool:
        """Give the request its one outcome. Total: never raises, and any further call does nothing and says False."""
        if self.phase == DONE:
            return False
        self.phase = DONE
        self.input = b""
        if self.prepared is not None:
            self.prepared = None
        if self.permit is not None:
            self.permit.give_back()
            self.permit = None
        self.ended = now
        if isinstance(outcome, CarpoolError):
            self.result_code = outcome.code
            if outcome.__traceback__ is not None:  # it was raised somewhere
                without_frames(outcome)
            if type(outcome) is DeadlineExceeded:  # the caller need not know whose deadline it was
                outcome = deadline_passed(self)
        else:
            self.call = outcome.call
        try:
            self.waiter.settled(self, outcome)
        except Exception:  # a waiter's defect must not stop the outcomes of its neighbours
            logger.exception("a waiter failed to take an outcome")
        self.ticket = None
        if self.result_key is not None:
            self.result_key = self.result = None  # the key may be the whole input
        return True


def deadline_passed(request: Request) -> DeadlineExceeded:
    """The error for a request whose deadline passed: it says who set that."""
    if request.own_timeout_s:
        return own_deadline_passed(request.own_timeout_s)
    return task_time_passed() if request.is_task else total_time_passed(request.deadline - request.arrived)


def facts_of_failure(request: Request) -> CallFacts | None:
    """What is known of the last call of a request that failed; its `gpu_s` is 0. None: it was in no batch."""
    batch = request.batch
    if request.call is not None or batch is None:
        return request.call
    search_s = searched_since(request, request.ended)
    return CallFacts(
        batch.size,
        0.0,
        endpoint=batch.endpoint,
        attempts=request.sends or batch.attempts,
        started_s=request.ended - request.taken if search_s else max(0.0, batch.sent - request.taken),
        batch_id=batch.id,
        reason=batch.reason,
        search_s=search_s,
        searched_s=request.searched_s,
        is_traced=batch.is_traced,
        failure=batch.failure,
    )


def searched_since(request: Request, now: float) -> float:
    """For how long a search has looked for bad inputs in its batch: the batch is over, and this request is not."""
    batch = request.batch
    return now - batch.ended if batch is not None and request.taken <= batch.ended < now and batch.ended else 0.0


class Nobody:
    """The waiter of a request whose outcome is not awaited."""

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Does nothing."""


def ended_elsewhere(
    request_id: str, owner: str, tier: int, model: str, arrived: float, ended: float, error: CarpoolError
) -> Request:
    """A task that got its outcome where no process has it, as a Request for subscribers to outcomes."""
    request = Request(request_id, model, b"", b"", 0, tier, arrived, arrived, 0.0, ended, Nobody(), is_task=True)
    request.owner = owner
    request.settle(error, ended)
    return request
