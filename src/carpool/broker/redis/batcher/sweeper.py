"""Keeping the shards tidy: every batcher sweeps all of them from time to time."""

import asyncio
from collections.abc import Callable
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.dead_letters import LetterBounds
from carpool.broker.redis.ended_tasks import EndedTasks
from carpool.broker.redis.formats import LATE
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import EndedTask, RedisOps, Swept
from carpool.core.errors import CarpoolError
from carpool.core.problem import problem_json
from carpool.core.timers import Every

EVERY_S = 5.0
# Others use Redis too: after each part the sweeper pauses for so many times as long as that took, within bounds. Where
# many batchers sweep, a part takes longer, and so does the pause.
PAUSES_A_PART = 4
PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.1
CONSUMER_GONE_MS = 600_000
COUNT_ALL_EVERY_MS = 600_000
BEGINNING = b"0"


class Sweeper:
    """Drops empty streams and consumers that left, counts again, lets old dead letters go, ends tasks that are late."""

    def __init__(
        self,
        steps: RedisOps,
        letter_bounds: LetterBounds,
        result_ttl_ms: int,
        ended: Callable[[EndedTask, CarpoolError], None],
    ) -> None:
        self._steps = steps
        self._late = (problem_json(LATE, "@"), result_ttl_ms)
        # Tasks that have their outcome from here.
        self._ended = EndedTasks(steps, LATE, ended)
        self._letter_bounds = letter_bounds
        self._sweeps = Every(EVERY_S, self.sweep_all)
        # Shards that are to be swept, in turn, and where to go on; those of which more is due than was done.
        self._due: dict[Shard, bytes] = {}
        self._unfinished: set[Shard] = set()
        # A part is under way, or its pause.
        self._is_busy = False
        self._sent_at = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False

    def start(self) -> None:
        """Sweep from now on."""
        self._sweeps.start()

    def close(self) -> None:
        """Sweep no more."""
        self._is_closed = True
        self._sweeps.stop()
        self._ended.close()
        if self._pause is not None:
            self._pause.cancel()

    def sweep_all(self) -> None:
        """Tidy up every shard, one part after the other."""
        for shard in self._steps.keys.shards:
            self._due.setdefault(shard, BEGINNING)
        self._sweep_next()

    def _sweep_next(self) -> None:
        """A part of the shard whose turn it is."""
        if self._is_busy or not self._due:
            return
        self._is_busy = True
        self._sent_at = asyncio.get_running_loop().time()
        shard, cursor = next(iter(self._due.items()))
        letters = (*self._letter_bounds.arguments(), self._letter_bounds.ttl_ms, COUNT_ALL_EVERY_MS)
        receipt = self._ended.receipt()
        swept = partial(self._swept, shard, receipt)
        self._steps.sweep(shard, cursor, CONSUMER_GONE_MS, letters, (*self._late, receipt), swept)

    def _swept(self, shard: Shard, receipt: bytes, result: Swept | RedisFailure) -> None:
        took_s = asyncio.get_running_loop().time() - self._sent_at
        if not self._is_closed:
            pause_s = min(max(PAUSES_A_PART * took_s, PAUSE_S_MIN), PAUSE_S_MAX)
            self._pause = asyncio.get_running_loop().call_later(pause_s, self._rested)
        del self._due[shard]
        if isinstance(result, RedisFailure):  # until the next sweep
            self._unfinished.discard(shard)
            self._ended.failed(shard, result)
            return
        self._letter_bounds.note_dropped(result.letters_dropped)
        self._ended.came(shard, receipt, result.tasks_ended)
        if result.is_more:
            self._unfinished.add(shard)
        if result.cursor:
            self._due[shard] = result.cursor
        elif shard in self._unfinished:
            self._unfinished.remove(shard)
            self._due[shard] = BEGINNING

    def _rested(self) -> None:
        self._is_busy = False
        self._sweep_next()
