"""How tasks come into Redis: accepted (202) only when Redis has said that it has them.

1. The tasks of one turn of the event loop go together, into the shard of the first one: a task's id names its shard,
   and may be changed until it is accepted.
2. With replicas, a `WAIT` right behind them on the same connection covers them: only there it speaks of these writes.
   It holds up its connection, so that is one of its own, and the next tasks collect meanwhile. Tasks go as EVAL there:
   a script that Redis did not know would be sent again behind the WAIT.
3. What was not confirmed is removed; where the gateway does not know whether Redis has it, it tries that for a while.
   Until the gateway has decided, batchers may work on a task, but it has no outcome: of one that is refused nothing is
   left. If the gateway dies, the task counts as accepted after UNSURE_S. A server that comes back, or took another's
   place, is told the last acceptances again: it may not have heard of them, or have lost them.
4. A dead letter becomes a task in one step. Such a task is never removed: the letter would be lost with it. It needs no
   replicas: where this step is not known, the letter is still there.
"""

import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from carpool.broker.journal_records import webhooks_full
from carpool.broker.redis.client.link import Lost, RedisFailure
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.gateway.entries import NOBODY, header_of, parts_of, stream_of, values_of
from carpool.broker.redis.gateway.refusals import REFUSALS, error_of, out_of_reach
from carpool.broker.redis.keys import SHARDS_MAX, Shard
from carpool.broker.redis.notices import Notices
from carpool.broker.redis.redis_ops import EndedTask, Queued, RedisOps, Removed, Unreadable
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing, no
from carpool.core.errors import BrokerDown, CarpoolError, InternalError
from carpool.core.events import Events
from carpool.core.request import QUEUED, Request
from carpool.core.timers import Every, OncePerTurn

logger = logging.getLogger("carpool.broker")

TASKS_A_FLUSH_MAX = 256
# More would fill one shard's part of the bounds while others have room.
FLUSH_BYTES_MAX = 4 * 1024 * 1024
# Tasks that wait for a flush.
COLLECTED_MAX = 10_000
COLLECTED_BYTES_MAX = 64 * 1024 * 1024
# So long, beyond the wait for replicas, a gateway may take to accept or to remove a task: longer than most failovers.
UNSURE_S = 30.0

# Redis may still have the submission of a lost connection to read when it is first asked to remove the task.
ATTEMPTS = 3
RETRY_S = 1.0
DOUBTFUL_MAX = 10_000
# So many of the last acceptances of a shard are sent again.
LATELY_MAX = 1024

Accepted = Callable[[CarpoolError | None], None]


