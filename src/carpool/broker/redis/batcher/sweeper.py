"""Keeping the shards tidy: every batcher does it, from time to time, for all."""

import asyncio
from collections.abc import Callable
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.dead_letters.bounds import LetterBounds
from carpool.broker.redis.formats import LATE
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.steps import Steps, Swept
from carpool.core.problem import problem_json
from carpool.core.timers import Every

EVERY_S = 5.0
# Between the parts of a sweep: a shard with thousands of lanes must not be held up by it.
PAUSE_S = 0.02
CONSUMER_GONE_MS = 600_000
COUNT_LETTERS_EVERY_MS = 600_000


class Sweeper:
    """Drops empty streams and consumers that left, counts again, lets old dead letters go, ends tasks that are late."""

    def __init__(
        self, steps: Steps, letter_bounds: LetterBounds, result_ttl_ms: int, count: Callable[[str, int], None]
    ) -> None:
        self._steps = steps
        self._late = (problem_json(LATE, "@"), result_ttl_ms)
        # Is told the code of outcomes that tasks have from here, and how many.
        self._count = count
        self._letter_bounds = letter_bounds
        self._sweeps = Every(EVERY_S, self.sweep_all)
        # By shard, for its next part.
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_closed = False

    def start(self) -> None:
        """Sweep from now on."""
        self._sweeps.start()

    def close(self) -> None:
        """Sweep no more."""
        self._is_closed = True
        self._sweeps.stop()
        for timer in self._timers.values():
            timer.cancel()

    def sweep_all(self) -> None:
        """Tidy up every shard."""
        for shard in self._steps.keys.shards:
            self._sweep(shard, 0)

    def _sweep(self, shard: Shard, cursor: int) -> None:
        """A part of a shard; the next one follows."""
        letters = (*self._letter_bounds.arguments(), self._letter_bounds.ttl_ms, COUNT_LETTERS_EVERY_MS)
        self._steps.sweep(shard, cursor, CONSUMER_GONE_MS, letters, self._late, partial(self._swept, shard))

    def _swept(self, shard: Shard, result: Swept | RedisFailure) -> None:
        if isinstance(result, Swept):
            self._letter_bounds.note_dropped(result.letters_dropped)
            if result.tasks_ended:
                self._count(LATE.code, result.tasks_ended)
            if result.cursor and not self._is_closed:
                again = asyncio.get_running_loop().call_later(PAUSE_S, self._sweep, shard, result.cursor)
                self._timers[shard.number] = again
