"""How long the calls of one endpoint took lately. Pure: `now` is an argument.

A histogram for each endpoint would be a dozen series for each; two quantiles of its last calls are two. They are exact,
so that endpoints can be compared, and forgotten once the endpoint is quiet: what it did then says nothing of it now.
"""

from collections import deque
from math import ceil, inf
from typing import NamedTuple

CALLS_MAX = 100
QUIET_S = 300.0


class CallSeconds(NamedTuple):
    """So long took half of the calls at most, and 99 % of them."""

    p50: float
    p99: float


class LatestCalls:
    """The last calls that an endpoint answered."""

    __slots__ = ("_ended", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=CALLS_MAX)
        self._ended = -inf

    def add(self, seconds: float, now: float) -> None:
        """A call was answered after so long."""
        if now - self._ended > QUIET_S:
            self._seconds.clear()
        self._seconds.append(seconds)
        self._ended = now

    def quantiles(self, now: float) -> CallSeconds | None:
        """By nearest rank; None if the endpoint has answered no call, or none for a while."""
        if now - self._ended > QUIET_S:
            return None
        ordered = sorted(self._seconds)
        return CallSeconds(*(ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.99)))
