"""The Redis broker as the contract suite wants it: one object, synchronous, on the suite's clock.

A real broker over Redis is two: a gateway keeps requests and gets outcomes, a batcher takes entries and gives outcomes,
and what passes between them takes a while. `RedisBroker` owns one of each, in one event loop, and after every call lets
the loop run until nothing is under way any more. Nothing of the two is replaced; what is added:

1. What the batcher took are twins of the suite's requests: the same number, another object.
2. An outcome crosses Redis, so another object arrives than was sent. If the two are equal the suite gets its own one,
   which it knows by identity. Outputs cross as bytes.
3. A refusal that only Redis can give comes after `submit` has returned. Here `submit` waits for it.
4. The consumer is asked for one lane, as the suite asks, and in place of its timers and wakeups: time stands still.
5. Redis counts milliseconds; the suite compares arrivals exactly. The adapter knows which is which.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

import msgspec
from broker_contract import MODELS, TARGETS_S, Adapter

from carpool.broker.memory import MemoryBroker
from carpool.broker.redis.batcher.consumer import Consumer
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.client.link import OnReply, RedisFailure
from carpool.broker.redis.client.nodes import Nodes, Script
from carpool.broker.redis.dead_letters.box import RedisDeadLetterBox
from carpool.broker.redis.gateway.queue import RedisQueue
from carpool.broker.redis.keys import Keys, lane_name, line_name
from carpool.broker.redis.redis_ops import RedisOps
from carpool.broker.redis.scripts import AUDIT
from carpool.broker.redis.types import Budget, Taken
from carpool.core.errors import CarpoolError
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Broker, LaneQueue
from carpool.core.request import DONE, Request, Waiter
from carpool.testing import FakeClock
from carpool.tools.doctor_checks import parse_audit
from support.processes import PATIENCE_S, until
from support.redis_tasks import clear_shard, letter_bounds

STRICT_STEP_MS = 10**13

Result = TypeVar("Result")


class CountingNodes(Nodes):
    """Knows how many commands have no reply yet, and the last entry that was written for a reader."""

    def __init__(self, url: str, changed: Callable[[], None]) -> None:
        super().__init__(parse_broker_url(url), timeout_s=PATIENCE_S, changed=changed)
        self.outstanding = 0
        # By stream: the id of the last entry that a plain XADD made.
        self.written: dict[bytes, bytes] = {}

    def send(self, slot: int, on_reply: OnReply, *command: bytes | int | str) -> None:
        self.outstanding += 1
        super().send(slot, partial(self._replied, on_reply, command), *command)

    def send_all(self, slot: int, on_reply: OnReply, packed: list[bytes], size: int) -> None:
        self.outstanding += len(packed)
        super().send_all(slot, partial(self._replied, on_reply, ()), packed, size)

    def run(
        self,
        script: Script,
        slot: int,
        keys: Sequence[bytes],
        args: Sequence[bytes | int | str],
        on_reply: OnReply,
    ) -> None:
        self.outstanding += 1
        super().run(script, slot, keys, args, partial(self._replied, on_reply, ()))

    def _replied(self, on_reply: OnReply, command: tuple[bytes | int | str, ...], reply: Any) -> None:
        self.outstanding -= 1
        assert not isinstance(reply, RedisFailure) or str(reply).startswith(("QUEUEFULL", "LANESFULL")), reply
        if command[:1] == (b"XADD",) and isinstance(reply, bytes):
            self.written[cast(bytes, command[1])] = reply
        on_reply(reply)


class WaitingLane:
    """What the suite sees of a lane (core.ports.LaneQueue)."""

    def __init__(self, model: str, key: bytes) -> None:
        self.model = model
        self.key = key
        self.waiting = 0
        self.waiting_bytes = 0  # not known here
        self.is_quarantined = False
        self.arrivals = 0
        self.batching_notes: Any = None
        self.first_arrival = inf
        self.best_place = inf

    def oldest(self) -> float:
        return self.first_arrival

    def place(self, now: float = -inf) -> float:
        return self.best_place


class SuiteModel:
    """A model that the batcher serves (FedModel). Its slots are of no concern: the suite says how many it takes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refusal_of(self, request: Request) -> None:
        return None

    def free_slots(self) -> int:
        return 0

    def may_go_elsewhere(self, request: Request) -> bool:
        return False

    def is_probing(self) -> bool:
        return False

    def is_in_doubt(self) -> bool:
        return False

    def is_served_elsewhere(self) -> bool:
        return False

    def largest_batch(self) -> int:
        return 1

    def largest_batch_bytes(self) -> float:
        return inf

    def prepare(self, request: Request) -> None:
        """The suite's inputs need nothing."""


