"""The policies, rule by rule, and the arrival rate."""

import random

import msgspec
import pytest

from carpool.batching.policy import (
    Adaptive,
    Fixed,
    Idle,
    LaneView,
    Pid,
    Plan,
    PolicyName,
    Send,
    WaitUntil,
    make_policy,
)
from carpool.batching.rate import ArrivalRate

# 32 slots of 200 ms, 24 of them busy: pressure is at slots_busy_max_share, and the pace is 200 / 24 = 8.3 ms.
BUSY = LaneView(waiting=3, oldest=10.0, rate=2_000.0, free=8, slots=32, service_s=0.2, max_batch=64, max_wait_s=0.05)
PACE_S = 0.2 / (0.75 * 32)


def adaptive(now: float, **changes: float) -> Plan:
    return Adaptive(0.75).plan(msgspec.structs.replace(BUSY, **changes), now)


def wait_s(plan: Plan) -> float:
    assert isinstance(plan, WaitUntil)
    return plan.at - BUSY.oldest


@pytest.mark.parametrize(
    ("name", "kind"), [("fixed", Fixed), ("adaptive", Adaptive), ("pid", Pid)], ids=lambda value: str(value)
)
def test_make_policy_makes_what_the_settings_name(name: PolicyName, kind: type) -> None:
    assert type(make_policy(name, slots_busy_max_share=0.75, fill_target=0.8)) is kind


def test_fixed_sends_when_full_or_when_the_oldest_has_waited() -> None:
    policy = Fixed()
    assert policy.plan(BUSY, 10.0) == WaitUntil(10.05)
    assert policy.plan(BUSY, 10.049) == WaitUntil(10.05)
    assert policy.plan(BUSY, 10.05) == Send(3, "waited")
    assert policy.plan(msgspec.structs.replace(BUSY, waiting=70), 10.0) == Send(64, "full")
    assert policy.plan(msgspec.structs.replace(BUSY, waiting=70, free=0), 10.0) == Idle()
    assert policy.plan(msgspec.structs.replace(BUSY, draining=True), 10.0) == Send(3, "drain")


def test_adaptive_sends_at_once_into_an_idle_pool() -> None:
    """200/s would be held for company with most slots busy."""
    assert isinstance(adaptive(10.0, rate=200.0), WaitUntil)
    assert adaptive(10.0, free=32, rate=200.0) == Send(3, "expected-none")
    assert adaptive(10.002, free=32, rate=200.0) == Send(3, "idle")


def test_adaptive_does_not_wait_where_nobody_is_expected() -> None:
    assert adaptive(10.0, rate=50.0, waiting=1) == Send(1, "expected-none")
    assert adaptive(10.0, rate=0.0, waiting=1) == Send(1, "expected-none")


def test_adaptive_paces_the_batches_when_the_wanted_share_is_busy() -> None:
    plan = adaptive(10.0)
    assert 0.8 * PACE_S < wait_s(plan) <= 1.1 * PACE_S
    assert isinstance(plan, WaitUntil)
    assert adaptive(plan.at) == Send(3, "idle")


def test_adaptive_holds_longer_the_fewer_slots_are_free() -> None:
    holds = [wait_s(adaptive(10.0, free=free)) for free in (28, 20, 12, 8, 4, 1)]
    assert holds == sorted(holds)
    assert holds[0] < PACE_S
    assert holds[-1] > 0.9 * BUSY.max_wait_s


def test_adaptive_waits_for_full_batches_when_the_rate_needs_them_though_slots_are_free() -> None:
    """Start of a spike: the slots are still free, but small batches now would be missed in a moment."""
    assert wait_s(adaptive(10.0, free=32, rate=9_500.0)) > 0.02


def test_adaptive_sends_a_mostly_full_batch_whose_rest_is_late() -> None:
    late = {"free": 1, "rate": 100.0}
    assert isinstance(adaptive(10.0, waiting=40, **late), WaitUntil)
    assert isinstance(adaptive(10.0, waiting=60, **late), WaitUntil)
    assert adaptive(10.02, waiting=60, **late) == Send(60, "expected-none")
    assert isinstance(adaptive(10.02, waiting=40, **late), WaitUntil)


def test_adaptive_gives_the_last_slot_only_when_company_is_unlikely() -> None:
    """10/s: half a request is expected in max_wait, too little elsewhere, enough for the last slot."""
    assert adaptive(10.0, slots=4, free=1, rate=10.0, waiting=1) != Send(1, "expected-none")
    assert adaptive(10.0, slots=4, free=3, rate=10.0, waiting=1) == Send(1, "expected-none")
    assert adaptive(10.0, slots=1, free=1, rate=2.0, waiting=1) == Send(1, "expected-none")


