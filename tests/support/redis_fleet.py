"""Gateways and batchers over one Redis, their clients, and a look at who holds what: for the chaos tests.

Clients come at fixed rates, whatever comes back. Each request carries a nonce; every upstream here reverses it.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis.asyncio

from carpool.broker.redis.formats import decode_value
from carpool.broker.redis.keys import GROUP, Keys
from support.checker import Checker
from support.client import Connection, ConnectionBrokenError, Response, ask_once, inference_body
from support.processes import GatewayProcess, start_role, until
from support.upstreams import ScriptedUpstream

ASYNC = "Prefer: respond-async\r\n"
LEASE_S = 1.5
# Results outlive every run here, so that each can be read once more at the end.
SETTINGS: dict[str, object] = {"tasks.result_ttl_s": 3600, "gateway.drain_grace_s": 0.3}
# How long a task may take to its outcome, with everything that is done to the fleet meanwhile.
TASK_S_MAX = 60.0
POLL_MS = 5000
POLL_AGAIN_S = 0.1
HELD_MAX = 10_000


class Answer(NamedTuple):
    """What a client got, and when."""

    began: float
    ended: float
    # 0 for a connection that broke.
    status: int


class WatchedUpstream(ScriptedUpstream):
    """An endpoint of one batcher that knows what it was sent, and what it answered, since that batcher began."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: set[str] = set()
        # When each input came.
        self.sends: list[tuple[float, str]] = []
        self._life_began = 0
        # Told of each call: before it is answered, and after.
        self.when_called: Callable[[list[str]], None] = lambda inputs: None
        self.when_answered: Callable[[], None] = lambda: None

    def begin_anew(self) -> None:
        """Another batcher calls from now on."""
        self._life_began = len(self.seen)
        self.answered = set()

    def sent(self) -> set[str]:
        """What this batcher has sent so far."""
        return set(self.seen[self._life_began :])

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        """Answer one call, and tell of it."""
        came = time.monotonic() - self.latency_s
        self.sends += [(came, text) for text in inputs]
        self.when_called(inputs)
        await super().answer(inputs, writer)
        self.answered |= set(inputs)
        self.when_answered()


class Place:
    """A place in a fleet: the process in it may be killed, and is started again."""

    def __init__(self, directory: Path, role: str, flags: list[str], settings: Mapping[str, object]) -> None:
        self._directory = directory
        self._role = role
        self._flags = flags
        self._settings = settings
        self.process: GatewayProcess

    async def start(self) -> None:
        """Start a process and wait until it serves."""
        self.process = start_role(self._directory, self._role, self._flags, self._settings)
        await self.process.wait_until_serving()

    async def replace(self) -> None:
        """Start another process; kill the one that was there when the other serves."""
        old = self.process
        new = start_role(self._directory, self._role, self._flags, self._settings)
        try:
            await new.wait_until_serving()
        finally:
            self.process = new  # whatever happened, it is this one that must be ended
            old.kill()

    def end(self) -> None:
        if self.process.process.poll() is None:
            self.process.kill()

    @property
    def port(self) -> int:
        return self.process.port


class Fleet:
    """All places over one broker."""

    def __init__(self, directory: Path, broker_url: str, settings: Mapping[str, object]) -> None:
        self._directory = directory
        self._broker_url = broker_url
        self._settings = {**SETTINGS, **settings}
        self.gateways: list[Place] = []
        self.batchers: list[Place] = []

    async def add(self, role: str, *flags: str, settings: Mapping[str, object] | None = None) -> Place:
        places = self.batchers if role == "batcher" else self.gateways
        place = Place(
            self._directory / f"{role}-{len(places)}",
            role,
            ["--broker", self._broker_url, *flags],
            {**self._settings, **(settings or {})},
        )
        places.append(place)
        await place.start()
        return place

    def ports(self) -> list[int]:
        return [place.port for place in self.gateways]

    async def wait_until_ready(self) -> None:

        async def all_ready() -> bool:
            asked = [ask_once(p.process.admin_port, "GET", "/internal/ready") for p in self.gateways]
            return all(response.status == 200 for response in await asyncio.gather(*asked))

        await until(all_ready)

    def errors(self) -> list[str]:
        """What the processes of now logged as errors."""
        return [message for p in (*self.gateways, *self.batchers) for message in p.process.log_messages("error")]

    def resident_bytes(self) -> int:
        """Memory that the processes of now occupy, together."""
        return sum(place.process.resident_bytes() for place in (*self.gateways, *self.batchers))

    def end(self) -> None:
        for place in (*self.gateways, *self.batchers):
            place.end()


