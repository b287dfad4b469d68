"""Whether a call is made again, and when. Pure.

1. Only what may succeed later is repeated (`CarpoolError.retryable`), at most `retries` times a call.
2. All calls of a client share one budget: a share of them, and a few to begin with. While a gateway refuses all
   clients, the retries of all would keep it overloaded.
3. The pause is what the gateway asks for (Retry-After), else it doubles; with jitter, so that clients refused together
   do not come back together. It is never less than what was asked for.
4. Nothing is repeated when its pause would end after the deadline.
"""

from carpool.core.token_bucket import TokenBucket

PAUSE_FIRST_S = 0.1
PAUSE_LAST_S = 5.0
# The share that jitter adds at most to a pause that the gateway asks for; PAUSE_FIRST_S if that is more.
JITTER_SHARE = 0.25


class ClientRetryBudget(TokenBucket):
    """How many calls may be repeated: never more than `reserve` + `share` of those that were made. No time adds any."""

    __slots__ = ("_share",)

    def __init__(self, share: float = 0.1, reserve: float = 10.0) -> None:
        if not 0 <= share <= 1:
            raise ValueError("the share of calls that are repeated must be between 0 and 1")
        super().__init__(0.0, reserve)
        self._share = share

    def called(self) -> None:
        """A call is made, for the first time. Saved retries never exceed the reserve."""
        self.add(self._share)


def pause_s(attempt: int, retry_after_s: float | None, luck: float) -> float:
    """How long to wait after the attempt with this number, the first is 0; `luck` is between 0 and 1."""
    if retry_after_s is not None:
        return retry_after_s + luck * max(PAUSE_FIRST_S, retry_after_s * JITTER_SHARE)
    longest = min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * luck)
