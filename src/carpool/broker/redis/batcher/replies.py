"""The batcher's side of outcomes: each one back to the gateway, or the task, that it belongs to. Nothing is lost.

1. The outcomes of one turn of the event loop leave together: one entry in the reply stream of each gateway.
2. An entry of the queue is acknowledged, and deleted, only after Redis has said that its reply is written. So a batcher
   that dies in between causes work to be done twice, never an outcome to be lost.
3. A gateway that is gone has no stream any more: no client waits, and the entry is acknowledged.
4. What Redis does not take (it is away, or its memory is full) is tried again until no client can wait for it.
5. A task's result, its dead letter and the acknowledgement of its entry are one step. The batcher whose result Redis
   kept counts the task, once; where that reply was lost it asks again, under the same name.
6. A task that its gateway has not accepted yet has no outcome: the batcher keeps it and comes again. If the gateway
   withdraws the task, nothing is written and nothing is counted.
"""

import asyncio
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from carpool.broker.redis.batcher.leases import EntryLease, History, by_stream, carried_by_stream, parts_of
from carpool.broker.redis.client.link import RedisFailure, Refused
from carpool.broker.redis.dead_letters import LetterBounds
from carpool.broker.redis.formats import FAILED, SUCCESS, Reply, encode_reply, letter_of
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.notices import Notices
from carpool.broker.redis.redis_ops import EndedTask, Finished, RedisOps, TaskResult
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing
from carpool.core.errors import CarpoolError, ClientLeft, Draining, GivenBack, InternalError
from carpool.core.events import Events
from carpool.core.histograms import SECONDS_BOUNDS, Histogram
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.problem import problem_json
from carpool.core.request import Request, ended_elsewhere, facts_of_failure
from carpool.core.timers import OncePerTurn

logger = logging.getLogger("carpool.broker")

RETRY_S, RETRY_S_MAX = 0.1, 2.0
# A task that is not accepted yet is mostly accepted a moment later.
UNSURE_S = 0.005
# With so many outcomes that Redis has not taken, no more work is begun.
UNCONFIRMED_MAX = 10_000
# A reply is one value in Redis and is read in one piece; a longer one is cut.
REPLY_BYTES_MAX = 4 * 1024 * 1024


class Outbox:
    """Outcomes that leave for one gateway at the end of this turn."""

    def __init__(self) -> None:
        self.calls: list[CallFacts] = []
        self.outputs: list[tuple[int, int, float, Any, int | None]] = []
        self.errors: list[tuple[int, str, str, int | None]] = []
        self.error_calls: list[tuple[int, float]] = []
        self.leases: list[EntryLease] = []
        # When no client waits any more for any of them.
        self.useless_at = 0.0
        self.size = 0


