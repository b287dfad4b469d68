"""How long an endpoint's calls took lately, as metrics and the fleet's page show it."""

import pytest

from carpool.upstream.latency import CALLS_MAX, QUIET_S, CallSeconds, LatestCalls


def test_nothing_is_known_before_the_first_call() -> None:
    assert LatestCalls().quantiles(5.0) is None


def test_quantiles_are_of_calls_that_were() -> None:
    calls = LatestCalls()
    calls.add(0.2, 1.0)
    assert calls.quantiles(1.0) == CallSeconds(0.2, 0.2)
    for number in range(1, CALLS_MAX + 1):
        calls.add(number / 1000, 1.0)
    assert calls.quantiles(1.0) == pytest.approx((0.050, 0.099))


def test_only_the_last_calls_count() -> None:
    calls = LatestCalls()
    for seconds in [9.0] * CALLS_MAX + [0.1] * CALLS_MAX:
        calls.add(seconds, 1.0)
    assert calls.quantiles(1.0) == CallSeconds(0.1, 0.1)


def test_an_endpoint_that_was_quiet_starts_anew() -> None:
    calls = LatestCalls()
    calls.add(9.0, 0.0)
    assert calls.quantiles(QUIET_S) is not None
    assert calls.quantiles(QUIET_S + 1.0) is None
    calls.add(0.1, QUIET_S + 1.0)
    assert calls.quantiles(QUIET_S + 1.0) == CallSeconds(0.1, 0.1)
