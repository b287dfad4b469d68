"""Dead letters in the journal: how they come in, and what a person does with them.

1. A task becomes one together with its result (tasks.py); a synchronous request by `DeadLetterBox.bury`.
2. A replay is a new task with an id of its own: the old one has its outcome already. The letter goes in the transaction
   that accepts the task, so it is never lost, and never replayed twice.
3. `replay_all` ends: letters that its own tasks come back as are younger than where it stops.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Container
from typing import Any

from carpool.broker.journal import Journal
from carpool.broker.journal_records import DeadLetter, TaskRecord
from carpool.broker.journal_writer import no_such_letter
from carpool.broker.tasks import Tasks
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import DeadLetterSummary, Replayed, ReplayReport, StoredDeadLetter
from carpool.core.errors import CarpoolError, Malformed, NotFound, UnknownModel
from carpool.core.request import DONE, Request

# How many letters `replay_all` has in memory at once beyond those that the broker holds: enough for a good group
# commit. One more may be of any size.
PAGE_MAX = 64
PAGE_BYTES_MAX = 16 * 1024 * 1024


class DeadLetterBox:
    """Keeps synchronous requests that were given up on (core.ports.DeadLetters)."""

    def __init__(self, journal: Journal, clock: Clock = monotonic) -> None:
        self._journal = journal
        self._clock = clock

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request with its error, if there is room; to be called before it is settled."""
        if request.is_task or request.phase == DONE:  # a task's result buries it; who has left, left no input
            return
        now = time.time()
        record = TaskRecord(
            id=request.id,
            owner="",
            model=request.model,
            parameters=request.parameters,
            input=request.input,
            tier=request.tier,
            submitted_wall=now - (self._clock() - request.arrived),
            deadline=0.0,
        )
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
        """How many are kept."""
        return self._journal.dead_letters

    async def page(self, after: int, limit: int) -> list[DeadLetterSummary]:
        """Those with an id above `after`, the oldest first."""
        return await self._page(after, limit, None)

    async def show(self, letter_id: int) -> StoredDeadLetter:
        """One of them, whole; raises NotFound."""
        letter: StoredDeadLetter | None = await _answer(lambda done: self._journal.read_letter(letter_id, done))
        if letter is None:
            raise no_such_letter()
        return letter

    async def replay(self, letter_id: int) -> Replayed:
        """Make one a task again; raises NotFound, UnknownModel, or why no task is accepted now."""
        letter = await self.show(letter_id)
        if letter.summary.model not in self._models:
            raise UnknownModel("the model of this dead letter is no longer served here; drop it, or serve the model")
        now = self._clock()
        tier = min(letter.tier, len(self._tier_target_s) - 1)
        request = Request(
            id=secrets.token_hex(16),
            model=letter.summary.model,
            parameters=letter.parameters,
            input=letter.input,
            size=len(letter.input),
            tier=tier,
            arrived=now,
            place=now + self._tier_target_s[tier],
            queue_timeout_s=self._task_timeout_s,
            deadline=now + self._task_timeout_s,
            waiter=self._tasks,
            is_task=True,
        )
        self._tasks.prepare(request)
        await _answer(lambda done: self._tasks.submit(request, letter.owner, done, letter_id))
        return Replayed(letter_id, request.id)

    async def replay_all(self, cause: str | None) -> ReplayReport:
        """Make all there are now, or those of one cause, tasks again, until no more tasks are accepted."""
        last = self._journal.last_letter
        after = 0
        replayed: list[Replayed] = []
        reason: CarpoolError | None = None
        may_go_on = True
        while may_go_on and (found := await self._page(after, PAGE_MAX, cause)) and found[0].id <= last:
            page = _within([letter for letter in found if letter.id <= last], PAGE_BYTES_MAX)
            after = page[-1].id
            for result in await asyncio.gather(*(self.replay(letter.id) for letter in page), return_exceptions=True):
                if isinstance(result, Replayed):
                    replayed.append(result)
                elif isinstance(result, UnknownModel | Malformed):
                    reason = result  # no hindrance to the others
                elif isinstance(result, NotFound):
                    pass  # somebody was quicker
                elif isinstance(result, CarpoolError):
                    reason = result
                    may_go_on = False
                else:
                    raise result
        if reason is not None and not replayed:
            raise reason
        return ReplayReport(replayed, reason.detail if reason else None)

    async def drop(self, letter_id: int) -> None:
        """Remove one; raises NotFound."""
        if await _answer(lambda done: self._journal.drop_letters(letter_id, done)) == 0:
            raise no_such_letter()

    async def drop_all(self) -> int:
        """Remove all; returns how many."""
        dropped: int = await _answer(lambda done: self._journal.drop_letters(None, done))
        return dropped

    async def _page(self, after: int, limit: int, cause: str | None) -> list[DeadLetterSummary]:
        page: list[DeadLetterSummary] = await _answer(
            lambda done: self._journal.list_letters(after, limit, cause, done)
        )
        return page


def _within(letters: list[DeadLetterSummary], bytes_max: int) -> list[DeadLetterSummary]:
    """The first of them that fit together; at least one."""
    size = 0
    for index, letter in enumerate(letters):
        size += letter.size
        if index and size > bytes_max:
            return letters[:index]
    return letters


async def _answer(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """What a callback is told; an error is raised. Whoever asked may have been cancelled meanwhile."""
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(answer: Any) -> None:
        if told.done():
            return
        if isinstance(answer, CarpoolError):
            told.set_exception(answer)
        else:
            told.set_result(answer)

    ask(done)
    return await told
