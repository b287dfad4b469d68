"""The endpoints of one model and their slots. No I/O: a free slot is taken, never waited for.

1. Every slot is in exactly one place: offered in `_free`, taken by a call, or withheld because its endpoint's breaker
   is open or its limit is lower than its slots. With a limit below 1 an endpoint has one slot, which rests between two
   calls; `look` offers it again.
2. An endpoint whose breaker opens is offered no more. When its pause is over and its last call has ended, one slot is
   offered: the probe (`look`). Where there is a health page, it is asked before.
3. Breakers may take at most EJECT_SHARE_MAX of the endpoints out, at least one; and any but the last that is known to
   be well. If every endpoint that is left fails as well, it is the upstream that is down, and all of them open.
4. The pool is down while no breaker is closed and no probe is offered. So requests are admitted for a moment when a
   probe is due: without a request there could be none.
5. An endpoint that is closed to one owner only (breaker.py) has a probe on offer for all others at any time.
   Quarantined owners, retries and searches do not get it.
6. While a batch that failed at an endpoint is tried at another one, its slot is not offered if some other endpoint is
   known to be well. Else an endpoint that fails at once would be free first each time, and draw every batch.
7. An endpoint that fails is in doubt until it has answered a few calls: it is not known to be well meanwhile.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from carpool.core.defaults import half
from carpool.core.request import Request
from carpool.upstream.breaker import Breaker
from carpool.upstream.controller import PAUSE_S_MAX, Controller
from carpool.upstream.endpoint import Endpoint
from carpool.upstream.first_contact import Trouble
from carpool.upstream.latency import LatestCalls
from carpool.upstream.limits import BatchLimit

# An endpoint that answered well within this is known to be well.
WELL_S = 10.0
# Rule 7: a failure adds one to the doubt, up to a limit, and an answer leaves a part of it.
DOUBT_MAX, DOUBT_LEFT, IN_DOUBT_FROM = 2.0, 0.75, 0.5
# Lanes of which an endpoint's last answer is remembered.
WELL_LANES_MAX = 256
# Rule 3: while no endpoint is known to work, the calls must still go somewhere.
EJECT_SHARE_MAX = 0.5
# How well an endpoint fits a wish: it failed before, it did not, or it did not and is known to be well.
FIT_FAILED, FIT_OTHER, FIT_WELL = 0, 1, 2
# A slot that rested for so much too long rests so much less the next time: nothing looks at it all the time.
LATE_S_MAX = 0.05
# Weight of the newest measurement in an endpoint's utilisation.
UTILIZATION_WEIGHT = 0.5


class EndpointState:
    """An endpoint in the pool, and how it does."""

    __slots__ = (
        "_busy_s",
        "_busy_s_then",
        "_counted_until",
        "_measured",
        "alive_at",
        "batch_limit",
        "breaker",
        "controller",
        "doubt",
        "endpoint",
        "failed",
        "failed_probes",
        "helped",
        "in_flight",
        "is_asked",
        "is_leaving",
        "latest_calls",
        "limit",
        "offered",
        "probing",
        "rests_until",
        "succeeded",
        "trouble",
        "utilization",
        "well_at",
        "well_lanes",
    )

    def __init__(self, endpoint: Endpoint, breaker: Breaker, controller: Controller, now: float) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        # Decides how many calls it gets.
        self.controller = controller
        # How many inputs it takes in a call, as far as is known.
        self.batch_limit = BatchLimit()
        # Calls it may have at once: its slots, or fewer while it is overloaded; below 1, the share of the time in which
        # it may have one. And when its next one may begin then.
        self.limit = controller.limit
        self.rests_until = -inf
        # Calls it has now, and slots of it in the pool's list of free ones.
        self.in_flight = 0
        self.offered = 0
        # The call it has is a probe.
        self.probing = False
        # When it last answered well; by lane when that call began; counts, and how long calls took, for the fleet's
        # page and metrics.
        self.well_at = -inf
        self.well_lanes: dict[int, float] = {}
        self.succeeded = 0
        self.failed = 0
        self.latest_calls = LatestCalls()
        # How its calls failed while none was answered well; None before the first failure, and after a good answer.
        self.trouble: Trouble | None = None
        # Rules 6 and 7: batches that failed here and are tried elsewhere now; and how much the endpoint is in doubt.
        self.helped = 0
        self.doubt = 0.0
        # Kept by the watch over its health: when it last answered a probe, and how many probes failed since.
        self.alive_at = -inf
        self.failed_probes = 0
        # Busy share of its slots, lately.
        self.utilization = 0.0
        # Its health page is being asked.
        self.is_asked = False
        # It was removed: it gets no call any more, and goes when it has none.
        self.is_leaving = False
        # Slot-seconds spent busy until `_counted_until`; and until `_measured`, when utilisation was last worked out.
        self._busy_s = 0.0
        self._counted_until = now
        self._busy_s_then = 0.0
        self._measured = now

    def __repr__(self) -> str:
        return f"<EndpointState {self.name} {self.breaker.state} in_flight={self.in_flight} offered={self.offered}>"

    @property
    def name(self) -> str:
        """The endpoint's name, for logs and metrics."""
        return self.endpoint.name

    def busy_seconds(self, now: float) -> float:
        """Slot-seconds spent busy so far; to be called before `in_flight` changes."""
        self._busy_s += self.in_flight * (now - self._counted_until)
        self._counted_until = now
        return self._busy_s

    def measure(self, now: float) -> None:
        """Work out the utilisation since the last time."""
        busy_s = self.busy_seconds(now)
        share = (busy_s - self._busy_s_then) / max(1e-9, (now - self._measured) * self.controller.slots)
        self.utilization += UTILIZATION_WEIGHT * (min(share, 1.0) - self.utilization)
        self._busy_s_then, self._measured = busy_s, now


