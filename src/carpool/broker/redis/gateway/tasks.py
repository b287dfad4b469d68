"""Tasks in Redis: any gateway accepts, answers and deletes them; any batcher writes their results.

1. A task is accepted (202) only when Redis has it (task_intake.py). Its id names its shard, so any gateway finds it.
2. Its result, its dead letter and the acknowledgement of its entry are one step. The first written result wins; a task
   that was deleted meanwhile gets none.
3. A gateway where a client waits for a task says so in the task; the batcher that writes the result sends a notice. A
   notice can be lost, so every gateway also looks, once a second, at the tasks for which clients wait there.
4. A gateway keeps nothing about tasks but the polls that wait, and for a moment which results were read: where there is
   no room for new tasks, such results go first.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from carpool.broker.polls import Poll, Polls, WhenPolled, finished_state, no_such_task, queue_of
from carpool.broker.redis.client.link import RedisFailure, ignore
from carpool.broker.redis.ended_tasks import EndedTasks
from carpool.broker.redis.formats import LATE, Reply, encode_reply
from carpool.broker.redis.gateway.refusals import out_of_reach
from carpool.broker.redis.gateway.task_intake import Accepted, TaskIntake, TaskRemovals
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import EndedTask, LookedAt, RedisOps
from carpool.core.defaults import do_nothing
from carpool.core.errors import CarpoolError, ClientLeft, UnknownTask
from carpool.core.outcome import Outcome
from carpool.core.ports import Caller
from carpool.core.problem import problem_json
from carpool.core.request import Request
from carpool.core.task import TAKEN, QueuePlace, StoredTask
from carpool.core.timeline import RequestState
from carpool.core.timers import Every

LOOK_AGAIN_S = 1.0
# The gateway tells Redis of read results together: some at a call, which holds up Redis's other clients.
TELL_READ_S = 0.25
READ_A_CALL_MAX = 256
# How long to wait for other gateways that may have a request.
ELSEWHERE_S = 0.5
Found = StoredTask | RedisFailure | None
WhenFound = Callable[[RequestState | CarpoolError | None], None]


class RedisTasks:
    """Accepts, answers and deletes tasks at one gateway (core.ports.TaskBoard)."""

    def __init__(
        self,
        steps: RedisOps,
        gateway: bytes,
        intake: TaskIntake,
        removals: TaskRemovals,
        result_ttl_ms: int,
        ended: Callable[[EndedTask, CarpoolError], None] = do_nothing,
        queue_place: Callable[[str, str, int], QueuePlace | None] = do_nothing,
    ) -> None:
        self._steps = steps
        self._gateway = gateway
        self._intake = intake
        self._removals = removals
        self._result_ttl_ms = result_ttl_ms
        # Tasks that have their outcome from here: those that are deleted, and those whose time is over.
        self._deleted = EndedTasks(steps, ClientLeft("the task was deleted"), ended)
        self._late = EndedTasks(steps, LATE, ended)
        # Where a task stands, by its id, its model, and how many of its shard go before it.
        self._queue_place = queue_place
        self._polls = Polls(self._read)
        # Runs while polls wait.
        self._looks = Every(LOOK_AGAIN_S, self._look_again)
        # Tasks whose results were read, and of which Redis has not heard yet. Runs while there are some.
        self._read_ids: defaultdict[Shard, set[str]] = defaultdict(set)
        self._tells_read = Every(TELL_READ_S, self._tell_read)
        # By model: how many came so far.
        self.arrivals: Counter[str] = Counter()
        # While true, no poll is kept waiting.
        self.draining = False

    def __repr__(self) -> str:
        return f"<RedisTasks {self._polls!r}>"

    def submit(self, request: Request, accepted: Accepted, letter_id: int | None = None) -> None:
        """Accept a task: `accepted(None)` once it is safe, or `accepted(error)`. Its id may be another one then.

        With `letter_id`, in place of that dead letter, whose shard the request's id must name.
        """
        request.waiter = self
        self.arrivals[request.model] += 1
        self._intake.submit(request, accepted, letter_id)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Nothing to do: `accepted` answers the submitter, and the outcome is in Redis."""

    def look(self, caller: Caller, task_id: str, wait_s: float, forget: bool, answer: WhenPolled) -> Poll:
        """Answer with the task's state: at once, or as soon as it has an outcome but not later than `wait_s`."""
        poll = Poll(caller, task_id, answer, forget)
        if not names_a_shard(task_id):
            poll.tell(None)
        elif wait_s <= 0 or self.draining:
            self._read(poll)
        else:
            # Before it is looked at: the notice may be here before the answer.
            self._polls.wait(poll, wait_s)
            self._look(task_id, partial(self._first_look, poll))
            self._looks.start()
        return poll

    def leave(self, poll: Poll) -> None:
        """The client of a poll has left."""
        self._polls.leave(poll)

    def finished(self, task_id: str) -> None:
        """There is news of a task for which a client may wait here."""
        if task_id in self._polls:
            self._look(task_id, partial(self._next_look, task_id))

    def delete(self, caller: Caller, task_id: str, done: Callable[[CarpoolError | None], None]) -> None:
        """Cancel a waiting task, discard the result of a running one, forget a finished one."""

        def looked(found: Found) -> None:
            if isinstance(found, RedisFailure):
                done(out_of_reach())
            elif found is None or not caller.may_see(found.owner):
                done(no_such_task())
            else:
                self._delete(task_id, done)

        if not names_a_shard(task_id):
            done(no_such_task())
        else:
            self._look(task_id, looked, to_be_told=False)

    def _delete(self, task_id: str, done: Callable[[CarpoolError | None], None]) -> None:

        shard, receipt = self._steps.keys.shard_of_task(task_id), self._deleted.receipt()

        def deleted(found: bool | RedisFailure) -> None:
            if isinstance(found, RedisFailure):
                self._deleted.failed(shard, found)
                done(out_of_reach())
                return
            for poll in self._polls.take(task_id):
                poll.tell(UnknownTask("the task was deleted"))
            done(None if found else no_such_task())

        def cancelled(task: EndedTask) -> None:
            self._deleted.came(shard, receipt, [task])

        self._removals.remove(task_id, deleted, cancelled, receipt=receipt)

    def state(self, task_id: str, answer: WhenFound) -> None:
        """Tell an operator how far a task is, and while it waits where it stands; None if there is none."""

        def told(found: LookedAt | RedisFailure) -> None:
            if isinstance(found, RedisFailure):
                answer(out_of_reach())
            elif found.task is None or found.task.status != "PENDING":
                answer(None if found.task is None else finished_state(found.task, found.age_ms))
            elif (place := self._place(task_id, found)) is TAKEN:
                answer(RequestState("processing", found.age_ms, None, found.task.client_id or None))
            else:
                queue = UNSET if place is None else queue_of(place)
                answer(RequestState("queued", found.age_ms, None, found.task.client_id or None, queue=queue))

        if names_a_shard(task_id):
            self._look_at(task_id, told, to_be_told=False, with_standing=True)
        else:
            answer(None)

    def drain(self) -> None:
        """Long polls are answered with what there is."""
        self.draining = True
        for poll in self._polls.take_all():
            self._read(poll)

    @property
    def doubtful(self) -> int:
        """Refused tasks that Redis may have, and that are being removed."""
        return self._removals.doubtful

    def close(self) -> None:
        """Stop the timers; polls that still wait get no answer."""
        self._removals.close()
        self._deleted.close()
        self._late.close()
        self._looks.stop()
        self._tells_read.stop()
        self._polls.take_all()

    # Looking.

    def _look(
        self, task_id: str, done: Callable[[Found], None], *, to_be_told: bool = True, with_standing: bool = False
    ) -> None:
        """Ask for a task's state, and maybe for a notice when it has an outcome, or where it stands."""

        def told(found: LookedAt | RedisFailure) -> None:
            if isinstance(found, RedisFailure) or found.task is None:
                done(found if isinstance(found, RedisFailure) else None)
            else:
                done(msgspec.structs.replace(found.task, queue=self._place(task_id, found)))

        self._look_at(task_id, told, to_be_told=to_be_told, with_standing=with_standing)

    def _look_at(
        self, task_id: str, done: Callable[[LookedAt | RedisFailure], None], *, to_be_told: bool, with_standing: bool
    ) -> None:
        shard, receipt = self._steps.keys.shard_of_task(task_id), self._late.receipt()

        def told(found: LookedAt | RedisFailure) -> None:
            if isinstance(found, RedisFailure):
                self._late.failed(shard, found)
            elif found.was_over is not None:
                self._late.came(shard, receipt, [found.was_over])
            done(found)

        gateway, late = self._gateway if to_be_told else b"", problem_json(LATE, task_id)
        ending = (late, self._result_ttl_ms, receipt)
        self._steps.look_at_task(task_id, gateway, ending, told, with_standing=with_standing)

    def _place(self, task_id: str, found: LookedAt) -> QueuePlace | None:
        if found.queue_stats is None:
            return None
        model, ahead = found.queue_stats
        return TAKEN if ahead < 0 else self._queue_place(task_id, model, ahead)

    def _first_look(self, poll: Poll, found: Found) -> None:
        if isinstance(found, RedisFailure):
            if self._polls.remove(poll):
                poll.tell(out_of_reach())
        elif poll.is_hidden(found):
            if self._polls.remove(poll):
                poll.tell(None)  # at once: to wait would show that there is one
        else:
            self._next_look(poll.task_id, found)

    def _next_look(self, task_id: str, found: Found) -> None:
        """Polls go on waiting while there is no outcome, or while Redis is away."""
        if isinstance(found, RedisFailure) or (found is not None and found.status == "PENDING"):
            return
        for poll in self._polls.take(task_id):
            self._answer(poll, found)

    def _look_again(self) -> None:
        for task_id in self._polls:
            self._look(task_id, partial(self._next_look, task_id))
        if not self._polls:
            self._looks.stop()

    def _read(self, poll: Poll) -> None:
        """Answer with what Redis has now."""
        self._look(poll.task_id, partial(self._answer, poll), to_be_told=False, with_standing=True)

    def _answer(self, poll: Poll, found: Found) -> None:
        if not poll.tell(out_of_reach() if isinstance(found, RedisFailure) else found):
            return
        if poll.forget:
            self._removals.remove(poll.task_id, lambda _: None)
        else:
            self._read_ids[self._steps.keys.shard_of_task(poll.task_id)].add(poll.task_id)
            self._tells_read.start()

    def _tell_read(self) -> None:
        """Tell Redis which results were read. If that does not arrive, nothing is lost: they stay longer."""
        told, self._read_ids = self._read_ids, defaultdict(set)
        for shard, task_ids in told.items():
            ids = list(task_ids)
            for at in range(0, len(ids), READ_A_CALL_MAX):
                self._steps.were_read(shard, ids[at : at + READ_A_CALL_MAX], ignore)
        if not told:
            self._tells_read.stop()


