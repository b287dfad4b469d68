"""The two halves of the Redis broker in this process, over a real Redis: gateways that submit, batchers that take.

Nothing of them is replaced but the models, whose slots a test opens and closes. Every half has connections of its own,
as it has in a process of its own.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import msgspec
import redis.asyncio

from carpool.broker.memory import MemoryBroker
from carpool.broker.redis.batcher.consumer import Consumer
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.batcher.sweeper import Sweeper
from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.client.link import Link, OnReply
from carpool.broker.redis.client.node import Reader
from carpool.broker.redis.client.nodes import Nodes, Script
from carpool.broker.redis.dead_letters import LetterBounds, RedisDeadLetterBox
from carpool.broker.redis.formats import decode_value
from carpool.broker.redis.gateway.queue import RedisQueue
from carpool.broker.redis.keys import GROUP, Keys, Shard, line_name
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import monotonic
from carpool.core.errors import CarpoolError
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.processes import PATIENCE_S, until
from support.redis_servers import RedisServer
from support.redis_tasks import letter_bounds

MODEL = "m"
TARGETS_S = (0.05, 0.15, 0.5)
TASK_PATIENCE_MS = 1000
LINE_OFFSETS_MS = {
    line_name(tier, is_task, is_over): round(target_s * 1000) + is_task * TASK_PATIENCE_MS
    for tier, target_s in enumerate(TARGETS_S)
    for is_task, is_over in ((False, False), (False, True), (True, False))
}
LATE_MS = {line_name(tier, is_task=False, is_over=True): 2000 for tier in range(len(TARGETS_S))}
# Deadlines and ends of leases that do not come while a test waits: what comes, comes for another reason.
NEVER_S = 600.0
NEVER_MS = 600_000


class WatchedNodes(Nodes):
    """Knows which scripts were run and which bells were heard, and can keep replies of scripts back."""

    def __init__(self, url: str, changed: Callable[[], None], timeout_s: float, **options: Any) -> None:
        super().__init__(parse_broker_url(url), changed=changed, timeout_s=timeout_s, **options)
        # By name: how often each script was run.
        self.runs: Counter[str] = Counter()
        # Bells that were heard.
        self.wakeups = 0
        self._kept: list[tuple[OnReply, Any]] | None = None
        self._kept_names: tuple[str, ...] = ()
        self._kept_wakeups: list[tuple[OnReply, Any]] | None = None

    def keep_replies(self, *names: str) -> None:
        """From now on, scripts (these, or all) are run but their replies stay on the way."""
        self._kept, self._kept_names = [], names

    def let_replies_come(self) -> None:
        """Those that were kept too."""
        kept, self._kept = self._kept or [], None
        for on_reply, reply in kept:
            on_reply(reply)

    def let_one_reply_come(self) -> None:
        """The first of those that were kept; the others stay on the way."""
        assert self._kept is not None
        on_reply, reply = self._kept.pop(0)
        on_reply(reply)

    @property
    def kept(self) -> int:
        """Replies on the way."""
        return len(self._kept or ())

    def keep_wakeups(self) -> None:
        """From now on, nothing is heard of bells and subscriptions."""
        self._kept_wakeups = []

    def let_one_wakeup_come(self) -> None:
        """The first of what was kept."""
        assert self._kept_wakeups is not None
        received, message = self._kept_wakeups.pop(0)
        received(message)

    @property
    def kept_wakeups(self) -> int:
        """Bells and subscriptions on the way."""
        return len(self._kept_wakeups or ())

    def run(
        self,
        script: Script,
        slot: int,
        keys: Sequence[bytes],
        args: Sequence[bytes | int | str],
        on_reply: OnReply,
    ) -> None:
        self.runs[script.name] += 1

        def replied(reply: Any) -> None:
            if self._kept is None or (self._kept_names and script.name not in self._kept_names):
                on_reply(reply)
            else:
                self._kept.append((on_reply, reply))

        super().run(script, slot, keys, args, replied)

    def reader(
        self,
        slot: int,
        *,
        connected: Callable[[Link], None],
        received: OnReply,
        lost: Callable[[], None] = lambda: None,
    ) -> Reader:
        def heard(reply: Any) -> None:
            if self._kept_wakeups is not None:
                self._kept_wakeups.append((received, reply))
                return
            received(reply)
            self.wakeups += isinstance(reply, list) and reply[0] == b"smessage"

        return super().reader(slot, connected=connected, received=heard, lost=lost)


class SlotsModel:
    """A model with as many free slots as a test says (carpool.broker.redis.batcher.entries.FedModel)."""

    def __init__(self, free: int, largest: int, name: str = MODEL) -> None:
        self.name = name
        self.free = free
        self.largest = largest
        # Why nothing is taken up now; whether another batcher would; whether it has only a probe to send.
        self.refusal: CarpoolError | None = None
        self.elsewhere = False
        self.probing = False
        # How long requests may wait without a free slot.
        self.patience_s = 0.0

    def refusal_of(self, request: Request) -> CarpoolError | None:
        return self.refusal

    def free_slots(self) -> int:
        return self.free

    def stuck_after_s(self) -> float:
        return inf if self.free > 0 else self.patience_s

    def may_go_elsewhere(self, request: Request) -> bool:
        return self.elsewhere

    def is_probing(self) -> bool:
        return self.probing

    def is_in_doubt(self) -> bool:
        return self.probing

    def is_served_elsewhere(self) -> bool:
        return self.elsewhere

    def largest_batch(self) -> int:
        return self.largest

    def largest_batch_bytes(self) -> float:
        return inf

    def prepare(self, request: Request) -> None:
        """Inputs need nothing."""


class Gateway:
    """Where clients wait."""

    def __init__(self, nodes: WatchedNodes, queue: RedisQueue, local: MemoryBroker | None) -> None:
        self.nodes = nodes
        self.queue = queue
        # What it does without Redis goes here.
        self.local = local
        self.witness = Witness()

    def request(self, name: str, **options: Any) -> Request:
        """One that arrives now."""
        given = {"queue_timeout_s": NEVER_S, "total_timeout_s": NEVER_S, **options}
        return make_request(name, self.witness, now=monotonic(), **given)

    def submit(self, *names: str, **options: Any) -> list[Request]:
        """Let requests in, in one turn of the event loop."""
        requests = [self.request(name, **options) for name in names]
        assert [self.queue.submit(request) for request in requests] == [None] * len(names)
        return requests

    def outcomes(self) -> dict[str, Outcome]:
        """By request id: what was told, and that it was told once."""
        assert {len(told) for told in self.witness.told.values()} <= {1}
        return {name: told[0] for name, told in self.witness.told.items()}

    async def until_told(self, number: int) -> dict[str, Outcome]:
        """Wait for so many outcomes; no more may come."""
        await until(lambda: len(self.witness.told) >= number)
        assert len(self.witness.told) == number
        return self.outcomes()

    async def until_mode(self, mode: str) -> None:
        await until(lambda: self.queue.mode == mode)


class Batcher:
    """Where a GPU is."""

    def __init__(
        self, nodes: WatchedNodes, consumer: Consumer, broker: MemoryBroker, replies: ReplyWriter, model: SlotsModel
    ) -> None:
        self.nodes = nodes
        self.consumer = consumer
        self.broker = broker
        self.replies = replies
        self.model = model

    async def until_staged(self, number: int) -> None:
        """Wait until so many wait here for a slot; no more may come."""
        await until(lambda: self.broker.depth >= number)
        assert self.broker.depth == number

    def start_batch(self) -> list[Request]:
        """Take everything that is staged, as the batching loop does."""
        lanes = list(self.broker.lanes(MODEL))
        return [request for lane in lanes for request in self.broker.take(lane, lane.waiting, monotonic())]

    def answer(self, batch: Sequence[Request], tokens_used: Sequence[int | None] = ()) -> None:
        """Each gets its own input back."""
        facts = CallFacts(len(batch), 0.01)
        tokens = tokens_used or [None] * len(batch)
        outputs = [Output(request.input, facts, used) for request, used in zip(batch, tokens, strict=True)]
        self.broker.settle_batch(batch, outputs)

    def serve(self) -> None:
        """Answer what is staged, and from now on whatever comes, at once."""
        self.answer(self.start_batch())
        self.broker.when_work_arrives(MODEL, lambda lane: self.answer(self.broker.take(lane, 1, monotonic())))

    async def until_confirmed(self) -> None:
        """Wait until Redis has every outcome."""
        assert await self.replies.finish(PATIENCE_S)


class QueueEntry(msgspec.Struct, frozen=True):
    """One entry in Redis, and its lease if it has one."""

    shard: Shard
    field: bytes
    id: bytes
    request_id: str
    input: bytes
    owner: bytes = b""
    idle_ms: int = 0
    deliveries: int = 0


class Halves:
    """One namespace in one Redis, and the gateways and batchers that meet there."""

    def __init__(
        self,
        server: RedisServer,
        client: "redis.asyncio.Redis",
        shards: int,
        opened: AsyncExitStack,
        timeout_s: float,
    ) -> None:
        self.server = server
        # How long a Redis that hangs is waited for.
        self.timeout_s = timeout_s
        # As the tests see it: its own types allow for options that are not used here.
        self.client: Any = client
        self.keys = Keys(f"halves-{secrets.token_hex(4)}", shards)
        self._opened = opened
        # Batchers that hear the bells.
        self._listeners = 0

    async def gateway(
        self, name: bytes = b"g1", *, with_upstream: bool = False, pending_bytes_max: int = 10**8, **options: Any
    ) -> Gateway:
        """One that is connected; with an upstream of its own it can do without Redis."""
        queues: list[RedisQueue] = []

        def changed() -> None:
            for queue in queues:
                queue.nodes_changed()

        nodes = self._connect(changed, pending_bytes_max=pending_bytes_max)
        settings: dict[str, Any] = {"waiting_max": 100_000, "bytes_max": 10**9, "lanes_max": 64}
        settings |= {"line_offsets_ms": LINE_OFFSETS_MS, **options}
        local = local_broker() if with_upstream else None
        queue = RedisQueue(RedisOps(nodes, self.keys), name, models=[MODEL], local=local, **settings)
        queues.append(queue)
        self._opened.callback(queue.close)
        gateway = Gateway(nodes, queue, local)
        await gateway.until_mode("redis")
        return gateway

    async def informed_gateway(self, name: bytes = b"g1", **options: Any) -> Gateway:
        """One that has heard from every shard that next to nothing is there: so it adds by plain commands. The queue
        must be empty.
        """
        gateway = await self.gateway(name, **options)
        for shard in self.keys.shards:
            (request,) = gateway.submit(f"first-{shard.number}")
            await self.until_entries(1)
            gateway.queue.cancel(request)
            await self.until_entries(0)
        gateway.witness.told.clear()
        gateway.nodes.runs.clear()
        return gateway

    async def batcher(
        self,
        name: bytes = b"b1",
        *,
        free: int = 100,
        largest: int = 64,
        started: bool = True,
        others: Sequence[SlotsModel] = (),
        **options: Any,
    ) -> Batcher:
        """One that is connected. If it is not `started`, it hears no bell and has no timers."""
        nodes = await self.nodes()
        broker, model = local_broker(), SlotsModel(free, largest)
        steps = RedisOps(nodes, self.keys)
        bounds: LetterBounds = options.pop("letter_bounds", None) or letter_bounds()
        replies = ReplyWriter(steps, name, result_ttl_ms=60_000, letter_bounds=bounds)
        letters = RedisDeadLetterBox(steps, bounds=bounds)
        settings: dict[str, Any] = {"lease_ms": NEVER_MS, "late_ms": LATE_MS, **options}
        settings |= {"line_offsets_ms": LINE_OFFSETS_MS, "tier_target_s": TARGETS_S, "letter_bounds": bounds}
        consumer = Consumer(steps, name, broker, replies, letters, [model, *others], **settings)
        self._opened.callback(consumer.close)
        if started:
            consumer.start()
            self._listeners += 1
            await until_seen(self._are_wakeups_heard)
        return Batcher(nodes, consumer, broker, replies, model)

    async def nodes(self, **options: Any) -> WatchedNodes:
        """Connections of their own."""
        nodes = self._connect(lambda: None, **options)
        await until(lambda: nodes.is_up(0))
        return nodes

    def sweeper(self, batcher: Batcher, bounds: LetterBounds | None = None) -> Sweeper:
        """As a batcher has one, but without a timer."""
        steps = RedisOps(batcher.nodes, self.keys)
        sweeper = Sweeper(steps, bounds or letter_bounds(), batcher.replies.result_ttl_ms, batcher.replies.ended)
        self._opened.callback(sweeper.close)
        return sweeper

    async def entries(self) -> list[QueueEntry]:
        """Everything in the queue."""
        found: list[QueueEntry] = []
        for shard in self.keys.shards:
            async for stream in self.client.scan_iter(match=shard.stream(b"*"), count=1000):
                leases = await self._leases(stream)
                for entry_id, fields in await self.client.xrange(stream):
                    (value,) = fields.values()
                    record, given = decode_value(value)
                    field = stream.removeprefix(shard.stream(b""))
                    lease = leases.get(entry_id, (b"", 0, 0))
                    found.append(QueueEntry(shard, field, entry_id, record.request_id, bytes(given), *lease))
        return found

    async def number_of_entries(self) -> int:
        return len(await self.entries())

    async def counted_entries(self) -> int:
        """As the scripts count them."""
        return sum([int(await self.client.hget(shard.counts, "held") or 0) for shard in self.keys.shards])

    async def until_entries(self, number: int) -> None:
        """Wait until so many are in the queue."""

        async def is_so() -> bool:
            return await self.number_of_entries() == number

        await until_seen(is_so)

    async def let_lapse(self, entry: QueueEntry, deliveries: int) -> None:
        """Make a lease old, as if its owner had stood still, after so many deliveries."""
        stream = entry.shard.stream(entry.field)
        await self.client.xclaim(
            stream, GROUP, entry.owner, 0, [entry.id], idle=2 * NEVER_MS, retrycount=deliveries, justid=True
        )

    async def stand_still(self, batcher: Batcher, number: int, deliveries: int) -> None:
        """A batcher takes what there is, so many, and stands still until its leases are over, as others before it."""
        await self.until_entries(number)
        batcher.consumer.notify()
        await batcher.until_staged(number)
        for entry in await self.entries():
            await self.let_lapse(entry, deliveries)

    async def orphan(self, number: int, deliveries: int = 1) -> None:
        """Another batcher takes what there is, so many, and dies; it is the last of so many that did."""
        dead = await self.batcher(b"dead", started=False)
        await self.stand_still(dead, number, deliveries)
        dead.consumer.close()

    async def fill_memory(self) -> None:
        """From now on Redis refuses whatever needs memory."""
        await self.client.config_set("maxmemory", "1mb")

    async def cut(self, *commands: str) -> None:
        """Close connections from Redis's side: those whose last command was one of these, or all but this one."""
        for facts in await self.client.client_list():
            if facts["cmd"] in commands or not (commands or facts["cmd"] == "client|list"):
                await self.client.client_kill_filter(_id=facts["id"])

    async def clear(self) -> None:
        """Leave nothing behind: others use this Redis too."""
        names = [name async for name in self.client.scan_iter(match=self.keys.namespace + b":*", count=1000)]
        if names:
            await self.client.unlink(*names)

    def _connect(self, changed: Callable[[], None], **options: Any) -> WatchedNodes:
        nodes = WatchedNodes(self.server.url, changed, self.timeout_s, **options)
        self._opened.push_async_callback(nodes.close)
        nodes.start()
        return nodes

    async def _are_wakeups_heard(self) -> bool:
        wakeups = [shard.wakeup for shard in self.keys.shards]
        heard = dict(await self.client.pubsub_shardnumsub(*wakeups))
        return all(heard[wakeup] == self._listeners for wakeup in wakeups)

    async def _leases(self, stream: bytes) -> dict[bytes, tuple[bytes, int, int]]:
        try:
            pending = await self.client.xpending_range(stream, GROUP, "-", "+", 10_000)
        except redis.ResponseError:  # it has no group
            return {}
        names = ("consumer", "time_since_delivered", "times_delivered")
        return {facts["message_id"]: tuple(facts[name] for name in names) for facts in pending}


@asynccontextmanager
async def open_halves(server: RedisServer, *, shards: int = 1, timeout_s: float = 5.0) -> AsyncIterator[Halves]:
    """A namespace of its own; what was opened in it is closed at the end."""
    async with AsyncExitStack() as opened, server.client() as client:
        halves = Halves(server, client, shards, opened, timeout_s)
        yield halves
        await opened.aclose()
        if server.is_running:
            await halves.clear()


async def until_seen(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until Redis says so. What asks it is never cancelled: a cancellation can be lost in a client of Redis."""
    give_up_at = monotonic() + PATIENCE_S
    while not await condition():
        assert monotonic() < give_up_at, f"not within {PATIENCE_S:g} s"
        await asyncio.sleep(0.002)


def local_broker() -> MemoryBroker:
    """As a process has it."""
    broker = MemoryBroker(waiting_max=10**6, bytes_max=10**9, lanes_max=1000, tiers=len(TARGETS_S))
    broker.when_work_arrives(MODEL, lambda lane: None)
    return broker