class LaneConsumer(Consumer):
    """A consumer whose budget is what the suite asks for: so many of one lane."""

    _wanted: tuple[WaitingLane, int] | None = None

    def look_for(self, lane: WaitingLane, count: int) -> None:
        """Take up to `count` of a lane, wherever they are."""
        self._wanted = (lane, count)
        self.look_at_all()

    def hear_wakeups(self) -> None:
        """Something was queued."""
        for view in self._views:
            view.barren_until = 0.0

    def _budgets(self) -> list[Budget]:
        if self._wanted is None:
            return []
        lane, count = self._wanted
        room = count - sum(self._staged_by_lane(lane.model).values())
        return [Budget(lane.model, 0, count, {lane_name(lane.model, lane.key): room})] if room > 0 else []

    @property
    def is_quiet(self) -> bool:
        return not (self.unanswered or self.turn.is_due)


class Refusals:
    """Waits for a refusal in place of a request's own waiter."""

    def __init__(self) -> None:
        self.refusal: CarpoolError | None = None

    def settled(self, request: Request, outcome: Outcome) -> None:
        assert isinstance(outcome, CarpoolError)
        self.refusal = outcome


class Crossing:
    """Stands before a waiter while an outcome is under way to it."""

    def __init__(self, waiter: Waiter, outcome: Outcome) -> None:
        self.waiter = waiter
        self.outcome = outcome

    def settled(self, request: Request, outcome: Outcome) -> None:
        self.waiter.settled(request, self.outcome if is_same(outcome, self.outcome) else outcome)


