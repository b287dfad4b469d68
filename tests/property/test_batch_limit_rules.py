"""What is believed of an endpoint's limit, whatever it says and does."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from carpool.upstream.limits import LATELY_S, TEST_LASTS_S_MAX, BatchLimit

sizes = st.integers(1, 64)


class AnyEndpoint(RuleBasedStateMachine):
    """It answers and refuses as it likes, and states what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.known = BatchLimit()
        self.now = 1000.0
        self.answers: list[tuple[float, int]] = []
        self.test_began = -1e9

    @rule(seconds=st.sampled_from([0.0, 0.1, 30.0, 60.0, 61.0, 500.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(size=sizes)
    def answers_one(self, size: int) -> None:
        before = self.known.learned
        self.known.answered(size, self.now)
        self.answers.append((self.now, size))
        if before is not None:
            assert self.known.learned == (None if size > before else before)
            if size > before:
                self.test_began = -1e9

    @rule(limit=st.integers(-1, 70), size=sizes)
    def states_a_limit(self, limit: int, size: int) -> None:
        before = self.known.learned
        changed = self.known.said(limit, size, self.now)
        assert changed == (self.known.learned != before)
        if changed:
            assert self.known.learned == limit < size
            self.test_began = -1e9
        elif before is not None and size > before:
            self.test_began = -1e9

    @rule(data=st.data(), size=st.integers(2, 64))
    def refuses_a_whole(self, data: st.DataObject, size: int) -> None:
        before = self.known.learned
        part = data.draw(st.integers(1, size - 1))
        self.known.answered(part, self.now)
        self.answers.append((self.now, part))
        if before is not None and part > before:
            before = None
            assert self.known.learned is None
        changed = self.known.split(size, part, self.now)
        assert changed == (self.known.learned != before)
        if changed:
            assert self.known.learned is not None and part <= self.known.learned < size
        self.test_began = -1e9

    @rule(wanted=sizes)
    def sends(self, wanted: int) -> None:
        limit = self.known.learned
        allowed = self.known.largest(self.now, wanted)
        assert 1 <= allowed <= wanted
        if limit is None:
            assert allowed == wanted
        elif allowed > limit:  # a test: alone, and not too large
            assert allowed <= 2 * limit
            assert self.now - self.test_began >= TEST_LASTS_S_MAX
            self.test_began = self.now
            assert self.known.largest(self.now, wanted) == limit
        else:
            assert allowed == min(wanted, limit)

    @invariant()
    def never_below_what_was_answered_lately(self) -> None:
        """One bad client, or one bad moment, cannot make the batches of an endpoint small that takes large ones."""
        limit = self.known.learned
        if limit is not None:
            assert limit >= 1
            assert all(size <= limit for when, size in self.answers if self.now - when <= LATELY_S)


TestAnyEndpoint = AnyEndpoint.TestCase


class Server:
    """An endpoint with a limit, and the sender in front of it, which knows nothing but `BatchLimit`."""

    def __init__(self, limit: int, *, states_it: bool) -> None:
        self.limit = limit
        self.states_it = states_it
        self.known = BatchLimit()
        self.refused = 0

    def send(self, wanted: int, now: float) -> None:
        """Send all of these, in as many calls as it takes."""
        while wanted:
            size = self.known.largest(now, wanted)
            wanted -= size
            if size <= self.limit:
                self.known.answered(size, now)
                continue
            self.refused += 1
            parts = self._halve(size, now)
            if self.states_it:
                self.known.said(self.limit, size, now)
            else:
                self.known.split(size, parts, now)

    def _halve(self, size: int, now: float) -> int:
        """The largest part that was answered."""
        halves = [size // 2, size - size // 2]
        if max(halves) <= self.limit:
            for half in halves:
                self.known.answered(half, now)
            return max(halves)
        return max(self._halve(half, now) for half in halves)


@given(limit=st.integers(1, 100), states_it=st.booleans(), wanted=st.lists(sizes, min_size=30, max_size=60))
def test_a_real_limit_is_found_and_rarely_exceeded(limit: int, states_it: bool, wanted: list[int]) -> None:
    server = Server(limit, states_it=states_it)
    now = 0.0
    for number in wanted * 20:  # one a second: at most 20 minutes
        server.send(number, now)
        now += 1.0
    assert limit < 64 or server.refused == 0
    # At first, and then at 60, 180, 420, 900 s; a limit that was learned from parts is lower than the real one, so that
    # a test may be answered: then it is learned anew.
    assert server.refused <= (6 if states_it else 3 * 20)


@given(lie=st.integers(1, 63), now=st.floats(0, 1e6))
def test_a_lie_does_not_outlive_its_test(lie: int, now: float) -> None:
    """Nothing was answered lately, so that it is believed. The endpoint takes 64."""
    known = BatchLimit()
    assert known.said(lie, 64, now)
    sent: list[int] = []
    for second in range(63):
        sent.append(known.largest(now + second, 64))
        known.answered(sent[-1], now + second)
    assert (sent[0], sent[-1]) == (lie, 64)
