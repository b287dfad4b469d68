"""Dead letters in the journal: how they come in, and what a person does with them.

1. `Tasks` buries a task together with its result (tasks.py); `DeadLetterBox.bury` buries a synchronous request, if the
   settings keep its kind of error.
2. A replay is a new task with an id of its own: the old one has its outcome already. The letter goes in the transaction
   that accepts the task, so it is never lost, and never replayed twice.
3. `replay_all` ends (replays.py): it stops at the last letter there was; its own tasks that fail become newer ones.
"""

import time
from collections.abc import Container
from functools import partial

from carpool.broker.journal import Journal
from carpool.broker.journal_records import DeadLetter, record_of
from carpool.broker.replays import ReplayRun, answer_of, no_such_letter, not_served, replay_request
from carpool.broker.tasks import Tasks
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import (
    DeadLetterSummary,
    Replayed,
    ReplayReport,
    StoredDeadLetter,
    SynchronousKept,
    is_kept,
)
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


class DeadLetterDesk:
    """Shows, replays and drops dead letters (core.ports.DeadLetterDesk)."""

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
        self._journal = journal
        self._tasks = tasks
        self._models = models
        self._tier_target_s = tier_target_s
        self._task_timeout_s = task_timeout_s
        self._clock = clock

    def total(self) -> int:
        """How many dead letters are kept."""
        return self._journal.counts.dead_letters

    async def page(self, after: int, limit: int) -> list[DeadLetterSummary]:
        """Dead letters with an id above `after`, the oldest first."""
        return await self._page(after, limit, None)

    async def show(self, letter_id: int) -> StoredDeadLetter:
        """One dead letter, whole; raises NotFound."""
        letter: StoredDeadLetter | None = await answer_of(lambda done: self._journal.read_letter(letter_id, done))
        if letter is None:
            raise no_such_letter()
        return letter

    async def replay(self, letter_id: int) -> Replayed:
        """Make one a task again; raises NotFound, UnknownModel, or why no task is accepted now."""
        letter = await self.show(letter_id)
        if letter.summary.model not in self._models:
            raise not_served()
        request = replay_request(letter, self._tasks, self._clock(), self._tier_target_s, self._task_timeout_s)
        self._tasks.prepare(request)
        await answer_of(lambda done: self._tasks.submit(request, done, letter_id))
        return Replayed(letter_id, request.id)

    async def replay_all(self, cause: str | None) -> ReplayReport:
        """Make all letters there are now, or those of one cause, tasks again, until no more tasks are accepted."""
        run = ReplayRun(self.replay)
        await run.go(self._journal.last_letter, partial(self._page, cause=cause))
        return run.report()

    async def drop(self, letter_id: int) -> None:
        """Remove one; raises NotFound."""
        if await answer_of(lambda done: self._journal.drop_letters(letter_id, done)) == 0:
            raise no_such_letter()

    async def drop_all(self) -> int:
        """Remove all; returns how many."""
        dropped: int = await answer_of(lambda done: self._journal.drop_letters(None, done))
        return dropped

    async def _page(self, after: int, limit: int, cause: str | None) -> list[DeadLetterSummary]:
        page: list[DeadLetterSummary] = await answer_of(
            lambda done: self._journal.list_letters(after, limit, cause, done)
        )
        return page
