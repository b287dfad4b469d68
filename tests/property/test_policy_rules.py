"""What every policy promises for any view, and for a lane driven by arbitrary arrivals and service times."""

import heapq
from collections import deque
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.batching.policy import Adaptive, Fixed, Idle, LaneView, Pid, Policy, PolicyName, Send, WaitUntil
from carpool.batching.rate import ArrivalRate

NAMES: tuple[PolicyName, ...] = ("fixed", "adaptive", "pid")
MAX_BATCH = 8
MAX_WAIT_S = 0.05

every_policy = pytest.mark.parametrize("name", NAMES)
shares = st.floats(0.01, 1.0)
histories = st.lists(st.integers(1, 64), max_size=30)


def policy_with(name: PolicyName, share: float) -> Policy:
    policies: dict[PolicyName, Policy] = {"fixed": Fixed(), "adaptive": Adaptive(share), "pid": Pid(share)}
    return policies[name]


def policy_with_history(name: PolicyName, share: float, sizes: list[int]) -> Policy:
    """A policy that has already been told of batches, so that stateful ones are not met at their start only."""
    policy = policy_with(name, share)
    for size in sizes:
        policy.plan(LaneView(size, 0.0, 100.0, 1, 4, 0.2, 64, 0.05), 0.01)
        policy.sent(size, 64)
    return policy


@st.composite
def views(draw: st.DrawFn) -> LaneView:
    slots = draw(st.integers(1, 300))
    return LaneView(
        waiting=draw(st.integers(1, 10_000)),
        oldest=draw(st.floats(0.0, 1e6)),
        rate=draw(st.floats(0.0, 1e6)),
        free=draw(st.integers(0, slots)),
        slots=slots,
        service_s=draw(st.floats(0.0, 60.0)),
        max_batch=draw(st.integers(1, 4096)),
        max_wait_s=draw(st.floats(0.0, 0.1)),
        draining=draw(st.booleans()),
    )


@every_policy
@given(view=views(), age=st.floats(-0.001, 1.0), share=shares, sizes=histories)
def test_every_plan_keeps_the_rules(
    name: PolicyName, view: LaneView, age: float, share: float, sizes: list[int]
) -> None:
    now = view.oldest + age
    plan = policy_with_history(name, share, sizes).plan(view, now)

    if view.free == 0:
        assert isinstance(plan, Idle)
    elif view.waiting >= view.max_batch:
        assert plan == Send(view.max_batch, "full")
    elif view.oldest + view.max_wait_s <= now:
        assert plan == Send(view.waiting, "waited")
    elif view.draining:
        assert plan == Send(view.waiting, "drain")
    elif isinstance(plan, WaitUntil):
        assert now < plan.at <= view.oldest + view.max_wait_s
    else:
        assert isinstance(plan, Send)
        assert plan.count == view.waiting
        assert plan.reason in ("idle", "expected-none")


@every_policy
@given(view=views(), age=st.floats(0.0, 0.1), share=shares, sizes=histories)
def test_a_plan_is_anchored_on_the_oldest_and_kept(
    name: PolicyName, view: LaneView, age: float, share: float, sizes: list[int]
) -> None:
    """Planned again with the same view, a wait neither moves nor fails to end when it said."""
    policy = policy_with_history(name, share, sizes)
    now = view.oldest + age
    plan = policy.plan(view, now)
    if isinstance(plan, WaitUntil):
        between = now + (plan.at - now) / 2
        assert policy.plan(view, between) == plan or between == plan.at
        assert isinstance(policy.plan(view, plan.at), Send)


@given(share=shares, batches=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4)), max_size=300))
def test_the_hold_of_pid_stays_within_bounds_and_unwinds(share: float, batches: list[tuple[int, int]]) -> None:
    policy = Pid(share)
    for size, free in batches:
        policy.plan(LaneView(size, 0.0, 100.0, free, 4, 0.2, 64, 0.05), 0.01)
        policy.sent(size, 64)
        assert 0.0 <= policy.hold_share <= 1.0
    # Anti-windup: however long it was at one end, as many batches of the other kind bring it to the other end.
    for size, end in ((1, 1.0), (64, 0.0)):
        target = policy.fill_target
        if abs(target - size / 64) < 0.05:
            continue
        wanted_end = end if (target > size / 64) == (end == 1.0) else 1.0 - end
        for _ in range(500):
            policy.plan(LaneView(size, 0.0, 100.0, 4, 4, 0.2, 64, 0.05), 0.01)
            policy.sent(size, 64)
        assert policy.hold_share == wanted_end


