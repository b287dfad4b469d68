"""When to send a batch: the pure policies.

The rules, for every policy:

1. No free slot: `Idle`. Requests wait in the broker and fill the next batch by themselves.
2. `max_batch` waiting: send `max_batch` ("full").
3. The oldest has waited `max_wait_s`: send ("waited"). Every wait is anchored on the oldest request of the
   lane, so no request waits longer than that for company, however often the lane is planned again.
4. The process is leaving: send ("drain"); company will not come.
5. Otherwise the policy chooses how long the oldest is held, between 0 and `max_wait_s`. When the hold is over,
   send ("idle": slots are); before that, `WaitUntil` its end, which is later than now.
6. A batch is never larger than what waits, nor than `max_batch`.

`fixed` holds for `max_wait_s`.

`adaptive` weighs what waiting is worth against whether company will come:

7. Pace. One batch every `service_s / (slots_busy_max_share * slots)` keeps `slots_busy_max_share` of the slots busy, at
   any rate. Sending faster takes slots from the requests that come next; sending slower lets requests wait while slots
   are idle. It is never below a few milliseconds: each batch costs the gateway too, and a pool of many quick slots
   would otherwise be fed with batches of a handful until the gateway has no time left.
8. Pressure is the share of the other slots that are busy or, if larger, the share of all slots that full
   batches would keep busy at this rate. Up to `slots_busy_max_share` the hold is the pace times a root of pressure: no
   hold while the pool is idle, the pace at `slots_busy_max_share`. Above, it grows to `max_wait_s`: the last slots are
   for full batches.
9. The next request is expected a mean gap (1 / rate) from now. Company is not waited for when it is expected
   after the hold: so the hold ends a gap early, and no request is held at all where none is expected within a
   hold ("expected-none"). On the last slot a fair chance of company is enough, since the requests that come next
   would wait for a whole batch to end.
10. Mostly full, and the rest not expected within the hold: send ("expected-none").
11. Pace is stretched while partial batches keep more than `slots_busy_max_share` of the slots busy: other lanes send.

`pid` holds for a share of `max_wait_s` that a controller sets from how full the batches were:

12. Batches emptier than `fill_target` make the hold longer, fuller ones shorter. On the last slot the target
    is 1, because a pool that is all busy keeps up only with full batches. Anti-windup: the integral never
    leaves the range of the output.

Nothing here reads a clock, draws a random number or touches a socket: the same classes run in the gateway, on
virtual time in `carpool simulate`, and under property tests. The why: `docs/decisions/0003-adaptive-policy.md`.
"""

from math import inf, sqrt
from typing import Literal, Protocol

import msgspec

Reason = Literal["full", "waited", "idle", "expected-none", "drain"]
PolicyName = Literal["adaptive", "fixed", "pid"]
Fit = Literal["auto", "off", "on"]

# The share of the slots that `adaptive` keeps busy for the sake of latency: a higher one shortens waits by little and
# leaves less for a sudden peak (decision 3). And the fill ratio that `pid` holds.
SLOTS_BUSY_MAX_SHARE, FILL_TARGET = 0.75, 0.8
# Rule 7: a batch costs some 0.3 ms of the gateway's core; one every 4 ms is less than a tenth of it.
PACE_S_MIN = 0.004
# Rule 9: how many requests must be expected within the hold, on the last slot; elsewhere it is one.
LAST_SLOT_COMPANY = 0.25
# Rule 10: from this fill on, the whole rest of the batch must be expected, not just one more.
MOSTLY_FULL = 0.9
# Rule 11: how fast pace follows the busy share, per batch sent. The busy share lags by `service_s`, in which
# dozens of batches go out: a gain near 1 would overshoot.
STRETCH_GAIN = 0.1
STRETCH_MAX = 16.0
# Rule 12: gains per batch sent. The derivative is small because the fill of one batch is noisy.
PROPORTIONAL, INTEGRAL, DERIVATIVE = 0.25, 0.05, 0.05


