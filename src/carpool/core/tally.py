"""Counts that cost next to nothing to keep; telemetry reads them when it is scraped.

prometheus-client's own `observe` takes about a microsecond and a lock, 64 times a batch. A stage counts here
with plain integers, and `telemetry.metrics` turns them into metric families only when somebody asks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket, with their sum. `bounds` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        # One more than bounds: the last is everything above.
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values: a step for each bucket that they fall into, not for each of them."""
        bounds, counts = self.bounds, self.counts
        ordered = sorted(values)
        bucket, last = bisect_left(bounds, ordered[0]), bisect_left(bounds, ordered[-1])
        counted = 0
        while bucket < last:
            below = bisect_right(ordered, bounds[bucket])
            counts[bucket] += below - counted
            counted = below
            bucket += 1
        counts[last] += len(ordered) - counted
        self.total += sum(values)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, as Prometheus wants them."""
        running = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound is None else repr(float(bound)), running))
        return pairs


SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0, 10.0, 30.0)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 63, 64, 96, 128)
