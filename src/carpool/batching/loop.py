"""The effects around the policy: when something changes, plan; send what the plan says; sleep until its time.

One loop per model. It is woken by an arrival, a freed slot or its timer, and runs when a batch is full and once for
all else that happened in one turn of the event loop: its cost is per batch and not per request. It cannot raise: a
failure is logged and the loop wakes again a moment later.

Slots that took their batches together become free together, and none becomes free in between: with 32 slots of 200 ms
the first request in the order waits up to 200 ms, not 6. So when more waits than the slots can take, batches leave a
little apart, at SPREAD of the even pace: after a few calls the slots are spread out, and lose nothing after that. Where
calls take now long, now short, slots become free apart in any case, and that would cost them time again and again: so
it is done while calls take about the same time, for APART_CALLS of every APART_EVERY calls. And no slot stands idle for
it longer than `max_wait_s` at a time.

Where an endpoint pays for padding (`cost.py`), batches are put together by size while many requests wait: `fit`.

Bytes are bounded too: those of a batch, and those of all batches that run. While there is no room for one more batch,
no slot counts as free; an outcome makes room, and notifies the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil, inf
from secrets import token_hex

from carpool.batching.cost import CostModel
from carpool.batching.policy import Adaptive, Fit, LaneView, Policy, Send, WaitUntil
from carpool.batching.rate import ArrivalRate
from carpool.core.batch import Batch, BatchIds
from carpool.core.clock import STOOD_STILL_S, Clock, monotonic
from carpool.core.histograms import BATCH_SIZE_BOUNDS, SHARE_BOUNDS, Histogram, off_by
from carpool.core.ports import Broker, Dispatcher, FetchedQueue, LaneQueue, Slots
from carpool.core.request import Request

logger = logging.getLogger("carpool.batching")

# How long a batch takes, until the first has been seen. Rather too long: taken too short, a burst at the start would
# spend every slot on a small batch; taken too long, it costs the first few requests a longer wait for company.
SERVICE_S_PRIOR = 1.0
# Weight of the newest batch in the running mean of service times.
SERVICE_WEIGHT = 0.1
GAP_WEIGHT = 0.3
# The same for the mean size of batches that left while other requests still waited; and by how much it goes back to the
# largest with each batch that left no request behind, for then nothing is known of it.
SIZE_WEIGHT, SIZE_DRIFT = 0.1, 0.02
# So many batches must have ended before batches leave apart; then they do for the time of so many calls, of so many,
# while calls take no more than such a share longer or shorter than the mean.
APART_AFTER, REGULAR_SHARE = 8, 0.2
APART_CALLS, APART_EVERY = 5, 10
TIMER_S_MIN = 0.001
# How far apart batches leave while more waits than the slots can take, in parts of the even pace.
SPREAD = 0.9
# Requests for a batch that leaves so soon may be fetched now; fetched earlier, they would take the slot of better ones.
AHEAD_S = 0.01
# Where batches are put together by size, so many more batches may be fetched to choose from, of so many seconds' work:
# others cannot serve what is here any more.
AHEAD_BATCHES_MAX, AHEAD_WORK_S = 8, 0.5
# By size, one request in a hundred waits so many times as long as in order.
BY_SIZE_SPREAD = 1.5
# How long a batch waits for company that is being fetched.
COMPANY_S = 0.01
# What was fetched so shortly before a slot became free is as good as what is fetched then: where calls are that short,
# asking Redis each time would leave the slot idle for a good part of them.
FRESH_S = 0.02
RETRY_AFTER_FAILURE_S = 0.01
# Requests a second from which on the error of the estimated arrival rate is counted.
RATE_CHECKED_MIN = 10.0
LOOK_S = 1.0
# For so long batches count for the capacity, if that is more than a few of them.
STEADY_S = 1.0
# The part of the largest batch from which on a call tells of the growth; the weight of the newest; and by how
# much growth is forgotten with each smaller call.
MANY = 0.5
GROWTH_WEIGHT = 0.5
FORGOTTEN = 0.001
# No call takes less.
SECONDS_MIN = 1e-6


class CallTimes:
    """How long the calls of one model take, all endpoints together, by how many inputs they have.

    A call takes as long as a call of one input, and linearly longer with each more: `growth` times for a full batch.
    Calls of few inputs show the time of one, calls of many show the growth. So what full batches have shown is still
    known when only small ones come; it is forgotten slowly, for an endpoint may have changed.
    """

    def __init__(self, prior_s: float) -> None:
        self._single_s = prior_s
        self._growth = 1.0
        # How many calls have ended; and whether one of few inputs has.
        self.ended = 0
        self._is_single_known = False

    def __repr__(self) -> str:
        return f"<CallTimes single={self._single_s:.6f} growth={self._growth:.2f}>"

    def of(self, size: float, largest: int) -> float:
        """Seconds that a call with so many inputs takes, as far as is known."""
        return self._single_s * (1.0 + (self._growth - 1.0) * _part(size, largest))

    def seen(self, size: int, largest: int, seconds: float, weight: float) -> None:
        """A call has ended; `weight` is that of the newest of few inputs."""
        seconds = max(seconds, SECONDS_MIN)
        part = _part(size, largest)
        self.ended += 1
        if part >= MANY and self._is_single_known:
            # A call of few inputs takes no longer than a call of many.
            self._single_s += GROWTH_WEIGHT * min(0.0, seconds - self._single_s)
            growth = 1.0 + max(0.0, seconds / self._single_s - 1.0) / part
            self._growth += GROWTH_WEIGHT * (growth - self._growth)
        elif part >= MANY or self._is_single_known:
            single_s = seconds / (1.0 + (self._growth - 1.0) * part)
            self._single_s += max(weight, 1.0 / self.ended) * (single_s - self._single_s)
            self._growth += FORGOTTEN * (1.0 - self._growth) * (part < MANY)
        else:  # the first of few: so far all were taken to need what full ones do
            full_s = self._single_s if self.ended > 1 else seconds
            self._single_s, self._growth, self._is_single_known = seconds, max(1.0, full_s / seconds), True


def _part(size: float, largest: int) -> float:
    return min((size - 1.0) / (largest - 1.0), 1.0) if largest > 1 else 0.0


class BatchLoop:
    """Decides when the waiting requests of one model are sent, and which."""

    def __init__(
        self,
        model: str,
        broker: Broker,
        slots: Slots,
        dispatcher: Dispatcher,
        policy: Policy,
        *,
        max_batch: int,
        max_wait_s: float,
        batch_bytes_max: float = inf,
        in_flight_bytes_max: float = inf,
        # Where requests of this model are fetched from, if they wait elsewhere; and whether company for the requests
        # that wait here is being fetched.
        fetched: FetchedQueue | None = None,
        company_comes: Callable[[], bool] | None = None,
        # Sees one request of each batch that leaves.
        sampled: Callable[[Request], None] | None = None,
        # Whether batches are put together by size; `auto`: where padding costs time.
        fit: Fit = "off",
        # No batch should take longer: it has fewer requests where one would.
        batch_seconds_max: float = inf,
        clock: Clock = monotonic,
    ) -> None:
        self.model = model
        self.max_batch = max_batch
        self.max_wait_s = max_wait_s
        self.batch_bytes_max = batch_bytes_max
        self.in_flight_bytes_max = in_flight_bytes_max
        self.policy = policy
        self.fit = fit
        self.batch_seconds_max = batch_seconds_max
        # What calls cost by what is in them; and how many times the mean the largest input of a batch is.
        self.cost = CostModel()
        self._spread = 1.0
        self.service_s = SERVICE_S_PRIOR
        # By how much calls take more or less than that.
        self._deviation_s = 0.0
        # The same by size, of the last second: where calls take now long, now short, ten of them say little of the
        # capacity.
        self._times = CallTimes(SERVICE_S_PRIOR)
        # While no call has ended well: the oldest batch that is under way, or has failed.
        self._first: Batch | None = None
        # How long a slot stands idle though requests wait: until these are fetched, or batches leave apart.
        self._gap_s = 0.0
        # The mean size of batches while all slots are busy: with many lanes it is less than `max_batch`.
        self.busy_size = float(max_batch)
        # While true, company is no longer waited for.
        self.draining = False
        # When `look` last ran; and when this process last stood still: calls that began before that say nothing.
        self._looked_at = inf
        self._stood_still_until = -inf
        # For metrics.
        self.batches: dict[str, int] = {}
        self.batch_sizes = Histogram(BATCH_SIZE_BOUNDS)
        self._batch_ids = BatchIds(token_hex(4))
        # How full batches were, by why they left. And by how much the estimated arrival rate was too high, and too low.
        self.batch_fills: dict[str, Histogram] = {}
        self.rate_errors = off_by(SHARE_BOUNDS)
        self._broker = broker
        self._slots = slots
        self._dispatcher = dispatcher
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # True while a run is due in this turn of the event loop. No `OncePerTurn`: `arrived` is called for each
        # request, and a batch that is full runs at once.
        self._rung = False
        # True during a run. A run may cause an arrival (a client gets an outcome, and sends its next request): that
        # must not start another run inside it, which would take its slot.
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        broker.when_work_arrives(model, self.arrived)
        broker.when_bytes_free(model, self.notify)
        slots.when_slot_frees(self._slot_freed)
        # When a slot last became free.
        self._freed_at = -inf
        # While more waits than the slots can take: when the next batch may leave; when they last began to leave apart.
        self._is_crowded = False
        self._next_at = -inf
        self._apart_from = -inf
        # Since when slots are free, the longest first.
        self._free_since: deque[float] = deque()
        self._fetched = fetched
        self._company_comes = company_comes
        self._sampled = sampled

    def __repr__(self) -> str:
        return f"<BatchLoop {self.model} free_since={len(self._free_since)}>"

    def arrived(self, lane: LaneQueue) -> None:
        """A request came. A batch that is full leaves now: left to the end of the turn, all batches that fill in this
        turn would leave together, and come back together, and so on.
        """
        if lane.waiting % self.max_batch == 0 and not self._is_running:
            self._run()
        elif not self._rung:
            self._rung = True
            self._loop.call_soon(self._run)

    def _slot_freed(self) -> None:
        """A slot may have become free. This is also called where one that was free may now be for others."""
        if len(self._free_since) < self._slots.free():
            self._freed_at = self._clock()
            self._free_since.append(self._freed_at)
        self.notify()

    def notify(self) -> None:
        """Something changed: plan again at the end of this turn of the event loop."""
        if not self._rung:
            self._rung = True
            self._loop.call_soon(self._run)

    def free_slots(self) -> int:
        """Slots that could take a batch now."""
        return self._slots.free() if self.has_room() else 0

    def slots_due(self) -> int:
        """Free slots that will take a batch in a moment: while batches leave apart, not all do."""
        free, now = self.free_slots(), self._clock()
        if free <= 1 or not self._is_kept_back(now):
            return free
        return min(free, 1 + max(0, int((now + AHEAD_S - self._next_time()) / self._pace_s())))

    def is_by_size(self) -> bool:
        """Whether batches are put together by size, while many wait."""
        return self.fit == "on" or (self.fit == "auto" and self.cost.is_padded)

    def wait_spread(self) -> float:
        """How many times as long as the others some requests wait, if many wait: those of rare sizes."""
        return BY_SIZE_SPREAD if self.is_by_size() else 1.0

    def batches_ahead(self) -> int:
        """Batches to fetch beyond what slots can take, to choose from."""
        if not self.is_by_size() or not self.has_room():
            return 0
        return min(AHEAD_BATCHES_MAX, int(AHEAD_WORK_S * self._slots.total() / max(self.service_s, SECONDS_MIN)))

    def has_room(self) -> bool:
        """Whether the bytes of a whole batch may be sent: less room would be spent on many small ones."""
        return self._room_bytes() >= self.batch_bytes_max

    def drain(self) -> None:
        """Wait for no more company."""
        self.draining = True
        self.notify()

    def _run(self) -> None:
        self._rung = False
        self._is_running = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            wake = self._send_what_is_ready(self._clock())
        except Exception:
            logger.exception("batching failed; it goes on")
            wake = self._clock() + RETRY_AFTER_FAILURE_S
        self._is_running = False
        if wake < inf:
            # The event loop's timers have millisecond steps; a shorter one would only spin.
            delay = max(wake - self._clock(), TIMER_S_MIN)
            self._timer = self._loop.call_later(delay, self.notify)

    def _send_what_is_ready(self, now: float) -> float:
        """Fill free slots, best lane first; returns when to look again."""
        while len(self._free_since) > self._slots.free():  # retries and searches take some as well
            self._free_since.popleft()
        if self.free_slots() <= 0:
            return inf  # a freed slot, or an outcome that makes room, will notify
        if self._is_kept_back(now):
            return self._next_time()
        # Each lane is planned once, and again when its turn has come: the slots may have gone to others meanwhile.
        ready, wake = self._ready(now)
        while ready and self.free_slots() > 0:
            _, number, lane = heappop(ready)
            if not lane.waiting or (lane.is_quarantined and self._slots.free_for_quarantined() <= 0):
                continue
            plan = self.policy.plan(self._view(lane, now), now)
            if isinstance(plan, Send):
                if self._awaits_company(lane, now):
                    wake = min(wake, self._freed_at + COMPANY_S)
                    continue
                if not self._send(lane, plan, now):
                    return inf  # no other lane overtakes it: an outcome will make room for it, and notify
                if self.free_slots() > 0 and self._is_kept_back(now):
                    return self._next_time()
                if lane.waiting:
                    heappush(ready, (lane.place(), number, lane))
            elif isinstance(plan, WaitUntil):
                wake = min(wake, plan.at)
        return wake if self.free_slots() > 0 else inf

    def _ready(self, now: float) -> tuple[list[tuple[float, int, LaneQueue]], float]:
        """The lanes that may send now, as a heap, the best first; and when another one may."""
        wake = inf
        ready: list[tuple[float, int, LaneQueue]] = []
        for number, lane in enumerate(self._broker.lanes(self.model)):
            if lane.is_quarantined and self._slots.free_for_quarantined() <= 0:
                continue  # the scheduler notifies when quarantined owners may have a slot
            plan = self.policy.plan(self._view(lane, now), now)
            if isinstance(plan, Send):
                is_due = lane.is_quarantined and self._slots.is_quarantined_due()
                ready.append((-inf if is_due else lane.place(), number, lane))
            elif isinstance(plan, WaitUntil):
                wake = min(wake, plan.at)
        heapify(ready)
        return ready, wake

    def _send(self, lane: LaneQueue, send: Send, now: float) -> bool:
        """Send a batch; false if too many bytes are under way for the first request of the lane."""
        # Promise 4, whatever a policy says; and at least one, so that the lane gets shorter.
        largest = self._dispatcher.batch_max(lane, self.max_batch)
        count = min(max(send.count, 1), largest)
        if self.batch_seconds_max < inf:
            count = self._count_in_time(lane, count)
        is_full = self._is_full_of_bytes(lane)
        by_size = self.is_by_size()
        batch = self._broker.take(lane, count, now, self.batch_bytes_max, self._room_bytes(), by_size=by_size)
        if not batch:
            return not lane.waiting  # all of them had expired, or the first one is too large for now
        named = Batch(self._batch_ids.next(), self.model, len(batch), send.reason, now)
        for request in batch:
            request.batch = named
        # First: nothing that fails may come between.
        ended: Callable[[float], None] = partial(self._batch_ended, len(batch))
        if self.fit != "off" or self.batch_seconds_max < inf:
            sizes = [request.size for request in batch]
            self._spread += SIZE_WEIGHT * (max(sizes) * len(sizes) / max(1, sum(sizes)) - self._spread)
            in_order = not by_size or lane.is_in_order
            ended = partial(self._learn_cost, ended, named, sum(sizes), max(sizes), in_order)
        self._dispatcher.dispatch(batch, ended)
        if not self._times.ended and (self._first is None or self._first.ended):
            self._first = named
        self.batches[send.reason] = self.batches.get(send.reason, 0) + 1
        self.batch_sizes.observe(len(batch))
        self._count_fill(send.reason, 1.0 if is_full else len(batch) / largest)
        self.policy.sent(largest if is_full else len(batch), largest)
        self._look_around(lane, len(batch), largest, now)
        if self._sampled is not None:
            self._sampled(batch[-1])
        return True

    def _count_in_time(self, lane: LaneQueue, count: int) -> int:
        """How many of a lane, `count` at most, are expected to take no longer than a batch may."""
        mean = lane.waiting_bytes / max(1, lane.waiting)
        while count > 1 and self.cost.seconds(count, count * mean, self._spread * mean) > self.batch_seconds_max:
            count -= 1 + count // 16
        return count

    def _count_fill(self, reason: str, fill: float) -> None:
        fills = self.batch_fills.get(reason)
        if fills is None:
            fills = self.batch_fills[reason] = Histogram(SHARE_BOUNDS)
        fills.observe(min(fill, 1.0))

    def _rate_checked(self, expected: float, came: float) -> None:
        """So many a second were expected, and so many came. Of a few, chance decides."""
        most = max(expected, came)
        if most >= RATE_CHECKED_MIN:
            self.rate_errors["too-high" if expected > came else "too-low"].observe(abs(expected - came) / most)

    def _look_around(self, lane: LaneQueue, size: int, largest: int, now: float) -> None:
        """After a batch of this size: what the slots can do, and whether the next one may leave at once."""
        # Requests that would have fitted into the batch do not count: they have just come, or the load shedder lets no
        # more wait. Nor do quarantined ones: they have their share of the slots, and fill no other batch.
        lanes = self._broker.lanes(self.model)
        waiting = sum(each.waiting for each in lanes if not each.is_quarantined)
        if self._fetched is not None:
            waiting += self._fetched.unread()
        room = largest if lane.is_quarantined else 0 if lane.waiting else largest - size
        is_waiting, is_full = waiting > room, self._slots.free() <= 0
        if self._free_since and self._is_crowded:
            # A longer gap is not one between two batches: the requests that waited have left, or none could be fetched.
            gap_s = min(now - self._free_since[0], self.max_wait_s + COMPANY_S)
            self._gap_s += GAP_WEIGHT * (gap_s - self._gap_s)
        if is_full:
            self._free_since.clear()
        elif self._free_since:
            self._free_since.popleft()
        if is_full and is_waiting:
            self.busy_size += SIZE_WEIGHT * (size - self.busy_size) * (not lane.is_quarantined)
            self._is_crowded = True
        else:
            self.busy_size += SIZE_DRIFT * (largest - self.busy_size)
            self._gap_s *= 1.0 - SIZE_DRIFT
            self._is_crowded = self._is_crowded and is_waiting
        slots = self._slots.total()
        if slots > 1 and self._times.ended >= APART_AFTER:
            if self._is_crowded and now - self._apart_from >= APART_EVERY * self.service_s:
                self._apart_from = now
            pace_s = self._pace_s()
            # From when it was due, not from when a late timer let it go: else the slots would stand idle.
            self._next_at = max(self._next_at, now - max(pace_s, TIMER_S_MIN)) + pace_s if self._is_crowded else -inf
            if self._is_crowded and self._fetched is not None:
                self._fetched.batch_is_due()
        else:
            self._next_at = -inf

    def _pace_s(self) -> float:
        """How far apart batches leave while more waits than the slots can take."""
        return max(SPREAD * self.service_s / self._slots.total(), 1e-6)

    def _is_kept_back(self, now: float) -> bool:
        """Whether the next batch leaves later, so that slots do not become free together."""
        is_apart = now - self._apart_from < APART_CALLS * self.service_s
        is_regular = self._deviation_s < REGULAR_SHARE * self.service_s
        return is_apart and is_regular and now < self._next_time() and not self.draining

    def _next_time(self) -> float:
        """When the next batch may leave."""
        return min(self._next_at, self._free_since[0] + self.max_wait_s) if self._free_since else self._next_at

    def capacity_rps(self, slots: float) -> float:
        """Requests a second that so many slots serve while all of them are busy."""
        return slots * self.busy_size / (self._times.of(self.busy_size, self.max_batch) + self._gap_s)

    def is_capacity_known(self) -> bool:
        """Whether it is known how long a batch takes."""
        return self._times.ended > 0

    def first_sent(self) -> float:
        """While that is not known: since when the first batch is under way; inf if none is."""
        return inf if self._first is None or self._first.ended else self._first.taken

    def _awaits_company(self, lane: LaneQueue, now: float) -> bool:
        """Whether to wait a moment for company: the slot has just become free, and requests wait elsewhere."""
        if self._company_comes is None or self.draining or now - self._freed_at >= COMPANY_S:
            return False
        if lane.waiting < self._dispatcher.batch_max(lane, self.max_batch):
            return self._company_comes()
        # Those that came during a long call may go before all that was fetched ahead.
        fetched, free_s = self._fetched, now - self._free_since[0] if self._free_since else inf
        if fetched is None or not self.is_by_size() or free_s >= COMPANY_S:
            return False
        return fetched.unread() > 0 and fetched.unread_s() > free_s + FRESH_S and fetched.is_asked()

    def _is_full_of_bytes(self, lane: LaneQueue) -> bool:
        """To the policy this is as good as `max_batch` requests: no company could come along."""
        return lane.waiting_bytes >= self.batch_bytes_max

    def _room_bytes(self) -> float:
        """What may be sent beside what runs; anything, if nothing does."""
        running = self._broker.bytes_running(self.model)
        return self.in_flight_bytes_max - running if running else inf

    def _view(self, lane: LaneQueue, now: float) -> LaneView:
        rate: ArrivalRate | None = lane.batching_notes
        if rate is None:
            rate = lane.batching_notes = ArrivalRate(self._rate_checked if isinstance(self.policy, Adaptive) else None)
        return LaneView(
            waiting=max(lane.waiting, self.max_batch) if self._is_full_of_bytes(lane) else lane.waiting,
            oldest=lane.oldest(),
            rate=rate.update(lane.arrivals, now),
            free=(free := self.free_slots()),
            slots=max(free, ceil(self._slots.total())),
            service_s=self.service_s,
            max_batch=self._dispatcher.batch_max(lane, self.max_batch),
            max_wait_s=self.max_wait_s,
            draining=self.draining,
        )

    def look(self, now: float) -> None:
        """See that this process lives. To be called every LOOK_S."""
        if self._has_stood_still(now):
            self._stood_still_until = now
        self._looked_at = now

    def _has_stood_still(self, now: float) -> bool:
        return now - self._looked_at > LOOK_S + STOOD_STILL_S

    def _learn_cost(
        self, ended: Callable[[float], None], batch: Batch, size: int, largest: int, in_order: bool, seconds: float
    ) -> None:
        """Learn what a batch costs as well."""
        ended(seconds)
        if not self._is_doubtful(seconds):
            self.cost.seen(batch.size, size, largest, seconds, batch.endpoint, in_order=in_order)

    def _is_doubtful(self, seconds: float) -> bool:
        """Whether this process stood still during a batch that has just ended."""
        now = self._clock()
        return self._has_stood_still(now) or now - seconds < self._stood_still_until

    def _batch_ended(self, size: int, seconds: float) -> None:
        """Learn how long a batch occupies a slot; nothing from a batch during which this process stood still."""
        if self._is_doubtful(seconds):
            return
        if not self._times.ended:
            self.service_s = seconds
        self._deviation_s += SERVICE_WEIGHT * (abs(seconds - self.service_s) - self._deviation_s)
        self.service_s += SERVICE_WEIGHT * (seconds - self.service_s)
        weight = min(SERVICE_WEIGHT, self.service_s / (STEADY_S * max(1, self._slots.total())))
        self._times.seen(size, self.max_batch, seconds, weight)
        if self._times.ended == 1 and self._fetched is not None:
            self._fetched.call_time_is_known()
