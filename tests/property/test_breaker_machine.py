"""The circuit breaker under any sequence of calls, answers and pauses, as its endpoint's pool would drive it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.upstream.breaker import Breaker, State

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0
# What may become of a state in one step; staying is always fine.
LEGAL = {("closed", "open"), ("open", "half-open"), ("open", "closed"), ("half-open", "closed"), ("half-open", "open")}


class BreakerMachine(RuleBasedStateMachine):
    """One endpoint: calls start when the breaker allows, and end at any time in any way."""

    @initialize(failures_max=st.integers(1, 4))
    def make(self, failures_max: int) -> None:
        self.failures_max = failures_max
        self.breaker = Breaker(failures_max, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.now = 1000.0
        self.before: State = "closed"
        self.opened_at = 0.0
        # Calls under way: whether each is the probe.
        self.calls: list[bool] = []
        # Failures in a row, as an observer counts them while it is closed.
        self.in_a_row = 0

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        if self.breaker.allows(self.now):
            probe = self.breaker.started(self.now)
            assert probe == (self.before == "open")
            if probe:
                assert self.now >= self.opened_at + FIRST_PAUSE_S / 2
                assert True not in self.calls  # one at a time
            self.calls.append(probe)
            self.check_step()

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 99))
    def answered(self, which: int) -> None:
        self.calls.pop(which % len(self.calls))
        self.breaker.succeeded()
        assert self.breaker.state == "closed"
        self.in_a_row = 0
        # Whoever was the probe is an ordinary call now.
        self.calls = [False] * len(self.calls)
        self.check_step()

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 99), share=st.floats(0.0, 1.0), may_open=st.booleans())
    def failed(self, which: int, share: float, may_open: bool) -> None:
        probe = self.calls.pop(which % len(self.calls))
        pausing = self.before == "open" and not self.breaker.allows(self.now)
        opened = self.breaker.failed(self.now, share, probe=probe, may_open=may_open)
        if self.before == "closed":
            self.in_a_row += 1
            assert opened == (may_open and self.in_a_row >= self.failures_max)
        elif probe:
            assert opened
        elif pausing or self.before == "half-open":
            assert not opened
        if opened:
            self.opened_at = self.now
            pause_s = self.breaker.probe_at() - self.now
            assert FIRST_PAUSE_S / 2 - 1e-9 <= pause_s <= LONGEST_PAUSE_S + 1e-9
            assert not self.breaker.allows(self.now)
        assert self.breaker.is_failing == (self.breaker.failures >= self.failures_max)
        self.check_step()

    @precondition(lambda self: True in self.calls)
    @rule()
    def probe_tells_nothing(self) -> None:
        self.calls.remove(True)
        self.breaker.probe_left()
        assert self.breaker.allows(self.now)
        self.check_step()

    @precondition(lambda self: self.before == "closed")
    @rule(share=st.floats(0.0, 1.0))
    def opened_by_the_pool(self, share: float) -> None:
        self.breaker.open(self.now, share)
        self.opened_at = self.now
        self.check_step()

    def check_step(self) -> None:
        after = self.breaker.state
        assert after == self.before or (self.before, after) in LEGAL
        self.before = after

    @invariant()
    def half_open_is_exactly_one_probe(self) -> None:
        if hasattr(self, "breaker"):
            assert (self.breaker.state == "half-open") == (True in self.calls)
            assert self.calls.count(True) <= 1
            if self.breaker.state == "half-open":
                assert not self.breaker.allows(self.now)

    def teardown(self) -> None:
        """However it was treated, an endpoint that answers is used again."""
        if not hasattr(self, "breaker"):
            return
        self.now += 10 * LONGEST_PAUSE_S
        if self.breaker.state != "half-open":
            assert self.breaker.allows(self.now)
            self.breaker.started(self.now)
        self.breaker.succeeded()
        assert self.breaker.allows(self.now)


BreakerMachine.TestCase.settings = settings(stateful_step_count=40)
TestBreakerMachine = BreakerMachine.TestCase
