"""Requests that wait at a gateway while batchers work on them, for any broker whose batchers are other processes.

A request is known by its number here: clients choose ids, and may repeat them. Its first outcome counts; what comes
later is dropped.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import inf

from carpool.broker.deadlines import Deadlines
from carpool.broker.queue_stats import ParkedShares
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, QueueFull
from carpool.core.events import Events
from carpool.core.histograms import SECONDS_BOUNDS, Histogram, RequestSeconds
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.ports import QueueStats
from carpool.core.request import Request


class PendingRequests:
    """The requests of one gateway without an outcome, bounded in number and in bytes."""

    def __init__(
        self,
        *,
        waiting_max: int,
        bytes_max: int,
        models: Iterable[str],
        # Where outcomes are counted; those of a local broker, if there is one, belong to the same sum.
        outcomes: Counter[str] | None = None,
        waited: Histogram | None = None,
        seconds: RequestSeconds | None = None,
        events: Events | None = None,
        # Sees one request of each handful that got an output.
        sampled: Callable[[Request], None] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._waiting_max = waiting_max
        self._bytes_max = bytes_max
        self._events = events or Events()
        self._clock = clock
        self._parked: dict[int, Request] = {}
        self._next_number = 1
        self._deadlines = Deadlines()
        # By model and tier.
        self._shares: defaultdict[tuple[str, int], ParkedShares] = defaultdict(ParkedShares)
        self.held = 0
        self.held_bytes = 0
        # For metrics.
        self.arrivals = dict.fromkeys(models, 0)
        self.outcomes: Counter[str] = Counter() if outcomes is None else outcomes
        self.waited = Histogram(SECONDS_BOUNDS) if waited is None else waited
        self.seconds = seconds or RequestSeconds()
        self.late_outcomes = 0
        self._sampled = sampled

    def __repr__(self) -> str:
        return f"<PendingRequests held={self.held} bytes={self.held_bytes}>"

    def __contains__(self, request: Request) -> bool:
        return self._parked.get(request.number) is request

    def park(self, request: Request) -> CarpoolError | None:
        """Keep a request until it has an outcome, or say why not."""
        held_bytes = self.held_bytes + request.size
        if self.held >= self._waiting_max or held_bytes > self._bytes_max:
            return QueueFull("the queue is full; try again soon", retry_after_s=1)
        self.held += 1
        self.held_bytes = held_bytes
        self.arrivals[request.model] += 1
        number = request.number = self._next_number
        self._next_number = number + 1
        self._parked[number] = request
        if request.is_task:
            self._deadlines.add_unordered(request, request.deadline)
        else:
            self._shares[request.model, request.tier].park(request)
            self._deadlines.add(request)
        if self._events.of_admitted:
            self._events.admitted(request)
        return None

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why not all of them could be parked; None if they can."""
        size = sum(request.size for request in requests)
        if self.held + len(requests) > self._waiting_max or self.held_bytes + size > self._bytes_max:
            return QueueFull("the queue has no room for all inputs of this call; try again soon", retry_after_s=1)
        return None

    def queue_stats(self, model: str, tier: int) -> QueueStats:
        """Synchronous requests of one model and tier parked here, by owner. It stays the same object."""
        return self._shares[model, tier]

    def oldest(self, model: str) -> float:
        """When the oldest parked request of a model came; inf if there is none."""
        return next((each.arrived for each in self._parked.values() if each.model == model), inf)

    def still_here(self, requests: Iterable[Request]) -> list[Request]:
        """Those of these requests that are parked here."""
        parked = self._parked
        return [request for request in requests if parked.get(request.number) is request]

    def find(self, number: int) -> Request | None:
        """The request with this number, if it waits here."""
        return self._parked.get(number)

    def requests(self) -> list[Request]:
        """All of them."""
        return list(self._parked.values())

    def due(self, now: float) -> list[Request]:
        """Parked requests that have waited for a slot as long as they may, or whose time is over."""
        return self.still_here(self._deadlines.due(now))

    def await_end(self, request: Request) -> None:
        """It is `due` again when its time is over."""
        self._deadlines.add_unordered(request, request.deadline)

    def remove(self, request: Request) -> None:
        """A request goes another way."""
        del self._parked[request.number]
        if not request.is_task:
            self._shares[request.model, request.tier].release(request)
        self.held -= 1
        self.held_bytes -= request.size
        request.held_by = None

    def end(self, request: Request, outcome: Outcome) -> None:
        """Settle a parked request and give back what it counts for.

        A request that is not parked any more has its outcome: the waiter of an earlier one may have cancelled it.
        """
        if request not in self:
            return
        self.remove(request)
        request.settle(outcome, self._clock())
        self.outcomes[request.result_code] += 1  # bounded: codes come from the error tree
        if self._events.subscribers:
            self._events.settled(request, outcome)

    def fail(self, number: int, error: CarpoolError, call: CallFacts | None = None, queue_s: float = 0.0) -> None:
        """Settle the request with this number, if it still waits; with what is known of its last call."""
        request = self._parked.get(number)
        if request is None:
            self.late_outcomes += 1
        else:
            if call is not None:
                request.call, request.taken = call, request.arrived + queue_s
            self.end(request, error)

    def settle_all(
        self, outputs: Iterable[tuple[int, int, float, bytes, int | None]], calls: Sequence[CallFacts]
    ) -> None:
        """Outputs came: number of the request, of its call, seconds in the queue, the value, tokens used."""
        parked, now, is_heard = self._parked, self._clock(), bool(self._events.subscribers)
        settled, request = 0, None
        waits: list[float] = []
        # By call, of synchronous requests: how long ago it was taken, and by tier how long ago each came.
        since_taken_s = [0.0] * len(calls)
        seconds: list[defaultdict[int, list[float]]] = [defaultdict(list) for _ in calls]
        told: defaultdict[str, tuple[list[Request], list[Output]]] = defaultdict(lambda: ([], []))
        for number, call, queue_s, value, tokens_used in outputs:
            facts = calls[call]  # before the request is out of reach
            found = parked.pop(number, None)
            if found is None:
                self.late_outcomes += 1
                continue
            request = found
            settled += 1
            # Before its waiter is called: the next request of the same client may come from there.
            self.held -= 1
            self.held_bytes -= request.size
            if not request.is_task:
                self._shares[request.model, request.tier].release(request)
                if not request.is_shared:  # else the coalescer counts its members
                    age_s = now - request.arrived
                    since_taken_s[call] = age_s - queue_s
                    seconds[call][request.tier].append(age_s)
            request.taken = request.arrived + queue_s
            request.held_by = None
            if not request.is_shared:
                waits.append(queue_s)
            output = Output(value, facts, tokens_used)
            request.settle(output, now)
            if is_heard:
                requests, given = told[request.model]
                requests.append(request)
                given.append(output)
        for requests, given in told.values():
            self._events.all_settled(requests, given)
        if settled:
            self.outcomes["ok"] += settled
            if waits:
                self.waited.observe_all(waits)
            for answered in zip(seconds, since_taken_s, calls, strict=True):
                self.seconds.answered(*answered)
            if self._sampled is not None and request is not None:
                self._sampled(request)