class RedisBroker:
    """A gateway and a batcher in one (core.ports.Broker)."""

    def __init__(
        self,
        runner: "asyncio.Runner",
        nodes: CountingNodes,
        shards: int,
        clock: FakeClock,
        *,
        waiting_max: int,
        bytes_max: int,
        lanes_max: int,
        strict_order: bool,
        min_share: float,
    ) -> None:
        self._runner = runner
        self._nodes = nodes
        self._clock = clock
        self._keys = Keys(f"contract-{secrets.token_hex(6)}", shards)
        gateway = secrets.token_hex(6).encode()
        self._stream = self._keys.replies(gateway)
        steps = self._steps = RedisOps(nodes, self._keys, self._now_ms)
        self._offsets_ms = {
            line_name(tier, is_task, is_over): STRICT_STEP_MS * tier if strict_order else round(target_s * 1000)
            for tier, target_s in enumerate(TARGETS_S)
            for is_task, is_over in ((False, False), (False, True), (True, False))
        }
        self.queue = RedisQueue(
            steps,
            gateway,
            line_offsets_ms=self._offsets_ms,
            waiting_max=waiting_max,
            bytes_max=bytes_max,
            lanes_max=lanes_max,
            models=MODELS,
            clock=clock,
        )
        self._local = MemoryBroker(
            waiting_max=1000,
            bytes_max=10**9,
            lanes_max=1000,
            tiers=len(TARGETS_S),
            strict_order=strict_order,
            clock=clock,
        )
        bounds = letter_bounds()
        self._replies = ReplyWriter(steps, b"batcher", clock, result_ttl_ms=60_000, letter_bounds=bounds)
        self._consumer = LaneConsumer(
            steps,
            b"batcher",
            self._local,
            self._replies,
            RedisDeadLetterBox(steps, bounds=bounds),
            [SuiteModel(model) for model in MODELS],
            line_offsets_ms=self._offsets_ms,
            late_ms={line: 2000 for line in self._offsets_ms if line.startswith(b"o")},
            strict_order=strict_order,
            min_share=min_share,
            tier_target_s=TARGETS_S,
            letter_bounds=bounds,
            clock=clock,
        )
        for model in MODELS:
            self._local.when_work_arrives(model, lambda lane: None)
        self._arrived: dict[str, Callable[[LaneQueue], None]] = {}
        # By number: the suite's requests, and the batcher's of those that were taken.
        self._submitted: dict[int, Request] = {}
        self._twins: dict[int, Request] = {}
        self._lanes: dict[bytes, WaitingLane] = {}
        # What Redis counts, beside the truth.
        self._audits: list[Any] = []
        # By millisecond: when exactly somebody arrived.
        self._arrivals: dict[int, float] = {}

    # What the suite calls.

    def when_work_arrives(self, model: str, arrived: Callable[[LaneQueue], None]) -> None:
        self._arrived[model] = arrived

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        return self.queue.refusal_of_all(requests)

    def submit(self, request: Request) -> CarpoolError | None:
        refusal = self.queue.submit(request)
        if refusal is not None:
            return refusal
        waiter, refusals = request.waiter, Refusals()
        if not self._is_under_way():  # else it was called by a waiter that is told something: no time to wait
            request.waiter = refusals
            self._let_run()
            request.waiter = waiter
            if refusals.refusal is not None:
                return refusals.refusal
        self._submitted[request.number] = request
        self._arrivals[milliseconds(request.arrived)] = request.arrived
        name = lane_name(request.model, request.lane_key)
        lane = self._lanes.setdefault(name, WaitingLane(request.model, request.lane_key))
        lane.arrivals += 1
        lane.waiting += 1
        self._consumer.hear_wakeups()
        self._arrived[request.model](lane)
        return None

    def cancel(self, request: Request) -> None:
        self.queue.cancel(request)
        self._let_run()

    def settle(self, request: Request, outcome: Outcome) -> bool:
        twin = self._twins.get(request.number)
        if twin is None:
            was_settled = self.queue.settle(request, outcome)
        else:
            was_settled = request.phase != DONE
            self._cross(request, outcome)
            self._local.settle(twin, on_the_wire(outcome))
        self._let_run()
        return was_settled

    def settle_batch(self, batch: Sequence[Request], outputs: Sequence[Output]) -> None:
        for request, output in zip(batch, outputs, strict=False):
            self._cross(request, output)
        self._local.settle_batch([self._twins[request.number] for request in batch], list(map(on_the_wire, outputs)))
        self._let_run()

    def lanes(self, model: str) -> Iterable[LaneQueue]:
        for lane in self._lanes.values():
            lane.waiting, lane.first_arrival, lane.best_place = 0, inf, inf
        for shard in self._keys.shards:
            self._steps.read(shard, b"", MODELS, (), self._looked)
            self._nodes.run(AUDIT, shard.slot, (shard.counts,), (), self._audits.append)
        self._let_run()
        audits, self._audits[:] = list(self._audits), []
        for facts in (parse_audit(0, b"", reply) for reply in audits):
            assert (facts.held_counted, facts.unread_counted) == (facts.held, facts.unread)
        return [lane for lane in self._lanes.values() if lane.model == model and lane.waiting]

    def take(
        self, lane: LaneQueue, count: int, now: float, bytes_max: float = inf, room_bytes: float = inf
    ) -> list[Request]:
        assert isinstance(lane, WaitingLane)
        self._consumer.look_for(lane, count)
        self._let_run()
        (*staged,) = self._local.lanes(lane.model)
        assert [each.key for each in staged] in ([], [lane.key]), "another lane was taken"
        twins = self._local.take(staged[0], count, now, bytes_max, room_bytes) if staged else []
        self._twins.update((twin.number, twin) for twin in twins)
        return [self._submitted[twin.number] for twin in twins]

    def bytes_running(self, model: str) -> int:
        return self._local.bytes_running(model)

    def when_bytes_free(self, model: str, notify: Callable[[], None]) -> None:
        self._local.when_bytes_free(model, notify)

    # For the adapter.

    def expire(self, now: float) -> None:
        """As a process with both does."""
        self.queue.expire(now)
        self._local.expire(now)
        self._let_run()

    async def close(self) -> None:
        """Leave nothing behind."""
        self._consumer.close()
        self.queue.close()
        for shard in self._keys.shards:
            await clear_shard(self._nodes, shard)
        await self._until_quiet()

    # Time.

    def _now_ms(self) -> bytes:
        return b"%d" % milliseconds(self._clock())

    def _is_under_way(self) -> bool:
        return self._runner.get_loop().is_running()

    def _let_run(self) -> None:
        """Let everything happen that was caused; a call from inside of that is part of it."""
        if not self._is_under_way():
            self._runner.run(self._until_quiet())

    async def _until_quiet(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self._is_quiet():  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0)

    def _is_quiet(self) -> bool:
        if self._nodes.outstanding or self.queue.flush.is_due or self._replies.flush.is_due:
            return False
        written = self._nodes.written.get(self._stream, b"0-0")
        return self._consumer.is_quiet and entry_key(self.queue.replies.last_seen) >= entry_key(written)

    # Outcomes and lanes.

    def _cross(self, request: Request, outcome: Outcome) -> None:
        if request.phase != DONE:
            request.waiter = Crossing(request.waiter, outcome)

    def _looked(self, found: Taken | RedisFailure) -> None:
        assert isinstance(found, Taken)
        assert found.view is not None
        for head in found.view.heads:
            arrived_ms = round(head.place) - self._offsets_ms[head.field.partition(b":")[2]]
            lane = self._lanes[head.lane]
            lane.waiting += head.unread
            lane.first_arrival = min(lane.first_arrival, self._arrivals[arrived_ms])
            lane.best_place = min(lane.best_place, head.place / 1000)