def test_adaptive_stretches_its_pace_while_other_lanes_keep_the_slots_busy() -> None:
    policy = Adaptive(0.75)
    before = wait_s(policy.plan(BUSY, 10.0))
    for _ in range(100):
        policy.plan(msgspec.structs.replace(BUSY, free=1), 10.06)
        policy.sent(3, 64)
    assert wait_s(policy.plan(BUSY, 10.0)) > 2 * before
    for _ in range(100):
        policy.plan(msgspec.structs.replace(BUSY, free=32), 10.06)
        policy.sent(3, 64)
    assert wait_s(policy.plan(BUSY, 10.0)) == before


def test_adaptive_learns_nothing_of_its_pace_from_full_batches() -> None:
    policy = Adaptive(0.75)
    for _ in range(100):
        policy.plan(msgspec.structs.replace(BUSY, free=1, waiting=64), 10.0)
        policy.sent(64, 64)
    assert policy.stretch == 1.0


def test_pid_holds_less_when_batches_are_too_full_and_more_when_too_empty() -> None:
    policy = Pid(0.8)
    assert wait_s(policy.plan(BUSY, 10.0)) == pytest.approx(0.05)
    for _ in range(40):
        policy.plan(BUSY, 10.0)
        policy.sent(64, 64)
    shorter = wait_s(policy.plan(BUSY, 10.0))
    assert 0.0 < shorter < 0.04
    for _ in range(20):
        policy.plan(BUSY, 10.0)
        policy.sent(16, 64)
    assert wait_s(policy.plan(BUSY, 10.0)) > shorter


def test_pid_does_not_shorten_the_hold_while_it_spends_the_last_slot() -> None:
    policy = Pid(0.8)
    for _ in range(100):
        policy.plan(msgspec.structs.replace(BUSY, free=1), 10.0)
        policy.sent(64, 64)
    assert policy.hold_share == 1.0


def poisson_estimates(rate: ArrivalRate, true_rate: float, start: float, seconds: float) -> list[float]:
    """Feed Poisson arrivals, one update for each, and return the estimates."""
    rng = random.Random(7)
    now, total, estimates = start, 1_000_000, []
    while now < start + seconds:
        now += rng.expovariate(true_rate)
        total += 1
        estimates.append(rate.update(total, now))
    return estimates


@pytest.mark.parametrize("true_rate", [500.0, 2_000.0, 9_500.0])
def test_the_rate_is_steady_under_poisson_noise(true_rate: float) -> None:
    estimates = sorted(poisson_estimates(ArrivalRate(), true_rate, 0.0, 10.0)[int(true_rate) :])
    assert estimates[len(estimates) // 2] == pytest.approx(true_rate, rel=0.1)
    assert estimates[len(estimates) // 100] > 0.8 * true_rate
    assert estimates[-(len(estimates) // 100)] < 1.3 * true_rate


def test_the_rate_sees_a_spike_within_milliseconds() -> None:
    rate = ArrivalRate()
    for step in range(1_000):
        rate.update(step, step * 0.02)
    assert rate.update(1_000, 20.0) == pytest.approx(50.0, rel=0.2)
    estimate = 0.0
    for step in range(1, 161):
        estimate = rate.update(1_000 + step, 20.0 + step / 8_000)
    assert estimate > 0.75 * 8_000


def test_the_first_update_only_sets_the_start() -> None:
    rate = ArrivalRate()
    assert rate.update(5_000, 1.0) == 0.0
    assert rate.update(5_000, 2.0) == 0.0


def test_a_count_that_starts_again_counts_from_zero() -> None:
    rate = ArrivalRate()
    rate.update(1_000, 0.0)
    assert rate.update(500, 10.0) == pytest.approx(50.0)


def test_time_that_goes_back_changes_nothing() -> None:
    rate, straight = ArrivalRate(), ArrivalRate()
    for estimator in (rate, straight):
        estimator.update(0, 0.0)
        estimator.update(100, 1.0)
    assert rate.update(150, 0.5) == straight.update(100, 1.0)
    assert rate.update(200, 2.0) == straight.update(200, 2.0)


def test_the_rate_tells_what_it_expected_and_what_came() -> None:
    told: list[float] = []
    rate = ArrivalRate(lambda expected, came: told.extend((expected, came)))
    for step in range(301):
        rate.update(step, step / 100)
    assert told == pytest.approx([100, 100] * 2, rel=0.1), "not of the first second"
    told.clear()
    for step in range(1, 111):
        rate.update(300 + 3 * step, 3 + step / 100)
    assert told == pytest.approx([100, 300], rel=0.1)
    told.clear()
    rate.update(10_000, 20.0)
    assert told == [], "nobody asked for it for a long time"