class LaneView(msgspec.Struct, frozen=True, gc=False):
    """What a policy sees of one lane and of the pool that serves it; times are monotonic seconds."""

    # Requests waiting in the lane, at least 1.
    waiting: int
    # When the longest-waiting of them arrived.
    oldest: float
    # Arrivals per second of this lane, from ArrivalRate.
    rate: float
    # Free slots of the pool now, and all of them (at least 1).
    free: int
    slots: int
    # How long a batch occupies a slot, as an EWMA.
    service_s: float
    max_batch: int
    max_wait_s: float
    # The process is leaving: company will not come.
    draining: bool = False


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send the best `count` requests of the lane now, and count the batch under `reason`."""

    count: int
    reason: Reason


class WaitUntil(msgspec.Struct, frozen=True, gc=False):
    """Plan again at this time, or sooner if a request arrives or a slot frees."""

    at: float


class Idle(msgspec.Struct, frozen=True, gc=False):
    """Nothing to do until a slot frees."""


Plan = Send | WaitUntil | Idle
IDLE = Idle()


class Policy(Protocol):
    """Decides between sending and waiting. One instance serves all lanes of a pool."""

    def plan(self, view: LaneView, now: float) -> Plan:
        """Say what to do with a lane in which requests wait."""

    def sent(self, size: int, max_batch: int) -> None:
        """Learn the size of the batch that the last plan led to."""


def decided_by_rule(view: LaneView, now: float) -> Plan | None:
    """Apply rules 1 to 4, the same for every policy; None leaves the choice of the hold to the policy."""
    if view.free <= 0:
        return IDLE
    if view.waiting >= view.max_batch:
        return Send(view.max_batch, "full")
    if view.oldest + view.max_wait_s <= now:
        return Send(view.waiting, "waited")
    if view.draining:
        return Send(view.waiting, "drain")
    return None


class Fixed:
    """Sends full batches, or when the oldest has waited `max_wait_s`."""

    def plan(self, view: LaneView, now: float) -> Plan:
        """Hold for `max_wait_s`."""
        return decided_by_rule(view, now) or WaitUntil(view.oldest + view.max_wait_s)

    def sent(self, size: int, max_batch: int) -> None:
        """Need not know."""


class Adaptive:
    """Spends up to `slots_busy_max_share` of the slots on short waits, and only full batches on the rest."""

    __slots__ = ("_busy", "slots_busy_max_share", "stretch")

    def __init__(self, slots_busy_max_share: float = SLOTS_BUSY_MAX_SHARE) -> None:
        self.slots_busy_max_share = slots_busy_max_share
        # Rule 11: how many times longer than for a lone lane the pace is.
        self.stretch = 1.0
        # Share of the slots that were busy at the last plan.
        self._busy = 0.0

    def plan(self, view: LaneView, now: float) -> Plan:
        """Hold according to the pressure on the slots, but not for company that is not expected."""
        self._busy = (view.slots - view.free) / view.slots
        decided = decided_by_rule(view, now)
        if decided is not None:
            return decided
        busy_others = (view.slots - view.free) / (view.slots - 1) if view.slots > 1 else 1.0
        busy_if_full = view.rate * view.service_s / (view.slots * view.max_batch)
        pressure = min(1.0, max(busy_others, busy_if_full))
        pace_s = self.stretch * view.service_s / (self.slots_busy_max_share * view.slots)
        pace_s = min(view.max_wait_s, max(PACE_S_MIN, pace_s))
        # How far pressure is above slots_busy_max_share, 0 to 1.
        excess = 0.0
        if pressure <= self.slots_busy_max_share:
            hold_s = pace_s * sqrt(pressure / self.slots_busy_max_share)
        else:
            excess = (pressure - self.slots_busy_max_share) / (1.0 - self.slots_busy_max_share)
            hold_s = min(view.max_wait_s, pace_s + (view.max_wait_s - pace_s) * excess * excess)
        hold_ends = view.oldest + hold_s
        mostly_full = view.waiting >= MOSTLY_FULL * view.max_batch
        company = view.max_batch - view.waiting if mostly_full else 1.0 - (1.0 - LAST_SLOT_COMPANY) * excess
        gap_s = company / view.rate if view.rate > 0.0 else inf
        # After this the company is not expected within the hold any more.
        hopeful_until = hold_ends - gap_s
        if hopeful_until > now:
            return WaitUntil(hopeful_until)
        over = hold_ends <= now or (gap_s < hold_s and not mostly_full)
        return Send(view.waiting, "idle" if over else "expected-none")

    def sent(self, size: int, max_batch: int) -> None:
        """Stretch or relax the pace; full batches say nothing about it, since they did not wait for it."""
        if size < max_batch:
            stretched = self.stretch * (1.0 + STRETCH_GAIN * (self._busy - self.slots_busy_max_share))
            self.stretch = min(STRETCH_MAX, max(1.0, stretched))


class Pid:
    """Holds the fill ratio of the batches at `fill_target`, as far as `max_wait_s` allows."""

    __slots__ = ("_error", "_integral", "_target", "fill_target", "hold_share")

    def __init__(self, fill_target: float = FILL_TARGET) -> None:
        self.fill_target = fill_target
        # The output: share of max_wait_s that the oldest is held. Starts like `fixed`, which wastes no slots.
        self.hold_share = 1.0
        self._integral = 1.0
        self._error = 0.0
        self._target = fill_target

    def plan(self, view: LaneView, now: float) -> Plan:
        """Hold for the controller's share of `max_wait_s`."""
        self._target = self.fill_target if view.free > 1 else 1.0
        decided = decided_by_rule(view, now)
        if decided is not None:
            return decided
        hold_ends = view.oldest + self.hold_share * view.max_wait_s
        return WaitUntil(hold_ends) if hold_ends > now else Send(view.waiting, "idle")

    def sent(self, size: int, max_batch: int) -> None:
        """Take one step of the controller."""
        error = self._target - size / max_batch
        self._integral = min(1.0, max(0.0, self._integral + INTEGRAL * error))
        output = self._integral + PROPORTIONAL * error + DERIVATIVE * (error - self._error)
        self._error = error
        self.hold_share = min(1.0, max(0.0, output))


def make_policy(name: PolicyName) -> Policy:
    """Make the policy that the settings name."""
    if name == "fixed":
        return Fixed()
    if name == "adaptive":
        return Adaptive()
    return Pid()
