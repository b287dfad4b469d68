"""However batches and retries come: no more retries than were paid for."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from carpool.core.token_bucket import ROUNDING
from carpool.upstream.retry import RetryBudget


class RetryBudgetMachine(RuleBasedStateMachine):
    """A gateway that retries as often as it may."""

    @initialize(
        share=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
        floor_per_s=st.sampled_from([0.0, 0.5, 1.0, 10.0]),
        kept_max=st.sampled_from([2.0, 5.0, 20.0]),
    )
    def make(self, share: float, floor_per_s: float, kept_max: float) -> None:
        self.share, self.floor_per_s, self.kept_max = share, floor_per_s, kept_max
        self.began = self.now = 1000.0
        self.budget = RetryBudget(share, floor_per_s, kept_max, now=self.now)
        self.batches = self.retries = 0

    @rule(count=st.integers(1, 50))
    def batches_are_sent(self, count: int) -> None:
        for _ in range(count):
            self.budget.batch_sent()
        self.batches += count

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 50))
    def retries_are_wanted(self, count: int) -> None:
        got = sum(self.budget.take(self.now) for _ in range(count))
        self.retries += got
        assert got <= self.kept_max  # a burst is bounded, whatever was saved

    @rule()
    def a_refusal_stays_one_while_nothing_is_paid(self) -> None:
        while self.budget.take(self.now):
            self.retries += 1
        assert not self.budget.take(self.now)
        if self.floor_per_s:
            self.now += 1.01 / self.floor_per_s
            assert self.budget.take(self.now)
            self.retries += 1

    @invariant()
    def no_more_than_was_paid_for(self) -> None:
        if hasattr(self, "budget"):
            paid = self.share * self.batches + self.floor_per_s * (self.now - self.began) + self.kept_max / 2
            assert self.retries <= paid + 2 * ROUNDING


RetryBudgetMachine.TestCase.settings = settings(stateful_step_count=30)
TestRetryBudget = RetryBudgetMachine.TestCase
