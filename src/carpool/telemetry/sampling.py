"""Which traces are kept: those on which a ratio falls. Pure.

A ratio goes by trace id, as OpenTelemetry's samplers do: the last seven bytes, as a number, are among the highest. All
services with this rule keep the same traces. Requests that begin a trace draw no id each: the tracer draws the gap to
the next request that is kept, and gives that one an id which fits.
"""

from collections.abc import Callable
from math import inf, log

RANDOM_BITS = 56


class Ratio:
    """`random_bits(n)` draws a number of n bits, `random_share()` one from 0 to 1."""

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
