"""Tasks: requests that outlive their client, and this process.

1. A task is accepted (202) only when the journal has committed it; only then is it queued.
2. No client gets its outcome before the journal has committed it, so no reader ever sees a result that a crash could
   take back. First written result wins.
3. While a task has no outcome it is in `_live`; afterwards the journal alone knows it, so memory holds no results.
4. A task that the upstream failed is also a dead letter: kept with its input for a person to look at.
"""

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from carpool.broker.journal import Journal
from carpool.broker.journal_records import DeadLetter, TaskResult, record_of
from carpool.broker.memory import MemoryBroker
from carpool.broker.polls import Poll, Polls, WhenPolled, finished_state, no_such_task
from carpool.broker.result_cache import SameKey
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import is_dead_letter
from carpool.core.defaults import do_nothing
from carpool.core.errors import CarpoolError, ClientLeft, Draining, QueueFull, UnknownModel, UnknownTask
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Caller
from carpool.core.problem import problem_json
from carpool.core.request import ADMITTED, RUNNING, Request
from carpool.core.task import TAKEN, StoredTask, place_behind
from carpool.core.timeline import RequestState, state_of


def unknown_capacity(model: str) -> float:
    """The capacity where nothing is known of it."""
    return 0.0


class LiveTask(msgspec.Struct, eq=False):
    """A task without an outcome."""

    request: Request
    submitted_wall: float


