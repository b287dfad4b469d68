"""Long polls: clients that wait at this process for the outcomes of tasks, wherever these are kept."""

import asyncio
from collections.abc import Callable, Iterator

import msgspec
from msgspec import UNSET

from carpool.core.errors import CarpoolError, UnknownTask
from carpool.core.ports import Caller
from carpool.core.problem import code_of
from carpool.core.task import QueuePlace, StoredTask
from carpool.core.timeline import Queue, RequestState

# Returns False if the client was gone.
WhenPolled = Callable[[StoredTask | CarpoolError], bool | None]


class Poll(msgspec.Struct, eq=False):
    """A client that wants to know what became of a task."""

    caller: Caller
    task_id: str
    answer: WhenPolled
    forget: bool
    # None for a poll that does not wait, or no longer.
    timer: asyncio.TimerHandle | None = None
    has_left: bool = False

    def leave(self) -> None:
        """The client was answered, or has left: drop `answer`, which refers back to this poll."""
        self.has_left, self.answer = True, _tell_nobody

    def tell(self, found: StoredTask | CarpoolError | None) -> bool:
        """Answer with what was found; says whether that was an outcome, and the client was there to read it."""
        if self.has_left:
            return False
        if found is None or self.is_hidden(found):
            found = no_such_task()
        answer = self.answer
        self.leave()
        # A client that hung up meanwhile must be able to come back for the result.
        return answer(found) is not False and isinstance(found, StoredTask) and found.status != "PENDING"

    def is_hidden(self, found: object) -> bool:
        """Whether that is a task that this caller may not see."""
        return isinstance(found, StoredTask) and not self.caller.may_see(found.owner)


class Polls:
    """The polls that wait, by task."""

    def __init__(self, waited_enough: Callable[[Poll], None]) -> None:
        self._waited_enough = waited_enough
        self._waiting: dict[str, list[Poll]] = {}

    def __repr__(self) -> str:
        return f"<Polls {sum(map(len, self._waiting.values()))}>"

    def __iter__(self) -> Iterator[str]:
        """The tasks for which polls wait."""
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._waiting

    def wait(self, poll: Poll, seconds: float) -> None:
        """Let a poll wait, not longer than this."""
        poll.timer = asyncio.get_running_loop().call_later(seconds, self._time_is_over, poll)
        self._waiting.setdefault(poll.task_id, []).append(poll)

    def remove(self, poll: Poll) -> bool:
        """It need not be answered when the outcome comes; false if it did not wait."""
        if poll.timer is None:
            return False
        poll.timer.cancel()
        poll.timer = None
        polls = self._waiting[poll.task_id]
        polls.remove(poll)
        if not polls:
            del self._waiting[poll.task_id]
        return True

    def leave(self, poll: Poll) -> None:
        """The client has left."""
        poll.leave()
        self.remove(poll)

    def take(self, task_id: str) -> list[Poll]:
        """Remove and return the polls that wait for a task; their timers are cancelled."""
        polls = list(self._waiting.get(task_id, ()))
        for poll in polls:
            self.remove(poll)
        return polls

    def take_all(self) -> list[Poll]:
        """Remove and return all polls."""
        return [poll for task_id in list(self._waiting) for poll in self.take(task_id)]

    def _time_is_over(self, poll: Poll) -> None:
        if self.remove(poll):
            self._waited_enough(poll)


def _tell_nobody(found: StoredTask | CarpoolError) -> bool:
    return False


def no_such_task() -> UnknownTask:
    """The error for a task that never was, has expired, was deleted, or is another owner's: always the same."""
    return UnknownTask("there is no such task, or its result has expired; results are kept for a limited time")


def finished_state(task: StoredTask, latency_ms: float) -> RequestState:
    """What an operator sees of a task that has its outcome."""
    client_id = task.client_id or None
    if task.error is None:
        return RequestState("completed", latency_ms, None, client_id)
    return RequestState("failed", latency_ms, code_of(task.error), client_id)


def queue_of(place: QueuePlace) -> Queue:
    """What an operator sees of a task's place."""
    wait_ms = UNSET if place.estimated_wait_ms is None else place.estimated_wait_ms
    return Queue(place=place.place, estimated_wait_ms=wait_ms)
