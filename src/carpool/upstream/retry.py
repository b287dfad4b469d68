"""Whether and when to try a batch again. Pure: time and randomness are arguments.

1. Pauses grow exponentially, with full jitter.
2. Retries are paid from a budget: every batch puts a share of a retry in, every retry takes one out. So when
   everything fails, the upstream gets at most that share more calls than were offered. A floor per second lets a quiet
   gateway retry too.
"""

from carpool.core.token_bucket import TokenBucket


def pause_before(attempt: int, backoff_s: float, random_share: float) -> float:
    """Seconds to pause before attempt 2, 3, …: exponential with full jitter; `random_share` is in [0, 1)."""
    ceiling: float = backoff_s * 2 ** (attempt - 2)
    return ceiling * random_share


class RetryBudget(TokenBucket):
    """How many retries may be made now. `kept_max` can be saved up: retries after a calm, but not a flood."""

    __slots__ = ("_share",)

    def __init__(
        self, share: float = 0.2, floor_per_s: float = 1.0, kept_max: float = 20.0, *, now: float = 0.0
    ) -> None:
        super().__init__(floor_per_s, kept_max, kept_max / 2, now)
        self._share = share

    def batch_sent(self) -> None:
        """A first attempt was made."""
        self.add(self._share)
