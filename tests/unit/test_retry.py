"""Whether and when to try again."""

from carpool.upstream.retry import RetryBudget


def spend(budget: RetryBudget, now: float) -> int:
    """Take all there is."""
    taken = 0
    while budget.take(now):
        taken += 1
    return taken


def test_the_floor_lets_a_quiet_gateway_retry() -> None:
    budget = RetryBudget(share=0.2, floor_per_s=2.0, kept_max=20.0, now=1000.0)
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
