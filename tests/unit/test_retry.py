"""Whether and when to try again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.retry import RetryBudget, pause_before


@given(st.integers(2, 10), st.floats(0.0, 60.0), st.integers(0, 99))
def test_the_pause_is_anywhere_below_a_ceiling_that_doubles(attempt: int, backoff_s: float, percent: int) -> None:
    share = percent / 100
    pause_s = pause_before(attempt, backoff_s, share)
    assert 0.0 <= pause_s <= backoff_s * 2 ** (attempt - 2)
    assert pause_before(attempt + 1, backoff_s, share) == pytest.approx(2 * pause_s)


def test_full_jitter() -> None:
    assert pause_before(2, 0.05, 0.0) == 0.0
    assert pause_before(2, 0.05, 0.5) == 0.025
    assert pause_before(4, 0.05, 0.5) == 0.1


def spend(budget: RetryBudget, now: float) -> int:
    """Take all there is."""
    taken = 0
    while budget.take(now):
        taken += 1
    return taken


def test_a_fresh_budget_has_half_of_what_it_may_keep() -> None:
    budget = RetryBudget(share=0.2, floor_per_s=1.0, kept_max=20.0)
    assert spend(budget, 1000.0) == 10
    assert not budget.take(1000.0)


def test_batches_pay_a_share_of_a_retry_each() -> None:
    budget = RetryBudget(share=0.25, floor_per_s=0.0, kept_max=20.0)
    spend(budget, 1000.0)
    for _ in range(3):
        budget.batch_sent()
    assert not budget.take(1000.0)
    budget.batch_sent()
    assert spend(budget, 1000.0) == 1


def test_the_floor_lets_a_quiet_gateway_retry() -> None:
    budget = RetryBudget(share=0.2, floor_per_s=2.0, kept_max=20.0)
    spend(budget, 1000.0)
    assert not budget.take(1000.4)
    assert spend(budget, 1003.0) == 6


def test_a_long_calm_saves_no_more_than_the_limit() -> None:
    budget = RetryBudget(share=0.2, floor_per_s=1.0, kept_max=20.0)
    budget.take(1000.0)
    for _ in range(1000):
        budget.batch_sent()
    assert spend(budget, 999_999.0) == 20
    assert repr(budget) == "<RetryBudget 0.0>"