class DrivenLane:
    """A lane and its slots, planned as the batching loop does it; checks the promises at every step."""

    def __init__(self, policy: Policy, slots: int, services: list[float]) -> None:
        self.policy = policy
        self.slots = slots
        self.services = services
        self.rate = ArrivalRate()
        self.waiting: deque[float] = deque()
        self.arrived = 0
        self.running: list[float] = []
        self.sizes: list[int] = []
        # Since when a slot has been free without a break; infinite while none is.
        self.free_since = 0.0
        self.timer = inf

    def drive(self, arrivals: list[float]) -> None:
        while self.arrived < len(arrivals) or self.waiting or self.running:
            arrival = arrivals[self.arrived] if self.arrived < len(arrivals) else inf
            now = min(arrival, self.running[0] if self.running else inf, self.timer)
            assert now < inf, "requests wait, and nothing will ever send them"
            while self.arrived < len(arrivals) and arrivals[self.arrived] <= now:
                self.waiting.append(arrivals[self.arrived])
                self.arrived += 1
            while self.running and self.running[0] <= now:
                if len(self.running) == self.slots:
                    self.free_since = now
                heapq.heappop(self.running)
            self.replan(now)

    def replan(self, now: float) -> None:
        self.timer = inf
        rate = self.rate.update(self.arrived, now)
        while self.waiting:
            free = self.slots - len(self.running)
            oldest = self.waiting[0]
            if free:
                assert now <= max(oldest + MAX_WAIT_S, self.free_since), "held past max_wait with a slot free"
            view = LaneView(len(self.waiting), oldest, rate, free, self.slots, 0.02, MAX_BATCH, MAX_WAIT_S)
            plan = self.policy.plan(view, now)
            if isinstance(plan, Send):
                self.send(plan.count, now)
                continue
            assert isinstance(plan, Idle) == (free == 0)
            if isinstance(plan, WaitUntil):
                self.timer = plan.at
            return

    def send(self, count: int, now: float) -> None:
        assert 1 <= count <= min(len(self.waiting), MAX_BATCH)
        assert len(self.running) < self.slots
        for _ in range(count):
            self.waiting.popleft()
        self.policy.sent(count, MAX_BATCH)
        service_s = self.services[len(self.sizes) % len(self.services)]
        heapq.heappush(self.running, now + service_s)
        if len(self.running) == self.slots:
            self.free_since = inf
        self.sizes.append(count)


@every_policy
@given(
    gaps=st.lists(st.sampled_from((0.0, 0.0001, 0.001, 0.01, 0.2)) | st.floats(0.0, 0.3), max_size=120),
    slots=st.integers(1, 5),
    services=st.lists(st.floats(0.0001, 0.5), min_size=1, max_size=8),
    share=shares,
)
def test_a_driven_lane_sends_every_request_in_time(
    name: PolicyName, gaps: list[float], slots: int, services: list[float], share: float
) -> None:
    arrivals: list[float] = []
    for gap in gaps:
        arrivals.append((arrivals[-1] if arrivals else 0.0) + gap)
    lane = DrivenLane(policy_with(name, share), slots, services)
    lane.drive(arrivals)
    assert sum(lane.sizes) == len(arrivals)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(-1.0, 10.0)), max_size=100))
def test_the_rate_is_finite_and_not_negative(steps: list[tuple[int, float]]) -> None:
    """Also when the count starts again, or time stands still or goes back."""
    rate = ArrivalRate()
    now = 1000.0
    for total, step in steps:
        now += step
        estimate = rate.update(total, now)
        assert estimate >= 0.0
        assert isfinite(estimate)


@given(st.floats(1.0, 20_000.0), st.floats(0.0001, 0.05))
def test_the_rate_converges_to_a_steady_one_and_decays_when_quiet(true_rate: float, every_s: float) -> None:
    rate = ArrivalRate()
    estimate = 0.0
    steps = int(2.0 / every_s) + 1
    for step in range(steps):
        estimate = rate.update(int(true_rate * step * every_s), step * every_s)
    # Below one arrival in SLOW_S the mean follows each single arrival: allow for one either way.
    assert abs(estimate - true_rate) <= 0.02 * true_rate + 2 / 0.2
    total, now = int(true_rate * (steps - 1) * every_s), (steps - 1) * every_s
    assert rate.update(total, now + 0.4) <= estimate * 0.2
    assert rate.update(total, now + 5.0) < 1e-6 * true_rate


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_arrivals_seen_while_time_stood_still_are_not_lost(first: int, more: int) -> None:
    rate, batched = ArrivalRate(), ArrivalRate()
    for estimator in (rate, batched):
        estimator.update(first, 0.0)
    assert rate.update(first + more, 0.0) == 0.0
    assert rate.update(first + more, 0.01) == batched.update(first + more, 0.01) > 0.0
