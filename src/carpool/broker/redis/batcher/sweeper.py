"""Keeping the shards tidy: every batcher sweeps all of them from time to time."""

import asyncio
from collections import deque
from collections.abc import Callable

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
        self._sweeping: asyncio.Task[None] | None = None
        # Where to go on, and whether a part before has left something; the shards take turns.
        self._due: deque[tuple[Shard, bytes, bool]] = deque()

    def start(self) -> None:
        """Sweep from now on."""
        self._sweeps.start()

    def close(self) -> None:
        """Sweep no more."""
        self._sweeps.stop()
        self._ended.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def sweep_all(self) -> None:
        """Tidy up every shard that is not under way."""
        under_way = {shard for shard, _, _ in self._due}
        self._due.extend((shard, BEGINNING, False) for shard in self._steps.keys.shards if shard not in under_way)
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        loop, due = asyncio.get_running_loop(), self._due
        while due:
            shard, cursor, is_more = due[0]  # which stays there until its part is done
            sent_at = loop.time()
            result = await self._sweep_part(shard, cursor)
            due.popleft()
            if isinstance(result, Swept):
                is_more = is_more or bool(result.is_more)
                if result.cursor:
                    due.append((shard, result.cursor, is_more))
                elif is_more:
                    due.append((shard, BEGINNING, False))
            await asyncio.sleep(min(max(PAUSES_A_PART * (loop.time() - sent_at), PAUSE_S_MIN), PAUSE_S_MAX))

    async def _sweep_part(self, shard: Shard, cursor: bytes) -> Swept | RedisFailure:
        letters = (*self._letter_bounds.arguments(), self._letter_bounds.ttl_ms, COUNT_ALL_EVERY_MS)
        receipt = self._ended.receipt()
        came: asyncio.Future[Swept | RedisFailure] = asyncio.get_running_loop().create_future()

        def swept(result: Swept | RedisFailure) -> None:
            if not came.done():  # it is when the sweeper was closed
                came.set_result(result)
            if isinstance(result, RedisFailure):
                self._ended.failed(shard, result)
            else:
                self._letter_bounds.note_dropped(result.letters_dropped)
                self._ended.came(shard, receipt, result.tasks_ended)

        self._steps.sweep(shard, cursor, CONSUMER_GONE_MS, letters, (*self._late, receipt), swept)
        return await came