class TaskRemovals:
    """Removes tasks in any state, with their entries if no batcher took them yet; says which ones are accepted."""

    def __init__(self, steps: RedisOps) -> None:
        self._steps = steps
        self._notices = Notices(steps)
        # How many more times to ask for a task that Redis did not know.
        self._doubtful: dict[str, int] = {}
        # Accepted tasks of which Redis may not know that.
        self._accepted: set[str] = set()
        self._is_closed = False
        # The last ones that were accepted, by shard; and the shards that were in reach when that was looked at.
        self._lately: defaultdict[Shard, deque[str]] = defaultdict(lambda: deque(maxlen=LATELY_MAX))
        self._up: set[Shard] = set()
        # Runs while there are some.
        self._tries = Every(RETRY_S, self._try)

    def accept(self, task_ids: Sequence[str]) -> None:
        """Tell Redis that these tasks, of one shard, are accepted: they may have outcomes."""
        shard = self._steps.keys.shard_of_task(task_ids[0])
        self._lately[shard].extend(task_ids)
        self._tell(shard, task_ids)

    def nodes_changed(self) -> None:
        """A server was lost, or one is there again."""
        up = {shard for shard in self._steps.keys.shards if self._steps.nodes.is_up(shard.slot)}
        for shard in up - self._up:
            if shard in self._lately:
                self._tell(shard, list(self._lately[shard]))
        self._up = up

    def _tell(self, shard: Shard, task_ids: Sequence[str]) -> None:
        self._steps.accept_tasks(shard, task_ids, partial(self._said, task_ids))

    def _said(self, task_ids: Sequence[str], found: int | RedisFailure) -> None:
        has_room = not self._is_closed and len(self._accepted) < DOUBTFUL_MAX  # beyond, UNSURE_S does it
        if isinstance(found, RedisFailure) and has_room:
            self._accepted.update(task_ids)
            self._tries.start()

    def remove(
        self,
        task_id: str,
        done: Callable[[bool | RedisFailure], None],
        cancelled: Callable[[EndedTask], None] = do_nothing,
        *,
        was_refused: bool = False,
        receipt: bytes = b"",
    ) -> None:
        """Remove a task; `done` says whether there was one, `cancelled` is called before if that had no result yet.

        Gateways where a client waits for it get a notice. `was_refused`: it was never accepted; `receipt`: see
        ended_tasks.py.
        """

        def told(removed: Removed | RedisFailure | None) -> None:
            if isinstance(removed, RedisFailure):
                done(removed)
                return
            if removed is not None:
                self._notices.tell(removed.gateways, task_id)
                if removed.ended is not None:
                    cancelled(removed.ended)
            done(removed is not None)

        self._steps.remove_task(task_id, told, was_refused=was_refused, receipt=receipt)

    def remove_if_there(self, task_id: str) -> None:
        """The gateway has refused the task, but Redis may have it: keep trying to remove it."""
        if len(self._doubtful) < DOUBTFUL_MAX:  # beyond, they count as accepted when their time for that is over
            self._doubtful[task_id] = ATTEMPTS
            self._tries.start()

    @property
    def doubtful(self) -> int:
        """Refused tasks that Redis may have."""
        return len(self._doubtful)

    def close(self) -> None:
        """Give up."""
        self._doubtful.clear()
        self._accepted.clear()
        self._is_closed = True
        self._tries.stop()

    def _try(self) -> None:
        for task_id in self._doubtful:
            if self._steps.nodes.is_up(self._steps.keys.shard_of_task(task_id).slot):
                self.remove(task_id, partial(self._tried, task_id), was_refused=True)
        accepted: defaultdict[Shard, list[str]] = defaultdict(list)
        for task_id in self._accepted:
            accepted[self._steps.keys.shard_of_task(task_id)].append(task_id)
        for shard, task_ids in accepted.items():
            if self._steps.nodes.is_up(shard.slot):
                self._accepted.difference_update(task_ids)
                self._tell(shard, task_ids)
        if not self._doubtful and not self._accepted:
            self._tries.stop()

    def _tried(self, task_id: str, found: bool | RedisFailure) -> None:
        if isinstance(found, RedisFailure) or task_id not in self._doubtful:
            return
        self._doubtful[task_id] -= 1
        if found or self._doubtful[task_id] == 0:
            del self._doubtful[task_id]


class Submission(msgspec.Struct, eq=False):
    """The ticket of a request on its way into Redis."""

    accepted: Accepted
    # The dead letter that becomes this task; empty for none.
    letter: bytes
    # Redis will answer.
    is_sent: bool = False


class Flush(msgspec.Struct, eq=False):
    """Tasks that one WAIT covers."""

    queued: list[Request]
    is_over: bool = False


