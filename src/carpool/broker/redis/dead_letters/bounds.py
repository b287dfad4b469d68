"""How many dead letters are kept in Redis, and what is dropped so that there are no more.

Letters never keep a request out: they have bounds of their own, and while the memory of Redis is short, before requests
are refused for it, the oldest go.
"""

import logging
from collections.abc import Callable

from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing, no

logger = logging.getLogger("carpool.broker")

DROPPED_LOG_S = 10.0


class LetterBounds:
    """The bounds of each shard, for the scripts that keep letters; and a count of those that were dropped."""

    def __init__(
        self,
        *,
        letters_max: int,
        bytes_max: int,
        ttl_ms: int,
        is_memory_short: Callable[[], bool] = no,
        # Of Redis's memory, the part of a shard; None: no limit.
        memory_bytes_max: Callable[[], int | None] = do_nothing,
        clock: Clock = monotonic,
    ) -> None:
        self._letters_max = letters_max
        self._bytes_max = bytes_max
        self.ttl_ms = ttl_ms
        self._is_memory_short = is_memory_short
        self._memory_bytes_max = memory_bytes_max
        self._clock = clock
        self._logged_at = -DROPPED_LOG_S
        self._logged = 0
        # Letters that went before their time, since the start of this process. For metrics.
        self.dropped = 0

    def arguments(self) -> tuple[int, int, int]:
        """Most letters, most bytes of them, and 1 while memory is short."""
        memory_bytes_max = self._memory_bytes_max()
        bytes_max = self._bytes_max if memory_bytes_max is None else min(self._bytes_max, memory_bytes_max)
        return self._letters_max, bytes_max, int(self._is_memory_short())

    def note_dropped(self, number: int) -> None:
        """A script dropped so many. Said in the log once in a while."""
        self.dropped += number
        now = self._clock()
        if self.dropped > self._logged and now - self._logged_at >= DROPPED_LOG_S:
            logger.warning("%d dead letters were dropped to make room", self.dropped - self._logged)
            self._logged, self._logged_at = self.dropped, now
