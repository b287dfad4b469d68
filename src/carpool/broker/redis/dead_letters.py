"""Dead letters in Redis: how many are kept, and how synchronous requests become some.

1. Letters never keep a request out: they have bounds of their own, and while the memory of Redis is short, before
   requests are refused for it, the oldest go.
2. A task becomes a letter in the step that writes its result (`letter_of`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import encode_letter
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import (
    SynchronousKept,
    dead_letter_causes,
    is_kept,
)
from carpool.core.defaults import do_nothing, no
from carpool.core.errors import CarpoolError, Malformed
from carpool.core.request import DONE, Request

logger = logging.getLogger("carpool.broker")

# On their way into Redis.
BURYING_MAX = 1000
BURYING_BYTES_MAX = 64 * 1024 * 1024
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


class RedisDeadLetterBox:
    """Keeps synchronous requests that were given up on (core.ports.DeadLetters)."""

    def __init__(
        self,
        steps: RedisOps,
        *,
        bounds: LetterBounds,
        kept: SynchronousKept = "poison",
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        self._keys = steps.keys
        self._kept = kept
        self._bounds = bounds
        self._next_shard = 0
        # Letters on their way into Redis.
        self.burying = 0
        self._burying_bytes = 0
        # For metrics. Every cause from the start: an alert on an increase needs the zero before the first one.
        self.buried = Counter(dict.fromkeys(dead_letter_causes(), 0))
        # Letters that Redis did not take.
        self.failures = 0

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request with its error, if the settings keep such errors and there is room; before it is settled."""
        if is_kept(self._kept, error):
            self._bury(request, error, sends)

    def bury_suspect(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request that batchers did not survive: it is poison, whatever its error says."""
        if self._kept != "none":
            self._bury(request, error, sends)

    def bury_unreadable(self, entry_id: bytes, model: str, content: bytes, why: str) -> None:
        """Keep an entry of the queue that cannot be read, for an operator to look at."""
        now, name = monotonic(), entry_id.decode(errors="replace")
        self._bury(Request(name, model, b"", content, len(content), 0, now, now, 0.0, now, self), Malformed(why), 0)

    def settled(self, request: Request, outcome: object) -> None:
        """Nothing to do: no client waits for such an entry."""

    def count(self, cause: str) -> None:
        """A request was given up on; also for tasks (ReplyWriter calls this)."""
        self.buried[cause] += 1

    def _bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        if request.is_task or request.phase == DONE:  # a task's result buries it; a settled request has no input
            return
        self.count(error.code)
        shard = self._shard()
        if shard is None or self.burying >= BURYING_MAX or self._burying_bytes + request.size > BURYING_BYTES_MAX:
            self.failures += 1
            return
        self.burying += 1
        self._burying_bytes += request.size
        letter, done = encode_letter(request, error, sends), partial(self._done, request.size)
        self._steps.bury(shard, self._bounds.arguments(), letter, bytes(request.input), done)

    def _done(self, size: int, reply: int | RedisFailure) -> None:
        self.burying -= 1
        self._burying_bytes -= size
        if isinstance(reply, RedisFailure):
            self.failures += 1
        else:
            self._bounds.note_dropped(reply)

    def _shard(self) -> Shard | None:
        """The next shard that can be reached."""
        shards = self._keys.shards
        for _ in shards:
            self._next_shard = (self._next_shard + 1) % len(shards)
            if self._nodes.is_up(shards[self._next_shard].slot):
                return shards[self._next_shard]
        return None