class ReplyWriter:
    """The waiter of every request that came out of Redis (core.request.Waiter)."""

    def __init__(
        self,
        steps: RedisOps,
        consumer: bytes,
        clock: Clock = monotonic,
        *,
        result_ttl_ms: int,
        letter_bounds: LetterBounds,
        # Counts each task that became a dead letter, by its cause.
        buried: Callable[[str], None] = do_nothing,
        # Keeps the output of a task for requests that are the same.
        keep_result: Callable[[bytes, Output], object] = do_nothing,
        # Where tasks are counted whose result was written here. The gateways count their own requests.
        outcomes: Counter[str] | None = None,
        waited: Histogram | None = None,
        events: Events | None = None,
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        self._keys = steps.keys
        self._consumer = consumer
        # Unique names for the results of tasks: short, for tasks keep them.
        self._finishers = (b"%b%x" % (name, number) for name in (secrets.token_hex(4).encode(),) for number in count())
        self.result_ttl_ms = result_ttl_ms
        self._letter_bounds = letter_bounds
        self._buried = buried
        self._notices = Notices(steps)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[bytes, Outbox] = {}
        # By number of the shard: entries to forget, entries to give to others.
        self._finished: defaultdict[int, list[EntryLease]] = defaultdict(list)
        self._released: defaultdict[int, list[EntryLease]] = defaultdict(list)
        self.flush = OncePerTurn(self._flush)
        # What is to be done when the node of a slot is back.
        self._for_later: list[tuple[int, Callable[[], None]]] = []
        # Outcomes that Redis has not confirmed yet.
        self.unconfirmed = 0
        self.retries = 0
        self._keep_result = keep_result
        self._outcomes: Counter[str] = Counter() if outcomes is None else outcomes
        self._waited = Histogram(SECONDS_BOUNDS) if waited is None else waited
        self._events = events or Events()

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Send an outcome on its way."""
        lease: EntryLease = request.ticket
        if isinstance(outcome, Draining):  # another batcher has it
            history = lease.history
            if isinstance(outcome, GivenBack):
                failed = request.sends > history.failures
                history = history.given_back(failed=failed, was_probe=lease.is_probe, is_alone=outcome.is_alone)
            self.release(lease, history)
            return
        if isinstance(outcome, ClientLeft):
            self.forget(lease)
            return
        self.unconfirmed += 1
        if lease.header.is_task:
            self._finish_task(request, lease, outcome)
            return
        outbox = self._outboxes.get(lease.header.gateway)
        if outbox is None or outbox.size > REPLY_BYTES_MAX:
            outbox = self._new_outbox(lease.header.gateway)
        outbox.leases.append(lease)
        outbox.useless_at = max(outbox.useless_at, request.deadline)
        if isinstance(outcome, CarpoolError):
            outbox.errors.append((request.number, outcome.code, outcome.detail, outcome.retry_after_s))
            facts = facts_of_failure(request)
            if facts is not None:
                outbox.calls.append(facts)
            number = -1 if facts is None else len(outbox.calls) - 1
            outbox.error_calls.append((number, request.taken - request.arrived if request.taken else 0.0))
            return
        if not outbox.calls or outbox.calls[-1] is not outcome.call:
            outbox.calls.append(outcome.call)
        # A slice of the upstream's answer, which msgspec would take for a value of its own if it were a Raw.
        value = memoryview(outcome.value)
        outbox.size += len(value)
        waited_s = request.taken - request.arrived
        outbox.outputs.append((request.number, len(outbox.calls) - 1, waited_s, value, outcome.tokens_used))

    def release(self, lease: EntryLease, history: History | None = None) -> None:
        """Let another batcher have an entry, with what is known of it."""
        lease.leased.open.pop(lease.entry_id, None)
        if history is not None:
            lease.history = history
        self._released[lease.leased.shard.number].append(lease)
        self.flush.notify()

    def forget(self, lease: EntryLease) -> None:
        """An entry needs no outcome."""
        self.unconfirmed += 1
        self._finished[lease.leased.shard.number].append(lease)
        self.flush.notify()

    async def finish(self, timeout_s: float) -> bool:
        """Wait until Redis has confirmed everything; false if that did not come in time."""
        give_up_at = self._loop.time() + timeout_s
        while (self.unconfirmed or self._released) and self._loop.time() < give_up_at:  # noqa: ASYNC110 - once, at the start or the end of a process
            await asyncio.sleep(0.005)
        return not self.unconfirmed

    def _new_outbox(self, gateway: bytes) -> Outbox:
        full = self._outboxes.pop(gateway, None)
        if full is not None:
            self._send(gateway, full)
        outbox = self._outboxes[gateway] = Outbox()
        self.flush.notify()
        return outbox

    def _flush(self) -> None:
        outboxes, self._outboxes = self._outboxes, {}
        for gateway, outbox in outboxes.items():
            self._send(gateway, outbox)
        finished, self._finished = self._finished, defaultdict(list)
        for number, leases in finished.items():
            for part in parts_of(leases):
                self._acknowledge(self._keys.shards[number], part)
        released, self._released = self._released, defaultdict(list)
        for number, leases in released.items():
            for part in parts_of(leases):
                self._steps.release(self._keys.shards[number], self._consumer, carried_by_stream(part))

    # Replies.

    def _send(self, gateway: bytes, outbox: Outbox) -> None:
        try:
            reply = encode_reply(
                Reply(
                    calls=outbox.calls,
                    outputs=outbox.outputs,
                    errors=outbox.errors,
                    error_calls=outbox.error_calls,
                )
            )
        except Exception:  # a value that cannot be written must not cost others their outcomes
            logger.exception("outcomes could not be written")
            numbers = [output[0] for output in outbox.outputs] + [error[0] for error in outbox.errors]
            sorry = InternalError.code, "the outcome could not be written", None
            reply = encode_reply(Reply(errors=[(number, *sorry) for number in numbers]))
        outbox.outputs.clear()  # they are in the reply now, and may be large
        self._write(gateway, reply, outbox.leases, outbox.useless_at)

    def _write(self, gateway: bytes, reply: bytes, leases: list[EntryLease], useless_at: float) -> None:
        self._steps.reply(gateway, reply, partial(self._written, gateway, reply, leases, useless_at))

    def _written(self, gateway: bytes, reply: bytes, leases: list[EntryLease], useless_at: float, answer: Any) -> None:
        if isinstance(answer, Refused) and answer.code == "OOM":
            written = partial(self._written, gateway, reply, leases, useless_at)
            self._steps.reply(gateway, reply, written, by_script=True)
            return
        if isinstance(answer, RedisFailure) and self._clock() < useless_at:
            self.retries += 1
            self._loop.call_later(RETRY_S, self._write, gateway, reply, leases, useless_at)
            return
        for lease in leases:
            self._finished[lease.leased.shard.number].append(lease)
        self.flush.notify()

    def _acknowledge(self, shard: Shard, leases: list[EntryLease]) -> None:
        self._steps.forget_entries(shard, by_stream(leases), partial(self._acknowledged, shard, leases))

    def _acknowledged(self, shard: Shard, leases: list[EntryLease], answer: int | RedisFailure) -> None:
        if isinstance(answer, RedisFailure):
            self.retries += 1
            self._loop.call_later(RETRY_S, self._acknowledge, shard, leases)
            return
        self.unconfirmed -= len(leases)
        for lease in leases:
            self._closed(lease)

    def _closed(self, lease: EntryLease) -> None:
        """An entry is done with."""
        lease.leased.open.pop(lease.entry_id, None)
        if not lease.leased.open:
            lease.leased.are_done_with(lease.leased)

    # Tasks.

    def _finish_task(self, request: Request, lease: EntryLease, outcome: Outcome) -> None:
        if isinstance(outcome, CarpoolError):
            status, value, letter = FAILED, problem_json(outcome, request.id), letter_of(request, outcome)
        else:
            status, value, letter = SUCCESS, bytes(outcome.value), b""
            if request.result_key is not None:
                self._keep_result(request.result_key, outcome)
        waited_s = request.taken - request.arrived if request.taken else None
        # The answer to its whole batch is kept until Redis has the result only if there are subscribers.
        told = (request, outcome) if self._events.subscribers else None
        counts = partial(self._count_task, request.result_code, bool(letter), waited_s, told)
        age_ms = max(0, round(1000 * (request.ended - request.arrived)))
        result = TaskResult(request.id, status, value, letter, next(self._finishers), age_ms)
        self._write_result(lease, result, counts)

    def ended(self, task: EndedTask, error: CarpoolError) -> None:
        """A task got its outcome in Redis."""
        self._outcomes[error.code] += 1  # bounded: codes come from the error tree
        if self._events.subscribers:
            now = self._clock()
            request = ended_elsewhere(task.id, task.owner, task.tier, task.model, now - task.age_ms / 1000, now, error)
            self._events.settled(request, error)

    def _count_task(
        self, code: str, is_buried: bool, waited_s: float | None, told: tuple[Request, Outcome] | None
    ) -> None:
        self._outcomes[code] += 1
        if is_buried:
            self._buried(code)
        if waited_s is not None:
            self._waited.observe(waited_s)
        if told is not None:
            self._events.settled(*told)

    def _write_result(
        self, lease: EntryLease, result: TaskResult, counts: Callable[[], None], pause_s: float = 0.0
    ) -> None:
        """Give a task its result, if it has none; `counts` is called if Redis keeps this one."""
        shard, bounds = lease.leased.shard, self._letter_bounds

        def done(found: Finished | RedisFailure | None) -> None:
            if found is None or isinstance(found, RedisFailure):
                # For ever: the outcome of a task is owed; if this process dies, another batcher does it again.
                self.retries += 1
                again = partial(self._write_result, lease, result, counts)
                if self._nodes.is_up(shard.slot):  # it refuses, or the task is not accepted yet
                    pause = max(pause_s, UNSURE_S if found is None else RETRY_S)
                    self._loop.call_later(pause, again, min(2 * pause, RETRY_S_MAX))
                else:
                    self._when_up(shard.slot, again)
                return
            bounds.note_dropped(found.letters_dropped)
            if found.was_first:
                counts()
            self._notices.tell(found.gateways, result.task_id)
            self.unconfirmed -= 1
            self._closed(lease)

        place = (shard, lease.leased.field, lease.entry_id)
        self._steps.finish_task(*place, result, done, kept_ms=self.result_ttl_ms, letter_bounds=bounds.arguments())

    def _when_up(self, slot: int, again: Callable[[], None]) -> None:
        """Do it as soon as the node of this slot is back, which may be for a moment only."""
        if not self._for_later:
            self._loop.call_later(RETRY_S, self._look_who_is_up)
        self._for_later.append((slot, again))

    def _look_who_is_up(self) -> None:
        for_later, self._for_later = self._for_later, []
        for slot, again in for_later:
            if self._nodes.is_up(slot):
                again()
            else:
                self._when_up(slot, again)
