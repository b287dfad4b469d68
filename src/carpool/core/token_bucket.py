"""A token bucket: up to `burst` tokens at once, `rate` more a second. Pure: `now` is seconds on any clock.

1. In any t seconds at most rate * t + burst are taken, beside what was put in.
2. A caller that keeps to that is never refused. A refusal takes nothing.
3. What is borrowed beyond the burst is a debt: nothing is taken until that is paid. In rule 1 the largest call stands
   in the place of `burst`.
4. A clock that goes back adds nothing.
"""

from math import inf

# What adding up fractions may get wrong, in tokens: no caller comes so much too early to matter.
ROUNDING = 1e-6


class TokenBucket:
    """It is full at the beginning, or has `tokens` at the time `now`."""

    __slots__ = ("_updated", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, tokens: float | None = None, now: float = 0.0) -> None:
        self.rate = rate
        self.burst = burst
        # What there was at the time `_updated`; a debt is less than 0.
        self.tokens = burst if tokens is None else tokens
        self._updated = now

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tokens:.1f}>"

    def take(self, now: float, count: float = 1.0) -> bool:
        """Take so many, if they are there."""
        tokens = self.tokens
        if now > self._updated:
            tokens += (now - self._updated) * self.rate
            if tokens > self.burst:
                tokens = self.burst
            self.tokens, self._updated = tokens, now
        if tokens < count - ROUNDING:
            return False
        self.tokens = tokens - count
        return True

    def borrow(self, now: float, count: float) -> bool:
        """The same, but more than `burst` are taken from a full bucket: what is missing is a debt."""
        if not self.take(now, min(count, self.burst)):
            return False
        self.tokens -= max(count - self.burst, 0.0)
        return True

    def add(self, count: float) -> None:
        """Put some in: they were earned in another way than by waiting, or are given back."""
        self.tokens = min(self.tokens + count, self.burst)

    def wait_s(self, now: float, count: float = 1.0) -> float:
        """Seconds until so many are there, if none is taken; 0.0: they are."""
        self.take(now, 0.0)  # it brings `tokens` up to now
        missing = count - self.tokens
        if missing <= ROUNDING:
            return 0.0
        return missing / self.rate if self.rate else inf

    def is_full(self, now: float) -> bool:
        """Whether a new bucket would be the same."""
        return self.wait_s(now, self.burst) == 0.0
