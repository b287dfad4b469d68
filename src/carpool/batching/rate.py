"""The arrival rate of a lane, from its running count. Pure: time is an argument.

1. Two exponentially weighted means: a slow one, steady under Poisson noise, is the answer; a fast one sees a
   step within a few milliseconds.
2. When the fast one is above the slow one by more than noise explains, the slow one jumps up to it and forgets
   what it knew: it starts over as fast as the other, and slows down as it learns. The same at the very start. A
   spike noticed late has spent slots on small batches; the end of one noticed late costs only short holds.
3. No time passed: nothing is concluded, and the count is kept for the next update.
4. A count that went down started again from zero.
5. About once a second the callback `checked` gets the estimate and what then came, to measure how good it is. After a
   longer time without an update it is not called: the estimate was of no use then.
"""

from collections.abc import Callable
from math import exp, sqrt

SLOW_S = 0.2
FAST_S = 0.005
# Rule 2, in arrivals per FAST_S. Under Poisson arrivals the fast mean has the variance rate / (2 * FAST_S).
NOISE_SIGMAS = 4.0
NOISE_FLOOR = 1.0
# Rule 5.
CHECK_S, CHECK_S_MAX = 1.0, 2.0


class ArrivalRate:
    """Estimates arrivals per second. Keep one for each lane, also while the lane is empty."""

    __slots__ = (
        "_check_at",
        "_checked",
        "_expected",
        "_fast",
        "_memory_s",
        "_slow",
        "_total",
        "_total_then",
        "_updated",
    )

    def __init__(self, checked: Callable[[float, float], None] | None = None) -> None:
        # Rule 5: gets requests a second, expected and then seen; the estimate that is looked into, and since when.
        self._checked = checked
        self._expected: float | None = None
        self._total_then, self._check_at = 0, 0.0
        self._total = 0
        # None before the first update, which only sets the start: it cannot know since when the count runs.
        self._updated: float | None = None
        self._slow = 0.0
        self._fast = 0.0
        # Time constant of the slow mean: from FAST_S after a jump to SLOW_S.
        self._memory_s = FAST_S

    def update(self, arrivals_total: int, now: float) -> float:
        """Take the lane's running count of arrivals at `now`; return the rate."""
        if self._updated is None:
            self._total, self._updated = arrivals_total, now
            self._total_then, self._check_at = arrivals_total, now + CHECK_S
            return 0.0
        elapsed = now - self._updated
        if elapsed <= 0.0:
            return self._slow
        arrived = arrivals_total - self._total if arrivals_total >= self._total else arrivals_total
        self._total, self._updated = arrivals_total, now
        rate = arrived / elapsed
        self._slow = rate + (self._slow - rate) * exp(-elapsed / self._memory_s)
        self._memory_s = min(SLOW_S, self._memory_s + elapsed)
        self._fast = rate + (self._fast - rate) * exp(-elapsed / FAST_S)
        noise = NOISE_FLOOR + NOISE_SIGMAS * sqrt(self._slow * FAST_S / 2)
        if (self._fast - self._slow) * FAST_S > noise:
            self._slow, self._memory_s = self._fast, FAST_S
        if now >= self._check_at:
            self._check(now)
        return self._slow

    def _check(self, now: float) -> None:
        since_s, came = now - self._check_at + CHECK_S, self._total - self._total_then
        if self._checked is not None and self._expected is not None and since_s <= CHECK_S_MAX and came >= 0:
            self._checked(self._expected, came / since_s)
        self._expected, self._total_then, self._check_at = self._slow, self._total, now + CHECK_S
