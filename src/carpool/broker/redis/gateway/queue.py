"""The gateway's side of the queue: requests wait here for their outcome, and in Redis for a batcher.

1. The requests of one turn of the event loop are queued together, whatever their lanes and tiers, in the next shard of
   a rotation: plain commands add them, and one script behind these tells of all.
2. A request is known by its number. Its first outcome counts; what comes later is dropped.
3. When a shard's node is lost, its requests are queued again elsewhere. When Redis is gone, a gateway with upstreams of
   its own hands them to its local broker (direct mode); one without answers 503. Work may be done twice then; outcomes
   are given once. When Redis comes back, entries that were handed on are withdrawn, if no batcher took them. When it
   has lost what it had, this gateway's stream of replies too, all that waits here is queued again.
4. What exceeds its owner's share of what is parked here waits in a second line of its tier (broker/queue_stats.py).
5. When a client leaves, the gateway has its entry deleted, and a batcher that took it hears of that. When a request
   waited too long for a slot, the gateway has its entry deleted if no batcher took it yet.
6. This gateway's own clock decides when the time of a request is over. Batchers count on Redis's clock: if that is set,
   they may take a request for late that is not. Then it is queued again.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from carpool.broker.memory import MemoryBroker
from carpool.broker.pending import PendingRequests
from carpool.broker.redis.client.link import NoRoom, RedisFailure, Refused
from carpool.broker.redis.formats import Reply, make_error
from carpool.broker.redis.gateway.entries import ENTRIES_A_CALL_MAX, header_of, parts_of, stream_of, values_of
from carpool.broker.redis.gateway.refusals import REFUSALS, error_of, out_of_reach
from carpool.broker.redis.gateway.replies import ReplyReader
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import Queued, RedisOps
from carpool.broker.redis.types import LEFT, NOT_HELD, NOT_TAKEN, QueueStream
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing, no
from carpool.core.errors import (
    BrokerDown,
    BrokerMemoryFull,
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    InternalError,
    QueueTimeout,
    queue_time_passed,
)
from carpool.core.events import Events
from carpool.core.histograms import Histogram, RequestSeconds
from carpool.core.kept import Kept
from carpool.core.outcome import Outcome
from carpool.core.ports import QueueStats
from carpool.core.request import DONE, QUEUED, Request
from carpool.core.snapshot import Mode
from carpool.core.timers import Every, OncePerTurn

logger = logging.getLogger("carpool.broker")

# Model, parameters, lane, tier, time in the queue, whether it is a task, over its owner's share, late.
LaneAndLine = tuple[str, bytes, bytes, int, float, bool, bool, bool]
CANCELS_A_CALL_MAX = 500
# A script holds up Redis's other clients: none sees to more streams than this.
STREAMS_A_CALL_MAX = 32
# What a gateway remembers about lanes, and about entries that it must withdraw when Redis is back.
GROUPS_KEPT_MAX = 4096
TO_WITHDRAW_MAX = 100_000
# After so long a node that is up, but did not delete entries, is asked again.
TRY_AGAIN_S = 0.25
MOVING = ("MOVED", "ASK")
# The codes of requests that batchers take for late. A request with so much time left is not: a clock was set, or this
# process stood still.
LATE_CODES = (DeadlineExceeded.code, QueueTimeout.code)
NOT_LATE_S = 0.1


class EnqueueBatch(msgspec.Struct, eq=False):
    """Requests of one lane and line that are queued together, by one call."""

    stream: QueueStream
    header: bytes
    requests: list[Request]
    # Where they are queued, once they leave; of each its entry's id, or what came in place of it, once Redis answered.
    shard: Shard | None = None
    entry_ids: list[Any] = []
    # Some entries have to be withdrawn as soon as the ids are known.
    has_left: bool = False

    def withdrawal(self, entry_id: bytes, *of_parked: Any) -> "Withdrawal":
        """One of its entries is to be deleted."""
        assert self.shard is not None
        return Withdrawal(self.shard, self.stream.field, entry_id, *of_parked)


class Withdrawal(NamedTuple):
    """An entry that is to be deleted."""

    shard: Shard
    field: bytes
    entry_id: bytes
    # Of a request that is still parked: the error that it gets if no batcher has its entry.
    request: Request | None = None
    error: CarpoolError | None = None

    @property
    def which(self) -> int:
        """In which case it is deleted."""
        if self.request is None:
            return LEFT
        # A request whose time in the queue is over still waits if a batcher took it, also if that gave it back.
        return NOT_TAKEN if isinstance(self.error, QueueTimeout) else NOT_HELD


class RedisQueue:
    """Keeps the requests of one gateway until they have an outcome (core.ports.RequestQueue)."""

    def __init__(
        self,
        steps: RedisOps,
        name: bytes,
        *,
        waiting_max: int,
        bytes_max: int,
        lanes_max: int,
        # What each line (`line_name`) adds to an entry's time for its place in the order, in ms.
        line_offsets_ms: Mapping[bytes, int],
        models: Iterable[str],
        local: MemoryBroker | None = None,
        is_memory_full: Callable[[], bool] = no,
        task_finished: Callable[[str], None] = do_nothing,
        looked_for: Callable[[Reply], None] = do_nothing,
        mode_changed: Callable[[Mode], None] = do_nothing,
        # Sees one request of each handful that got an output.
        sampled: Callable[[Request], None] | None = None,
        seconds: RequestSeconds | None = None,
        events: Events | None = None,
        clock: Clock = monotonic,
    ) -> None:
        nodes, keys = steps.nodes, steps.keys
        self._steps = steps
        self._nodes = nodes
        self._keys = keys
        self._offsets_ms = line_offsets_ms
        self._name = name
        # Requests are spread evenly over the shards, and so is the bound on what may wait there.
        self._shard_max = -(-waiting_max // len(keys.shards))
        self._lanes_max = lanes_max
        self._local = local
        self._is_memory_full = is_memory_full
        self._task_finished = task_finished
        # Operators look for a request at some gateway.
        self._looked_for = looked_for
        self._mode_changed = mode_changed
        self._clock = clock
        self.mode: Mode = "direct" if local is not None else "down"
        self.pending = PendingRequests(
            waiting_max=waiting_max,
            bytes_max=bytes_max,
            models=models,
            outcomes=None if local is None else local.outcomes,
            waited=None if local is None else local.waited,
            seconds=seconds,
            events=events,
            sampled=sampled,
            clock=clock,
        )
        # By all that is the same for them: the stream and the header of requests; those that leave in this turn.
        self._known: Kept[LaneAndLine, tuple[QueueStream, bytes]] = Kept(GROUPS_KEPT_MAX)
        self._leaving: dict[LaneAndLine, EnqueueBatch] = {}
        # Entries to delete, in this turn, and when their shards are back.
        self._cancelled: list[Withdrawal] = []
        self._to_withdraw: list[Withdrawal] = []
        # Runs while a node that is up has not deleted some.
        self._tries = Every(TRY_AGAIN_S, self._withdraw_left)
        self.flush = OncePerTurn(self._flush)
        self._next_shard = 0
        self._up: list[Shard] = []
        # Entries in each shard, and lanes that count against the bound, as Redis last said; full until it has.
        self._held_in = [self._shard_max] * len(keys.shards)
        self._lanes_in = [0] * len(keys.shards)
        # For metrics.
        self.sent_again = 0
        # Outcomes or entries are lost, and Redis was not in reach to queue all again.
        self._is_emptied = False
        self.replies = ReplyReader(
            nodes, keys, name, came=self.reply_came, changed=self.nodes_changed, emptied=self.redis_emptied
        )

    @property
    def outcomes(self) -> Counter[str]:
        """What became of requests, by code."""
        return self.pending.outcomes

    @property
    def waited(self) -> Histogram:
        """How long requests waited for a slot."""
        return self.pending.waited

    @property
    def to_withdraw(self) -> int:
        """Entries of requests that went another way, in shards that cannot be reached now."""
        return len(self._to_withdraw)

    def __repr__(self) -> str:
        return f"<RedisQueue {self.mode} {self.pending!r}>"

    # What the face and admission call.

    def submit(self, request: Request) -> CarpoolError | None:
        """Queue the request, or say why not."""
        if self.mode != "redis":
            if self._local is None:
                return out_of_reach()
            refusal = self._local.submit(request)
            self.pending.arrivals[request.model] += refusal is None
            return refusal
        if self._is_memory_full():
            return memory_full()
        refusal = self.pending.park(request)
        if refusal is None:
            self._queue(request)
        return refusal

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why not all requests of one call can be queued, as far as this gateway knows."""
        if self.mode != "redis":
            return out_of_reach() if self._local is None else self._local.refusal_of_all(requests)
        return memory_full() if self._is_memory_full() else self.pending.refusal_of_all(requests)

    def queue_stats(self, model: str, tier: int) -> QueueStats:
        """Synchronous requests of a model and a tier parked here, by owner."""
        return self.pending.queue_stats(model, tier)

    def cancel(self, request: Request) -> None:
        """The client left: never send it if it has not been sent yet, discard its result otherwise."""
        self.settle(request, ClientLeft("the client left"))

    def settle(self, request: Request, outcome: Outcome) -> bool:
        """Give a request an outcome that did not come from Redis; false if it has one already."""
        if request.phase == DONE:
            return False
        if request not in self.pending:
            return self._local is not None and self._local.settle(request, outcome)
        self._withdraw(request)
        self.pending.end(request, outcome)
        return True

    def expire(self, now: float) -> None:
        """Look at the requests whose time is over."""
        for request in self.pending.due(now):
            if request.deadline <= now:
                self.settle(request, DeadlineExceeded("no result in time; the request was given up"))
            else:
                self.pending.await_end(request)
                self._withdraw(request, queue_time_passed(request.queue_timeout_s))

    def fail_waiting(self, model: str, since: float, error: CarpoolError) -> None:
        """No batcher can serve a model: fail its synchronous requests that came before and that no batcher has.

        Without this, requests that batchers gave back would wait until they are late.
        """
        for request in self.pending.requests():
            is_theirs = request.model == model and not request.is_task and request.arrived < since
            # Of others it is not known whether a batcher has them: they are looked at again soon.
            if is_theirs and (place := self.place_of(request)) is not None and place[0] in self._up:
                self._withdraw(request, error)

    # Modes.

    def nodes_changed(self) -> None:
        """A node, or the stream of replies, was lost or is back."""
        up = [shard for shard in self._keys.shards if self._nodes.is_up(shard.slot)]
        came_back = [shard for shard in up if shard not in self._up]
        is_lost = len(came_back) + len(self._up) > len(up)
        self._up = up
        if up and self.replies.is_up:
            mode: Mode = "redis"
        else:
            mode = "direct" if self._local is not None else "down"
        is_other = mode != self.mode
        if is_other:
            logger.log(logging.INFO if mode == "redis" else logging.WARNING, "the broker's mode is now %s", mode)
            self.mode = mode
        if is_lost or mode != "redis":
            parked = self.pending.requests()
            self._send_again(r for r in parked if r.held_by is not None and r.held_by.shard not in up)
        if mode == "direct":
            self._send_again(self.pending.requests())
        if self._to_withdraw and up:
            self._withdraw_left()
        if self._is_emptied:
            self.redis_emptied()
        if is_other:
            self._mode_changed(mode)

    def redis_emptied(self) -> None:
        """Outcomes may be lost, and entries too: queue again all that waits here. What a batcher has is withdrawn."""
        self._is_emptied = self.mode != "redis"
        if not self._is_emptied:
            self._send_again(request for request in self.pending.requests() if request.held_by is not None)
            self._withdraw_left()

    def close(self) -> None:
        """Give up what is still parked; its clients have been answered, or are gone."""
        self._tries.stop()
        self.replies.close()

    # Outcomes.

    def reply_came(self, reply: Reply) -> None:
        """Outcomes from a batcher."""
        if reply.outputs:
            self.pending.settle_all(reply.outputs, reply.calls)
        for index, (number, code, detail, retry_after_s) in enumerate(reply.errors):
            # A batcher of an older version tells nothing of their calls.
            call, queue_s = reply.error_calls[index] if index < len(reply.error_calls) else (-1, 0.0)
            facts = reply.calls[call] if 0 <= call < len(reply.calls) else None
            if facts is not None or code not in LATE_CODES or not self._is_queued_again(number, code):
                self.pending.fail(number, make_error(code, detail, retry_after_s), facts, queue_s)
        for task_id in reply.finished:
            self._task_finished(task_id)
        if reply.wanted or reply.found:
            self._looked_for(reply)

    def _is_queued_again(self, number: int, code: str) -> bool:
        """A batcher took a request for late, and never sent it: queue it again if there is time left."""
        request = self.pending.find(number)
        if request is None or self.mode != "redis" or not self._up:
            return False
        is_for_slot = code == QueueTimeout.code
        over_at = request.arrived + request.queue_timeout_s if is_for_slot else request.deadline
        if over_at - self._clock() < NOT_LATE_S:
            return False
        if isinstance(request.held_by, EnqueueBatch) and request.held_by.shard is not None:
            self._nodes.ask_time(request.held_by.shard.slot)
        self.sent_again += 1
        self._queue(request)
        return True

    def place_of(self, request: Request) -> tuple[Shard, bytes, bytes] | None:
        """Shard, field and id of a parked request's entry, if Redis has told it."""
        entry_id = entry_of(request) if request in self.pending else None
        return None if entry_id is None else (request.held_by.shard, request.held_by.stream.field, entry_id)

    # Into Redis.

    def _queue(self, request: Request) -> None:
        """Let a parked request leave at the end of this turn."""
        request.phase = QUEUED
        request.held_by = None
        queue_timeout_s = request.queue_timeout_s
        key = (
            request.model,
            request.parameters,
            request.lane,
            request.tier,
            queue_timeout_s,
            request.is_task,
            request.is_over,
            request.is_late,
        )
        batch = self._leaving.get(key)
        if batch is None:
            known = self._known.get(key)
            if known is None:
                known = (stream_of(request, self._offsets_ms), header_of(request, self._name))
                self._known.keep(key, known, 2 * len(known[1]))
            batch = self._leaving[key] = EnqueueBatch(*known, [])
            self.flush.notify()
        batch.requests.append(request)

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for batches in by_shard(self._parts_of(leaving.values())):
            try:
                self._send(batches)
            except Exception:  # a defect must not cost others of this turn their place
                logger.exception("requests could not be queued")
                for request in self.pending.still_here(request for batch in batches for request in batch.requests):
                    self.settle(request, InternalError("the request could not be queued"))
        cancelled: defaultdict[Shard, list[Withdrawal]] = defaultdict(list)
        for entry in self._cancelled:
            cancelled[entry.shard].append(entry)
        self._cancelled = []
        for shard, entries in cancelled.items():
            for start in range(0, len(entries), CANCELS_A_CALL_MAX):
                part = entries[start : start + CANCELS_A_CALL_MAX]
                ids = [(each.field, each.entry_id, each.which) for each in part]
                self._steps.cancel(shard, ids, partial(self._deleted, shard, part))

    def _parts_of(self, batches: Iterable[EnqueueBatch]) -> Iterable[EnqueueBatch]:
        """What one call may carry; without those whose clients have left, or that were handed on, since."""
        for batch in batches:
            if requests := self.pending.still_here(batch.requests):
                for part, _ in parts_of(requests, [request.input for request in requests]):
                    yield EnqueueBatch(batch.stream, batch.header, part)

    def _send(self, batches: list[EnqueueBatch]) -> None:
        """Queue all of these requests in one shard."""
        if not self._up:
            for batch in batches:
                self._send_again(batch.requests)
            return
        self._next_shard += 1
        shard = self._up[self._next_shard % len(self._up)]
        now, now_ms = self._clock(), self._steps.time_ms(shard)
        entries = sum(len(batch.requests) for batch in batches)
        lanes = sum(batch.stream.is_bound for batch in batches)
        is_near_bound = self._held_in[shard.number] + 2 * entries > self._shard_max
        is_lanes_bound_near = 2 * self._lanes_in[shard.number] + lanes > self._lanes_max
        plain: list[EnqueueBatch] = []
        additions: list[Any] = []
        for batch in batches:
            batch.shard = shard
            for request in batch.requests:
                request.held_by = batch
            owner, values = batch.requests[0].owner, values_of(batch.requests, now, now_ms)
            if is_near_bound or (batch.stream.is_bound and is_lanes_bound_near):
                whole = [record + content for record, content in values]
                about = (shard, batch.stream, batch.header, owner, whole, partial(self._submitted, shard, batch))
                self._steps.submit(*about, held_max=self._shard_max, lanes_max=self._lanes_max)
            else:
                plain.append(batch)
                additions.append((batch.stream, batch.header, owner, values))
        if plain:
            self._steps.add(shard, additions, partial(self._added, shard, plain))

    def _added(
        self,
        shard: Shard,
        batches: list[EnqueueBatch],
        entry_ids: list[list[Any]],
        counts: tuple[int, int] | RedisFailure,
    ) -> None:
        """The plain commands and the script behind them have their replies."""
        failure = counts if isinstance(counts, RedisFailure) else None
        if not isinstance(counts, RedisFailure):
            self._held_in[shard.number], self._lanes_in[shard.number] = counts
        refused: list[bytes] = []
        for batch, ids in zip(batches, entry_ids, strict=True):
            if not all(isinstance(entry_id, bytes) for entry_id in ids):
                refused.append(batch.stream.field)
                # Where slots are moving, the next ones go by the script: it is redirected, plain commands are not.
                if any(isinstance(entry_id, Refused) and entry_id.code in MOVING for entry_id in ids):
                    self._held_in[shard.number] = self._shard_max
            self._answered(batch, ids, failure)
        if refused and failure is None:  # the script has counted them
            self._steps.count_again(shard, refused)

    def _submitted(self, shard: Shard, batch: EnqueueBatch, queued: Queued | RedisFailure) -> None:
        """Redis has answered a submission."""
        number = len(batch.requests)
        if isinstance(queued, RedisFailure):
            self._answered(batch, [queued] * number)
            return
        self._held_in[shard.number], self._lanes_in[shard.number] = queued.held, queued.lanes
        no_room = NoRoom("the queue is full")
        self._answered(batch, [*queued.entry_ids, *[no_room] * (number - len(queued.entry_ids))])

    def _answered(self, batch: EnqueueBatch, entry_ids: list[Any], failure: RedisFailure | None = None) -> None:
        """Redis has told the ids of entries, or why there are none. `failure`: why batchers may not know of them."""
        batch.entry_ids = entry_ids
        for request, entry_id in zip(batch.requests, entry_ids, strict=True):
            if request.held_by is batch and not isinstance(entry_id, bytes):
                self._not_queued([request], entry_id)
            elif request.held_by is batch and failure is not None:
                batch.has_left = True
                self._not_queued([request], failure)
        if batch.has_left:
            for request, entry_id in zip(batch.requests, entry_ids, strict=True):
                if request.held_by is not batch and isinstance(entry_id, bytes):
                    self._cancelled.append(batch.withdrawal(entry_id))
            self.flush.notify()

    def _not_queued(self, waiting: list[Request], failure: RedisFailure) -> None:
        if isinstance(failure, NoRoom) or (isinstance(failure, Refused) and failure.code in REFUSALS):
            for request in waiting:
                self.pending.end(request, error_of(failure))
        elif not isinstance(failure, Refused) or failure.code in MOVING:
            self._send_again(waiting)
        else:  # LOADING, CLUSTERDOWN, …: nothing was queued, and the nodes are looked at again
            sorry = BrokerDown("Redis cannot take requests right now; try again soon", retry_after_s=1)
            for request in waiting:
                self.pending.end(request, sorry)

    def _send_again(self, requests: Iterable[Request]) -> None:
        """Their entries are out of reach: send them by another shard, by this gateway's upstreams, or not at all."""
        for request in requests:
            if request not in self.pending:
                continue
            if self.mode == "redis" and self._up:
                self._leave_entry(request)
                self.sent_again += 1
                self._queue(request)
            elif self._local is not None:
                self._leave_entry(request)
                self.sent_again += 1
                self._move_to_local(request)
            elif entry_of(request) is None:
                self.pending.end(request, BrokerDown("Redis was lost; try again soon", retry_after_s=1))
            # Else it is in Redis, and may have its outcome when Redis is back in time.

    def _leave_entry(self, request: Request) -> None:
        """Remember the entry of a request that goes another way: it is withdrawn as soon as it can be reached."""
        batch: EnqueueBatch | None = request.held_by
        if batch is not None:
            batch.has_left = True
            if (entry_id := entry_of(request)) is not None and len(self._to_withdraw) < TO_WITHDRAW_MAX:
                self._to_withdraw.append(batch.withdrawal(entry_id))

    def _move_to_local(self, request: Request) -> None:
        assert self._local is not None
        now = self._clock()
        if request.arrived + request.queue_timeout_s <= now:
            request.taken = now  # a batcher took it in time: what it waits for is its outcome
        refusal = self._local.reserve(request)
        if refusal is None:
            self.pending.remove(request)
            request.number = 0
            self._local.enqueue(request)
        else:
            self.pending.end(request, refusal)

    # Out of Redis.

    def _withdraw(self, request: Request, error: CarpoolError | None = None) -> None:
        """Have the entry deleted if no batcher has it. With `error`, the request is still parked: it is settled only if
        the entry was still there.
        """
        batch: EnqueueBatch | None = request.held_by
        entry_id = entry_of(request)
        if batch is None or entry_id is None or batch.shard not in self._up:
            self._leave_entry(request)
            if error is not None:
                self.pending.end(request, error)
            return
        of_parked = () if error is None else (request, error)
        self._cancelled.append(batch.withdrawal(entry_id, *of_parked))
        self.flush.notify()

    def _deleted(self, shard: Shard, entries: list[Withdrawal], deleted: list[bool] | RedisFailure) -> None:
        if isinstance(deleted, RedisFailure):
            # Requests that wait still have their deadline; the entries of the others are left until the shard is back.
            left = [each for each in entries if each.request is None]
            self._to_withdraw += left[: TO_WITHDRAW_MAX - len(self._to_withdraw)]
            if self._nodes.is_up(shard.slot):  # it was never away: there was no room for this, or it was refused
                self._tries.start()
            return
        for entry, was_deleted in zip(entries, deleted, strict=False):
            if entry.request is not None and entry.error is not None and was_deleted and entry.request in self.pending:
                self.pending.end(entry.request, entry.error)

    def _withdraw_left(self) -> None:
        self._tries.stop()
        left, self._to_withdraw = self._to_withdraw, []
        for entry in left:
            (self._cancelled if entry.shard in self._up else self._to_withdraw).append(entry)
        self.flush.notify()


def by_shard(batches: Iterable[EnqueueBatch]) -> Iterable[list[EnqueueBatch]]:
    """What is queued together, in one shard: one step for all streams costs Redis far less than one for each."""
    together: list[EnqueueBatch] = []
    entries = 0
    for batch in batches:
        number = len(batch.requests)
        if together and (entries + number > ENTRIES_A_CALL_MAX or len(together) >= STREAMS_A_CALL_MAX):
            yield together
            together, entries = [], 0
        together.append(batch)
        entries += number
    if together:
        yield together


def memory_full() -> BrokerMemoryFull:
    """The refusal while Redis has hardly any memory left."""
    return BrokerMemoryFull("the memory of Redis is nearly full; try again soon", retry_after_s=1)


def entry_of(request: Request) -> bytes | None:
    """The id of a request's entry, if it has one and it is known."""
    batch: EnqueueBatch | None = request.held_by
    if batch is None or not batch.entry_ids:
        return None
    entry_id = batch.entry_ids[batch.requests.index(request)]
    return entry_id if isinstance(entry_id, bytes) else None
