"""Identical requests are coalesced: one of them is sent, and all get its result. Results that are kept need none.

1. Each client has a request of its own, with its own waiter, deadline and end. The broker has the leader. While a
   client shares with no other, the leader is its own request, so that a request which stays alone costs little more
   than without coalescing. When a second client comes, a SharedRequest becomes the leader, and both are its members.
2. The leader has the best place and the latest deadline of its members. A leader that waits is queued anew for a
   member with a better place: of a higher tier, or of an owner with far less waiting. Where the coalescer does not know
   whether the leader still waits (Redis), or which one goes first (owners take turns), the old leader stays in the
   queue as well, and the first result counts: no member waits longer, and the model may see the input twice.
3. Each member has its own deadline and its own time in the queue. The last member that leaves withdraws the leader.
4. All members get an output, and an error that would come again. Any other error is the first member's alone: the
   others, if they have time left, are sent once more, together; what comes of that is for all of them.
5. Members count against bounds of their own, as many requests and bytes as the broker may have. Input and parameters
   are one object for all members, which the broker counts: no client fills that bound by sending one large input often.
6. Where other processes keep results too (Redis), the coalescer asks them before it queues a leader. Members may join
   meanwhile.
7. No member waits for a quarantined owner's leader, which waits for longer. When the owner of a leader is quarantined,
   the coalescer queues it anew for another member.
8. Where no client asks twice, requests pass by all this (broker/asked_twice.py).
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from copy import copy
from functools import partial
from math import inf

from msgspec.structs import replace

from carpool.broker.asked_twice import AskedTwice
from carpool.broker.deadlines import Deadlines
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
from carpool.core.histograms import Histogram, RequestSeconds
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.ports import NO_OPTIONS, FarResults, QueueStats, RequestOptions, RequestQueue, Results, SameKey
from carpool.core.request import ADMITTED, DONE, QUEUED, RUNNING, Request, Waiter

logger = logging.getLogger("carpool.broker")

# Rule 2: so many times as much waiting is far more.
FAR_MORE = 4
LOOKUPS = ("hit", "miss", "shared", "passed")


class SharedRequest:
    """What the requests with one key have in common. It is the waiter of the leaders that the broker has for them."""

    __slots__ = ("_coalescer", "first", "is_looked_for", "key", "members", "refusal", "requests", "waiter")

    def __init__(self, coalescer: "Coalescer", key: SameKey, request: Request) -> None:
        self._coalescer = coalescer
        self.key = key
        # What was queued for it, or is about to be; empty when it is over.
        self.requests = [request]
        # The waiter of its first request, while no other request shares it.
        self.waiter: Waiter = request.waiter if request.result is None else request.result
        # The members; None while the first is alone. The first may have left.
        self.members: dict[int, Request] | None = None
        self.first: Request | None = None
        # Other processes are asked for a result: nothing is queued yet.
        self.is_looked_for = False
        # Why admission refused its first request before they were asked: its outcome if they have none and it is alone.
        self.refusal: CarpoolError | None = None

    def settled(self, request: Request, outcome: Outcome) -> None:
        """One of its requests has an outcome."""
        self._coalescer.ended(self, request, outcome)


class Coalescer:
    """Stands before admission for models whose results are kept (core.ports.Sharing), and before the queue for
    clients that leave.
    """

    def __init__(
        self,
        admit: Callable[[Request], CarpoolError | None],
        admit_task: Callable[[Request, Callable[[CarpoolError | None], None]], None],
        queue: RequestQueue,
        results: Results,
        key_of: Callable[[Request], SameKey],
        *,
        # Where the broker counts outcomes, and how long requests waited and took.
        outcomes: Counter[str],
        waited: Histogram,
        seconds: RequestSeconds,
        waiting_max: int,
        bytes_max: int,
        # Where other processes keep results; None: the broker is in this process, and sees changes of its requests.
        far: FarResults | None = None,
        strict_order: bool = False,
        # Model and owner of the quarantined, who share batches with each other only. Empty is false.
        quarantined: Set[tuple[str, str]] = frozenset(),
        # What waits of a model and a tier, by owner; None where all owners are treated alike.
        queue_stats: Callable[[str, int], QueueStats] | None = None,
        events: Events | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._admit = admit
        self._admit_task = admit_task
        self._queue = queue
        self._results = results
        self._kept = results.numbers
        self._asked_twice = AskedTwice(is_one_of_many=far is not None)
        self._key_of = key_of
        self._outcomes = outcomes
        self._waited = waited
        self._seconds = seconds
        self._waiting_max = waiting_max
        self._bytes_max = bytes_max
        self._far = far
        self._strict_order = strict_order
        self._quarantined = quarantined
        self._queue_stats = queue_stats
        # Quarantined owners for whose leaders no other owner's member waits any more.
        self._parted: Set[tuple[str, str]] = frozenset()
        self._events = events or Events()
        self._clock = clock
        # What new requests may still share: shared requests, and requests that are alone and need none yet.
        self._open: dict[SameKey, SharedRequest | Request] = {}
        self._deadlines = Deadlines()
        # Members, and requests for which other processes are asked.
        self.held = 0
        self.held_bytes = 0
        # Leaders that the broker has and that are no client's own request.
        self.queued = 0
        # For metrics: requests whose result was kept, that were sent, that shared another, that passed by.
        self.hits = 0
        self.misses = 0
        self.shared = 0
        self.passed = 0

    def __repr__(self) -> str:
        return f"<Coalescer open={len(self._open)} held={self.held} bytes={self.held_bytes} queued={self.queued}>"

    def lookups(self) -> dict[str, int]:
        """What became of requests, by what `/metrics` calls it."""
        return dict(zip(LOOKUPS, (self.hits, self.misses, self.shared, self.passed), strict=True))

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
            if options.no_cache:  # no request shares it, but its result is kept
                self.misses += 1
                request.result_key, request.result, request.waiter = self._key_of(request), request.waiter, self
                return self._admit(request)
        # Most requests have neither result nor leader: what follows is written so that these cost little.
        refusal, asked = None, self._asked_twice
        if request.arrived < asked.rests_until and (number := asked.passes(request)):
            refusal = self._admit(request)
            if refusal is None:
                asked.remember(number)
                self.passed += 1
                return None
        key = self._key_of(request)  # also if refused: load refuses no request whose result is there
        if hash(key) in self._kept and (found := self._results.find(key, request.arrived)) is not None:
            self._hit(request, found)
            return None
        if key in self._open:
            shared = self._open[key]
            if not self._quarantined or self._may_share(shared, request):
                leader = shared.requests[0] if isinstance(shared, SharedRequest) else shared
                return self._join(key, shared, leader, request)
        if self._far is not None and not request.is_judged:  # else `needing` has asked them
            request.waiter = shared_request = self._open[key] = SharedRequest(self, key, request)
            shared_request.refusal = refusal
            return self._look(shared_request, request, self._far)
        self.misses += 1
        if refusal is not None:
            return refusal
        request.result_key, request.result, request.waiter = key, request.waiter, self
        self._open[key] = request
        return self._admit(request)

    def needing(
        self, requests: Sequence[Request], options: RequestOptions, told: Callable[[Sequence[Request]], None]
    ) -> None:
        """Call `told` with the requests of one call that would be sent: none with a result, or an identical request."""
        if options.no_store or options.no_cache:
            told(requests)
            return
        keyed = [(self._key_of(request), request) for request in requests]
        needing = self._needing(keyed)
        # Also in a rest: no other step looks for their results before admission judges them.
        sizes = {key: those[0].size for key, those in needing.items()}
        size, missing = sum(sizes.values()), len(sizes)
        has_room = self.held + missing <= self._waiting_max and self.held_bytes + size <= self._bytes_max
        if self._far is None or not needing or not has_room:
            told([those[0] for those in needing.values()])
            return

        def found(key: SameKey, output: Output | None, age_s: float) -> None:
            nonlocal missing
            missing -= 1
            self.held -= 1
            self.held_bytes -= sizes[key]
            if output is not None:
                self._results.keep(key, output, self._clock(), age_s)
                for request in needing[key]:
                    request.result = output
            if not missing:  # once more: the request that one of them would have shared may be gone
                told([those[0] for those in self._needing(keyed).values()])

        self.held += missing
        self.held_bytes += size
        for key in sizes:
            assert isinstance(key, bytes)
            self._far.look(key, partial(found, key))

    def _needing(self, keyed: Sequence[tuple[SameKey, Request]]) -> defaultdict[SameKey, list[Request]]:
        """Requests for which there is neither a result nor a leader, by their keys."""
        needing: defaultdict[SameKey, list[Request]] = defaultdict(list)
        for key, request in keyed:
            if (
                request.result is None
                and key not in self._open
                and (hash(key) not in self._kept or self._results.find(key, request.arrived) is None)
            ):
                needing[key].append(request)
        if len(needing) < len(keyed):
            self._asked_twice.again()  # ends a rest, in which `ask` would queue the others, too
        return needing

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request that was alone to its end has its outcome."""
        key = request.result_key
        if (shared := self._open.pop(key, request)) is not request:
            self._open[key] = shared  # another leader has this key
        if isinstance(outcome, Output):
            self._asked_twice.kept(request.ended)
            if self._far is None:
                self._results.keep(key, outcome, request.ended)
            else:
                self._keep(key, outcome)
        request.result.settled(request, outcome)

    def submit(
        self, request: Request, options: RequestOptions, accepted: Callable[[CarpoolError | None], None]
    ) -> None:
        """Let a task in, with its result if that is known. Tasks are not coalesced: they outlive this process."""
        if not options.no_store:
            key = request.result_key = self._key_of(request)
            if not options.no_cache:
                request.result = self._results.find(key, request.arrived)
                if request.result is None and self._far is not None:
                    assert isinstance(key, bytes)
                    self._far.look(key, partial(self._task_looked_for, request, accepted))
                    return
                self._count_task(request)
        self._admit_task(request, accepted)

    def keep(self, key: SameKey, output: Output) -> None:
        """Keep the result of a task."""
        self._results.keep(key, output, self._clock())

    def cancel(self, request: Request) -> None:
        """The client left. Requests that share nothing are the queue's alone."""
        if request.phase == DONE and not request.is_shared:
            return
        shared_request = request.waiter if isinstance(request.waiter, SharedRequest) else request.held_by
        if not isinstance(shared_request, SharedRequest):
            self._queue.cancel(request)
        elif shared_request.members is None:
            self._leave_alone(shared_request, request)
        else:
            member = shared_request.first if request.is_shared else request
            if member is not None and member.phase != DONE:
                self._leave(member, client_left())

    def own(self, request: Request) -> Request:
        """The client's own request, where it became a shared one: either may have ended without the other."""
        shared_request = request.waiter
        if not isinstance(shared_request, SharedRequest) or not request.is_shared or shared_request.first is None:
            return request
        return shared_request.first if DONE in (request.phase, shared_request.first.phase) else request

    def expire(self, now: float) -> None:
        """Look at the members whose time is over, and at members that wait for a quarantined owner."""
        if self._quarantined != self._parted:
            parted = [self._part(shared) for shared in list(self._open.values()) if isinstance(shared, SharedRequest)]
            if all(parted):  # else again: a leader that runs may come back, and a full queue gets room
                self._parted = frozenset(self._quarantined)
        for member in self._deadlines.due(now):
            if member.phase == DONE:
                continue  # the waiter of an earlier member has made it leave
            if member.deadline <= now:
                self._leave(member, DeadlineExceeded("no result in time; the request was given up"))
            elif self._may_run(member.held_by, member):
                self._deadlines.add_unordered(member, member.deadline)
            else:
                self._leave(member, queue_time_passed(member.queue_timeout_s))

    # What the broker calls.

    def ended(self, shared_request: SharedRequest, request: Request, outcome: Outcome) -> None:
        """A shared request has its outcome."""
        if not request.is_shared:
            self._close(shared_request)
            if isinstance(outcome, Output):
                self._asked_twice.kept(request.ended)
                self._keep(shared_request.key, outcome)
            shared_request.waiter.settled(request, outcome)
            return
        self._outcomes[request.result_code] -= 1  # the broker counted the leader; here its members count
        self.queued -= 1
        if request not in shared_request.requests:
            return  # given up
        shared_request.requests.remove(request)
        assert shared_request.members is not None
        if isinstance(outcome, Output):
            self._close(shared_request)
            self._keep(shared_request.key, outcome)
            members = list(shared_request.members.values())
            for member in members:
                ride_along(member, request)
            self._settle_all(shared_request, members, outcome)
            self._count_seconds(members, request.taken, outcome.call)
        elif not shared_request.requests:  # else another leader is under way for them
            self._close(shared_request)
            members = (
                self._go_again(shared_request, outcome) if outcome.retryable else list(shared_request.members.values())
            )
            for member in members:
                ride_along(member, request)
            self._settle_all(shared_request, members, outcome)

    # Results.

    def _hit(self, request: Request, output: Output) -> None:
        self.hits += 1
        self._asked_twice.again()
        request.taken = request.arrived
        if self._events.subscribers:
            self._events.admitted(request)
        self._count(request, output)

    def _keep(self, key: SameKey, output: Output) -> None:
        if self._far is not None:
            assert isinstance(key, bytes)
            if self._far.keep(key, output) and hash(key) not in self._kept:
                return  # here too once a request asks for it: most results are never asked for again
        self._results.keep(key, output, self._clock())

    def _look(self, shared_request: SharedRequest, request: Request, far: FarResults) -> CarpoolError | None:
        """Ask other processes for the result of a new shared request."""
        if (refusal := self._refusal(request.size)) is not None:
            return refusal
        self.held += 1
        self.held_bytes += request.size
        shared_request.is_looked_for = True
        assert isinstance(shared_request.key, bytes)
        far.look(shared_request.key, partial(self._looked_for, shared_request, request))
        return None

    def _looked_for(self, shared_request: SharedRequest, request: Request, output: Output | None, age_s: float) -> None:
        """The other processes have answered: with the result, or the request must be queued."""
        now = self._clock()
        self.held -= 1
        self.held_bytes -= request.size
        shared_request.is_looked_for = False
        if output is not None:
            self._results.keep(shared_request.key, output, now, age_s)
        if not shared_request.requests:
            return  # all have left
        if output is not None:
            self._close(shared_request)
            if shared_request.members is None:
                request.waiter = shared_request.waiter
                self._hit(request, output)
                return
            self.hits += 1
            self._asked_twice.again()
            drop(request)
            members = list(shared_request.members.values())
            for member in members:
                member.taken = member.arrived
            self._settle_all(shared_request, members, output)
            return
        self.misses += 1
        try:
            refusal = shared_request.refusal or expired(request, now) or self._admit(request)
        except Exception as failure:
            refusal = defect(failure)
        self.queued += request.is_shared
        if refusal is not None:
            self._outcomes[refusal.code] += request.is_shared  # `ended` counts it out
            request.settle(refusal, now)

    def _task_looked_for(
        self,
        request: Request,
        accepted: Callable[[CarpoolError | None], None],
        output: Output | None,
        age_s: float,
    ) -> None:
        if output is not None:
            self._results.keep(request.result_key, output, self._clock(), age_s)
        request.result = output
        self._count_task(request)
        try:
            self._admit_task(request, accepted)
        except Exception as failure:
            accepted(defect(failure))

    def _count_task(self, request: Request) -> None:
        if request.result is None:
            self.misses += 1
        else:
            self.hits += 1
            self._asked_twice.again()

    # Members.

    def _join(
        self, key: SameKey, shared: SharedRequest | Request, leader: Request, request: Request
    ) -> CarpoolError | None:
        """Let a request wait for the result of another."""
        if (refusal := self._refusal(own_bytes(request))) is not None:
            return refusal
        if isinstance(shared, SharedRequest):
            shared_request = shared
        else:
            leader.waiter = shared_request = self._open[key] = SharedRequest(self, key, leader)
            leader.result_key = leader.result = None
        if shared_request.members is None:
            self._share(shared_request, leader)
        self.shared += 1
        self._asked_twice.again()
        if leader.trace is None:
            leader.trace = request.trace  # so that its batch is kept, too
        # The same bytes need not be held twice.
        request.input, request.prepared, request.parameters = leader.input, leader.prepared, leader.parameters
        if self._events.subscribers:
            self._events.admitted(request)
        self._add(shared_request, request)
        if self._far is None or shared_request.is_looked_for:
            leader.deadline = max(leader.deadline, request.deadline)
        last = shared_request.requests[-1]
        is_better = request.tier < last.tier and (self._strict_order or request.place < last.place)
        if (is_better or self._has_less_waiting(request, shared_request, last)) and not self._offends(request):
            self._move_up(shared_request, last, request)
        return None

    def _has_less_waiting(self, member: Request, shared_request: SharedRequest, leader: Request) -> bool:
        """Whether a leader of this member's tier is queued for an owner that has far more waiting."""
        if self._queue_stats is None or member.tier != leader.tier or member.owner == leader.owner:
            return False
        if self._far is not None and not (leader.is_over or leader.is_late or shared_request.is_looked_for):
            return False  # over Redis only requests over their owner's share, and late ones, go later
        queue_stats = self._queue_stats(leader.model, leader.tier)
        return FAR_MORE * (queue_stats.of(member.owner) + 1) < queue_stats.of(leader.owner)

    def _share(self, shared_request: SharedRequest, leader: Request) -> None:
        """The first is not alone any more: give it a request of its own. What the broker has is the shared one now."""
        shared_request.members, shared_request.refusal = {}, None
        first = shared_request.first = copy(leader)
        first.waiter, first.number = shared_request.waiter, 0
        leader.is_shared, leader.ticket, leader.permit, leader.own_timeout_s = True, None, None, 0.0
        if not shared_request.is_looked_for:
            self.queued += 1
        elif self._events.subscribers:
            self._events.admitted(first)
        if self._far is None:
            leader.queue_timeout_s = inf  # its members have their own
        self._add(shared_request, first)

    def _add(self, shared_request: SharedRequest, member: Request) -> None:
        assert shared_request.members is not None
        self.held += 1
        self.held_bytes += own_bytes(member)
        shared_request.members[id(member)] = member
        member.phase, member.held_by = QUEUED, shared_request
        self._deadlines.add_unordered(member, min(member.arrived + member.queue_timeout_s, member.deadline))

    def _move_up(self, shared_request: SharedRequest, leader: Request, member: Request) -> None:
        """A leader that waits gets the place that this member would have; a leader that runs needs none."""
        if shared_request.is_looked_for:
            leader.tier, leader.place, leader.owner = member.tier, member.place, member.owner
            leader.is_late = member.is_late
            return
        if member.tier <= leader.tier and not any(each.taken for each in shared_request.requests):
            self._queue_anew(shared_request, leader, member, stays=member.tier == leader.tier)

    def _queue_anew(
        self, shared_request: SharedRequest, leader: Request, member: Request, *, stays: bool = False
    ) -> bool:
        """Queue a leader where this member would wait, if there is room. `stays`: the old leader is kept as well."""
        assert shared_request.members is not None
        latest = max(each.deadline for each in shared_request.members.values())
        moved = self._shared_for(shared_request, member, latest, leader.queue_timeout_s)
        moved.place = member.place
        if self._queue.submit(moved) is not None:
            return False  # it stays where it is
        self.queued += 1
        if stays or self._far is not None:
            shared_request.requests.append(moved)  # a batcher may have the old one already
        else:
            before, shared_request.requests = shared_request.requests, [moved]
            for each in before:
                self._queue.cancel(each)
        return True

    def _may_share(self, shared: SharedRequest | Request, request: Request) -> bool:
        """Whether a request would not wait for another owner that is quarantined."""
        if isinstance(shared, Request):
            return shared.owner == request.owner or not self._offends(shared)
        self._part(shared)
        return any(each.owner == request.owner or not self._offends(each) for each in shared.requests)

    def _part(self, shared_request: SharedRequest) -> bool:
        """If a shared request waits for quarantined owners only, queue it for another member. False: not yet."""
        if shared_request.members is None or not all(self._offends(each) for each in shared_request.requests):
            return True
        others = [member for member in shared_request.members.values() if not self._offends(member)]
        if not others:
            return True
        if any(each.phase == RUNNING for each in shared_request.requests):
            return False
        best, leader = min(others, key=by_place), shared_request.requests[-1]
        if shared_request.is_looked_for:
            leader.tier, leader.place, leader.owner = best.tier, best.place, best.owner
            leader.is_late = best.is_late
            return True
        return self._queue_anew(shared_request, leader, best)

    def _offends(self, request: Request) -> bool:
        return (request.model, request.owner) in self._quarantined

    def _shared_for(
        self, shared_request: SharedRequest, member: Request, deadline: float, queue_timeout_s: float
    ) -> Request:
        """What the broker gets, as if this member came now."""
        now = self._clock()
        request = copy(member)
        request.waiter, request.ticket, request.held_by, request.number = shared_request, None, None, 0
        request.phase, request.is_shared, request.is_quarantined, request.taken = ADMITTED, True, False, 0.0
        request.permit, request.own_timeout_s, request.is_over = None, 0.0, False
        request.place += now - request.arrived
        request.arrived, request.deadline, request.queue_timeout_s = now, deadline, queue_timeout_s
        return request

    def _go_again(self, shared_request: SharedRequest, error: CarpoolError) -> list[Request]:
        """Send the members that do not get this error again, together; returns the members that get it."""
        assert shared_request.members is not None
        now = self._clock()
        again = [member for member in shared_request.members.values() if rides_again(shared_request, member, now)]
        if not again:
            return list(shared_request.members.values())
        for member in again:
            del shared_request.members[id(member)]
            member.sends += 1
        best = min(again, key=lambda member: (self._offends(member), by_place(member)))
        latest = max(member.deadline for member in again)
        timeout_s = inf if self._far is None else best.queue_timeout_s
        other = SharedRequest(self, shared_request.key, best)
        request = self._shared_for(other, best, latest, timeout_s)
        other.requests, other.members = [request], {id(member): member for member in again}
        for member in again:
            member.held_by = other
        self._open.setdefault(shared_request.key, other)
        failed = list(shared_request.members.values())
        self.queued += 1
        if (refusal := self._admit(request)) is not None:
            self._outcomes[refusal.code] += 1  # `ended` counts it out
            request.settle(refusal, now)
        return failed

    def _leave(self, member: Request, outcome: CarpoolError) -> None:
        """A member does not wait any more. The last one takes the shared request along."""
        shared_request: SharedRequest = member.held_by
        assert shared_request.members is not None
        del shared_request.members[id(member)]
        is_last = not shared_request.members
        if is_last:
            self._close(shared_request)
        if shared_request.requests and shared_request.requests[0].phase == RUNNING:
            ride_along(member, shared_request.requests[0])
        self._settle(member, outcome)
        if is_last:
            self._give_up(shared_request)
            shared_request.key = b""

    def _leave_alone(self, shared_request: SharedRequest, request: Request) -> None:
        """A client left whose request no other shared."""
        if not shared_request.is_looked_for:
            self._queue.cancel(request)
            return
        shared_request.requests = []
        self._close(shared_request)
        request.waiter = shared_request.waiter
        if self._events.subscribers:
            self._events.admitted(request)
        self._count(request, client_left())

    def _give_up(self, shared_request: SharedRequest) -> None:
        """Withdraw the leaders that are left: no member needs them any more."""
        requests, shared_request.requests = shared_request.requests, []
        for request in requests:
            if shared_request.is_looked_for:
                drop(request)
            else:
                self._queue.cancel(request)

    def _close(self, shared_request: SharedRequest) -> None:
        """Let no request join it from now on."""
        if self._open.get(shared_request.key) is shared_request:
            del self._open[shared_request.key]

    def _settle_all(self, shared_request: SharedRequest, members: list[Request], outcome: Outcome) -> None:
        waiting = shared_request.members
        assert waiting is not None
        self._give_up(shared_request)
        shared_request.key = b""  # it may be remembered for a while, with its requests
        if isinstance(outcome, Output) and len(members) > 1:
            outcome = shared_output(outcome, len(members))
        for member in members:
            if waiting.pop(id(member), None) is not None:  # else an earlier member's waiter made it leave
                self._settle(member, outcome)

    def _settle(self, member: Request, outcome: Outcome) -> None:
        """Give a member its one outcome, and back what it counts for."""
        self.held -= 1
        self.held_bytes -= own_bytes(member)
        member.held_by = None
        self._count(member, outcome)

    def _count(self, request: Request, outcome: Outcome) -> None:
        request.settle(outcome, self._clock())
        self._outcomes[request.result_code] += 1  # bounded: codes come from the error tree
        if self._events.subscribers:
            self._events.settled(request, outcome)

    def _count_seconds(self, members: Sequence[Request], taken: float, call: CallFacts) -> None:
        """Count where the members' time went; the leader itself counts nowhere."""
        together: defaultdict[int, list[float]] = defaultdict(list)
        late: defaultdict[int, list[float]] = defaultdict(list)
        waits: list[float] = []
        for member in members:
            if member.result_code != "ok":
                continue  # the waiter of an earlier member has made it leave
            waits.append(member.taken - member.arrived)
            # Thousands of members may have come while the leader ran.
            (together if member.taken == taken else late)[member.tier].append(member.ended - member.arrived)
        if waits:
            self._waited.observe_all(waits)
        if together:
            self._seconds.answered(together, self._clock() - taken, call)
        self._seconds.answered_late(late, call)

    def _may_run(self, shared_request: SharedRequest, member: Request) -> bool:
        """Whether a shared request has left the queue, or another process sees to it that it does not wait too long."""
        if self._far is None:
            return any(request.taken for request in shared_request.requests)
        return not shared_request.is_looked_for and any(
            request.arrived <= member.arrived for request in shared_request.requests
        )

    def _refusal(self, size: int) -> CarpoolError | None:
        if self.held >= self._waiting_max or self.held_bytes + size > self._bytes_max:
            return QueueFull("the queue is full; try again soon", retry_after_s=1)
        return None