@asynccontextmanager
async def fleet_over(
    directory: Path, broker_url: str, settings: Mapping[str, object] | None = None
) -> AsyncIterator[Fleet]:
    """An empty fleet; whatever is in it at the end is killed."""
    fleet = Fleet(directory, broker_url, settings or {})
    try:
        yield fleet
    finally:
        fleet.end()


class Clients:
    """Clients that ask and clients that submit tasks, each at a fixed rate, at any gateway of `ports`."""

    def __init__(
        self, checker: Checker, ports: Callable[[], list[int]], bytes_min: int = 0, owners: Sequence[str] = ()
    ) -> None:
        self.checker = checker
        # Addresses from which requests seem to come, by turns, behind a proxy that the gateways trust; () for our own.
        self._owners = cycle(f"X-Forwarded-For: {owner}\r\n" for owner in owners) if owners else repeat("")
        self._ports = ports
        self._bytes_min = bytes_min
        self._idle: dict[int, list[Connection]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._sources: list[asyncio.Task[None]] = []
        # A gateway that may be killed: what it has not answered is not owed.
        self.may_break: Callable[[int], bool] = lambda port: False
        self.answers: list[Answer] = []
        self.task_answers: list[Answer] = []
        # When each input had its outcome, and each task its 202.
        self.ended: dict[str, float] = {}
        self.accepted: dict[str, float] = {}
        self.inputs: dict[str, str] = {}
        self._head_of: dict[str, str] = {}
        # Accepted tasks that Redis no longer knows.
        self.missing: set[str] = set()
        # Statuses of polls that were not 200.
        self.poll_failures: Counter[int] = Counter()
        # The problems that clients were told of, by status and detail.
        self.problems: Counter[str] = Counter()

    def start(self, *, asks_per_s: float, tasks_per_s: float) -> None:
        for per_s, act in ((asks_per_s, self.ask), (tasks_per_s, self.run_task)):
            if per_s:
                self._sources.append(asyncio.create_task(self._keep_coming(per_s, act)))

    async def stop(self) -> None:
        """No new ones; wait for the outcomes of those under way."""
        for source in self._sources:
            source.cancel()
        await asyncio.gather(*self._sources, return_exceptions=True)
        self._sources.clear()
        await asyncio.gather(*self._running)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up, whatever is under way."""
        left = [*self._sources, *self._running]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connections in self._idle.values():
            for connection in connections:
                await connection.close()

    async def ask(self) -> None:
        text = self.checker.new_input(self._bytes_min)
        port = random.choice(self._ports())
        began = time.monotonic()
        self.checker.accepted(text, within_s=10.0)
        try:
            response = await self._exchange(port, "POST", "/v1/inference", inference_body(text), next(self._owners))
        except ConnectionRefusedError:
            self.checker.left(text)
            return
        except ConnectionBrokenError:
            if self.may_break(port):
                self.checker.left(text)
            else:
                self.checker.broke_off(text)
            self.answers.append(Answer(began, time.monotonic(), 0))
            return
        self.answers.append(Answer(began, time.monotonic(), response.status))
        self.ended[text] = time.monotonic()
        if response.status == 200:
            self.checker.output(text, response.json["output"])
        else:
            self.problems[f"{response.status}: {response.json['detail']}"] += 1
            self.checker.failed(text, response.status)

    async def run_task(self) -> None:
        """Submit a task at one gateway and wait for its outcome at any."""
        text = self.checker.new_input(self._bytes_min)
        task_id = await self.submit(text)
        if task_id:
            await self.wait_for(task_id)

    async def submit(self, text: str) -> str:
        """Submit a task; its id, or "" if it was not accepted."""
        began = time.monotonic()
        try:
            head = ASYNC + next(self._owners)
            response = await self._exchange(
                random.choice(self._ports()), "POST", "/v1/inference", inference_body(text), head
            )
            if response.status == 202:
                self._head_of[response.json["task_id"]] = head.removeprefix(ASYNC)
        except (ConnectionRefusedError, ConnectionBrokenError):
            return ""  # not answered with 202: nothing is owed
        self.task_answers.append(Answer(began, time.monotonic(), response.status))
        if response.status != 202:
            self.checker.refused(text, response.status)
            return ""
        task_id: str = response.json["task_id"]
        self.checker.accepted(text, within_s=TASK_S_MAX)
        self.accepted[text] = time.monotonic()
        self.inputs[task_id] = text
        return task_id

    async def wait_for(self, task_id: str, wait_ms: int = POLL_MS) -> None:
        """Poll until the task has its outcome, is unknown, or took too long."""
        text = self.inputs[task_id]
        give_up_at = time.monotonic() + TASK_S_MAX
        while time.monotonic() < give_up_at:
            try:
                port = random.choice(self._ports())
                head = self._head_of[task_id]  # a task is its owner's alone
                response = await self._exchange(port, "GET", f"/v1/result/{task_id}?wait_ms={wait_ms}", headers=head)
            except (ConnectionRefusedError, ConnectionBrokenError):
                await asyncio.sleep(POLL_AGAIN_S)
                continue
            if response.status == 404:
                self.missing.add(text)
                return
            if response.status != 200:
                self.poll_failures[response.status] += 1
                await asyncio.sleep(POLL_AGAIN_S)
                continue
            task = response.json
            if task["status"] == "SUCCESS":
                self.ended.setdefault(text, time.monotonic())
                self.checker.output(text, task["output"], told_at=task["timestamp"])
                return
            if task["status"] == "FAILED":
                self.ended.setdefault(text, time.monotonic())
                self.problems[f"{task['error']['status']}: {task['error']['detail']}"] += 1
                self.checker.failed(text, task["error"]["status"])
                return

    async def read_again(self) -> None:
        """Read every result once more: what was told once must still be true."""
        left = [task_id for task_id, text in self.inputs.items() if text not in self.missing]

        async def read_some() -> None:
            while left:
                await self.wait_for(left.pop(), wait_ms=1000)

        await asyncio.gather(*(read_some() for _ in range(16)))

    async def _keep_coming(self, per_s: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        next_at = time.monotonic()
        while True:
            next_at += random.expovariate(per_s)
            await asyncio.sleep(next_at - time.monotonic())
            task = asyncio.create_task(act())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _exchange(self, port: int, method: str, target: str, body: bytes = b"", headers: str = "") -> Response:
        """One request on an idle connection or a new one."""
        idle = self._idle.setdefault(port, [])
        try:
            connection = idle.pop() if idle else await Connection.open(port)
        except OSError as failure:
            raise ConnectionRefusedError from failure
        try:
            response = await connection.ask(method, target, body, headers)
        except BaseException:
            await connection.close()
            raise
        if response.is_last:
            await connection.close()
        else:
            idle.append(connection)
        return response


async def queue_streams(client: redis.asyncio.Redis, keys: Keys) -> list[bytes]:
    """All streams that may have entries now."""
    asked = client.pipeline(transaction=False)
    for shard in keys.shards:
        asked.hkeys(shard.lanes.decode())
    return [
        shard.stream(field)
        for shard, fields in zip(keys.shards, await asked.execute(), strict=True)
        for field in fields
    ]


async def held_by(client: redis.asyncio.Redis, consumer: str, keys: Keys) -> set[str]:
    """The inputs of the entries that a batcher took and that nobody acknowledged yet."""
    streams = await queue_streams(client, keys)
    asked = client.pipeline(transaction=False)
    for stream in streams:
        asked.xpending_range(stream, GROUP, "-", "+", HELD_MAX, consumer)
    pending = await asked.execute(raise_on_error=False)  # a stream may be dropped meanwhile
    for stream, entries in zip(streams, pending, strict=True):
        for entry in entries if isinstance(entries, list) else ():
            asked.xrange(stream, entry["message_id"], entry["message_id"])
    found = await asked.execute()
    values = [value for entries in found for _, fields in entries for value in fields.values()]
    return {json.loads(bytes(decode_value(value)[1])) for value in values}