class RedisAdapter(Adapter):
    """Makes brokers on one Redis, each in a namespace of its own."""

    def __init__(self, url: str, shards: int) -> None:
        self._shards = shards
        self._brokers: list[RedisBroker] = []
        self._runner = asyncio.Runner()
        self._nodes = self._runner.run(self._connect(url))

    def make(
        self,
        clock: FakeClock,
        *,
        waiting_max: int = 1000,
        bytes_max: int = 1_000_000,
        lanes_max: int = 100,
        strict_order: bool = False,
        min_share: float = 0.0,
    ) -> RedisBroker:
        async def make() -> RedisBroker:
            broker = RedisBroker(
                self._runner,
                self._nodes,
                self._shards,
                clock,
                waiting_max=waiting_max,
                bytes_max=bytes_max,
                lanes_max=lanes_max,
                strict_order=strict_order,
                min_share=min_share,
            )
            self._brokers.append(broker)
            await until(lambda: broker.queue.mode == "redis")
            return broker

        return self._runner.run(make())

    def expire(self, broker: Broker, now: float) -> None:
        cast(RedisBroker, broker).expire(now)

    def held(self, broker: Broker) -> tuple[int, int]:
        queue = cast(RedisBroker, broker).queue
        return queue.pending.held, queue.pending.held_bytes

    def clear(self) -> None:
        """Close the brokers that were made."""
        brokers, self._brokers = self._brokers, []
        for broker in brokers:
            self._runner.run(broker.close())

    def close(self) -> None:
        """Leave Redis."""
        self.clear()
        self._runner.run(self._nodes.close())
        self._runner.close()

    async def _connect(self, url: str) -> CountingNodes:
        nodes = CountingNodes(url, self._nodes_changed)
        nodes.start()
        await until(lambda: not nodes.trouble)
        return nodes

    def _nodes_changed(self) -> None:
        for broker in self._brokers:
            broker.queue.nodes_changed()


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def entry_key(entry_id: bytes) -> tuple[int, int]:
    """By which ids are compared."""
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)


def on_the_wire(outcome: Result) -> Result:
    """An outcome as a batcher has it: outputs are bytes."""
    if isinstance(outcome, Output) and isinstance(outcome.value, str):
        return msgspec.structs.replace(outcome, value=outcome.value.encode())
    return outcome


def is_same(came: Outcome, sent: Outcome) -> bool:
    """Whether nothing of an outcome was lost on its way through Redis."""
    if isinstance(came, Output) and isinstance(sent, Output):
        facts = msgspec.structs.astuple(came.call) == msgspec.structs.astuple(sent.call)
        return facts and (came.value, came.tokens_used) == (on_the_wire(sent).value, sent.tokens_used)
    if isinstance(came, CarpoolError) and isinstance(sent, CarpoolError):
        return (type(came), came.detail, came.retry_after_s) == (type(sent), sent.detail, sent.retry_after_s)
    return False