class Tasks:
    """Accepts, answers and deletes tasks; their waiter when they run."""

    def __init__(
        self,
        broker: MemoryBroker,
        journal: Journal,
        *,
        prepare: Callable[[Request], None] = do_nothing,
        waiting_max: int = 50_000,
        capacity_rps: Callable[[str], float] = unknown_capacity,
        # Keeps the result of a task for requests that are the same.
        keep_result: Callable[[SameKey, Output], None] = do_nothing,
        # Called when an outcome that is to be sent to a webhook is safe.
        webhook_is_due: Callable[[], None] = do_nothing,
        clock: Clock = monotonic,
    ) -> None:
        self._broker = broker
        # Requests of a model that are served in a second; 0.0 while that is not known.
        self._capacity_rps = capacity_rps
        self._journal = journal
        # Does for a request from the journal what the face does for a new one; raises an error of the tree.
        self.prepare = prepare
        self._waiting_max = waiting_max
        self._clock = clock
        self._live: dict[str, LiveTask] = {}
        self._restored: list[Request] = []
        self._polls = Polls(self._waited_enough)
        self._keep_result = keep_result
        self._webhook_is_due = webhook_is_due
        # By model: how many came to be run, those from the journal included.
        self.arrivals: Counter[str] = Counter()
        # While true, accepted tasks go to the journal alone: the next process runs them.
        self.draining = False

    def __repr__(self) -> str:
        return f"<Tasks live={len(self._live)}>"

    def restore(self, models: frozenset[str], place_of: Callable[[int, float], float]) -> int:
        """Take up what the journal kept of an earlier process, for `send_restored` to queue; returns how many."""
        count = 0
        now, uptime = self._clock(), self._journal.now()
        for record in self._journal.pending():
            count += 1
            request = Request(
                id=record.id,
                model=record.model,
                parameters=record.parameters,
                input=record.input,
                size=len(record.input),
                tier=record.tier,
                arrived=now,
                place=place_of(record.tier, now),
                queue_timeout_s=0.0,
                deadline=now + record.deadline - uptime,
                waiter=self,
                is_task=True,
                owner=record.owner,
                client_id=record.client_id,
                callback_url=record.callback_url,
            )
            self._live[record.id] = LiveTask(request, record.submitted_wall)
            fault: CarpoolError | None = None
            try:
                if record.model not in models:
                    raise UnknownModel("the model of this task is no longer served here")
                self.prepare(request)
            except CarpoolError as error:
                fault = error
            self._broker.hold(request)  # after `prepare`, which may have made it larger
            if self._broker.events.subscribers:
                self._broker.events.admitted(request)
            if fault is not None:
                self._broker.settle(request, fault)
            else:
                self._restored.append(request)
        return count

    def send_restored(self) -> None:
        """Queue the restored tasks once this process has its ports: without them it would exit with work under way."""
        restored, self._restored = self._restored, []
        for request in restored:
            if request.phase == ADMITTED:  # else it was deleted meanwhile
                self._enqueue(request)

    def submit(
        self,
        request: Request,
        accepted: Callable[[CarpoolError | None], None],
        letter_id: int | None = None,
    ) -> None:
        """Accept a task: `accepted(None)` once it is safe, or `accepted(error)`.

        With `letter_id`, in place of that dead letter.
        """
        request.waiter = self
        refusal = self._full() or self._broker.reserve(request)
        if refusal is not None:
            request.settle(refusal, self._clock())  # not `_live`, so nothing is written
            accepted(refusal)
            return
        if self._broker.events.subscribers:
            self._broker.events.admitted(request)
        task = LiveTask(request, time.time())
        deadline = self._journal.now() + request.deadline - request.arrived

        def committed(error: CarpoolError | None) -> None:
            if error is not None:
                self._broker.settle(request, error)
            else:
                self._live[request.id] = task
                if self.draining:
                    self._broker.withdraw(request)
                elif request.result is not None:
                    self._broker.settle(request, request.result)
                else:
                    self._enqueue(request)
            accepted(error)

        self._journal.append(record_of(request, task.submitted_wall, deadline), committed, letter_id)

    def _enqueue(self, request: Request) -> None:
        self.arrivals[request.model] += 1
        self._broker.enqueue(request)

    def _full(self) -> CarpoolError | None:
        """Tasks wait for minutes: they must leave room for synchronous requests."""
        if len(self._live) < self._waiting_max:
            return None
        return QueueFull("too many tasks are waiting; try again later", retry_after_s=10)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Write a task's outcome; when that is safe, wake the polls that wait for it."""
        if request.id not in self._live or isinstance(outcome, ClientLeft | Draining):
            return  # never accepted, or deleted, or left to the next process
        dead_letter: DeadLetter | None = None
        if isinstance(outcome, CarpoolError):
            result = TaskResult("FAILED", None, problem_json(outcome, request.id), time.time())
            if is_dead_letter(outcome):
                dead_letter = DeadLetter(outcome.code, outcome.detail, request.sends)
        else:
            result = TaskResult("SUCCESS", bytes(outcome.value), None, time.time())
            if request.result_key is not None and request.result is None:
                self._keep_result(request.result_key, outcome)
        self._journal.finish(request.id, result, lambda _: self._finished(request), dead_letter)

    def look(self, caller: Caller, task_id: str, wait_s: float, forget: bool, answer: WhenPolled) -> Poll:
        """Answer with the task's state: at once, or as soon as it has an outcome but not later than `wait_s`."""
        poll = Poll(caller, task_id, answer, forget)
        task = self._live.get(task_id)
        if task is None:
            self._read(poll)
        elif wait_s <= 0 or self.draining or not caller.may_see(task.request.owner):
            poll.tell(self._pending(task))
        else:
            self._polls.wait(poll, wait_s)
        return poll

    def state(self, task_id: str, answer: Callable[[RequestState | CarpoolError | None], None]) -> None:
        """Tell an operator how far a task is; None if there is none."""

        def found(stored: StoredTask | CarpoolError | None) -> None:
            if not isinstance(stored, StoredTask):
                answer(stored)
            else:  # as the wall clock has it: that may have been set back
                answer(finished_state(stored, max(0.0, stored.timestamp_wall - stored.submitted_wall) * 1000))

        task = self._live.get(task_id)
        if task is not None:
            answer(state_of(task.request, self._clock()))
        else:
            self._journal.read(task_id, found)

    def leave(self, poll: Poll) -> None:
        """The client of a poll has left."""
        self._polls.leave(poll)

    def delete(self, caller: Caller, task_id: str, done: Callable[[CarpoolError | None], None]) -> None:
        """Cancel a waiting task, discard the result of a running one, forget a finished one.

        Only when the journal has let it go: if that fails the task is still accepted, and comes to its outcome.
        """

        def found(stored: StoredTask | CarpoolError | None) -> None:
            if isinstance(stored, CarpoolError):
                done(stored)
            elif stored is None or not caller.may_see(stored.owner):
                done(no_such_task())
            else:
                self._delete(task_id, done)

        self._journal.read(task_id, found)

    def _delete(self, task_id: str, done: Callable[[CarpoolError | None], None]) -> None:

        def deleted(found: bool | CarpoolError) -> None:
            if isinstance(found, CarpoolError):
                done(found)
                return
            task = self._live.pop(task_id, None)
            if task is not None:
                self._broker.cancel(task.request)
                self._answer_polls(task_id, UnknownTask("the task was deleted"))
            done(None if found else no_such_task())

        self._journal.delete(task_id, deleted)

    def drain(self) -> None:
        """Leave waiting tasks to the next process; long polls are answered with what there is."""
        self.draining = True
        for task in list(self._live.values()):
            self._broker.withdraw(task.request)
            self._answer_polls(task.request.id, self._pending(task))

    def _finished(self, request: Request) -> None:
        """The outcome is safe: from now on the journal answers."""
        self._live.pop(request.id, None)
        for poll in self._polls.take(request.id):
            self._read(poll)
        if request.callback_url:
            self._webhook_is_due()

    def _read(self, poll: Poll) -> None:
        def found(stored: StoredTask | CarpoolError | None) -> None:
            if not poll.tell(stored):
                return
            if poll.forget:
                self._journal.delete(poll.task_id, lambda _: None)
            else:
                self._journal.was_read(poll.task_id)

        self._journal.read(poll.task_id, found)

    def _waited_enough(self, poll: Poll) -> None:
        poll.tell(self._pending(self._live[poll.task_id]))

    def _answer_polls(self, task_id: str, answer: StoredTask | CarpoolError) -> None:
        for poll in self._polls.take(task_id):
            poll.tell(answer)

    def _pending(self, task: LiveTask) -> StoredTask:
        request = task.request
        queue = TAKEN if request.phase == RUNNING else None
        if (ahead := self._broker.before_task(request)) is not None:
            queue = place_behind(ahead, self._capacity_rps(request.model))
        return StoredTask(request.id, request.owner, "PENDING", None, None, task.submitted_wall, queue=queue)
