"""Identical requests are coalesced: one of them is sent, and all get its result. Results that are kept need none.

1. What the broker has is the leader. A client that shares with no other has its own request there. When a second one
   comes, the leader becomes no client's own: each client has a member, with its own waiter, deadline and end.
2. A request joins the leader that is open for its key, unless it would be served sooner than that: the leader was not
   taken yet, and is of a lower tier, or of an owner that has far more waiting. Then the request is queued itself, and
   is the one that is open. The leader before it keeps its members: the model may see the input twice. If such a request
   is refused, it joins after all.
3. A member that leaves, or whose time is over, has its own outcome, and the others do not notice: the leader has the
   latest deadline of its members. The last one that leaves withdraws the leader. Over Redis, where no deadline can be
   changed, a leader ends with the time of its first client, and rule 4 is for the others.
4. All members get an output, and an error that would come again. Any other error is the first member's alone: the
   others, if they have time left, get another leader, once; what comes of that is for all of them.
5. No member waits for a quarantined owner's leader, which waits for longer: other owners do not join it, and if the
   owner is quarantined later, they get another leader, unless it runs.
6. Members count against bounds of their own, as many requests and bytes as the broker may have. Input and parameters
   are one object for all members, which the broker counts: no client fills that bound by sending one large input often.
7. Where other processes keep results too (Redis), the coalescer asks them before it queues or joins.
8. Where no client asks twice, requests pass by all this (broker/asked_twice.py).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from copy import copy
from functools import partial
from math import inf

from msgspec.structs import replace

from carpool.broker.asked_twice import AskedTwice
from carpool.broker.deadlines import Deadlines
from carpool.broker.result_cache import ResultCache, SameKey
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    InternalError,
    QueueFull,
    queue_time_passed,
)
from carpool.core.events import Events
from carpool.core.histograms import RequestSeconds
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, CountingQueue, FarResults, RequestOptions
from carpool.core.request import ADMITTED, DONE, QUEUED, RUNNING, Request

logger = logging.getLogger("carpool.broker")

# Rule 2: so many times as much waiting is far more.
FAR_MORE = 4
LOOKUPS = ("hit", "miss", "shared", "passed")


class SharedRequest:
    """A leader and its members. It is the leader's waiter."""

    __slots__ = ("_coalescer", "first", "key", "leader", "members", "waiter")

    def __init__(self, coalescer: "Coalescer", key: SameKey, leader: Request) -> None:
        self._coalescer = coalescer
        self.key = key
        self.leader = leader
        # Of a client that is alone: its waiter, and no members.
        self.waiter = leader.waiter
        self.members: dict[int, Request] = {}
        # The member in whose place the leader was queued; it may have left.
        self.first = leader

    def settled(self, request: Request, outcome: Outcome) -> None:
        """The leader has its outcome."""
        self._coalescer.ended(self, request, outcome)


