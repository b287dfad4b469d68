"""The load shedder of one model: a request that would wait too long is refused at once. Pure: `now` is an argument.

1. How long a request of a tier would wait for a slot: the work ahead of it in its order, and what overtakes it
   meanwhile, divided by the capacity (healthy slots x batch / seconds a batch takes). A request that would wait longer
   than its tier's `wait_max` is refused. So the lowest tier is refused first: everything is ahead of it.
2. The rule is turned around: a tier has *headroom* for so many more. That is counted anew every few milliseconds, from
   what truly waits; in between each admission takes a place. So most requests cost one comparison. While no tier has
   used half of its headroom, a count may be older: it shows too little headroom, and no request is refused by it.
3. While more comes than can be served, half of what a tier may have waiting is for any request; else all of it is, for
   what is short then will soon be there again. Beyond that the wait of the request's owner counts: inside a tier owners
   are served in turn, so an owner with few requests waits behind as many of each other owner, not behind all that the
   busiest of them has; and one with many would wait for all that the others still bring.
4. Bursts are served, standing queues are cut. The queue of a tier and those above it stands while more of them wait
   than a batch takes, and for a second after the last refusal: a queue that is short because the shedder cuts it still
   stands. In its first second a request for which there is no room may come in late: it may wait for as long as its
   time in the queue, less one call. Over the next second that falls linearly to its tier's `wait_max`. Requests of its
   tier and above that come in time go before it, so it takes nothing from them; lower tiers count it as ahead of them.
   While it waits, its owner's next requests come in late, too, behind it, or not at all; other owners of its tier come
   in time by their share of the owners. It is let in where there is time for it, behind all that wait and all that are
   expected to go before it; each of many gateways has an equal part, or one by what comes to it if that is more. Until
   a call has ended, one is taken to need twice what the oldest has needed so far; while none runs nothing is known, and
   no request is refused.
5. An estimate may be wrong. If even the shortest wait that was seen in a while is longer than the tier may wait, the
   capacity is trusted less, until it is not (as CoDel does it). It is also trusted less while some requests wait much
   longer than others: the limits are for all of them.
6. The lowest tier always has headroom for its minimum share: it must not starve while other tiers use everything.
7. `thresholds` is the simple way: by how many wait, and by the rate that comes in. Over Redis that is the whole queue
   against what the whole fleet can serve: this gateway's requests as they are now, those of the others by their last
   heartbeats. Of the room that there was then, each gateway takes its part.
8. Over Redis a gateway does not see which of its requests still wait and which are being served. It supposes that all
   slots are full: of each tier in proportion to what was served of it lately, and of each owner as many.
9. A slot that becomes free must find a full batch. So any request comes in while fewer wait than one batch takes, of
   all tiers together, however slow the model is and whatever may overtake it. And with several slots, a tier may have
   two batches waiting, before what goes ahead of it: only where some are left behind does the loop keep slots apart.
10. Requests of different lanes share no batch. While several lanes wait, a request that joins a batch which is not full
    comes in: it costs no call. A request that opens a lane comes in if the calls of all lanes of its tier and above,
    its own among them unless its owner has no other, take no longer than it may wait (half of it if higher tiers come).
11. A call of many comes in whole or not at all: where its first would come in, and its last would get a slot in its
    time in the queue. By thresholds: where there is room for all of them, or no request waits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf, sqrt

import msgspec

from carpool.core.errors import Shed
from carpool.core.histograms import SECONDS_BOUNDS, off_by
from carpool.core.ports import LaneCounts, QueueStats
from carpool.core.request import Request

# Rule 2: so old a count may be; and while there is much room.
RECOUNT_S, RECOUNT_QUIET_S = 0.005, 0.05
# Rule 4: for so long it is a burst; after as long again the queue stands.
BURST_S = 1.0
# The planned share of the time in the queue: a prediction is not exact, and admitted requests must not expire.
MARGIN = 0.98
# Rule 3: what is for any request while more comes than can be served.
ANY_SHARE = 0.5
UNENDED_TIMES = 2.0
# Rule 5: how long the shortest wait is looked for, how many must be seen, and by how much trust falls and grows.
GUARD_S = 0.5
GUARD_SEEN_MIN = 4
TRUST_FALLS, TRUST_GROWS, TRUST_MIN = 0.8, 0.05, 0.05
TICK_S = 0.1
# Weight of the newest tick in the rates; and in the rates that must see at once that more comes.
RATE_WEIGHT, QUICK_WEIGHT = 0.2, 0.5
# A rate is not worked out from less time than this.
RATE_S_MIN = 0.02
# More may come than the mean: so many standard deviations are counted on top of it.
SIGMAS = 3.0
# The same for a wait that was seen.
WAIT_WEIGHT = 0.1
# Rule 7: with more waiting than so many seconds of capacity only the highest tier comes in, or all but the lowest; nor
# does the lowest while more than this share of the capacity comes.
DEPTH_HIGHEST_ONLY_S, DEPTH_NOT_LOWEST_S, RATE_SHARE = 0.35, 0.07, 0.7
# The share of the capacity that should be used, where pressure is 1: beyond it waits grow fast.
UTILIZATION_TARGET = 0.75
RETRY_AFTER_S_MAX = 30
# Ticks of which it is remembered what was predicted then.
PREDICTIONS_KEPT = 64


class TierRule(msgspec.Struct, frozen=True):
    """What the shedder must know of a tier."""

    # What is added to an arrival for its place in the order.
    target_s: float
    wait_max_s: float
    name: str = ""


class Elsewhere(msgspec.Struct, frozen=True):
    """What the other gateways last said of themselves (rule 7), and this gateway's part of the room there is."""

    requests: int = 0
    # Admitted a second.
    rate: float = 0.0
    part: float = 1.0
    heard_at: float = -inf


