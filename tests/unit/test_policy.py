"""The policies, rule by rule, and the arrival rate."""

import random

import msgspec
import pytest

from carpool.batching.policy import (
    Adaptive,
    Fixed,
    LaneView,
    Pid,
    Plan,
    PolicyName,
    Send,
    WaitUntil,
    make_policy,
)
from carpool.batching.rate import ArrivalRate

# 32 slots of 200 ms, 24 of them busy: pressure is at SLOTS_BUSY_MAX_SHARE, and the pace is 200 / 24 = 8.3 ms.
BUSY = LaneView(waiting=3, oldest=10.0, rate=2_000.0, free=8, slots=32, service_s=0.2, max_batch=64, max_wait_s=0.05)


def adaptive(now: float, **changes: float) -> Plan:
    return Adaptive().plan(msgspec.structs.replace(BUSY, **changes), now)


def wait_s(plan: Plan) -> float:
    assert isinstance(plan, WaitUntil)
    return plan.at - BUSY.oldest


@pytest.mark.parametrize(
    ("name", "kind"), [("fixed", Fixed), ("adaptive", Adaptive), ("pid", Pid)], ids=lambda value: str(value)
)
def test_make_policy_makes_what_the_settings_name(name: PolicyName, kind: type) -> None:
    assert type(make_policy(name)) is kind


def test_adaptive_sends_at_once_into_an_idle_pool() -> None:
    """200/s would be held for company with most slots busy."""
    assert isinstance(adaptive(10.0, rate=200.0), WaitUntil)
    assert adaptive(10.0, free=32, rate=200.0) == Send(3, "expected-none")
    assert adaptive(10.002, free=32, rate=200.0) == Send(3, "idle")


def test_adaptive_waits_for_full_batches_when_the_rate_needs_them_though_slots_are_free() -> None:
    """Start of a spike: the slots are still free, but small batches now would be missed in a moment."""
    assert wait_s(adaptive(10.0, free=32, rate=9_500.0)) > 0.02


def test_adaptive_gives_the_last_slot_only_when_company_is_unlikely() -> None:
    """10/s: half a request is expected in max_wait, too little elsewhere, enough for the last slot."""
    assert adaptive(10.0, slots=4, free=1, rate=10.0, waiting=1) != Send(1, "expected-none")
    assert adaptive(10.0, slots=4, free=3, rate=10.0, waiting=1) == Send(1, "expected-none")
    assert adaptive(10.0, slots=1, free=1, rate=2.0, waiting=1) == Send(1, "expected-none")


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


def test_time_that_goes_back_changes_nothing() -> None:
    rate, straight = ArrivalRate(), ArrivalRate()
    for estimator in (rate, straight):
        estimator.update(0, 0.0)
        estimator.update(100, 1.0)
    assert rate.update(150, 0.5) == straight.update(100, 1.0)
    assert rate.update(200, 2.0) == straight.update(200, 2.0)
