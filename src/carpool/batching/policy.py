"""When to send a batch: the pure policies.

The rules, for every policy:

1. No free slot: `Idle`. Requests wait in the broker and fill the next batch by themselves.
2. `max_batch` waiting: send `max_batch` ("full").
3. The oldest has waited `max_wait_s`: send ("waited"). Every wait is anchored on the oldest request of the lane,
   so that nobody waits longer for company than that, however often the lane is planned again.
4. The process is leaving: send ("drain"); company will not come.
5. Otherwise the policy chooses how long the oldest is held, between 0 and `max_wait_s`. A hold that is over means
   send; one that is not means `WaitUntil` its end, which is always later than now.
6. A batch is never larger than what waits, nor than `max_batch`.

`fixed` holds for `max_wait_s`.

`adaptive` asks what waiting is worth and whether company will come:

7. Pace. Sending every `service_s / (busy_share * slots)` keeps `busy_share` of the slots busy, whatever the rate.
   Sending faster takes slots from those who come later; sending slower makes people wait with slots unused.
8. Pressure is the share of the slots that is busy or, where larger, the share that full batches would keep busy at
   this rate. Below `busy_share` the hold is the pace scaled by pressure: all slots idle, no hold. Above
   it the hold grows to `max_wait_s` as pressure goes to 1: the last slots are only spent on full batches.
9. Company is expected one mean gap (1 / rate) from now. If it is expected after the hold has ended, it is
   not waited for ("expected-none"); in particular, below one request in a pace nobody is held.
10. Mostly full, and the rest is not expected before the hold ends: send ("expected-none").

`pid` holds for a share of `max_wait_s` that a controller sets from the fill ratio of the batches sent:

11. Batches emptier than `fill_target` make the hold longer, fuller ones shorter. The integral stops growing
    where the output is cut off at 0 or 1 (anti-windup), so that a quiet night is forgotten in a few batches.

Nothing here reads a clock, draws a random number or touches a socket: the same classes run in the gateway, on
virtual time in `bench/policy.py`, and under property tests.
"""

from typing import Literal, Protocol

import msgspec

Reason = Literal["full", "waited", "idle", "expected-none", "drain"]
PolicyName = Literal["fixed", "adaptive", "pid"]

EXP = 0.5
SOFT = .75
Q = 1.0
MOSTLY_FULL = 0.9


class View(msgspec.Struct, frozen=True, gc=False):
    waiting: int
    oldest: float
    rate: float
    free: int
    slots: int
    service_s: float
    max_batch: int
    max_wait_s: float
    draining: bool = False


class Send(msgspec.Struct, frozen=True, gc=False):
    count: int
    reason: Reason


class WaitUntil(msgspec.Struct, frozen=True, gc=False):
    at: float


class Idle(msgspec.Struct, frozen=True, gc=False):
    pass


Plan = Send | WaitUntil | Idle
IDLE = Idle()


class Policy(Protocol):
    def plan(self, view: View, now: float) -> Plan: ...
    def sent(self, size: int, max_batch: int) -> None: ...


def settled_by_rule(view: View, now: float) -> Plan | None:
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
    def plan(self, view: View, now: float) -> Plan:
        return settled_by_rule(view, now) or WaitUntil(view.oldest + view.max_wait_s)

    def sent(self, size: int, max_batch: int) -> None:
        pass


class Adaptive:
    def __init__(self, busy_share: float) -> None:
        self.busy_share = busy_share

    def hold_s(self, view: View) -> float:
        pace = view.service_s / (self.busy_share * view.slots)
        busy = (view.slots - view.free) / (view.slots-1) if view.slots>1 else 1.0
        needed = view.rate * view.service_s / (view.slots * view.max_batch)
        pressure = min(1.0, max(busy, needed))
        if pressure <= self.busy_share:
            hold = pace * (pressure / self.busy_share) ** EXP
        else:
            hold = pace + (view.max_wait_s - pace) * ((pressure - self.busy_share) / (1 - self.busy_share))**Q
        return min(hold, view.max_wait_s), (1 if pressure <= self.busy_share or not SOFT else 1-SOFT*(pressure-self.busy_share)/(1-self.busy_share))

    def plan(self, view: View, now: float) -> Plan:
        settled = settled_by_rule(view, now)
        if settled is not None:
            return settled
        hold, missing = self.hold_s(view)
        ends = view.oldest + hold
        if ends <= now:
            return Send(view.waiting, "idle")
        expected = view.rate * (ends - now)
        missing = view.max_batch - view.waiting if view.waiting >= MOSTLY_FULL * view.max_batch else missing
        if expected < missing:
            return Send(view.waiting, "expected-none")
        at = ends - missing / view.rate if missing else ends
        if at <= now:
            return Send(view.waiting, "expected-none")
        return WaitUntil(at)

    def sent(self, size: int, max_batch: int) -> None:
        pass
