"""How long calls take, by how many inputs they have. Pure.

1. A call takes as long as a call of one input, and linearly longer with each more: `growth` times for a full batch.
2. Calls of few inputs show the time of one, calls of many show the growth. So what full batches have shown is still
   known when only small ones come; it is forgotten slowly, for an endpoint may have changed.
"""

# Rule 2: the part of the largest batch from which on a call tells of the growth; the weight of the newest; and by how
# much growth is forgotten with each smaller call.
MANY = 0.5
GROWTH_WEIGHT = 0.5
FORGOTTEN = 0.001
# No call takes less.
SECONDS_MIN = 1e-6


class CallTimes:
    """The call times of one model, all endpoints together."""

    def __init__(self, prior_s: float) -> None:
        self._single_s = prior_s
        self._growth = 1.0
        # How many calls have ended; and whether one of few inputs has.
        self.ended = 0
        self._is_single_known = False

    def __repr__(self) -> str:
        return f"<CallTimes single={self._single_s:.6f} growth={self._growth:.2f}>"

    def of(self, size: float, largest: int) -> float:
        """Seconds that a call with so many inputs takes, as far as is known."""
        return self._single_s * (1.0 + (self._growth - 1.0) * _part(size, largest))

    def seen(self, size: int, largest: int, seconds: float, weight: float) -> None:
        """A call has ended; `weight` is that of the newest of few inputs."""
        seconds = max(seconds, SECONDS_MIN)
        part = _part(size, largest)
        self.ended += 1
        if part >= MANY and self._is_single_known:
            # A call of few inputs takes no longer than a call of many.
            self._single_s += GROWTH_WEIGHT * min(0.0, seconds - self._single_s)
            growth = 1.0 + max(0.0, seconds / self._single_s - 1.0) / part
            self._growth += GROWTH_WEIGHT * (growth - self._growth)
        elif part >= MANY or self._is_single_known:
            single_s = seconds / (1.0 + (self._growth - 1.0) * part)
            self._single_s += max(weight, 1.0 / self.ended) * (single_s - self._single_s)
            self._growth += FORGOTTEN * (1.0 - self._growth) * (part < MANY)
        else:  # the first of few: so far all were taken to need what full ones do
            full_s = self._single_s if self.ended > 1 else seconds
            self._single_s, self._growth, self._is_single_known = seconds, max(1.0, full_s / seconds), True


def _part(size: float, largest: int) -> float:
    return min((size - 1.0) / (largest - 1.0), 1.0) if largest > 1 else 0.0
