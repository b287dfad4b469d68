"""Carpool as it is installed, with two doors for clients: in one process, or as a fleet over a real Redis.

The processes are those that a command starts, with their timers, wakeups and ports, all in this event loop. What stands
in is the GPU, one for all of them, whose answers a test holds back and scripts. What a test asks goes through the ports
as a client's or an operator's word does, so that one suite fits every site.

Times are such that nobody reaches them on a busy machine, and nets under lost words are taken away: what comes, comes
by its own way.
"""

import asyncio
import hashlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.app import make_process
from carpool.broker.redis.gateway import tasks as redis_tasks
from carpool.composition.process import Process
from carpool.core.names import Role
from carpool.settings import Settings, load_settings
from carpool.testing import FakeUpstream, UpstreamCall, UpstreamResponse, inputs_of
from support.client import Connection, Response, ask_once
from support.forks import constants_in, place_of, settings_in
from support.processes import PATIENCE_S, until
from support.redis_servers import RedisCluster, RedisServer

JSON = "Content-Type: application/json\r\n"
ASYNC = JSON + "Prefer: respond-async\r\n"
NEVER_S = 600.0
NEVER_MS = 60_000
# Longer than a client of these tests reads: whoever waits so long is told before, or the test fails.
LONG_MS = 300_000
# Each has a key, and is of a tier. The lowest stands so much later that no pause of the machine changes the order.
OWNERS = {"alice": "free", "bob": "free", "rich": "enterprise"}
TARGETS_MS = {"enterprise": 50, "free": 300_000}
SHARDS_MAX = "carpool.composition.redis_context.SHARDS_MAX"
LANES_MAX = "carpool.composition.runtime.LANES_MAX"
TASKS_SHARE = "carpool.embedded.TASKS_SHARE"
# Over Redis each shard has its part of every bound.
ONE_SHARD: dict[str, object] = {SHARDS_MAX: 1}
SETTINGS: dict[str, object] = {
    "model": "m",
    "upstream.endpoints": ["http://gpu:9000/"],
    "upstream.timeout_s": NEVER_S / 2,
    "upstream.attempts": 2,
    "carpool.service.BACKOFF_S": 0.001,
    "batching.policy": "fixed",
    "batching.max_wait_ms": 1.0,
    "gateway.port": 0,
    "gateway.drain_grace_s": 0.0,
    "broker.queue_timeout_s": NEVER_S,
    "broker.total_timeout_s": NEVER_S,
    "broker.redis_timeout_ms": 3000,
    "carpool.composition.redis_context.LEASE_MS": NEVER_MS,
    "shedding.mode": "off",
    "limits.per_minute": 0,
    "carpool.face.http.gateway.WAIT_MS_MAX": LONG_MS,
    TASKS_SHARE: 1.0,
}