class Coalescer:
    """Stands before admission for models whose results are kept (core.ports.Sharing), and before the queue for
    clients that leave.
    """

    def __init__(
        self,
        admit: Callable[[Request], CarpoolError | None],
        admit_task: Callable[[Request, Callable[[CarpoolError | None], None]], None],
        queue: CountingQueue,
        results: ResultCache,
        key_of: Callable[[Request], SameKey],
        *,
        seconds: RequestSeconds,
        waiting_max: int,
        bytes_max: int,
        # Where other processes keep results; None: the broker is in this process, and sees changes of its requests.
        far: FarResults | None = None,
        strict_order: bool = False,
        # Model and owner of the quarantined, who share batches with each other only. Empty is false.
        quarantined: Set[tuple[str, str]] = frozenset(),
        events: Events | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._admit = admit
        self._admit_task = admit_task
        self._queue = queue
        self._results = results
        self._asked_twice = AskedTwice(is_one_of_many=far is not None)
        self._key_of = key_of
        self._seconds = seconds
        self._waiting_max = waiting_max
        self._bytes_max = bytes_max
        self._far = far
        self._strict_order = strict_order
        self._quarantined = quarantined
        self._events = events or Events()
        self._clock = clock
        # What new requests may join; and all that have members and a leader, also those that are not open any more.
        self._open: dict[SameKey, SharedRequest] = {}
        self._joined: set[SharedRequest] = set()
        self._deadlines = Deadlines()
        # Members, and requests for which other processes are asked.
        self.held = 0
        self.held_bytes = 0
        # Leaders that the broker has and that are no client's own request.
        self.queued = 0
        # For metrics: requests whose result was kept, that were sent, that shared another, that passed by.
        self.lookups = dict.fromkeys(LOOKUPS, 0)

    def __repr__(self) -> str:
        return f"<Coalescer open={len(self._open)} held={self.held} bytes={self.held_bytes} queued={self.queued}>"

    # What the face calls.

    def ask(self, request: Request, options: RequestOptions) -> CarpoolError | None:
        """Let a synchronous request in, or say why not. It may have its outcome when this returns."""
        if request.result is not None:  # `needing` has found it
            found, request.result = request.result, None
            self._hit(request, found)
            return None
        if options is not NO_OPTIONS:
            if options.no_store:
                return self._admit(request)
            if options.no_cache:  # no request joins it, but its result is kept
                self.lookups["miss"] += 1
                return self._send(self._key_of(request), request, is_open=False)
        # Most requests have neither result nor leader: what follows is written so that these cost little.
        refusal, asked = None, self._asked_twice
        if request.arrived < asked.rests_until and (number := asked.passes(request)):
            refusal = self._admit(request)
            if refusal is None:
                asked.remember(number)
                self.lookups["passed"] += 1
                return None
        key = self._key_of(request)  # also if refused: load refuses no request whose result is there
        if (found := self._results.find(key, request.arrived)) is not None:
            self._hit(request, found)
            return None
        if self._far is None or request.is_judged or key in self._open:  # if judged, `needing` has asked them
            return self._come_in(key, request, refusal)
        if (full := self._refusal(1, request.size)) is not None:
            return full
        request.held_by = self
        self._look(key, request.size, partial(self._looked_for, key, request, refusal))
        return None

    def _come_in(self, key: SameKey, request: Request, refusal: CarpoolError | None) -> CarpoolError | None:
        """Let a request join, or queue it; `refusal`: admission has refused it already."""
        shared = self._open.get(key)
        if shared is not None:
            leader = shared.leader
            if leader.owner != request.owner and self._is_quarantined(leader):
                shared = None
            elif not self._is_better(request, leader):
                return self._join(shared, request)
        refusal = refusal or self._send(key, request)
        if refusal is not None and shared is not None:
            return self._join(shared, request)
        self.lookups["miss"] += 1
        return refusal

    def needing(
        self, requests: Sequence[Request], options: RequestOptions, told: Callable[[Sequence[Request]], None]
    ) -> None:
        """Call `told` with the requests of one call that would be sent: none with a result, or an identical request."""
        if options.no_store or options.no_cache:
            told(requests)
            return
        keyed = [(self._key_of(request), request) for request in requests]
        needing = self._needing(keyed)
        missing, size = len(needing), sum(those[0].size for those in needing.values())
        # Also in a rest: no other step looks for their results before admission judges them.
        if self._far is None or not needing or self._refusal(missing, size) is not None:
            told([those[0] for those in needing.values()])
            return

        def found(those: list[Request], output: Output | None) -> None:
            nonlocal missing
            missing -= 1
            for request in those:
                request.result = output
            if not missing:  # once more: the request that one of them would have joined may be gone
                told([those[0] for those in self._needing(keyed).values()])

        for key, those in needing.items():
            self._look(key, those[0].size, partial(found, those))

    def _needing(self, keyed: Sequence[tuple[SameKey, Request]]) -> defaultdict[SameKey, list[Request]]:
        """Requests for which there is neither a result nor a leader, by their keys."""
        needing: defaultdict[SameKey, list[Request]] = defaultdict(list)
        for key, request in keyed:
            if request.result is None and key not in self._open and self._results.find(key, request.arrived) is None:
                needing[key].append(request)
        if len(needing) < len(keyed):
            self._asked_twice.again()  # ends a rest, in which `ask` would queue the others, too
        return needing

    def submit(
        self, request: Request, options: RequestOptions, accepted: Callable[[CarpoolError | None], None]
    ) -> None:
        """Let a task in, with its result if that is known. Tasks are not coalesced: they outlive this process."""
        if not options.no_store:
            key = request.result_key = self._key_of(request)
            if not options.no_cache:
                found = self._results.find(key, request.arrived)
                if found is None and self._far is not None:
                    self._look(key, request.size, partial(self._submit, request, accepted))
                else:
                    self._submit(request, accepted, found)
                return
        self._admit_task(request, accepted)

    def _submit(self, request: Request, accepted: Callable[[CarpoolError | None], None], found: Output | None) -> None:
        request.result = found
        self.lookups["miss" if found is None else "hit"] += 1
        if found is not None:
            self._asked_twice.again()
        if (failure := guarded(partial(self._admit_task, request, accepted))) is not None:
            accepted(failure)

    def cancel(self, request: Request) -> None:
        """The client left. Requests that share nothing are the queue's alone."""
        own, left = own_of(request), ClientLeft("the client left")
        if isinstance(own.held_by, SharedRequest):
            self._leave(own, left)
        elif own.held_by is self:
            own.held_by = None
            if self._events.subscribers:
                self._events.admitted(own)
            self._count(own, left)
        else:
            self._queue.cancel(own)

    def own(self, request: Request) -> Request:
        """The client's own request, where it became a leader: either may have ended without the other."""
        own = own_of(request)
        return own if DONE in (request.phase, own.phase) else request

    def expire(self, now: float) -> None:
        """Look at the members whose time is over, and at members that wait for a quarantined owner."""
        if self._quarantined:
            for shared in list(self._joined):
                self._part(shared, now)
        for member in self._deadlines.due(now):
            if member.phase == DONE:
                continue  # the waiter of an earlier member has made it leave
            if member.deadline <= now:
                self._leave(member, DeadlineExceeded("no result in time; the request was given up"))
                continue
            leader: Request = member.held_by.leader
            # Over Redis another process sees to it that a leader does not wait too long.
            if leader.taken if self._far is None else leader.arrived <= member.arrived:
                self._deadlines.add_unordered(member, member.deadline)
            else:
                self._leave(member, queue_time_passed(member.queue_timeout_s))

    # What the broker calls.

    def ended(self, shared: SharedRequest, leader: Request, outcome: Outcome) -> None:
        """A leader has its outcome."""
        key = self._close(shared)
        if isinstance(outcome, Output):
            self._asked_twice.kept(leader.ended)
            self._keep(key, outcome, leader.ended)
        if not leader.is_shared:
            leader.waiter = shared.waiter
            leader.waiter.settled(leader, outcome)
            return
        self._queue.outcomes[leader.result_code] -= 1  # the broker counted the leader; here its members count
        self.queued -= 1
        if isinstance(outcome, CarpoolError) and outcome.retryable:
            self._go_again(key, shared)
        for member in shared.members.values():
            ride_along(member, leader)
        self._settle_all(shared, outcome)

    # Results.

    def _hit(self, request: Request, output: Output) -> None:
        self.lookups["hit"] += 1
        self._asked_twice.again()
        request.taken = request.arrived
        if self._events.subscribers:
            self._events.admitted(request)
        self._count(request, output)

    def _keep(self, key: SameKey, output: Output, now: float) -> None:
        if self._far is not None:
            assert isinstance(key, bytes)
            if self._far.keep(key, output) and key not in self._results:
                return  # here too once a request asks for it: most results are never asked for again
        self._results.keep(key, output, now)

    def _look(self, key: SameKey, size: int, found: Callable[[Output | None], None]) -> None:
        """Ask other processes for a result."""
        assert self._far is not None
        assert isinstance(key, bytes)
        self.held += 1
        self.held_bytes += size

        def told(output: Output | None, age_s: float) -> None:
            self.held -= 1
            self.held_bytes -= size
            if output is not None and key not in self._results:  # else others have asked for it, too
                self._results.keep(key, output, self._clock(), age_s)
            found(output)

        self._far.look(key, told)

    def _looked_for(self, key: SameKey, request: Request, refusal: CarpoolError | None, output: Output | None) -> None:
        if request.phase == DONE:
            return  # its client has left
        request.held_by = None
        if output is not None:
            self._hit(request, output)
        elif (refusal := guarded(partial(self._come_in, key, request, refusal))) is not None:
            request.settle(refusal, self._clock())

    # Leaders.

    def _is_better(self, request: Request, leader: Request) -> bool:
        """Whether a request would be served sooner than a leader that may still wait."""
        if leader.taken or self._is_quarantined(request):
            return False
        if request.tier != leader.tier:
            return request.tier < leader.tier and (self._strict_order or request.place < leader.place)
        if request.owner == leader.owner:
            return False
        if self._far is not None and not (leader.is_over or leader.is_late):
            return False  # over Redis only requests over their owner's share, and late ones, go later
        queue_stats = self._queue.queue_stats(leader.model, leader.tier)
        return FAR_MORE * (queue_stats.of(request.owner) + 1) < queue_stats.of(leader.owner)

    def _is_quarantined(self, request: Request) -> bool:
        return (request.model, request.owner) in self._quarantined

    def _send(self, key: SameKey, request: Request, *, is_open: bool = True) -> CarpoolError | None:
        """Queue the request of a client that is alone."""
        shared = SharedRequest(self, key, request)
        request.waiter = shared
        refusal = self._admit(request)
        if refusal is not None:
            request.waiter = shared.waiter
        elif is_open and request.phase != DONE:
            self._open[key] = shared
        return refusal

    def _share(self, shared: SharedRequest, leader: Request) -> None:
        """A second client comes: the first one gets a member."""
        first = shared.first = copy(leader)
        first.waiter, first.number = shared.waiter, 0
        self._disown(shared, leader)
        self._add(shared, first)

    def _lead(
        self, key: SameKey, members: Sequence[Request], admit: Callable[[Request], CarpoolError | None], now: float
    ) -> None:
        """Queue another leader for some members, in the place of the best of them."""
        best = min(members, key=lambda member: (self._is_quarantined(member), member.tier, member.place))
        leader = copy(best)
        leader.held_by, leader.number, leader.phase, leader.taken = None, 0, ADMITTED, 0.0
        leader.is_quarantined = leader.is_over = leader.is_back = False
        leader.arrived, leader.deadline = now, max(member.deadline for member in members)
        leader.trace = next((member.trace for member in members if member.trace is not None), None)
        shared = self._open[key] = SharedRequest(self, key, leader)
        leader.waiter, shared.first = shared, best
        for member in members:
            del member.held_by.members[id(member)]
            member.held_by = shared
            shared.members[id(member)] = member
        self._disown(shared, leader)
        if (refusal := guarded(partial(admit, leader))) is not None:
            self._queue.outcomes[refusal.code] += 1  # `ended` counts it out
            leader.settle(refusal, now)

    def _disown(self, shared: SharedRequest, leader: Request) -> None:
        """A leader is no client's own request any more, or never was."""
        leader.is_shared, leader.ticket, leader.permit, leader.own_timeout_s = True, None, None, 0.0
        if self._far is None:
            leader.queue_timeout_s = inf  # its members have their own
        self._joined.add(shared)
        self.queued += 1

    def _go_again(self, key: SameKey, shared: SharedRequest) -> None:
        """Queue another leader for the members that do not get a passing error."""
        now, members = self._clock(), shared.members.values()
        again = [each for each in members if each is not shared.first and not each.sends and now < due(each)]
        for member in again:
            member.sends += 1
        if again:
            self._lead(key, again, self._admit, now)

    def _part(self, shared: SharedRequest, now: float) -> None:
        """If the owner of a leader that waits is quarantined, queue another one for members of other owners."""
        leader = shared.leader
        if leader.phase == RUNNING or not self._is_quarantined(leader):
            return
        others = [member for member in shared.members.values() if not self._is_quarantined(member)]
        if others and self._queue.refusal_of_all(others[:1]) is None:  # else later, when there is room
            self._lead(shared.key, others, self._queue.submit, now)
            if not shared.members:
                self._close(shared)
                self._queue.cancel(leader)

    def _close(self, shared: SharedRequest) -> SameKey:
        """Let no request join any more; returns the key, which may be the whole input."""
        key, shared.key = shared.key, b""
        shared.leader = shared.first  # the leader keeps it for as long as people may look for the request
        if self._open.get(key) is shared:
            del self._open[key]
        self._joined.discard(shared)
        return key

    # Members.

    def _join(self, shared: SharedRequest, request: Request) -> CarpoolError | None:
        """Let a request wait for the result of another."""
        if (refusal := self._refusal(1, len(request.client_id))) is not None:
            return refusal
        self.lookups["shared"] += 1
        self._asked_twice.again()
        leader = shared.leader
        if not leader.is_shared:
            self._share(shared, leader)
        if leader.trace is None:
            leader.trace = request.trace  # so that its batch is kept, too
        if self._far is None:
            leader.deadline = max(leader.deadline, request.deadline)
        # The same bytes need not be held twice.
        request.input, request.prepared, request.parameters = leader.input, leader.prepared, leader.parameters
        if self._events.subscribers:
            self._events.admitted(request)
        self._add(shared, request)
        return None

    def _add(self, shared: SharedRequest, member: Request) -> None:
        self.held += 1
        self.held_bytes += len(member.client_id)
        shared.members[id(member)] = member
        member.phase, member.held_by = QUEUED, shared
        self._deadlines.add_unordered(member, due(member))

    def _remove(self, member: Request) -> None:
        self.held -= 1
        self.held_bytes -= len(member.client_id)
        del member.held_by.members[id(member)]
        member.held_by = None

    def _leave(self, member: Request, outcome: CarpoolError) -> None:
        """A member does not wait any more. The last one takes the leader along."""
        shared: SharedRequest = member.held_by
        leader = shared.leader
        self._remove(member)
        is_last = not shared.members
        if is_last:
            self._close(shared)
        if leader.phase == RUNNING:
            ride_along(member, leader)
        self._count(member, outcome)
        if is_last:
            self._queue.cancel(leader)

    def _settle_all(self, shared: SharedRequest, outcome: Outcome) -> None:
        """Give all members an outcome; they share the GPU seconds of an output, too."""
        members = list(shared.members.values())
        if isinstance(outcome, Output) and len(members) > 1:
            outcome = replace(outcome, call=replace(outcome.call, gpu_s=outcome.call.gpu_s / len(members)))
        for member in members:
            if member.phase != DONE:  # else the waiter of an earlier member has made it leave
                self._remove(member)
                self._count(member, outcome)
        answered = [member for member in members if member.result_code == "ok"]
        if isinstance(outcome, Output) and answered:
            waits = [member.taken - member.arrived for member in answered]
            self._queue.waited.observe_all(waits)
            seconds = [(member.tier, member.ended - member.arrived) for member in answered]
            self._seconds.answered_apart(seconds, waits, outcome.call)

    def _count(self, request: Request, outcome: Outcome) -> None:
        request.settle(outcome, self._clock())
        self._queue.outcomes[request.result_code] += 1  # bounded: codes come from the error tree
        if self._events.subscribers:
            self._events.settled(request, outcome)

    def _refusal(self, count: int, size: int) -> CarpoolError | None:
        if self.held + count > self._waiting_max or self.held_bytes + size > self._bytes_max:
            return QueueFull("the queue is full; try again soon", retry_after_s=1)
        return None


def own_of(request: Request) -> Request:
    """The client's own request, where that became a leader."""
    shared = request.waiter
    return shared.first if request.is_shared and isinstance(shared, SharedRequest) else request


def due(member: Request) -> float:
    """When a member that still waits for a slot must be looked at."""
    return min(member.arrived + member.queue_timeout_s, member.deadline)


def ride_along(member: Request, leader: Request) -> None:
    """Give a member the times, the batch, the call and the sends of its leader."""
    if leader.taken:
        member.taken = max(leader.taken, member.arrived)
    member.batch, member.call = leader.batch, leader.call
    member.sends, member.searched_s = leader.sends, leader.searched_s


def guarded(step: Callable[[], CarpoolError | None]) -> CarpoolError | None:
    """The error of a step for which no caller is left to see a defect."""
    try:
        return step()
    except Exception:
        logger.exception("a request failed on admission")
        return InternalError("the gateway failed on this request")
