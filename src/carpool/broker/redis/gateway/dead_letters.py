"""What a person does with dead letters in Redis.

Every shard keeps letters within bounds; the oldest go first. The id of a letter tells its shard, and rises. A replay is
a new task in the letter's shard.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial
from typing import TypeVar

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import IDS_A_MS, UnknownFormatError, decode_body, summary_of
from carpool.broker.redis.gateway.refusals import out_of_reach
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import LetterHeads, RedisOps
from carpool.broker.replays import Page, ReplayDesk, no_such_letter
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import DeadLetterSummary, StoredDeadLetter
from carpool.core.defaults import do_nothing
from carpool.core.errors import Malformed
from carpool.core.request import Request

# One call looks through so much of a shard, so that Redis's other clients do not wait for it.
LETTERS_A_CALL_MAX = 64
LOOKED_THROUGH_BYTES_MAX = 4 * 1024 * 1024

Found = TypeVar("Found")


class RedisDeadLetterDesk(ReplayDesk):
    """Shows, replays and drops the dead letters of a deployment."""

    def __init__(
        self,
        steps: RedisOps,
        tasks: RedisTasks,
        models: Container[str],
        *,
        tier_target_s: tuple[float, ...],
        task_timeout_s: float,
        prepare: Callable[[Request], None] = do_nothing,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(
            tasks, models, tier_target_s=tier_target_s, task_timeout_s=task_timeout_s, prepare=prepare, clock=clock
        )
        self._steps = steps
        self._keys = steps.keys
        self._total = 0

    def total(self) -> int:
        """How many were kept when that was last looked at: by `refresh`, or for a page."""
        return self._total

    async def refresh(self) -> None:
        """Look how many are kept; raises BrokerDown."""
        self._total = sum(await self._of_all(lambda shard: answered(self._steps.number_of_letters(shard))))

    async def page(self, after: int, limit: int) -> list[DeadLetterSummary]:
        """Dead letters with an id above `after`, the oldest first."""
        found: list[DeadLetterSummary] = []
        pages = await self._of_all(lambda shard: self._heads(shard, after, limit))
        self._total = sum(page.total for page in pages)
        waiting = [page.rows for page in pages]
        while len(found) < limit and (firsts := [rows[0] for rows in waiting if rows]):
            row = min(firsts)
            found.append(summary_of(*row))
            number = row[0] % IDS_A_MS
            waiting[number].pop(0)
            if not waiting[number] and len(found) < limit:
                # What it has beyond may still be older than what other shards show.
                more = await self._heads(self._keys.shards[number], row[0], limit - len(found))
                waiting[number] = more.rows
        return found

    async def drop_all(self) -> int:
        """Remove all; returns how many."""
        return sum(await self._of_all(lambda shard: answered(self._steps.drop_letters(shard))))

    async def _read(self, letter_id: int) -> StoredDeadLetter | None:
        body = await answered(self._steps.read_letter(self._shard_of(letter_id), letter_id))
        try:
            return None if body is None else decode_body(letter_id, body)
        except UnknownFormatError:
            raise Malformed("another version of Carpool wrote this letter; use that one, or drop it") from None

    async def _drop(self, letter_id: int) -> int:
        return await answered(self._steps.drop_letters(self._shard_of(letter_id), b"%d" % letter_id))

    def _task_id(self, letter_id: int) -> str:
        return f"{super()._task_id(letter_id)[:-1]}{self._shard_of(letter_id).number:x}"

    async def _now_kept(self, cause: str | None) -> Sequence[tuple[int, Page]]:
        # Each shard up to where it is: their clocks may differ, so one's letters of now may look old to another.
        starts = await self._of_all(lambda shard: self._heads(shard, 0, 1))
        shards = zip(self._keys.shards, starts, strict=True)
        return [(start.last, partial(self._page_of_cause, shard, cause)) for shard, start in shards]

    def _shard_of(self, letter_id: int) -> Shard:
        number = letter_id % IDS_A_MS
        if number >= len(self._keys.shards):
            raise no_such_letter()
        return self._keys.shards[number]

    async def _page_of_cause(self, shard: Shard, cause: str | None, after: int, limit: int) -> list[DeadLetterSummary]:
        """Some letters of one shard and cause; none only if there are no more."""
        while rows := (await self._heads(shard, after, limit)).rows:
            letters = [summary_of(*row) for row in rows]
            after = letters[-1].id
            if chosen := [letter for letter in letters if cause is None or letter.cause == cause]:
                return chosen
        return []

    async def _heads(self, shard: Shard, after: int, limit: int) -> LetterHeads:
        """Some letters of one shard, maybe fewer than asked for; none only if there are no more."""
        limit = min(limit, LETTERS_A_CALL_MAX)
        return await answered(self._steps.letters(shard, after, limit, LOOKED_THROUGH_BYTES_MAX))

    async def _of_all(self, ask: Callable[[Shard], Awaitable[Found]]) -> list[Found]:
        """What every shard answers: a shard out of reach must not look as if it had no letters."""
        return await asyncio.gather(*map(ask, self._keys.shards))


async def answered(question: Awaitable[Found]) -> Found:
    """What Redis says; raises BrokerDown where it says nothing."""
    try:
        return await question
    except RedisFailure:
        raise out_of_reach() from None
