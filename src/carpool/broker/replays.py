"""What a person does with dead letters, wherever they are kept.

1. A replay is a new task with an id of its own: the old one has its outcome already. The letter goes in the step that
   accepts the task, so it is never lost, and never replayed twice.
2. `replay_all` ends: it stops at the last letter there was; its own tasks that fail again become newer ones.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Protocol

from carpool.core.clock import Clock
from carpool.core.dead_letter import DeadLetterSummary, Replayed, ReplayReport, StoredDeadLetter
from carpool.core.errors import CarpoolError, Malformed, NotFound, UnknownModel
from carpool.core.request import Request, Waiter
from carpool.core.tensors import as_input

# How many letters are in memory at once beyond those that the broker holds: enough for a good group commit. One more
# may be of any size.
PAGE_MAX = 64
PAGE_BYTES_MAX = 16 * 1024 * 1024

# Shows letters with an id above the first argument, as many as the second one says.
Page = Callable[[int, int], Awaitable[list[DeadLetterSummary]]]


class ReplayBoard(Waiter, Protocol):
    """Where replays become tasks."""

    def submit(
        self, request: Request, accepted: Callable[[CarpoolError | None], None], letter_id: int | None = None
    ) -> None:
        """Accept a task in place of a dead letter."""


class ReplayDesk(ABC):
    """Shows, replays and drops dead letters (core.ports.DeadLetterDesk)."""

    def __init__(
        self,
        tasks: ReplayBoard,
        models: Container[str],
        *,
        tier_target_s: tuple[float, ...],
        task_timeout_s: float,
        prepare: Callable[[Request], None],
        clock: Clock,
    ) -> None:
        self._tasks = tasks
        self._models = models
        self._tier_target_s = tier_target_s
        self._task_timeout_s = task_timeout_s
        # Does for a kept request what the face does for a new one; raises an error of the tree.
        self._prepare = prepare
        self._clock = clock

    @abstractmethod
    async def _read(self, letter_id: int) -> StoredDeadLetter | None:
        """One dead letter, whole; None if it is gone."""

    @abstractmethod
    async def _drop(self, letter_id: int) -> int:
        """Remove one; returns how many there were."""

    @abstractmethod
    async def _now_kept(self, cause: str | None) -> Sequence[tuple[int, Page]]:
        """The letters there are now, or those of one cause: the last id, and how they are shown up to that."""

    def _task_id(self, letter_id: int) -> str:
        """A new id for the task that a letter becomes."""
        return secrets.token_hex(16)

    async def show(self, letter_id: int) -> StoredDeadLetter:
        """One dead letter, whole; raises NotFound."""
        letter = await self._read(letter_id)
        if letter is None:
            raise no_such_letter()
        return letter

    async def drop(self, letter_id: int) -> None:
        """Remove one; raises NotFound."""
        if await self._drop(letter_id) == 0:
            raise no_such_letter()

    async def replay(self, letter_id: int) -> Replayed:
        """Make one a task again; raises NotFound, UnknownModel, or why no task is accepted now."""
        letter = await self.show(letter_id)
        if letter.summary.model not in self._models:
            raise UnknownModel("the model of this dead letter is no longer served here; drop it, or serve the model")
        now, tier = self._clock(), min(letter.tier, len(self._tier_target_s) - 1)
        # Results of tasks are JSON, so their inputs are: packed ones become what a client would send as JSON.
        value = bytes(as_input(letter.input))
        request = Request(
            id=self._task_id(letter_id),
            model=letter.summary.model,
            parameters=letter.parameters,
            input=value,
            size=len(value),
            tier=tier,
            arrived=now,
            place=now + self._tier_target_s[tier],
            queue_timeout_s=self._task_timeout_s,
            deadline=now + self._task_timeout_s,
            waiter=self._tasks,
            is_task=True,
            owner=letter.owner,
        )
        self._prepare(request)
        await answer_of(lambda done: self._tasks.submit(request, done, letter_id))
        return Replayed(letter_id, request.id)

    async def replay_all(self, cause: str | None) -> ReplayReport:
        """Make all letters there are now, or those of one cause, tasks again, until no more tasks are accepted.

        Raises why not, if none was replayed.
        """
        replayed: list[Replayed] = []
        reason: CarpoolError | None = None
        is_over = False
        for last, page in await self._now_kept(cause):
            after = 0
            while not is_over and (found := await page(after, PAGE_MAX)) and found[0].id <= last:
                letters = _within([letter for letter in found if letter.id <= last], PAGE_BYTES_MAX)
                after = letters[-1].id
                attempts = (self.replay(letter.id) for letter in letters)
                for result in await asyncio.gather(*attempts, return_exceptions=True):
                    if isinstance(result, Replayed):
                        replayed.append(result)
                    elif isinstance(result, UnknownModel | Malformed):
                        reason = result  # no hindrance to the others
                    elif isinstance(result, NotFound):
                        pass  # another caller replayed or dropped it first
                    elif isinstance(result, CarpoolError):
                        reason, is_over = result, True
                    else:
                        raise result
        if reason is not None and not replayed:
            raise reason
        return ReplayReport(replayed, reason.detail if reason else None)


def no_such_letter() -> NotFound:
    """The error for a dead letter that is not there any more."""
    return NotFound("there is no such dead letter; it was replayed, dropped, or has expired")


async def answer_of(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """What `ask` hands to its callback; an error is raised. The caller may have been cancelled meanwhile."""
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


def _within(letters: list[DeadLetterSummary], bytes_max: int) -> list[DeadLetterSummary]:
    """The first of them that fit together; at least one."""
    size = 0
    for index, letter in enumerate(letters):
        size += letter.size
        if index and size > bytes_max:
            return letters[:index]
    return letters
