"""Whether and when to try a batch again. Pure: time and randomness are arguments.

1. Pauses grow exponentially, with full jitter.
2. Retries are paid from a budget: every batch puts a share of a retry in, every retry takes one out. So when
   everything fails, the upstream gets at most that share more calls than were offered. A floor per second lets a quiet
   gateway retry too.
"""


def pause_before(attempt: int, backoff_s: float, random_share: float) -> float:
    """Seconds to pause before attempt 2, 3, …: exponential with full jitter; `random_share` is in [0, 1)."""
    ceiling: float = backoff_s * 2 ** (attempt - 2)
    return ceiling * random_share


class RetryBudget:
    """How many retries may be made now."""

    __slots__ = ("_floor_per_s", "_kept_max", "_share", "_tokens", "_updated")

    def __init__(self, share: float = 0.2, floor_per_s: float = 1.0, kept_max: float = 20.0) -> None:
        self._share = share
        self._floor_per_s = floor_per_s
        # What can be saved up: a burst of retries after a calm, but not a flood.
        self._kept_max = kept_max
        self._tokens = kept_max / 2
        self._updated: float | None = None

    def __repr__(self) -> str:
        return f"<RetryBudget {self._tokens:.1f}>"

    def batch_sent(self) -> None:
        """A first attempt was made."""
        self._tokens = min(self._kept_max, self._tokens + self._share)

    def take(self, now: float) -> bool:
        """Pay for one retry, if there is enough."""
        if self._updated is not None and now > self._updated:
            self._tokens = min(self._kept_max, self._tokens + (now - self._updated) * self._floor_per_s)
        self._updated = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
