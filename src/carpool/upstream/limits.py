"""How many inputs one endpoint takes at once, as far as that can be known. Pure: time is an argument.

What an endpoint says may be a client's words, and what it does may be a bad moment. So a limit is a hypothesis:

1. What it says is believed only if the batch that it refused was larger, and never below what it answered lately.
2. A batch that is answered refutes every limit below its size: the limit is forgotten at once.
3. What it does counts as well: an endpoint that refused a whole twice in a row though all parts of it were answered
   (by this endpoint or by others), with nothing as large answered in between, takes as many as the largest of these
   parts, and never fewer than it answered lately.
4. A limit is tested: after a while one batch of up to twice the limit may be sent. Each refusal of a test doubles the
   while. One test at a time; a test without a verdict may be repeated later.
5. "Lately" is the last 60 to 120 seconds: two numbers, whatever the load.
"""

from math import inf

LATELY_S = 60.0
TEST_AFTER_S_MIN = 60.0
TEST_AFTER_S_MAX = 3600.0
# A test without a verdict by then has none: its call failed for other reasons, or its inputs were withdrawn.
TEST_LASTS_S_MAX = 60.0


class BatchLimit:
    """What is known of the largest batch that one endpoint takes."""

    __slots__ = (
        "_answered_before",
        "_answered_now",
        "_generation",
        "_learned",
        "_parts_max",
        "_test_after_s",
        "_test_at",
        "_tested_until",
        "_whole_size",
    )

    def __init__(self) -> None:
        self._learned: int | None = None
        # The largest batch answered in this minute, and in the one before (rule 5).
        self._generation = 0
        self._answered_now = 0
        self._answered_before = 0
        # Rule 3: the last whole that was refused, and the largest of its parts; 0 once a batch as large was answered.
        self._whole_size = 0
        self._parts_max = 0
        # Rule 4: when the next test is due, how long it was waited for, and until when a verdict is awaited.
        self._test_at = inf
        self._test_after_s = TEST_AFTER_S_MIN
        self._tested_until = -inf

    def __repr__(self) -> str:
        return f"<BatchLimit {self._learned}, tested after {self._test_after_s:.0f} s>"

    @property
    def learned(self) -> int | None:
        """The most inputs that it takes, as far as is known; None: no limit is known."""
        return self._learned

    def allows(self, now: float, wanted: int) -> int:
        """How many of `wanted` inputs `largest` would let go now."""
        if self._learned is None or wanted <= self._learned:
            return wanted
        if now < self._test_at or now < self._tested_until:
            return self._learned
        return min(wanted, 2 * self._learned)

    def largest(self, now: float, wanted: int) -> int:
        """How many of `wanted` inputs may be sent in the call that is made now. That call may be a test."""
        allowed = self.allows(now, wanted)
        if self._learned is not None and self._learned < allowed:
            self._tested_until = now + TEST_LASTS_S_MAX  # this one is the test
        return allowed

    def said(self, limit: int, size: int, now: float) -> bool:
        """It refused a batch of `size` and stated a limit. True if that changed what is known."""
        if not 0 < limit < size or limit < self._answered_lately(now):
            return False
        return self._learn(limit, size, now)

    def split(self, size: int, answered_parts_max: int, now: float) -> bool:
        """It refused a whole of `size` whose parts were all answered. True if that changed what is known."""
        if self._learned is not None and size > self._learned:
            return self._learn(self._learned, size, now)  # one is enough: it only confirms
        first_size, first_parts_max = self._whole_size, self._parts_max
        self._whole_size, self._parts_max = size, answered_parts_max
        limit = max(first_parts_max, answered_parts_max, self._answered_lately(now))
        is_second = first_size > 0
        return is_second and 0 < limit < min(first_size, size) and self._learn(limit, size, now)

    def has_answered(self, size: int, now: float) -> bool:
        """Whether it has answered a batch of this size lately."""
        return self._answered_lately(now) >= size

    def answered(self, size: int, now: float) -> None:
        """It answered a batch of `size`."""
        self._turn_to(now)
        self._answered_now = max(size, self._answered_now)
        if size >= self._whole_size:
            self._whole_size = self._parts_max = 0
        if self._learned is not None and size > self._learned:
            self._learned = None
            self._test_at, self._tested_until = inf, -inf

    def _learn(self, limit: int, size: int, now: float) -> bool:
        """Take this limit for true from now on; `size` was refused."""
        is_new = limit != self._learned
        is_verdict = now < self._tested_until and self._learned is not None and size > self._learned
        if is_new:
            self._test_after_s = TEST_AFTER_S_MIN
        elif is_verdict:
            self._test_after_s = min(2 * self._test_after_s, TEST_AFTER_S_MAX)
        if is_new or is_verdict:  # the rest were sent before it was known
            self._test_at = now + self._test_after_s
            self._tested_until = -inf
        self._learned = limit
        self._whole_size = self._parts_max = 0
        return is_new

    def _answered_lately(self, now: float) -> int:
        self._turn_to(now)
        return max(self._answered_now, self._answered_before)

    def _turn_to(self, now: float) -> None:
        """Let the minutes pass."""
        generation = int(now // LATELY_S)
        if generation != self._generation:
            self._answered_before = self._answered_now if generation == self._generation + 1 else 0
            self._answered_now = 0
            self._generation = generation
