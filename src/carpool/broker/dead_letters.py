"""Dead letters in the journal. `Tasks` buries a task together with its result (tasks.py)."""

import time
from collections.abc import Container, Sequence
from functools import partial

from carpool.broker.journal import Journal
from carpool.broker.journal_records import DeadLetter, record_of
from carpool.broker.replays import Page, ReplayDesk
from carpool.broker.tasks import Tasks
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import DeadLetterSummary, StoredDeadLetter, SynchronousKept, is_kept
from carpool.core.errors import CarpoolError
from carpool.core.request import DONE, Request


class DeadLetterBox:
    """Keeps synchronous requests that were given up on (core.ports.DeadLetters)."""

    def __init__(self, journal: Journal, kept: SynchronousKept = "poison", clock: Clock = monotonic) -> None:
        self._journal = journal
        self._kept = kept
        self._clock = clock

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request with its error, if the settings keep such errors and there is room; before it is settled."""
        if request.is_task or request.phase == DONE:  # a task's result buries it; a settled request has no input
            return
        if not is_kept(self._kept, error):
            return
        record = record_of(request, time.time() - (self._clock() - request.arrived), deadline=0.0)
        self._journal.bury(record, DeadLetter(error.code, error.detail, sends))


class DeadLetterDesk(ReplayDesk):
    """Shows, replays and drops the dead letters of a journal."""

    def __init__(
        self,
        journal: Journal,
        tasks: Tasks,
        models: Container[str],
        *,
        tier_target_s: tuple[float, ...],
        task_timeout_s: float,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(
            tasks,
            models,
            tier_target_s=tier_target_s,
            task_timeout_s=task_timeout_s,
            prepare=tasks.prepare,
            clock=clock,
        )
        self._journal = journal

    def total(self) -> int:
        """How many dead letters are kept."""
        return self._journal.counts.dead_letters

    async def page(self, after: int, limit: int, cause: str | None = None) -> list[DeadLetterSummary]:
        """Dead letters with an id above `after`, the oldest first; of one cause, or any."""
        return await self._journal.look(lambda store, now: store.letters(after, limit, cause, now))

    async def drop_all(self) -> int:
        """Remove all; returns how many."""
        return await self._journal.change(lambda store, _: store.drop_all_letters())

    async def _read(self, letter_id: int) -> StoredDeadLetter | None:
        return await self._journal.look(lambda store, now: store.letter(letter_id, now))

    async def _drop(self, letter_id: int) -> int:
        return len(await self._journal.change(lambda store, now: store.drop_letters([letter_id], now)))

    async def _now_kept(self, cause: str | None) -> Sequence[tuple[int, Page]]:
        return [(self._journal.last_letter, partial(self.page, cause=cause))]