class EndpointPreference(NamedTuple):
    """What a retry would rather have. It takes nothing less than the best of the endpoints in use, and waits for it."""

    # The endpoints that have failed: rather any other.
    failed: frozenset[EndpointState]
    # Rather an endpoint that is known to be well.
    known_well: bool


# Asks an endpoint's health page, and calls back with whether it is well.
AskHealth = Callable[[EndpointState, Callable[[bool], None]], None]


class Pool:
    """Slots of several endpoints; the one that has been free longest goes first."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        clock: Callable[[], float],
        *,
        eject_share_max: float = EJECT_SHARE_MAX,
        make_breaker: Callable[[], Breaker] = Breaker,
        random_share: Callable[[], float] = half,
        # Rule 2; None where there is no such page.
        ask_health: AskHealth | None = None,
    ) -> None:
        self._clock = clock
        self._make_breaker = make_breaker
        self.members = [self._member(endpoint) for endpoint in endpoints]
        self._eject_share_max = eject_share_max
        self._random_share = random_share
        # One entry for each free slot, dealt round so that consecutive batches go to different endpoints.
        self._free: deque[EndpointState] = deque()
        for turn in range(max(member.controller.slots for member in self.members)):
            for member in self.members:
                if turn < member.limit:
                    self._offer(member)
        # Endpoints whose slot rests, or did so a moment ago.
        self._resting: set[EndpointState] = set()
        # Endpoints that have answered well, the latest last: a look for one that is well need not go through them all.
        self._answered: dict[EndpointState, None] = {}
        # What `total` says; None when it is to be counted again.
        self._slots_in_use: float | None = None
        # Called when a slot becomes free.
        self._notifies: list[Callable[[], None]] = []
        # Endpoints that were removed with calls under way, and what to do when those have ended.
        self._leaving: dict[EndpointState, Callable[[], None]] = {}
        # Slot-seconds of endpoints that are no longer here.
        self._busy_s_gone = 0.0
        # When an endpoint answered a call well for the first time. No input can be blamed for what became of a call
        # that began before that (first_contact.py).
        self.proven_at = inf
        # When the first call began that was answered well, as far as is known: an endpoint worked from then on.
        self.works_since = inf
        # True while no endpoint may be called: synchronous requests are refused on admission then.
        self.is_down = False
        # How many breakers are closed; and whether none is: then endpoints may be tried with one call at a time.
        self._closed = len(self.members)
        self.is_none_closed = False
        # Called when the number changes.
        self._health_changes: list[Callable[[], None]] = []
        # Always 0, as `takes_probe` is always False: a pool with a probe on offer is not down (rule 5).
        self.probes = 0
        # True while an endpoint is closed to one owner only; see `is_shut_to`.
        self.is_shut_to_some = False
        # True while a limit of some endpoint is known; see `batch_max`.
        self.has_batch_limits = False
        self._ask_health = ask_health

    def __repr__(self) -> str:
        return f"<Pool slots={self.total():g} free={self.free()} down={self.is_down}>"

    @property
    def endpoints(self) -> list[Endpoint]:
        """Every endpoint."""
        return [member.endpoint for member in self.members]

    def total(self) -> float:
        """Slots of the endpoints that may be called; one that rests between two calls counts for its share of time."""
        if self._slots_in_use is None:
            self._slots_in_use = sum(member.limit for member in self.members if member.breaker.state == "closed")
        return self._slots_in_use or 1

    def free(self) -> int:
        """Slots that could take a batch now."""
        return len(self._free)

    def free_for_quarantined(self) -> int:
        """Slots among them that are not kept for other owners (rule 5)."""
        shut = (member for member in self.members if member.breaker.state != "closed") if self.is_any_out else ()
        return len(self._free) - sum(member.offered for member in shut if self._is_for_others(member))

    def busy(self) -> int:
        """Calls under way."""
        return sum(member.in_flight for member in (*self.members, *self._leaving))

    def busy_seconds(self) -> float:
        """Slot-seconds spent busy so far; two readings give the utilisation between them."""
        now = self._clock()
        here = sum(member.busy_seconds(now) for member in (*self.members, *self._leaving))
        return self._busy_s_gone + here

    def retry_after_s(self) -> int:
        """While the pool is down: whole seconds until the next probe."""
        soonest = min((member.breaker.probe_at() for member in self.members), default=0.0)
        return max(1, round(soonest - self._clock() + 0.5))

    @property
    def is_proven(self) -> bool:
        """Whether any endpoint has answered a call well."""
        return self.proven_at < inf

    def has_never_worked(self) -> bool:
        """Whether no endpoint has answered a call well, though some were made."""
        return not self.is_proven and any(member.trouble is not None for member in self.members)

    def when_slot_frees(self, notify: Callable[[], None]) -> None:
        """Have `notify` called when a slot becomes free."""
        self._notifies.append(notify)

    def when_health_changes(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when an endpoint that worked has failed, and when one works again."""
        self._health_changes.append(tell)

    def take(self, is_quarantined: bool = False) -> EndpointState:
        """Take a free slot; there must be one. `is_quarantined`: for a batch of quarantined owners."""
        if is_quarantined:
            member = next(member for member in self._free if not self._is_for_others(member))
            self._free.remove(member)
        else:
            member = self._free.popleft()
        member.offered -= 1
        self._start(member)
        return member

    @property
    def is_any_out(self) -> bool:
        """Whether a breaker is not closed: `look` has something to do."""
        return self._closed < len(self.members)

    @property
    def is_any_resting(self) -> bool:
        """Whether a slot rests: `look` has something to do."""
        return bool(self._resting)

    def look(self) -> None:
        """Offer the slots that have rested (rule 1), and the probes that are due (rule 2)."""
        for member in [each for each in self._resting if each.rests_until <= self._clock()]:
            self._resting.discard(member)
            if member.breaker.state == "closed":
                self._offer_what_may_be(member)
        for member in self.members if self.is_any_out else ():
            if member.breaker.state == "closed" or member.is_asked:
                continue
            if member.offered:
                self.notify()  # what was for others may be for all by now
            elif not self._may_probe(member.breaker) or (member.in_flight and not member.breaker.allows_others()):
                continue
            elif self._ask_health is None:
                self._offer_probe(member)
            else:
                member.is_asked = True
                self._ask_health(member, partial(self._health_told, member))

    def notify(self) -> None:
        """Tell the batching loops that there may be a slot for them."""
        for notify in self._notifies:
            notify()

    def take_at_once(self, wish: EndpointPreference) -> EndpointState | None:
        """A free slot of the endpoint that fits best, for a retry or a search; None if there is none now."""
        member = self._find_free(wish)
        if member is not None:
            self._free.remove(member)
            member.offered -= 1
            self._start(member)
        return member

    def has_free(self, wish: EndpointPreference) -> bool:
        """Whether `take_at_once` would find a slot."""
        return self._find_free(wish) is not None

    def batch_max(self, wanted: int) -> int:
        """How many of `wanted` inputs any endpoint in use takes in a call."""
        if not self.has_batch_limits:
            return wanted
        now = self._clock()
        in_use = [member.batch_limit for member in self.members if member.breaker.state == "closed"]
        self.has_batch_limits = any(member.batch_limit.learned is not None for member in self.members)
        return min((limit.allows(now, wanted) for limit in in_use), default=wanted)

    def takes_probe(self, request: Request) -> bool:
        """Whether a request may come as a probe while the pool is down: never, see rule 5."""
        return False

    def is_shut_to(self, owner: str) -> bool:
        """Whether no endpoint may be called for this owner, though some may be called for others."""
        now = self._clock()
        return self.is_shut_to_some and all(
            not member.breaker.allows(now) and member.breaker.blamed_owner in (None, owner) for member in self.members
        )

    def give_back(self, member: EndpointState) -> None:
        """End the use of a slot. `record_success` or `record_failure` says what the call showed of the endpoint."""
        assert member.in_flight > 0, "a slot was given back twice"
        now = self._clock()
        member.busy_seconds(now)
        member.in_flight -= 1
        if member.rests_until > now:  # this call may have been shorter than the one that its pause goes by
            member.rests_until = min(member.rests_until, now + PAUSE_S_MAX)
        if member.is_leaving and not member.in_flight:
            self._gone(member)
        if member.breaker.state == "closed":
            self._offer_what_may_be(member)
        # Else `look` offers a probe, a little later: what this call showed must not be taken for its result.

    def is_helped(self, member: EndpointState) -> None:
        """A batch that failed there is tried again: rule 6, until `help_ended`. To be called before `give_back`."""
        member.helped += 1

    def help_ended(self, member: EndpointState) -> None:
        """A batch that failed there has been answered elsewhere, or given up."""
        member.helped -= 1
        if member.breaker.state == "closed":
            self._offer_what_may_be(member)

    def record_success(self, member: EndpointState, lane: bytes = b"", began: float = -inf) -> None:
        """A call of a lane, which began then, was answered as it should be."""
        member.succeeded += 1
        self.proven_at = min(self.proven_at, self._clock())
        self.works_since = min(self.works_since, began)
        member.trouble = None
        member.well_at = self._clock()
        number = hash(lane)  # a lane's key may have kilobytes, and each endpoint has its own list
        if number not in member.well_lanes and len(member.well_lanes) >= WELL_LANES_MAX:
            member.well_lanes.clear()
        member.well_lanes[number] = max(began, member.well_lanes.get(number, -inf))
        member.failed_probes = 0
        member.probing = False
        if member.doubt:
            member.doubt = member.doubt * DOUBT_LEFT if member.doubt > IN_DOUBT_FROM else 0.0
        if not member.is_leaving:
            self._answered.pop(member, None)
            self._answered[member] = None
        was_open = member.breaker.state != "closed"
        member.breaker.succeeded()
        if was_open:
            self._slots_in_use = None
        if was_open and not member.is_leaving:
            self._offer_what_may_be(member)
            self._notice_if_down()

    def record_failure(self, member: EndpointState, owners: Collection[str] = ()) -> None:
        """A call failed, through the endpoint's fault or, as far as is known, on inputs of these owners."""
        member.failed += 1
        probe, member.probing = member.probing, False
        self._failed(
            member,
            member.breaker.failed(
                self._clock(), self._random_share(), probe=probe, may_open=self._may_eject(member), owners=owners
            ),
        )

    def record_failure_again(self, member: EndpointState, owner: str) -> None:
        """One more call of the same search failed, on inputs of this owner alone."""
        member.failed += 1
        self._failed(
            member,
            member.breaker.failed_again(self._clock(), self._random_share(), owner, may_open=self._may_eject(member)),
        )

    def record_answered_elsewhere(self, member: EndpointState) -> None:
        """A call that failed there was answered by another endpoint; called besides `record_failure`."""
        may_open = self.has_well(member)
        self._failed(
            member, member.breaker.record_answered_elsewhere(self._clock(), self._random_share(), may_open=may_open)
        )

    def raise_doubt(self, member: EndpointState) -> float:
        """A batch failed there, for whatever reason: rule 7. Returns the doubt that there was before."""
        before, member.doubt = member.doubt, min(member.doubt + 1.0, DOUBT_MAX)
        return before

    def _failed(self, member: EndpointState, is_opened: bool) -> None:
        if is_opened:
            self._withdraw(member)
        self._slots_in_use = None
        if all(other.breaker.state != "closed" or other.breaker.is_failing for other in self.members):
            for other in self.members:  # rule 3: none of them answers
                if other.breaker.state == "closed":
                    other.breaker.open(self._clock(), self._random_share())
                    self._withdraw(other)
        for other in self.members:  # rule 6 may not hold any more
            if other.helped and other.breaker.state == "closed":
                self._offer_what_may_be(other)
        self._notice_if_down()

    def says_nothing(self, member: EndpointState) -> None:
        """A call ended in a way that tells nothing of the endpoint: it was cancelled, for example."""
        if member.probing:
            member.probing = False
            member.breaker.probe_left()

    def refused(self, member: EndpointState) -> None:
        """A call was refused, for its input perhaps, or because the endpoint is busy: that tells nothing of it.

        But where others are known to be well, an endpoint that does not answer its probe is left alone for longer.
        """
        if member.probing and self.has_well(member):
            self.record_failure(member)
        else:
            self.says_nothing(member)

    def is_well(self, member: EndpointState) -> bool:
        """Whether the endpoint answered a call well a short while ago, and is not in doubt."""
        return self._clock() - member.well_at <= WELL_S and member.doubt < IN_DOUBT_FROM

    def is_in_doubt(self, least: float = IN_DOUBT_FROM) -> bool:
        """Whether every endpoint is closed to calls, or so much in doubt (rule 7)."""
        return all(member.breaker.state != "closed" or member.doubt >= least for member in self.members)

    def has_well(self, member: EndpointState) -> bool:
        """Whether another endpoint than this one is in use and known to be well."""
        return self._best_fit(EndpointPreference(frozenset((member,)), known_well=True)) == FIT_WELL

    def is_alive(self, since: float) -> bool:
        """Whether any endpoint in use has answered a call well since then."""
        for member in reversed(self._answered):
            if member.well_at <= since:
                return False
            if member.breaker.state == "closed":
                return True
        return False

    def answered_lane(self, member: EndpointState, lane: bytes, since: float) -> bool:
        """Whether the endpoint has answered a call of this lane that began since then: an older one proves nothing."""
        return member.well_lanes.get(hash(lane), -inf) > since

    def has_others(self, *members: EndpointState | None) -> bool:
        """Whether another endpoint than these is in use."""
        return any(other.breaker.state == "closed" and other not in members for other in self.members)

    def follow(self, member: EndpointState) -> None:
        """Let the endpoint have as many calls as its controller says."""
        if member.limit == member.controller.limit:
            return
        member.limit = member.controller.limit
        self._slots_in_use = None
        while member.offered and member.offered + member.in_flight > max(1, member.limit):
            self._free.remove(member)
            member.offered -= 1
        if member.breaker.state == "closed":  # else `look` offers a probe, when its health page was asked
            self._offer_what_may_be(member)

    def add(self, endpoint: Endpoint) -> None:
        """Take an endpoint in while running."""
        member = self._member(endpoint)
        self.members.append(member)
        self._slots_in_use = None
        self._offer_what_may_be(member)
        self._notice_if_down()

    def remove(self, endpoint: Endpoint, when_gone: Callable[[], None]) -> None:
        """Send an endpoint no more calls; `when_gone` is called once it has none under way."""
        member = next(member for member in self.members if member.endpoint is endpoint)
        self.members.remove(member)
        self._answered.pop(member, None)
        self._slots_in_use = None
        self._withdraw(member)
        self._resting.discard(member)
        member.is_leaving = True
        self._leaving[member] = when_gone
        self._notice_if_down()
        if not member.in_flight:
            self._gone(member)

    def _start(self, member: EndpointState) -> None:
        now = self._clock()
        member.busy_seconds(now)
        member.in_flight += 1
        if member.limit < 1:
            member.rests_until = max(member.rests_until, now - LATE_S_MAX) + member.controller.interval_s
        if member.breaker.started(now):
            member.probing = True
            self._notice_if_down()

    def _member(self, endpoint: Endpoint) -> EndpointState:
        return EndpointState(endpoint, self._make_breaker(), Controller(endpoint.slots), self._clock())

    def _gone(self, member: EndpointState) -> None:
        self._busy_s_gone += member.busy_seconds(self._clock())
        self._leaving.pop(member)()

    def _offer(self, member: EndpointState) -> None:
        self._free.append(member)
        member.offered += 1

    def _offer_what_may_be(self, member: EndpointState) -> None:
        """Offer the slots of the endpoint that no call has and nothing withholds."""
        if member.is_leaving:
            return
        breaker = member.breaker
        if breaker.state == "closed":
            most = max(1.0, member.limit)
            if member.limit < 1 and member.rests_until > self._clock():
                most = 0.0
                self._resting.add(member)
            if member.helped and self.has_well(member):
                most -= member.helped
        elif breaker.allows_others():  # beside calls that began before
            most = min(member.limit, member.in_flight + 1)
        else:
            most = int(breaker.allows(self._clock()))
        while member.offered + member.in_flight < most:
            self._offer(member)
            if breaker.state != "closed":
                self._notice_if_down()
            self.notify()

    def _find_free(self, wish: EndpointPreference) -> EndpointState | None:
        """The endpoint whose free slot a retry may have. Called often, with many slots: the best fit is found once."""
        best = self._best_fit(wish)
        if best == FIT_WELL and not any(member.offered for member in self._known_well(wish)):
            return None
        for member in self._free:
            if self._fit(member, wish) >= best and not self._is_for_others(member):
                return member
        return None

    def _notice_if_down(self) -> None:
        self.is_shut_to_some = any(member.breaker.is_closed_to_one for member in self.members)
        before, self._closed = self._closed, sum(member.breaker.state == "closed" for member in self.members)
        self.is_none_closed = self._closed == 0
        # An endpoint that is closed to one owner is, or will be in a moment, on offer for all other owners.
        self.is_down = self.is_none_closed and not self._free and not self.is_shut_to_some
        if self._closed != before:
            for tell in self._health_changes:
                tell()

    def _may_probe(self, breaker: Breaker) -> bool:
        return breaker.allows(self._clock()) or breaker.allows_others()

    def _is_for_others(self, member: EndpointState) -> bool:
        """Rule 5: whether the slot that the endpoint offers is for all owners but one."""
        breaker = member.breaker
        return breaker.state != "closed" and not breaker.allows(self._clock())

    def _health_told(self, member: EndpointState, is_well: bool) -> None:
        """Rule 2: its health page was asked, before a client's input is risked."""
        member.is_asked = False
        breaker = member.breaker
        if breaker.state != "open" or member.in_flight or member not in self.members:
            return  # things have changed meanwhile
        if is_well:
            self._offer_probe(member)
            return
        breaker.close_to_all()
        if breaker.allows(self._clock()):
            breaker.open(self._clock(), self._random_share())
        self._notice_if_down()

    def _offer_probe(self, member: EndpointState) -> None:
        self._offer_what_may_be(member)
        self._notice_if_down()

    def _withdraw(self, member: EndpointState) -> None:
        if member.offered:
            self._free = deque(other for other in self._free if other is not member)
            member.offered = 0

    def _may_eject(self, member: EndpointState) -> bool:
        open_now = sum(other.breaker.state != "closed" for other in self.members)
        return open_now + 1 <= max(1, int(len(self.members) * self._eject_share_max)) or self.has_well(member)

    def _best_fit(self, wish: EndpointPreference) -> int:
        """How well the best of the endpoints in use fits."""
        if wish.known_well and any(member.breaker.state == "closed" for member in self._known_well(wish)):
            return FIT_WELL
        return FIT_OTHER if self.has_others(*wish.failed) else FIT_FAILED

    def _fit(self, member: EndpointState, wish: EndpointPreference) -> int:
        if member in wish.failed:
            return FIT_FAILED
        return FIT_WELL if wish.known_well and self.is_well(member) else FIT_OTHER

    def _known_well(self, wish: EndpointPreference) -> Iterator[EndpointState]:
        """The endpoints that are known to be well, but for those that failed; the latest first."""
        for member in reversed(self._answered):
            if self._clock() - member.well_at > WELL_S:
                return
            if member not in wish.failed and member.doubt < IN_DOUBT_FROM:
                yield member