class TaskIntake:
    """Brings tasks into Redis."""

    def __init__(
        self,
        steps: RedisOps,
        removals: TaskRemovals,
        *,
        held_max: int,
        input_bytes_max: int,
        stored_bytes_max: int,
        lanes_max: int,
        line_offsets_ms: Mapping[bytes, int],
        result_ttl_ms: int = 600_000,
        shards_used: int = SHARDS_MAX,
        replicas: int = 0,
        replicas_timeout_ms: int = 200,
        durable_nodes: Nodes | None = None,
        is_memory_full: Callable[[], bool] = no,
        are_webhooks_full: Callable[[], bool] = no,
        # Called with the code of each outcome that a task gets here.
        count: Callable[[str], None] = do_nothing,
        events: Events | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if replicas and durable_nodes is None:
            raise ValueError("WAIT needs connections of its own: `durable_nodes`")
        self._steps = steps
        self._nodes = steps.nodes
        self._keys = steps.keys
        self._removals = removals
        # In each shard.
        self._held_max = held_max
        self._bytes_max = (input_bytes_max, stored_bytes_max)
        # The first so many shards take tasks, while they are in reach.
        self._shards_used = shards_used
        self._lanes_max = lanes_max
        self._offsets_ms = line_offsets_ms
        self._result_ttl_ms = result_ttl_ms
        self._replicas = replicas
        self._replicas_timeout_ms = replicas_timeout_ms
        self._unsure_ms = replicas_timeout_ms + round(UNSURE_S * 1000)
        self._durable_nodes = durable_nodes if replicas else None
        self._task_nodes = self._durable_nodes or steps.nodes
        self._is_memory_full = is_memory_full
        self._are_webhooks_full = are_webhooks_full
        self._count = count
        self._events = events or Events()
        self._clock = clock
        self._collected: list[Request] = []
        self._collected_bytes = 0
        self._flush = OncePerTurn(self._send_collected)
        self._is_confirming = False

    def submit(self, request: Request, accepted: Accepted, letter_id: int | None = None) -> None:
        """Accept a task: `accepted(None)` once it is safe, or `accepted(error)`. With `letter_id`, in place of that
        dead letter, whose shard the request's id must name.
        """
        letter = b"" if letter_id is None else b"%d" % letter_id
        request.ticket = Submission(accepted, letter)
        if self._is_memory_full():
            self._refuse(request, REFUSALS["OOM"]())
        elif request.callback_url and self._are_webhooks_full():
            self._refuse(request, webhooks_full())
        elif letter:
            self._send(self._keys.shard_of_task(request.id), [request], None)
        elif len(self._collected) >= COLLECTED_MAX or self._collected_bytes + request.size > COLLECTED_BYTES_MAX:
            self._refuse(request, REFUSALS["QUEUEFULL"]())
        else:
            self._collected.append(request)
            self._collected_bytes += request.size
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_confirming:
            self._flush.notify()

    def _send_collected(self) -> None:
        requests: list[Request] = []
        size = 0
        for request in self._collected[:TASKS_A_FLUSH_MAX]:
            if requests and size + request.size > FLUSH_BYTES_MAX:
                break
            requests.append(request)
            size += request.size
        del self._collected[: len(requests)]
        self._collected_bytes -= size
        shard = self._shard_for(requests[0])
        if shard is None:
            for request in requests:
                self._refuse(request, out_of_reach())
        else:
            self._send_all(shard, requests)
        if self._collected:
            self._flush_soon()

    def _shard_for(self, request: Request) -> Shard | None:
        """The shard that its id names, or another one if that is not used for tasks, or out of reach."""
        shard = self._keys.shard_of_task(request.id)
        if shard.number < self._shards_used and self._task_nodes.is_up(shard.slot):
            return shard
        up = [shard for shard in self._keys.shards if self._task_nodes.is_up(shard.slot)]
        used = [shard for shard in up if shard.number < self._shards_used]
        return random.choice(used or up) if up else None

    def _send_all(self, shard: Shard, requests: list[Request]) -> None:
        lines: defaultdict[tuple[object, ...], list[Request]] = defaultdict(list)
        for request in requests:
            if self._keys.shard_of_task(request.id) is not shard:
                request.id = f"{request.id[:-1]}{shard.number:x}"
            if request.result is None:
                lines[request.model, request.parameters, request.lane, request.tier].append(request)
        flush = Flush([]) if self._replicas else None
        for line in lines.values():
            try:
                self._send(shard, line, flush)
            except Exception:  # a client waits for a 202
                logger.exception("tasks could not be queued")
                for request in line:
                    if not request.ticket.is_sent:  # those that are on their way have an answer of their own
                        self._refuse(request, InternalError("the task could not be queued"))
        for request in requests:
            if request.result is not None:
                self._send_answered(shard, request, flush)
        if flush is not None:
            self._is_confirming = True
            confirmed = partial(self._confirmed, flush)
            self._steps.confirm(self._task_nodes, shard, self._replicas, self._replicas_timeout_ms, confirmed)

    def _send(self, shard: Shard, requests: list[Request], flush: Flush | None) -> None:
        """Queue tasks of one lane and line."""
        first = requests[0]
        stream = stream_of(first, self._offsets_ms)
        now = self._clock()
        values = [record + content for record, content in values_of(requests, now, self._steps.time_ms(shard))]
        for part, part_values in parts_of(requests, values):
            self._steps.submit(
                shard,
                stream,
                header_of(first, NOBODY),
                part[0].owner,
                part_values,
                partial(self._queued, part, flush),
                held_max=self._held_max,
                lanes_max=self._lanes_max,
                tasks=[
                    (request.id, request.owner, request.client_id, own_ms(request, now), request.callback_url)
                    for request in part
                ],
                task_bounds=(
                    *self._bytes_max,
                    round(1000 * max(request.deadline - now for request in part)),
                    0 if first.ticket.letter else self._unsure_ms,
                ),
                letter=first.ticket.letter,
                eval_on=None if flush is None else self._durable_nodes,
            )
            for request in part:
                request.ticket.is_sent = True

    def _send_answered(self, shard: Shard, request: Request, flush: Flush | None) -> None:
        """Bring in a task with the result that was kept for others like it."""
        request.ticket.is_sent = True
        self._steps.submit_answered(
            shard,
            (request.id, request.owner, request.client_id, request.callback_url),
            bytes(request.result.value),
            partial(self._queued, [request], flush),
            kept_ms=self._result_ttl_ms,
            stored_bytes_max=self._bytes_max[1],
            unsure_ms=self._unsure_ms,
            eval_on=None if flush is None else self._durable_nodes,
        )

    def _queued(self, requests: list[Request], flush: Flush | None, queued: Queued | RedisFailure) -> None:
        """Redis has answered a submission."""
        if isinstance(queued, RedisFailure):
            for request in requests:
                if isinstance(queued, Lost | Unreadable) and not request.ticket.letter:
                    self._removals.remove_if_there(request.id)
                self._refuse(request, error_of(queued))
            return
        number = len(queued.entry_ids)
        for request in requests[number:]:
            self._refuse(request, REFUSALS["QUEUEFULL"]())
        if flush is None:
            self._accept(requests[:number])
        elif flush.is_over:  # sent again to another node, behind the WAIT
            self._take_back(requests[:number])
        else:
            flush.queued += requests[:number]

    def _confirmed(self, flush: Flush, are_enough: bool | RedisFailure) -> None:
        """Redis says whether enough replicas have what was sent before."""
        flush.is_over = True
        self._is_confirming = False
        if are_enough is True:
            self._accept(flush.queued)
        else:
            self._take_back(flush.queued)
        if self._collected:
            self._flush_soon()

    def _accept(self, requests: Sequence[Request]) -> None:
        if requests and not requests[0].ticket.letter:
            self._removals.accept([request.id for request in requests])
        for request in requests:
            submission: Submission = request.ticket
            request.phase = QUEUED
            if self._events.subscribers:
                self._events.admitted(request)
            request.input, request.prepared, request.ticket = b"", None, None  # Redis has it
            if request.result is not None:
                self._answered(request)
            submission.accepted(None)

    def _answered(self, request: Request) -> None:
        """It came in with its result: that is its outcome."""
        output, request.result = request.result, None
        request.settle(output, self._clock())
        self._count(request.result_code)
        if self._events.subscribers:
            self._events.settled(request, output)

    def _take_back(self, requests: Sequence[Request]) -> None:
        """Remove tasks that too few replicas have; tell their submitters when that is done."""
        for request in requests:
            self._removals.remove(request.id, partial(self._taken_back, request), was_refused=True)

    def _taken_back(self, request: Request, found: bool | RedisFailure) -> None:
        if isinstance(found, RedisFailure):
            self._removals.remove_if_there(request.id)
        self._refuse(request, BrokerDown("not enough replicas confirmed the task; try again", retry_after_s=1))

    def _refuse(self, request: Request, error: CarpoolError) -> None:
        submission: Submission = request.ticket
        request.settle(error, self._clock())
        submission.accepted(error)


def own_ms(request: Request, now: float) -> int | str:
    """Milliseconds until its own deadline; "" if it has none."""
    return max(0, int((request.deadline - now) * 1000)) if request.own_timeout_s else ""
