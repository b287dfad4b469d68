"""Replays of dead letters, wherever they are kept: the new task, and how many are replayed one after another."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from carpool.core.dead_letter import DeadLetterSummary, Replayed, ReplayReport, StoredDeadLetter
from carpool.core.errors import CarpoolError, Malformed, NotFound, UnknownModel
from carpool.core.request import Request, Waiter
from carpool.core.tensors import as_input

# How many letters are in memory at once beyond those that the broker holds: enough for a good group commit. One more
# may be of any size.
PAGE_MAX = 64
PAGE_BYTES_MAX = 16 * 1024 * 1024


class ReplayRun:
    """Many replays, until no more tasks are accepted.

    It ends: its own tasks that fail again become letters newer than `last`, where it stops.
    """

    def __init__(self, replay: Callable[[int], Awaitable[Replayed]]) -> None:
        self._replay = replay
        self._replayed: list[Replayed] = []
        self._reason: CarpoolError | None = None
        self.may_go_on = True

    async def go(self, last: int, page: Callable[[int, int], Awaitable[list[DeadLetterSummary]]]) -> None:
        """Replay what `page(after, limit)` shows, up to the id `last`."""
        after = 0
        while self.may_go_on and (found := await page(after, PAGE_MAX)) and found[0].id <= last:
            letters = _within([letter for letter in found if letter.id <= last], PAGE_BYTES_MAX)
            after = letters[-1].id
            attempts = (self._replay(letter.id) for letter in letters)
            for result in await asyncio.gather(*attempts, return_exceptions=True):
                self._note(result)

    def report(self) -> ReplayReport:
        """What became of them; raises why not, if none was replayed."""
        if self._reason is not None and not self._replayed:
            raise self._reason
        return ReplayReport(self._replayed, self._reason.detail if self._reason else None)

    def _note(self, result: Replayed | BaseException) -> None:
        if isinstance(result, Replayed):
            self._replayed.append(result)
        elif isinstance(result, UnknownModel | Malformed):
            self._reason = result  # no hindrance to the others
        elif isinstance(result, NotFound):
            pass  # another caller replayed or dropped it first
        elif isinstance(result, CarpoolError):
            self._reason = result
            self.may_go_on = False
        else:
            raise result


def replay_request(
    letter: StoredDeadLetter, waiter: Waiter, now: float, tier_target_s: tuple[float, ...], timeout_s: float
) -> Request:
    """The new task that a letter becomes, with an id of its own."""
    tier = min(letter.tier, len(tier_target_s) - 1)
    # Results of tasks are JSON, so their inputs are: packed ones become what a client would send as JSON.
    value = bytes(as_input(letter.input))
    return Request(
        id=secrets.token_hex(16),
        model=letter.summary.model,
        parameters=letter.parameters,
        input=value,
        size=len(value),
        tier=tier,
        arrived=now,
        place=now + tier_target_s[tier],
        queue_timeout_s=timeout_s,
        deadline=now + timeout_s,
        waiter=waiter,
        is_task=True,
        owner=letter.owner,
    )


def not_served() -> UnknownModel:
    """Why a letter cannot be replayed here."""
    return UnknownModel("the model of this dead letter is no longer served here; drop it, or serve the model")


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