def names_a_shard(task_id: str) -> bool:
    """Whether a task could have this id; the face asks for others too."""
    return task_id[-1:] in "0123456789abcdef" and task_id != ""


class RequestStates:
    """How far a synchronous request is, for operators. Its own gateway knows; others ask that one over its replies."""

    def __init__(
        self, steps: RedisOps, gateway: bytes, *, lease_ms: int, others: Callable[[], Iterable[bytes]]
    ) -> None:
        self._steps = steps
        self._gateway = gateway
        self._lease_ms = lease_ms
        # The other gateways that live.
        self._others = others
        # By id of a request: the timer of the wait for other gateways, and the callbacks that wait.
        self._asking: dict[str, tuple[asyncio.TimerHandle, list[WhenFound]]] = {}

    def of_entry(self, shard: Shard, field: bytes, entry_id: bytes, waiting: RequestState, answer: WhenFound) -> None:
        """Whether a batcher has an entry; `waiting` is what is known without asking."""

        def told(is_taken: bool | RedisFailure) -> None:
            taken = msgspec.structs.replace(waiting, status="processing", queue=UNSET)
            answer(taken if is_taken is True else waiting)

        self._steps.is_leased(shard, field, entry_id, self._lease_ms, told)

    def elsewhere(self, request_id: str, answer: WhenFound) -> None:
        """Ask the other gateways for a request; None if none of them tells of it in time."""
        if request_id in self._asking:
            self._asking[request_id][1].append(answer)
            return
        timer = asyncio.get_running_loop().call_later(ELSEWHERE_S, self.told, request_id, None)
        self._asking[request_id] = (timer, [answer])
        for gateway in self._others():
            self._write(gateway, wanted=[(self._gateway, request_id)])

    def tell(self, gateway: bytes, request_id: str, state: RequestState) -> None:
        """Answer another gateway that looks for a request."""
        self._write(gateway, found=[(request_id, state)])

    def told(self, request_id: str, state: RequestState | None) -> None:
        """Another gateway has answered; or none did in time."""
        if request_id in self._asking:
            timer, answers = self._asking.pop(request_id)
            timer.cancel()
            for answer in answers:
                answer(state)

    def _write(self, gateway: bytes, **words: Any) -> None:
        self._steps.reply(gateway, encode_reply(Reply(**words)), ignore)
