"""Which traces are kept: a ratio, errors up to a rate, and the slowest share. Pure.

1. A ratio goes by trace id, as OpenTelemetry's samplers do: the last seven bytes, as a number, are among the highest.
   All services with this rule keep the same traces. Requests that begin a trace draw no id each: the tracer draws
   the gap to the next request that is kept, and gives that one an id which fits.
2. Errors are kept at a steady rate, and a second's worth at once.
3. The slowest share is that of a window of time. While it goes on, each request above a threshold is a candidate; at
   its end the slowest of these are picked, exactly as many as the share, and the threshold is set for the next window.
"""

from collections.abc import Callable, Iterator
from heapq import nlargest
from math import ceil, inf, log
from typing import Any

RANDOM_BITS = 56
# So many times the share of requests should be candidates, so that the slowest are among them.
CANDIDATES = 3.0
CANDIDATES_MAX = 4096
# Without a window to learn from, so many are candidates.
FIRST_CANDIDATES = 64


class Ratio:
    """Rule 1. `random_bits(n)` draws a number of n bits, `random_share()` one from 0 to 1."""

    def __init__(self, ratio: float, random_bits: Callable[[int], int], random_share: Callable[[], float]) -> None:
        self._kept = round(ratio * (1 << RANDOM_BITS))
        self._log_rest = -inf if ratio >= 1.0 else log(1.0 - ratio) if ratio > 0.0 else 0.0
        self._random_bits = random_bits
        self._random_share = random_share

    def keeps(self, trace_id: bytes) -> bool:
        """Whether a trace with this id is kept."""
        return int.from_bytes(trace_id[-7:]) >= (1 << RANDOM_BITS) - self._kept

    def gap(self) -> int:
        """How many requests come until one is kept, that one included; for ever where none is."""
        if not self._log_rest:
            return 1 << 62
        if self._log_rest == -inf:
            return 1
        return min(1 << 62, 1 + int(log(1.0 - self._random_share()) / self._log_rest))

    def kept_id(self) -> bytes:
        """A new trace id that is kept."""
        if self._log_rest == -inf:
            return (self._random_bits(128) or 1).to_bytes(16)
        below_the_highest = 1 + min(int(self._random_share() * self._kept), self._kept - 1)
        return self._random_bits(72).to_bytes(9) + ((1 << RANDOM_BITS) - below_the_highest).to_bytes(7)


class ErrorRate:
    """Rule 2."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._left = per_second
        self._at = 0.0

    def takes(self, now: float) -> bool:
        """Whether one more error is kept now."""
        self._left = min(self._per_second, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Slowest:
    """Rule 3. The caller counts requests in `seen`, and adds those at or above `threshold_s`."""

    __slots__ = ("_candidates", "_share", "seen", "threshold_s")

    def __init__(self, share: float) -> None:
        self._share = share
        self._candidates: list[tuple[float, int, Any]] = []
        self.seen = 0
        self.threshold_s = 0.0 if share else inf

    def add(self, seconds: float, candidate: Any) -> bool:
        """Add a candidate; false if there are too many."""
        if len(self._candidates) >= CANDIDATES_MAX:
            return False
        self._candidates.append((seconds, -len(self._candidates), candidate))
        if not self.threshold_s and len(self._candidates) >= FIRST_CANDIDATES:
            self.threshold_s = nlargest(FIRST_CANDIDATES // 2, self._candidates)[-1][0]
        return True

    def pick(self) -> Iterator[Any]:
        """The window is over: the slowest of it."""
        candidates, seen = self._candidates, self.seen
        wanted = int(seen * self._share)
        if not wanted:
            return iter(())  # too few came: the window goes on
        self._candidates, self.seen = [], 0
        aimed = ceil(CANDIDATES * wanted)
        if len(candidates) >= aimed:
            self.threshold_s = nlargest(aimed, candidates)[-1][0]
        else:  # the threshold was too high
            self.threshold_s *= max(0.5, len(candidates) / aimed)
        return (candidate for _, _, candidate in nlargest(wanted, candidates))
