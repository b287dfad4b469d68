"""Tasks on a real Redis, with a batcher and gateways that are as small as they can be."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from carpool.broker.redis.batcher.leases import EntryLease, LeasedEntries
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.dead_letters import LetterBounds
from carpool.broker.redis.formats import EntryRecord, Header, decode_header, decode_value
from carpool.broker.redis.gateway.task_intake import TaskIntake, TaskRemovals
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.keys import Keys, Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.errors import CarpoolError
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.processes import PATIENCE_S, until
from support.redis_nodes import connect
from support.tasks import told

RESULT_TTL_MS = 60_000
LETTERS_MAX = 100
LETTER_TTL_MS = 7 * 86_400_000


def letter_bounds(letters_max: int = LETTERS_MAX, bytes_max: int = 10**9, **options: Any) -> LetterBounds:
    """Bounds of dead letters, in each shard."""
    return LetterBounds(letters_max=letters_max, bytes_max=bytes_max, ttl_ms=LETTER_TTL_MS, **options)


class Taken(msgspec.Struct, frozen=True):
    """An entry that the batcher took."""

    shard: Shard
    field: bytes
    entry_id: bytes
    header: Header
    record: EntryRecord
    input: bytes

    @property
    def task_id(self) -> str:
        return self.record.request_id


def task_board(steps: RedisOps, gateway: bytes, **options: Any) -> RedisTasks:
    """The tasks of a gateway, with bounds that are far unless others are given."""
    ended = options.pop("ended", lambda task, error: None)
    bounds = {"held_max": 10_000, "input_bytes_max": 10**9, "stored_bytes_max": 10**9, "lanes_max": 9}
    removals = TaskRemovals(steps)
    intake = TaskIntake(steps, removals, **{**bounds, "line_offsets_ms": {}, **options})
    return RedisTasks(steps, gateway, intake, removals, 60_000, ended)


class Office:
    """One namespace in one Redis; `gateway` and `replies` are made for it."""

    def __init__(self, nodes: Nodes, shards: int) -> None:
        self.nodes = nodes
        self.keys = Keys(f"test-{secrets.token_hex(4)}", shards)
        self.steps = RedisOps(nodes, self.keys)
        self.buried: list[str] = []
        self.replies = self.writer()
        self._gateways: list[RedisTasks] = []

    def writer(self, **options: Any) -> ReplyWriter:
        """What gives tasks their results, as at a batcher."""
        steps = RedisOps(self.nodes, self.keys, options.pop("now_ms", lambda: b""))
        given = {"result_ttl_ms": RESULT_TTL_MS, "letter_bounds": letter_bounds(), **options}
        return ReplyWriter(steps, b"b1", buried=self.buried.append, **given)

    def gateway(self, name: bytes = b"g1", **options: Any) -> RedisTasks:
        """A gateway that is not told of finished tasks: it looks by itself."""
        steps = RedisOps(self.nodes, self.keys, options.pop("now_ms", lambda: b""))
        tasks = task_board(steps, name, **options)
        self._gateways.append(tasks)
        return tasks

    def request(self, value: bytes = b'"x"', **options: Any) -> Request:
        url = options.pop("callback_url", "")
        given = {"is_task": True, "total_timeout_s": 600.0, "tier": 1, **options}
        request = make_request(secrets.token_hex(16), Witness(), now=time.perf_counter(), value=value, **given)
        request.callback_url = url
        return request

    async def submit(self, tasks: RedisTasks, value: bytes = b'"x"', owner: str = "owner", **options: Any) -> str:
        request = self.request(value, owner=owner, **options)
        assert await told(lambda done: tasks.submit(request, done)) is None
        return request.id

    async def take(self, *models: str) -> list[Taken]:
        """Take everything there is of the models, as a batcher does."""
        taken: list[Taken] = []
        for shard in self.keys.shards:
            came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.steps.read(shard, b"b1", models or ("m",), (), came.set_result)
            reads = [(head.field, head.unread) for head in (await came).view.heads]
            came = asyncio.get_running_loop().create_future()
            self.steps.read(shard, b"b1", models or ("m",), reads, came.set_result)
            for field, entries, _ in (await came).streams:
                for entry_id, (header, value) in entries:
                    record, given = decode_value(value)
                    assert record.number == 0
                    taken.append(Taken(shard, field, entry_id, decode_header(header), record, bytes(given)))
        return taken

    async def finish(
        self, taken: Taken, outcome: Output | CarpoolError, sends: int = 0, *, after_s: float = 0.0
    ) -> bool:
        """Give a task its outcome, as a batcher does; false if Redis does not take it at once."""
        request = self.request(parameters=taken.header.parameters, tier=taken.header.tier, owner=taken.record.owner)
        leased = LeasedEntries(taken.shard, taken.field, 0.0, 0.0, {taken.entry_id: request})
        request.id, request.sends, request.waiter = taken.task_id, sends, self.replies
        request.ticket = EntryLease(leased, taken.entry_id, taken.header)
        retries = self.replies.retries
        request.settle(outcome, request.arrived + after_s)
        await until(lambda: not leased.open or self.replies.retries > retries)
        return not leased.open

    async def counts(self) -> tuple[int, int]:
        """Entries held and unread, as the shards say; and that these are true."""
        held = unread = 0
        for shard in self.keys.shards:
            fields = await self.nodes.ask(shard.slot, b"HMGET", shard.counts, b"held", b"unread")
            entries = pending = 0
            for field in await self.nodes.ask(shard.slot, b"HKEYS", shard.lanes):
                stream = shard.stream(field)
                entries += await self.nodes.ask(shard.slot, b"XLEN", stream)
                pending += (await self.nodes.ask(shard.slot, b"XPENDING", stream, b"batchers"))[0]
            assert [int(value or 0) for value in fields] == [entries, entries - pending]
            held, unread = held + entries, unread + entries - pending
        return held, unread

    async def hash_of(self, task_id: str) -> dict[bytes, bytes]:
        """A task's fields."""
        shard = self.keys.shard_of_task(task_id)
        flat = await self.nodes.ask(shard.slot, b"HGETALL", shard.task(task_id))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def close(self) -> None:
        """Stop everything."""
        for tasks in self._gateways:
            tasks.close()
        for shard in self.keys.shards:
            if self.nodes.is_up(shard.slot):
                await self._clear(shard)
        await self.nodes.close()

    async def _clear(self, shard: Shard) -> None:
        """Others use this Redis too, and count what it holds."""
        await clear_shard(self.nodes, shard)


@asynccontextmanager
async def open_office(url: str, *, shards: int = 16, timeout_s: float = PATIENCE_S) -> AsyncIterator[Office]:
    """An office that is connected."""
    office = Office(await connect(url, timeout_s=timeout_s), shards)
    try:
        yield office
    finally:
        await office.close()


async def clear_shard(nodes: Nodes, shard: Shard) -> None:
    """Remove all that a shard has."""
    cursor = b"0"
    while True:
        cursor, names = await nodes.ask(shard.slot, b"SCAN", cursor, b"MATCH", shard.prefix + b"*", b"COUNT", 1000)
        if names:
            await nodes.ask(shard.slot, b"DEL", *names)
        if cursor == b"0":
            return