ALONE = Elsewhere()


class LoadShedder:
    """Says which requests come in. What waits is read from `stats_by_tier`."""

    def __init__(
        self,
        tiers: Sequence[TierRule],
        stats_by_tier: Sequence[QueueStats],
        *,
        is_strict: bool = False,
        min_share: float = 0.05,
        by_thresholds: bool = False,
        queue_s: float = 0.0,
    ) -> None:
        count = len(tiers)
        # Rule 4: how long a request may wait for a slot at all. A request that comes in late has a place later by that.
        self.queue_s = queue_s
        self._tiers = tiers
        self._lowest = count - 1
        self._is_strict = is_strict
        self._stats_by_tier = stats_by_tier
        # Rule 10: how many wait, by lane; None where that is not known. By tier: how many lanes of it and above wait.
        self._lanes: LaneCounts | None = None
        self._lane_counts = [0] * count
        self._lanes_counted_at = -inf
        self._min_share = min_share
        self._by_thresholds = by_thresholds
        # Rule 7: what the others said, and how many requests there were here then.
        self._others, self._own_then = ALONE, 0
        # For how long after a request's arrival a later request of a higher tier, by number, still overtakes it.
        self._overtaking_s = [
            [
                min(tier.wait_max_s, inf if is_strict else max(0.0, tier.target_s - other.target_s))
                for other in tiers[:n]
            ]
            for n, tier in enumerate(tiers)
        ]
        # Requests a second that this process may have served, if only those of a tier and above count. By tier.
        self.capacity = [inf] * count
        # Rule 9: requests in a batch, as far as this process fills it.
        self._batch = [1.0] * count
        # Rule 8: above 0 where `stats_by_tier` also counts requests that are being served. How long a batch takes.
        self._batch_s = 0.0
        # Rule 4: how long a call takes, and what this process may let in late, in requests a second. By tier: since
        # when the queue of it and those above stands, or inf; when one was last refused; how many more than there is
        # room for may come in late.
        self.call_s = self._burst_rps = 0.0
        self._stands_since = [inf] * count
        self._refused_at = [-inf] * count
        self._late_headroom = [0.0] * count
        # While late requests of a tier, or of higher ones, wait: how many may come in time, and go before them.
        self._goes_before_late = [False] * count
        self._newcomers = [0.0] * count
        # What came in, in requests a second, when the queue did not stand; and what comes to other gateways, as far as
        # it takes from what this gateway counts on.
        self._calm_rates = [0.0] * count
        self._last_rates = [0.0] * count
        self._elsewhere = [0.0] * count
        # Whether the last request that was let in comes late.
        self.is_late = False
        # Until a call has ended: how many can be served at once, and since when the first one runs.
        self._first_call: Callable[[], tuple[float, float]] | None = None
        self._counts_running = False
        self._running = [0.0] * count
        self._served_rates = [0.0] * count
        self._stood = [0] * count
        self._admitted_rates = [0.0] * count
        self._quick_rates = [0.0] * count
        # Requests a second that come, also those that are refused.
        self.rates = [0.0] * count
        self.trust = [1.0] * count
        self._spread = 1.0
        # Rule 2: for how many more of each tier there is room. It stays the same list.
        self.headroom = [inf] * count
        # Rule 3: how much of the own tier may be ahead of a request.
        self._allowed = [inf] * count
        # The error for requests that are refused before the next count: the same for all of a tier.
        self._refusals: list[Shed | None] = [None] * count
        self._counted_at = self._recount_at = -inf
        self._is_known = False
        # Since the last tick.
        self._admitted = [0] * count
        self._refused = [0] * count
        self._ticked_at = self._guard_at = -inf
        # Rule 5: how often a wait was seen, and the shortest, since the last look.
        self._seen = [0] * count
        self._shortest = [inf] * count
        # How long requests waited that got a slot, lately.
        self._waits = [0.0] * count
        # For metrics. The last: by how much a predicted wait was longer, and shorter, than the wait was.
        self.shed = [0] * count
        self.wait_errors = off_by(SECONDS_BOUNDS)
        # When, and by tier how long a request would wait.
        self._predictions: deque[tuple[float, list[float]]] = deque(maxlen=PREDICTIONS_KEPT)

    def __repr__(self) -> str:
        return f"<LoadShedder capacity={self.capacity} headroom={self.headroom} trust={self.trust}>"

    def refusal(self, tier: int, owner: str, now: float, request: Request | None = None) -> Shed | None:
        """Let a request in, or say why not. `is_late` then says whether it comes in late."""
        headroom = self.headroom
        self.is_late = False
        has_lane = request is not None and (request.parameters or request.lane)
        if now >= self._recount_at or headroom[tier] <= 0 or has_lane:
            refusal = self.refusal_if_full(tier, owner, now, request=request)
            if refusal is not None:
                return refusal
            self._newcomers[tier] -= not self.is_late
        self._admitted[tier] += 1
        headroom[tier] -= 1
        if tier < self._lowest:
            for behind in range(tier + 1, len(headroom)):
                headroom[behind] -= 1
        return None

    def refusal_of_all(
        self, tier: int, owner: str, now: float, count: int, seconds: float, request: Request | None = None
    ) -> Shed | None:
        """Let so many of one call in, the last of which has so many seconds to wait, or say why not (rule 11)."""
        self.is_late = False
        refusal = self.refusal_if_full(tier, owner, now, count, request)
        refusal = refusal or self.refusal_by_deadline(tier, owner, now, seconds, count)
        is_short = self._by_thresholds and self._is_known and self.headroom[tier] < count
        if refusal is None and is_short and self._depth() > 0:
            refusal = self._refuse(tier, count, self._too_long(tier))
        if refusal is None:
            self._admitted[tier] += count
            self._newcomers[tier] -= 0 if self.is_late else count
            for behind in range(tier, len(self.headroom)):
                self.headroom[behind] -= count
        return refusal

    def refusal_if_full(
        self, tier: int, owner: str, now: float, count: int = 1, request: Request | None = None
    ) -> Shed | None:
        """Why a request would be refused; None leaves the decision for later: then the caller asks again."""
        self._recount_if_due(tier, now)
        if not self._is_known:
            return None
        may_come = not self._by_thresholds
        if may_come and self._lanes is not None and (self._lane_counts[-1] > 1 or (request and request.lane_key)):
            if request is None or self._finds_batch(self._lanes, request, count):
                return None
            may_come = self._may_open_lane(self._lanes, tier, owner)
            if may_come and not self._goes_before_late[tier] and self._waiting(tier) < self._allowed[tier]:
                return None
        elif self.headroom[tier] > 0:
            return None
        if may_come:
            if self._comes_in_time(tier, owner, count):
                return None
            if self.headroom[tier] + self._late_headroom[tier] > 0:
                self.is_late = True
                return None
        self._refused_at[tier:] = [now] * (len(self._tiers) - tier)
        refusal = self._refusals[tier]
        if refusal is None:
            refusal = self._refusals[tier] = self._too_long(tier)
        return self._refuse(tier, count, refusal)

    def _finds_batch(self, lanes: LaneCounts, request: Request, count: int) -> bool:
        """Whether others of its lane wait for a batch that it can join, with all of its call (rule 10)."""
        waiting = lanes.waiting_in(request.lane_key)
        return waiting > 0 and waiting + count <= lanes.batch_max

    def _may_open_lane(self, lanes: LaneCounts, tier: int, owner: str) -> bool:
        """Whether a request that finds no batch to join may make a call necessary (rule 10)."""
        for behind in range(tier, len(self._tiers)):
            self._lane_counts[behind] += 1  # until the next count
        may_wait_s = MARGIN * self.queue_s - self.call_s
        if sum(map(self._rate_now, range(tier))) >= 1.0:
            may_wait_s /= 2
        # An owner that has opened a lane leaves room for the lane of an owner that has not.
        calls = self._lane_counts[tier] - (not lanes.opened_by(owner))
        return calls * self._batch[tier] <= self.capacity[tier] * may_wait_s

    def _recount_if_due(self, tier: int, now: float) -> None:
        if now >= self._recount_at or (self.headroom[tier] <= 0 and now >= self._counted_at + RECOUNT_S):
            self._recount(now)

    def _comes_in_time(self, tier: int, owner: str, count: int) -> bool:
        """Whether a request need not come in late, where its tier has no room for all."""
        allowed, queue_stats = self._allowed[tier], self._stats_by_tier[tier]
        if queue_stats.late_of(owner):
            return False  # behind its own
        # Of a call of many the first request counts; but all of them where they would go before requests that are late.
        if not self._goes_before_late[tier]:
            count = 1
        elif self._newcomers[tier] < count:
            return False
        # A request waits for one of each owner at least: where that is too long, `_turns` need not be worked out.
        return queue_stats.owners + 1 < allowed and self._turns(tier, owner, count) < allowed

    def refusal_by_deadline(self, tier: int, owner: str, now: float, seconds: float, count: int = 1) -> Shed | None:
        """Why a request that must have its slot within so many seconds is not let in; it would not be served by then.

        To be called before it is let in: it takes no place. Of a call of `count`, it is about the last request.
        """
        self._recount_if_due(tier, now)
        if self._by_thresholds or not self._is_known:
            return None
        seconds = max(seconds, 0.0)
        if self.headroom[tier] > 0 or self._comes_in_time(tier, owner, count):
            waiting, overtakers = self._waiting(tier), self._overtakers(tier, seconds)
            ahead = self._ahead(tier) - waiting + min(waiting + count - 1, self._turns(tier, owner, count))
        else:
            # As rule 4 has it: the call that runs now may have just begun. It may take longer than the client waits.
            seconds = max(seconds - self.call_s, 0.0)
            overtakers = self._overtaking_late(tier, seconds)
            ahead = self._all_waiting() + count - 1
        if ahead <= 0:
            return None  # a request that does not wait is not overtaken
        capacity = self.capacity[tier] * self.trust[tier]
        wait_s = (ahead + overtakers) / capacity if capacity > 0.0 else inf
        if wait_s <= seconds:
            return None
        fewer = int(capacity * seconds)
        advice = f"; send {fewer} inputs at most in a call" if fewer < count else ""
        return self._refuse(tier, count, too_long(wait_s, f"it must have one within {as_ms(seconds)}", advice))

    def _refuse(self, tier: int, count: int, refusal: Shed) -> Shed:
        self._refused[tier] += count
        self.shed[tier] += count
        return refusal

    def _too_long(self, tier: int) -> Shed:
        """By which limit a request of this tier is refused now."""
        wait_s = self.predicted_wait_s(tier)
        if self._by_thresholds:
            wait_s = max(wait_s, self._depth() / self.capacity[-1]) if self.capacity[-1] else inf
            return too_long(wait_s, 'too many wait or come for its tier (`shedding.mode = "thresholds"`)')
        rule, limit_s = self._tiers[tier], self._limit_s(tier, self._counted_at)
        setting = f"its `wait_max_ms` is {rule.wait_max_s * 1000:g}"
        why = f"one of tier {rule.name} may wait for {as_ms(limit_s)} now ({setting})"
        return too_long(max(wait_s, limit_s), why)

    def _limit_s(self, tier: int, now: float) -> float:
        """How long a request of this tier that comes now may wait for a slot (rule 4)."""
        wait_max_s = self._tiers[tier].wait_max_s
        burst_s = MARGIN * self.queue_s
        if sum(self._rate_now(n) + self._elsewhere[n] for n in range(tier)) >= 1.0:
            # No request comes in late behind higher tiers while it is not even known what can be served.
            burst_s = burst_s if self._first_call is None else 0.0
        burst_s = max(burst_s - self.call_s, wait_max_s)
        stands_s = now - self._stands_since[tier]
        return burst_s - (burst_s - wait_max_s) * min(max(0.0, stands_s / BURST_S - 1.0), 1.0)

    def predicted_wait_s(self, tier: int) -> float:
        """How long a request of this tier would wait for a slot, by all that waits now."""
        capacity = self.capacity[tier] * self.trust[tier]
        if not self._is_known or capacity <= 0.0:
            return inf if self._is_known else 0.0
        return (self._ahead(tier) + self._overtaking(tier)) / capacity

    def wait_now_s(self, tier: int) -> float:
        """How long a request of this tier would wait for what waits now; 0 where nothing does, whatever may come."""
        return self.predicted_wait_s(tier) if self._ahead(tier) > 0 else 0.0

    def learn(
        self,
        capacity: Sequence[float],
        batch: Sequence[float],
        stats_by_tier: Sequence[QueueStats],
        *,
        call_s: float = 0.0,
        burst_rps: float = 0.0,
        elsewhere: Sequence[float] = (),
        batch_s: float = 0.0,
        lanes: LaneCounts | None = None,
        spread: float = 1.0,
        others: Elsewhere = ALONE,
    ) -> None:
        """What can be served, and is in a batch, by tier; where it waits. For rule 4: how long a call takes, what may
        be let in late, and what other gateways bring that takes of that, by tier. For rule 5: how many times as long
        as the others some requests wait. For rule 7: what the other gateways have.

        With `batch_s`, `stats_by_tier` also counts requests that are being served, for so long each.
        """
        self.capacity, self._batch = list(capacity), list(batch)
        self._stats_by_tier, self._lanes = stats_by_tier, lanes
        self._batch_s = batch_s
        self._spread = spread
        self.call_s, self._burst_rps = call_s, burst_rps
        self._elsewhere = list(elsewhere) or [0.0] * len(self._tiers)
        self._is_known, self._first_call = True, None
        if others.heard_at != self._others.heard_at:
            self._own_then = self.requests()
        self._others = others

    def requests(self) -> int:
        """How many there are here, those that are being served included if `stats_by_tier` counts them."""
        return sum(queue_stats.waiting for queue_stats in self._stats_by_tier)

    def admitted_rps(self) -> float:
        """Requests a second that were let in lately."""
        return sum(self._admitted_rates)

    def suppose(
        self,
        first_call: Callable[[], tuple[float, float]],
        stats_by_tier: Sequence[QueueStats],
        *,
        counts_running: bool = False,
    ) -> None:
        """No call has ended: all that is known is how many can be served at once, and since when the first one runs.

        With `counts_running`, `stats_by_tier` also counts requests that are being served.
        """
        self._stats_by_tier = stats_by_tier
        self._is_known = self._is_known and self._first_call is not None
        self._first_call, self._counts_running = first_call, counts_running
        self._others = ALONE

    def _suppose(self, at_once: float, since: float, now: float) -> None:
        """What a call that has run for so long tells of the capacity (rule 4)."""
        self._is_known = at_once > 0 and now > since
        if self._is_known:
            count, call_s = len(self._tiers), UNENDED_TIMES * (now - since)
            self.capacity, self._batch = [at_once / call_s] * count, [at_once] * count
            self.call_s, self._burst_rps = call_s, at_once / call_s
            self._batch_s = call_s if self._counts_running else 0.0

    def tick(self, now: float) -> None:
        """Work out the rates since the last tick, and how far the estimate is to be trusted. To be called every TICK_S.

        Timers come late when there is much to do: the time counts that passed.
        """
        seconds = max(now - self._ticked_at, TICK_S / 10) if self._ticked_at > -inf else TICK_S
        for tier, admitted in enumerate(self._admitted):
            stands = self._stats_by_tier[tier].waiting
            came, served = admitted + self._refused[tier], max(0, admitted - (stands - self._stood[tier]))
            self.rates[tier] += RATE_WEIGHT * (came / seconds - self.rates[tier])
            self._admitted_rates[tier] += RATE_WEIGHT * (admitted / seconds - self._admitted_rates[tier])
            self._quick_rates[tier] += QUICK_WEIGHT * (admitted / seconds - self._quick_rates[tier])
            self._served_rates[tier] += RATE_WEIGHT * (served / seconds - self._served_rates[tier])
            self._admitted[tier] = self._refused[tier] = 0
            self._stood[tier] = stands
        self._ticked_at = now
        for tier, since in enumerate(self._stands_since):
            if self._is_known and since == inf:
                # Of the tick before: the last may have seen a burst begin. The smaller: a past burst is forgotten.
                self._calm_rates[tier] = self._last_rates[tier]
                self._last_rates[tier] = min(self._admitted_rates[tier], self._quick_rates[tier])
        if now >= self._guard_at:
            self._guard_at = now + GUARD_S
            self._guard()
        if self._is_known:
            self._predictions.append((now, [self.predicted_wait_s(tier) for tier in range(len(self._tiers))]))

    def waited(self, tier: int, seconds: float, arrived: float = -inf) -> None:
        """A request of this tier that came at `arrived` has got its slot after so long. A sample is enough."""
        for then, predicted in reversed(self._predictions):
            if then <= arrived:
                if (error := predicted[tier] - seconds) < inf:
                    self.wait_errors["too-high" if error > 0.0 else "too-low"].observe(abs(error))
                break
        self._seen[tier] += 1
        self._shortest[tier] = min(self._shortest[tier], seconds)
        self._waits[tier] += WAIT_WEIGHT * (seconds - self._waits[tier])

    def _guard(self) -> None:
        for tier, rule in enumerate(self._tiers):
            is_late = self._seen[tier] >= GUARD_SEEN_MIN and self._shortest[tier] > rule.wait_max_s
            trust = self.trust[tier]
            grown = min(1.0 / self._spread, trust + TRUST_GROWS)
            self.trust[tier] = max(TRUST_MIN, trust * TRUST_FALLS) if is_late else grown
            if not self._seen[tier]:
                self._waits[tier] = 0.0
            self._seen[tier], self._shortest[tier] = 0, inf

    def _recount(self, now: float) -> None:
        seconds = now - self._counted_at
        self._counted_at, self._recount_at = now, now + RECOUNT_S
        if self._first_call is not None:
            self._suppose(*self._first_call(), now)
        if not self._is_known:
            return
        self._refusals = [None] * len(self._tiers)
        self._running = self._count_running() if self._batch_s else [0.0] * len(self._tiers)
        if self._by_thresholds:
            self.headroom[:] = self._headroom_by_threshold()
            return
        self._look_at_queue(now)
        self._count_newcomers(seconds)
        # Each of many gateways has an equal part of what runs, as of what may be let in late.
        running = min(sum(self._running), self._burst_rps * self._batch_s)
        waiting_late = sum(queue_stats.waiting for queue_stats in self._stats_by_tier) - running
        is_quiet, all_waiting = True, self._all_waiting()
        for_any = ANY_SHARE if sum(self.rates) > max(self.capacity) else 1.0
        if self._lanes is None:  # a gateway that has Redis again does not know what waits there
            self._lane_counts = [0] * len(self._tiers)
        elif now >= self._lanes_counted_at + RECOUNT_QUIET_S:
            # Not each time: there may be a thousand lanes. Meanwhile `_may_open_lane` counts those that open.
            self._lane_counts, self._lanes_counted_at = self._lanes.by_tier(), now
        for tier, rule in enumerate(self._tiers):
            capacity, batch = self.capacity[tier], self._batch[tier]
            served = max(capacity * self.trust[tier] * rule.wait_max_s, min(capacity * self.call_s, 2 * batch))
            waiting, batch_room = self._waiting(tier), batch - all_waiting
            allowed = max(served - self._overtaking(tier) - (self._ahead(tier) - waiting), batch_room + waiting)
            if tier == self._lowest:
                allowed = max(allowed, served * self._min_share)
            room = max(for_any * allowed - waiting, batch_room)
            self._allowed[tier] = allowed
            # While late requests or several lanes wait, each arrival is looked at by itself.
            self.headroom[tier] = min(room, 0.0) if self._goes_before_late[tier] or self._lane_counts[-1] > 1 else room
            limit_s, late = self._limit_s(tier, now), -inf
            if limit_s > rule.wait_max_s:
                most, first = self._burst_rps * self.trust[tier] * limit_s, self._overtaking_late(tier, limit_s)
                if first < batch / 8:  # hardly any: the last batch may be full, which takes no longer
                    most = ceil(most / batch) * batch
                late = most - first - waiting_late
            self._late_headroom[tier] = late - self.headroom[tier]
            is_quiet = is_quiet and allowed > 2 * waiting
        if is_quiet:
            self._recount_at = now + RECOUNT_QUIET_S

    def _look_at_queue(self, now: float) -> None:
        """Whether the queue stands (rule 4). A flood of lower tiers says nothing: it is cut by itself."""
        waiting = 0.0
        for tier, queue_stats in enumerate(self._stats_by_tier):
            waiting += max(0.0, queue_stats.waiting - self._running[tier])
            if waiting > self._batch[tier]:
                self._stands_since[tier] = min(self._stands_since[tier], now)
            elif now > self._refused_at[tier] + BURST_S:
                self._stands_since[tier] = inf

    def _count_newcomers(self, seconds: float) -> None:
        """How many requests may come in time while late ones wait, which let them go first.

        In the tier of the late ones, other owners have their share of what can be served, as owners are served in turn,
        or what they brought before if that is more. Lower tiers have what is left if all late ones get slots in 1 s.
        """
        late_above = 0
        for tier, (rule, queue_stats) in enumerate(zip(self._tiers, self._stats_by_tier, strict=True)):
            capacity = self.capacity[tier] * self.trust[tier]
            rate = capacity - sum(map(self._rate_now, range(tier))) - late_above / BURST_S
            if queue_stats.late:
                rate *= 1.0 - queue_stats.late_owners / (queue_stats.owners + 1)
            least = self._calm_rates[tier] if not late_above else capacity * self._min_share * (tier == self._lowest)
            rate = max(rate, least)
            most = max(rate * rule.wait_max_s, self._batch[tier])
            late_above += queue_stats.late
            self._goes_before_late[tier] = late_above > 0
            came = min(max(self._newcomers[tier], 0.0) + rate * seconds, most)
            self._newcomers[tier] = came if late_above else 0.0

    def _headroom_by_threshold(self) -> list[float]:
        capacity, own = self.capacity[-1], self.requests()
        others, came = self._others, own - self._own_then

        def headroom_below(seconds: float) -> float:
            room = seconds * capacity - (self._depth() - came)
            return room * (others.part if room > 0 else 1.0) - came

        headroom = [inf] + [headroom_below(DEPTH_HIGHEST_ONLY_S)] * (len(self._tiers) - 1)
        if len(headroom) > 1:
            is_too_fast = self.admitted_rps() + others.rate > RATE_SHARE * capacity
            headroom[-1] = 0.0 if is_too_fast else min(headroom[-1], headroom_below(DEPTH_NOT_LOWEST_S))
        return headroom

    def _depth(self) -> float:
        """How many wait, here and at the other gateways; below 0 where slots are free."""
        return self.requests() + self._others.requests - self.capacity[-1] * self._batch_s

    def _count_running(self) -> list[float]:
        """Rule 8. Capacity that a tier may use, and the tiers below may not, serves requests of that tier and above."""
        stand = [float(queue_stats.waiting) for queue_stats in self._stats_by_tier]
        most = [capacity * self._batch_s for capacity in self.capacity]
        if sum(stand) <= most[-1]:
            return stand
        running = [0.0] * len(stand)
        below = 0.0
        for tier in reversed(range(len(stand))):
            mix = self._served_rates[: tier + 1]
            if sum(mix) <= 0.0:
                mix = stand[: tier + 1]
            whole, free = max(sum(mix), 1e-9), max(0.0, most[tier] - below)
            for each, part in enumerate(mix):
                running[each] += free * part / whole
            below = max(below, most[tier])
        return running

    def _all_waiting(self) -> float:
        """How many requests wait, of all tiers, late or not."""
        return max(0.0, sum(queue_stats.waiting for queue_stats in self._stats_by_tier) - sum(self._running))

    def _waiting(self, tier: int, *, late: bool = False) -> float:
        """How many wait that came in time; or those that came in late, which stand behind them."""
        queue_stats = self._stats_by_tier[tier]
        stands = queue_stats.late if late else queue_stats.waiting - queue_stats.late
        if not self._batch_s:
            return stands
        return max(0.0, stands - self._running[tier] * stands / max(queue_stats.waiting, 1))

    def _ahead(self, tier: int) -> float:
        """What is served before a request of this tier that comes now: of lower tiers what has waited long enough."""
        ahead = sum(map(self._waiting, range(tier + 1)))
        ahead += sum(self._waiting(higher, late=True) for higher in range(tier))
        if not self._is_strict:
            for lower in range(tier + 1, len(self._tiers)):
                head_start_s = max(0.0, self._tiers[lower].target_s - self._tiers[tier].target_s)
                if (wait_s := self._waits[lower]) > head_start_s:
                    ahead += self._waiting(lower) * (1.0 - head_start_s / wait_s)
        return ahead

    def _turns(self, tier: int, owner: str, count: int = 1) -> float:
        """Rule 3: what is served of a tier until it is the turn of one more request of this owner, or of so many."""
        queue_stats = self._stats_by_tier[tier]
        own: float = queue_stats.of(owner)
        owners = max(queue_stats.owners + (own == 0), 1)
        if self._batch_s:  # rule 8: of what is being served, owners have equal shares
            own = max(0.0, own - self._running[tier] / owners)
        return (own + count) * owners

    def _overtaking(self, tier: int) -> float:
        """What comes later, within the longest wait of this tier, and is served before."""
        most = self._overtakers(tier, inf)
        return most + SIGMAS * sqrt(most)

    def _overtakers(self, tier: int, seconds: float) -> float:
        """The mean of that, for a request that waits so long."""
        return sum(self._rate_now(n) * min(each, seconds) for n, each in enumerate(self._overtaking_s[tier]))

    def _overtaking_late(self, tier: int, seconds: float) -> float:
        """The same for a request that came in late. Before it go: all of higher tiers, even those that are refused just
        now; of its own tier as many as came here before the burst; and the minimum share of the lowest.
        """
        higher = sum(max(self._rate_now(n), self.rates[n]) for n in range(tier))
        elsewhere = sum(self._elsewhere[: tier + 1])
        # Half is left at least: some that came before may be among those that come in late now.
        own = min(self._calm_rates[tier], self._burst_rps / 2)
        min_share = self._burst_rps * self._min_share if tier < self._lowest else 0.0
        most = (higher + elsewhere + own + min_share) * seconds
        return most + SIGMAS * sqrt(most)

    def _rate_now(self, tier: int) -> float:
        """Requests a second that are let in: of late, or since the last tick if that is more."""
        since_s = max(self._counted_at - self._ticked_at, RATE_S_MIN)
        return max(self._admitted_rates[tier], self._quick_rates[tier], self._admitted[tier] / since_s)


def as_ms(seconds: float) -> str:
    """So that a person can read it."""
    return f"{seconds * 1000:,.0f} ms"


def too_long(wait_s: float, why: str, advice: str = "") -> Shed:
    """The error for a request that would wait so long, and may not."""
    if wait_s == inf:
        wait_ms, retry_after_s = None, RETRY_AFTER_S_MAX
        waits = "it cannot be said when a slot will be free"
    else:
        # From the rounded number: 1.0004 s reads as "1,000 ms", and a client that reads that should not wait for 2 s.
        wait_ms = round(wait_s * 1000)
        retry_after_s = min(RETRY_AFTER_S_MAX, max(1, ceil(wait_ms / 1000)))
        waits = f"this request would wait for a slot for {as_ms(wait_s)} or more"
    return Shed(
        f"more comes in than can be served in time: {waits}, and {why}; try again after the time in Retry-After, "
        f"or submit a task{advice}",
        retry_after_s=retry_after_s,
        predicted_wait_ms=wait_ms,
    )


def pressure(rates: Sequence[float], capacity: float) -> float:
    """How much comes in, as a share of what should: 1 at the target."""
    return 0.0 if capacity == inf else sum(rates) / max(capacity * UTILIZATION_TARGET, 1e-9)