def ride_along(member: Request, leader: Request) -> None:
    """Give a member the times, the batch, the call and the sends of its leader."""
    if leader.taken:
        member.taken = max(leader.taken, member.arrived)
    member.batch, member.call = leader.batch, leader.call
    member.sends, member.searched_s = leader.sends, leader.searched_s


def own_bytes(member: Request) -> int:
    """The bytes of a member that are not one object for all members."""
    return len(member.client_id)


def by_place(member: Request) -> tuple[int, float]:
    """The best place first."""
    return member.tier, member.place


def rides_again(shared_request: SharedRequest, member: Request, now: float) -> bool:
    """Whether a member is sent again after a retryable error: not the first, only once, and if it has time left."""
    has_time = now < min(member.arrived + member.queue_timeout_s, member.deadline)
    return member is not shared_request.first and not member.sends and has_time


def expired(request: Request, now: float) -> CarpoolError | None:
    """The error of a request whose time is over before it is queued; None if it has time left."""
    return DeadlineExceeded("no result in time; the request was given up") if request.deadline <= now else None


def defect(failure: Exception) -> InternalError:
    """The error of a request that a defect keeps out after other processes were asked: no caller is left to see it."""
    logger.error("a request failed on admission", exc_info=failure)
    return InternalError("the gateway failed on this request")


def drop(request: Request) -> None:
    """End a leader that was never queued, without an outcome: it is no client's own request."""
    request.phase, request.input, request.prepared = DONE, b"", None


def shared_output(output: Output, members: int) -> Output:
    """The leader's output for each of its members: they share its GPU seconds too."""
    return replace(output, call=replace(output.call, gpu_s=output.call.gpu_s / members))


def client_left() -> ClientLeft:
    """The outcome of a request whose client left."""
    return ClientLeft("the client left")