class Door:
    """One gateway, as its clients and its operators see it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def ask(self, value: Any = "x", owner: str = "alice", headers: str = "", **fields: Any) -> Response:
        body = json.dumps({"input": value, **fields}).encode()
        return await ask_once(self.process.port, "POST", "/v1/inference", body, JSON + credential(owner) + headers)

    async def begin_to_ask(self, value: Any = "x", owner: str = "alice", headers: str = "", **fields: Any) -> "Asking":
        """A request whose client waits: this ends when the gateway has it."""
        before = await self.held()
        asking = Asking(await Connection.open(self.process.port))
        body = json.dumps({"input": value, **fields}).encode()
        asking.send("POST", "/v1/inference", body, JSON + credential(owner) + headers)
        await until(lambda: self._holds(before + 1))
        return asking

    async def held(self) -> float:
        """Requests that the gateway has not answered."""
        return await self.metric("held_requests")

    async def _holds(self, number: float) -> bool:
        return await self.held() >= number

    async def offer(self, value: Any = "x", owner: str = "alice", headers: str = "", **fields: Any) -> Response:
        """Submit a task; what the client is told."""
        body = json.dumps({"input": value, **fields}).encode()
        return await ask_once(self.process.port, "POST", "/v1/inference", body, ASYNC + credential(owner) + headers)

    async def submit(self, value: Any = "x", owner: str = "alice", **fields: Any) -> str:
        """Submit a task that is accepted; its id."""
        accepted = await self.offer(value, owner, **fields)
        assert (accepted.status, accepted.json["status"]) == (202, "PENDING"), accepted
        task_id: str = accepted.json["task_id"]
        return task_id

    async def look(self, task_id: str, wait_ms: int = 0, owner: str = "alice") -> dict[str, Any]:
        """What is told of a task; of one that is not there, {"status": 404} and why."""
        target = f"/v1/result/{task_id}" + (f"?wait_ms={wait_ms}" if wait_ms else "")
        found: dict[str, Any] = (await ask_once(self.process.port, "GET", target, headers=credential(owner))).json
        return found

    async def status(self, task_id: str, wait_ms: int = 0, owner: str = "alice") -> Any:
        """PENDING, SUCCESS or FAILED; 404 if it is not there."""
        return (await self.look(task_id, wait_ms, owner))["status"]

    async def output(self, task_id: str, owner: str = "alice") -> Any:
        """Of a task that comes to its good end."""
        return (await self.look(task_id, LONG_MS, owner))["output"]

    async def poll(self, task_id: str, wait_ms: int = LONG_MS) -> "Asking":
        """Begin to wait for a task, and be heard."""
        asking = Asking(await Connection.open(self.process.port))
        asking.send("GET", f"/v1/result/{task_id}?wait_ms={wait_ms}", headers=credential("alice"))
        await self.look(task_id)  # whoever asks later is answered later
        return asking

    async def delete(self, task_id: str, owner: str = "alice") -> int:
        """204, or 404."""
        target = f"/v1/result/{task_id}"
        return (await ask_once(self.process.port, "DELETE", target, headers=credential(owner))).status

    async def admin(self, method: str, target: str) -> Response:
        return await ask_once(self.process.admin_port, method, f"/internal/{target}")

    async def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or of those with this one."""
        text = (await ask_once(self.process.admin_port, "GET", "/metrics")).body.decode()
        found = re.findall(rf"^carpool_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(number) for labels, number in found if label in labels)


class Asking:
    """A client that waits for its answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.send = connection.send

    async def response(self) -> Response:
        response = await self._connection.read()
        await self._connection.close()
        return response

    async def answer(self) -> dict[str, Any]:
        """What it is told in the end."""
        answer: dict[str, Any] = (await self.response()).json
        return answer

    async def leave(self) -> None:
        await self._connection.close()


class Gpu(FakeUpstream):
    """Answers each input with itself, but for those that begin with "bad", which it refuses while it is strict."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots)
        self.is_strict = True
        # While it is set, every call fails with this status.
        self.failing = 0
        # While it is true, a call that was let go is the last one for now.
        self.is_one_by_one = False

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        answer = await super().post(call, timeout_s)
        if self.is_one_by_one:
            self.hold()
        if self.failing:
            return UpstreamResponse(self.failing, b"{}")
        if self.is_strict and any(value.startswith(b'"bad') for value in inputs_of(call)):
            return UpstreamResponse(400, b'{"error":"no"}')
        return answer

    def begin_anew(self) -> None:
        self.release()
        self.calls.clear()
        self.is_strict, self.failing = True, 0

    def seen(self) -> list[Any]:
        """All inputs that came, in their order."""
        return [json.loads(value) for received in self.calls for value in received.inputs]

    async def until_called(self, number: int = 1) -> None:
        """Wait until so many inputs came; no more may come."""
        await until(lambda: len(self.seen()) >= number)
        assert len(self.seen()) == number, self.seen()


class Site(ABC):
    """An installation. `here` and `there` are its doors, which may be one."""

    here: Door
    there: Door

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        self.directory = directory
        self.settings = SETTINGS | settings
        self.gpu = Gpu(slots=4)
        self.processes: list[Process] = []

    @abstractmethod
    async def start(self) -> None:
        """Start every process."""

    async def stop(self) -> None:
        leaving, self.processes = self.processes, []
        await asyncio.gather(*(process.drain() for process in leaving))

    async def restart(self, **settings: object) -> None:
        """All drain, and others take their places, maybe with other settings."""
        await self.stop()
        self.settings |= dotted(settings)
        await self.start()

    async def close(self) -> None:
        self.gpu.release()
        await asyncio.gather(*(process.close() for process in self.processes))

    async def add(self, role: Role, **settings: object) -> Process:
        process = make_process(self.read_settings(settings), role)
        process.runtime.endpoints = lambda model: lambda address: self.gpu
        self.processes.append(process)
        with pytest.MonkeyPatch.context() as without_net:
            without_net.setattr(redis_tasks, "LOOK_AGAIN_S", NEVER_S)
            await process.start()
        return process

    def read_settings(self, settings: Mapping[str, object]) -> Settings:
        file = self.directory / "carpool.toml"
        tiers = [f'[[tiers]]\nname = "{name}"\ntarget_ms = {target_ms}\n' for name, target_ms in TARGETS_MS.items()]
        keys = [f'[keys.{owner}]\nsha256 = "{sha256(owner)}"\ntier = "{tier}"\n' for owner, tier in OWNERS.items()]
        file.write_text("".join(tiers + keys))
        given = self.settings | {"auth.mode": "keys"} | dotted(settings)
        return load_settings(settings_in(given), environ={}, file=file)


class Embedded(Site):
    """Everything in one process, and tasks in a journal."""

    async def start(self) -> None:
        self.settings["tasks.data_dir"] = str(self.directory)
        self.here = self.there = Door(await self.add("serve"))


class OverRedis(Site):
    """Two gateways and a batcher, which share nothing but Redis."""

    def __init__(self, directory: Path, settings: dict[str, object], server: RedisServer | RedisCluster) -> None:
        super().__init__(directory, settings)
        self.settings |= {"broker.url": server.url}
        self.settings.setdefault("broker.namespace", f"site-{secrets.token_hex(4)}")

    async def start(self) -> None:
        """The batcher first: whoever comes later sees it at once."""
        await self.add("batcher")
        here, there = await asyncio.gather(self.add("gateway"), self.add("gateway"))
        self.here, self.there = Door(here), Door(there)
        await until(lambda: all_ready(here, there))


async def all_ready(*processes: Process) -> bool:
    asked = [ask_once(process.admin_port, "GET", "/internal/ready") for process in processes]
    return all(answer.status == 200 for answer in await asyncio.gather(*asked))


Open = Callable[..., Awaitable[Site]]


@asynccontextmanager
async def opened(directory: Path, server: RedisServer | RedisCluster | None) -> AsyncIterator[Open]:
    """What opens a site with settings of its own, until the block ends; without a server, in one process."""
    sites: list[Site] = []
    constants = pytest.MonkeyPatch()

    async def open_site(gpu_slots: int = 4, **settings: object) -> Site:
        given = dotted(settings)
        for constant, value in constants_in(SETTINGS | given).items():
            constants.setitem(*place_of(constant), value)
        site = Embedded(directory, given) if server is None else OverRedis(directory, given, server)
        site.gpu = Gpu(gpu_slots)
        sites.append(site)
        await asyncio.wait_for(site.start(), PATIENCE_S)
        return site

    try:
        yield open_site
    finally:
        for site in sites:
            await site.close()
        constants.undo()
        if isinstance(server, RedisServer) and server.is_running:
            await clear(server, sites)


async def clear(server: RedisServer, sites: list[Site]) -> None:
    """Others use this Redis too, and count what it holds."""
    async with server.client() as client:
        for site in sites:
            names = [name async for name in client.scan_iter(f"{site.settings['broker.namespace']}:*", count=1000)]
            if names:
                await client.unlink(*names)


def dotted(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings by their keys: `tasks__timeout_s` is `tasks.timeout_s`."""
    return {name.replace("__", "."): value for name, value in settings.items()}


def key_of(owner: str) -> str:
    """Long enough for an API key."""
    return f"key-of-{owner}-0123456789"


def sha256(owner: str) -> str:
    return hashlib.sha256(key_of(owner).encode()).hexdigest()


def credential(owner: str) -> str:
    return f"Authorization: Bearer {key_of(owner)}\r\n" if owner else ""
