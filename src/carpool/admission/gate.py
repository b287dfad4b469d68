"""Which requests come in: credential → rate limit → shed → permit. Nothing past the gate is refused for load.

Where no credential is asked for, a caller is its address (owners.py), of the lowest tier. The permit is the broker's
bound.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from carpool.admission.credentials import Credentials
from carpool.admission.limits import LocalLimits, Permits
from carpool.admission.owners import Owners
from carpool.admission.shedding import LoadShedder
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import one
from carpool.core.errors import CarpoolError, Draining, UpstreamDown
from carpool.core.ports import (
    Availability,
    Caller,
    EarlyRefusals,
    Peer,
    RateLimit,
    RateLimits,
    RequestQueue,
    TaskBoard,
)
from carpool.core.request import Request

# No request is shed.
NO_SHEDDERS: Mapping[str, LoadShedder] = {}


class Gate:
    """Admits requests to the broker, or says why not."""

    def __init__(
        self,
        broker: RequestQueue,
        tasks: TaskBoard,
        upstreams: Mapping[str, Availability],
        lowest_tier: int,
        trusted_proxies: Iterable[str] = (),
        shedders: Mapping[str, LoadShedder] = NO_SHEDDERS,
        decides_early: bool = False,
        clock: Clock = monotonic,
        credentials: Credentials | None = None,
        *,
        # The limit of callers where no credential is asked for; None: they have none.
        anonymous: RateLimit | None = None,
        rates: RateLimits | None = None,
        # How many gateways share the requests that an owner may have at once.
        sharers: Callable[[], int] = one,
    ) -> None:
        self._broker = broker
        self._tasks = tasks
        # By model.
        self._upstreams = upstreams
        # By model as well; none where no request is shed.
        self._shedders = shedders
        self.early: EarlyRefusals | None = (
            EarlyShedder(next(iter(shedders.values())), clock) if len(shedders) == 1 and decides_early else None
        )
        # By model: synchronous requests that were refused as no endpoint may be called. For scaling they came, too.
        self.turned_away = dict.fromkeys(upstreams, 0)
        self._lowest_tier = lowest_tier
        self._owners = Owners(trusted_proxies)
        # The caller behind a request with these headers, which came over the connection to that peer; raises why not.
        self.identify: Callable[[dict[bytes, bytes], Peer], Caller] = (
            self._caller_without if credentials is None else credentials.identify
        )
        self._anonymous = anonymous
        rates = rates or LocalLimits(clock)
        # Callers with a limit come in by these (core.ports.RateLimits).
        self.enter, self.when_known = rates.enter, rates.when_known
        # Counts the requests of one call among those that their owner may have at once.
        self.hold = Permits(sharers).give
        # Closed at the end of a drain, when nothing could be finished any more.
        self.closed = False

    def _caller_without(self, headers: dict[bytes, bytes], peer: Peer) -> Caller:
        """Where no credential is asked for."""
        if peer.caller is not None:
            return peer.caller
        if peer.proxy is None:  # the first request of this connection
            itself = Caller(self._owners.of_peer(peer.address), self._lowest_tier, limit=self._anonymous)
            if not self._owners.is_trusted(peer.address):
                peer.caller = itself
                return itself
            peer.proxy = itself
        owner = self._owners.behind(headers.get(b"x-forwarded-for", b""))
        return Caller(owner, self._lowest_tier, limit=self._anonymous) if owner else peer.proxy

    def admit(self, request: Request) -> CarpoolError | None:
        """Let a synchronous request in, or say why not."""
        if self.closed:
            return leaving()
        upstream = self._upstreams[request.model]
        is_any_shut = upstream.is_down or upstream.is_shut_to_some
        if is_any_shut and not request.is_judged and is_closed_to(request, upstream):
            return self._turn_away(request.model, 1)
        shedder = self._shedders.get(request.model)
        if shedder is None or request.is_judged:
            return self._broker.submit(request)
        now, refusal = request.arrived, None
        if request.own_timeout_s:
            seconds = request.deadline - now - shedder.call_s
            refusal = shedder.refusal_by_deadline(request.tier, request.owner, now, seconds)
        if (refusal := refusal or shedder.refusal(request.tier, request.owner, now, request)) is not None:
            return refusal
        if shedder.is_late:
            request.is_late = True
            request.place += shedder.queue_s
        return self._broker.submit(request)

    def _turn_away(self, model: str, count: int) -> UpstreamDown:
        """No endpoint may be called. An owner that alone is shut out brings no demand: more GPUs would do the same."""
        upstream = self._upstreams[model]
        if upstream.is_down:
            self.turned_away[model] += count
        return upstream_down(upstream)

    def judge_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why the requests of one call are not let in, all of them; if they are, `admit` still has to let each in."""
        first = requests[0]
        upstream = self._upstreams[first.model]
        # Once for all: the first of them may take the only probe, by which the endpoint is down for the others.
        if is_closed_to(first, upstream):
            return self._turn_away(first.model, len(requests))
        if (refusal := self._broker.refusal_of_all(requests)) is not None:
            return refusal
        if (shedder := self._shedders.get(first.model)) is not None:
            seconds = min(first.queue_timeout_s, first.deadline - first.arrived - shedder.call_s)
            refusal = shedder.refusal_of_all(first.tier, first.owner, first.arrived, len(requests), seconds, first)
            if refusal is not None:
                return refusal
            if shedder.is_late:
                for request in requests:
                    request.is_late = True
                    request.place += shedder.queue_s
        for request in requests:
            request.is_judged = True
        return None

    def admit_task(self, request: Request, accepted: Callable[[CarpoolError | None], None]) -> None:
        """Let a task in: `accepted(None)` once it is safe, or `accepted(error)`."""
        refusal: CarpoolError | None = leaving() if self.closed else None
        shedder = self._shedders.get(request.model)
        if refusal is None and shedder is not None and request.own_timeout_s and request.result is None:
            # A task that has its result already does not wait for a slot.
            seconds = request.deadline - request.arrived - shedder.call_s
            refusal = shedder.refusal_by_deadline(request.tier, request.owner, request.arrived, seconds)
        if refusal is not None:
            accepted(refusal)
        else:
            self._tasks.submit(request, accepted)


class EarlyShedder:
    """Refuses before the body is read: possible where there is one model, and no results are kept."""

    def __init__(self, shedder: LoadShedder, clock: Clock) -> None:
        self._shedder = shedder
        self._clock = clock
        self.headroom: Sequence[float] = shedder.headroom

    def refusal(self, caller: Caller) -> CarpoolError | None:
        """Why a request of this caller is refused, whatever is in its body; None if it is not, as far as is known."""
        return self._shedder.refusal_if_full(caller.tier, caller.owner, self._clock())


def is_closed_to(request: Request, upstream: Availability) -> bool:
    """Whether no endpoint may be called for the owner of a request, nor tried with it."""
    return (upstream.is_down and not upstream.takes_probe(request)) or upstream.is_shut_to(request.owner)


def upstream_down(upstream: Availability) -> UpstreamDown:
    """The error while no endpoint may be called."""
    failed = "has answered no call well so far" if upstream.has_never_worked() else "failed the last calls, or is gone"
    text = f"the inference API {failed}, and is left alone for a moment; try again soon, or submit a task"
    return UpstreamDown(text, retry_after_s=upstream.retry_after_s())


def leaving() -> Draining:
    """The error for requests that come when the gateway shuts down."""
    return Draining("this gateway is shutting down; connect again to reach another one", retry_after_s=1)
