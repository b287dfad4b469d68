"""Real Redis for tests: one server, a Cluster, or a primary watched by Sentinels, each process ended by its own id.

Nothing here belongs to an event loop: what one test started, a later one may use. Clients do: `async with
server.client() as client`.
"""

import asyncio
import random
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import hiredis
import redis.asyncio

from support.processes import PATIENCE_S, until

HOST = "127.0.0.1"
# One that is stopped gives none.
ANSWER_S_MAX = 5.0
SENTINEL_SERVICE = "carpool"
# Below the ports that the kernel gives to clients, and so are the Cluster's own (10,000 higher).
_PORTS = range(11_000, 22_000)
_CLUSTER_BUS = 10_000
_START_ATTEMPTS = 5
_NOT_PERSISTENT = {"--save": "", "--appendonly": "no"}
# Replicas attach at once.
_QUICK_REPLICATION = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


class PortTakenError(Exception):
    """Another process was quicker."""


class NoAnswerError(Exception):
    """The server is gone, stopped, or answered with an error."""


class RedisServer:
    """One `redis-server` on a loopback port."""

    def __init__(self, directory: Path, args: tuple[str, ...], port: int) -> None:
        self.directory = directory
        self.args = args
        self.port = port
        self.log = directory / f"redis-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    async def start(cls, directory: Path, *args: str) -> Self:
        """A server on a free port that answers; it keeps nothing on disk unless `args` say so."""
        for _ in range(_START_ATTEMPTS):
            server = cls(directory, args, free_port())
            server.launch()
            try:
                await server.wait_until_ready()
            except PortTakenError:
                continue
            except BaseException:
                server.kill()
                raise
            return server
        raise TimeoutError("no free port for redis-server")

    @property
    def url(self) -> str:
        """For `--broker`."""
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Has it not ended? A stopped one has not."""
        return self._process is not None and self._process.poll() is None

    def client(self, **options: Any) -> redis.asyncio.Redis:
        """A client. Close it: `async with`."""
        settings: dict[str, Any] = {"socket_timeout": PATIENCE_S, **options}
        return redis.asyncio.Redis(host=HOST, port=self.port, **settings)

    def launch(self) -> None:
        """Start the process; it may not answer yet."""
        assert not self.is_running, "this server runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    async def wait_until_ready(self) -> None:
        """Until it answers PING; PortTakenError if another process has its port."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (await asyncio.to_thread(self._is_ready) and self.is_running):
            if not self.is_running:
                text = self.log.read_text()[-2000:]
                raise PortTakenError(text) if "Address already in use" in text else RuntimeError(text)
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"redis-server does not answer: {self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone; nothing if it is gone already."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and wait until it has left."""
        self._end(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    async def restart(self) -> None:
        """Start it again after its end (it is terminated if it runs): same port, directory and arguments."""
        self.terminate()
        self.launch()
        await self.wait_until_ready()

    async def ask(self, *words: str | int) -> Any:
        """One command over a connection of its own, for the tests' own needs; raises NoAnswerError."""
        return await asyncio.to_thread(self._ask, *words)

    async def facts(self, section: str) -> dict[str, str]:
        """A section of INFO; raises NoAnswerError."""
        return _facts(await self.ask("INFO", section))

    def _command(self) -> list[str]:
        command = ["redis-server", "--port", str(self.port), "--bind", HOST, "--dir", str(self.directory)]
        for name, value in _NOT_PERSISTENT.items():
            command += [] if name in self.args else [name, value]
        return command + list(self.args)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)  # a stopped one would not hear of it
            self._process.wait(PATIENCE_S)

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "the server has ended"
        self._process.send_signal(which)

    def _is_ready(self) -> bool:
        try:
            self._ask("PING")
        except NoAnswerError as failure:
            # One that wants a password is ready as well; one that still reads its files says LOADING.
            return str(failure).startswith("NOAUTH")
        return True

    def _ask(self, *words: str | int) -> Any:
        reader = hiredis.Reader()
        try:
            with socket.create_connection((HOST, self.port), ANSWER_S_MAX) as connection:
                connection.settimeout(ANSWER_S_MAX)
                connection.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]  # its type says one word
                while (reply := reader.gets()) is False:
                    data = connection.recv(65536)
                    if not data:
                        raise NoAnswerError("the connection was closed")
                    reader.feed(data)
        except OSError as failure:
            raise NoAnswerError(f"port {self.port}: {failure}") from failure
        if isinstance(reply, hiredis.ReplyError):
            raise NoAnswerError(str(reply))
        return reply


class Sentinel(RedisServer):
    """One Sentinel; what it watches is in `sentinel.conf`, which it rewrites."""

    def _command(self) -> list[str]:
        return ["redis-server", str(self.directory / "sentinel.conf"), "--sentinel", "--port", str(self.port)]


class RedisCluster:
    """A Cluster of primaries and replicas."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        """For `--broker`."""
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    async def primary_of(self, slot: int) -> RedisServer:
        """The node that serves the slot, as the first node that answers tells."""
        return (await self._servers_of(slot))[0]

    async def replicas_of(self, slot: int) -> list[RedisServer]:
        """The nodes that follow the slot's primary, as far as they are known to be well."""
        return (await self._servers_of(slot))[1:]

    async def is_whole(self) -> bool:
        """Does every running node know all the others, find every slot served, and follow its primary in step?"""
        running = [node for node in self.nodes if node.is_running]
        ports = {node.port for node in running}
        return all(await asyncio.gather(*(_is_content(node, ports) for node in running)))

    async def wait_until_whole(self) -> None:
        """TimeoutError if that does not come."""
        await until(self.is_whole)

    async def begin_to_move(
        self, slot: int, source: RedisServer | None = None, target: RedisServer | None = None
    ) -> "Move":
        """Let a slot be on its way from its node to another one; either may be one that came later."""
        source = source or await self.primary_of(slot)
        primaries = [node for node in self.nodes if (await node.facts("replication"))["role"] == "master"]
        target = target or next(node for node in primaries if node is not source)
        names = [(await node.ask("CLUSTER", "MYID")).decode() for node in (source, target)]
        await target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        await source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        return Move(slot, source, target, names[1], primaries)

    async def _servers_of(self, slot: int) -> list[RedisServer]:
        for node in self.nodes:
            try:
                ranges = await node.ask("CLUSTER", "SLOTS")
            except NoAnswerError:
                continue
            for first, last, *places in ranges:
                if first <= slot <= last:
                    return [next(node for node in self.nodes if node.port == place[1]) for place in places]
        raise LookupError(f"nobody serves slot {slot}")


class Move:
    """A slot on its way from one node of a Cluster to another."""

    def __init__(
        self, slot: int, source: RedisServer, target: RedisServer, name: str, primaries: list[RedisServer]
    ) -> None:
        self.slot = slot
        self.source = source
        self.target = target
        self._target_name = name
        self._primaries = primaries

    async def keys(self, at: RedisServer) -> set[bytes]:
        """What one of the two has of it."""
        return set(await at.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 100_000))

    async def bring(self, *keys: bytes) -> None:
        """Bring these, also where the other node has such a key."""
        for key in keys:
            how = ("MIGRATE", HOST, self.target.port, key.decode(), 0, 5000, "REPLACE")
            await self.source.ask(*how)

    async def end(self) -> None:
        """Bring what is left, and let the other node have the slot."""
        while left := await self.keys(self.source):
            await self.bring(*left)
        for node in (self.target, self.source, *self._primaries):
            await node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self._target_name)


class SentinelGroup:
    """A primary, its replicas, and the Sentinels that watch them."""

    def __init__(self, servers: list[RedisServer], sentinels: list[Sentinel]) -> None:
        self.servers = servers
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        """For `--broker`."""
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SENTINEL_SERVICE}"

    async def primary(self) -> RedisServer:
        """The server that the first Sentinel that answers calls the primary."""
        for sentinel in self.sentinels:
            try:
                _, port = await sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SENTINEL_SERVICE)
            except NoAnswerError:
                continue
            return next(server for server in self.servers if server.port == int(port))
        raise LookupError("no Sentinel answers")

    async def is_whole(self) -> bool:
        """Do the Sentinels know one another and every replica, and are these in step?"""
        for sentinel in self.sentinels:
            flat = await sentinel.ask("SENTINEL", "MASTER", SENTINEL_SERVICE)
            facts = dict(zip(flat[::2], flat[1::2], strict=True))
            known = int(facts[b"num-other-sentinels"]) + 1, int(facts[b"num-slaves"]) + 1
            if known != (len(self.sentinels), len(self.servers)):
                return False
        return all(await asyncio.gather(*map(_is_in_step, self.servers)))


@asynccontextmanager
async def running_redis(directory: Path, *args: str) -> AsyncIterator[RedisServer]:
    """One server; killed at the end."""
    server = await RedisServer.start(directory, *args)
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def running_cluster(
    directory: Path, *args: str, primaries: int = 3, replicas: int = 1, node_timeout_ms: int = 1000
) -> AsyncIterator[RedisCluster]:
    """A whole Cluster, each primary with its replicas; killed at the end."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms), *_QUICK_REPLICATION, *args)
    nodes: list[RedisServer] = []
    try:
        while len(nodes) < primaries * (1 + replicas):
            nodes.append(await RedisServer.start(directory / f"node-{len(nodes)}", *options))
        await asyncio.to_thread(_create_cluster, nodes, replicas)
        cluster = RedisCluster(nodes)
        await cluster.wait_until_whole()
        yield cluster
    finally:
        for node in nodes:
            node.kill()


@asynccontextmanager
async def running_sentinels(
    directory: Path, *args: str, replicas: int = 2, sentinels: int = 3, down_after_ms: int = 1000
) -> AsyncIterator[SentinelGroup]:
    """A primary, its replicas, and Sentinels of which a majority must agree; killed at the end."""
    servers: list[RedisServer] = []
    watchers: list[Sentinel] = []
    try:
        servers.append(await RedisServer.start(directory / "server-0", *_QUICK_REPLICATION, *args))
        follow = ("--replicaof", f"{HOST} {servers[0].port}", *_QUICK_REPLICATION)
        while len(servers) < 1 + replicas:
            servers.append(await RedisServer.start(directory / f"server-{len(servers)}", *follow, *args))
        while len(watchers) < sentinels:
            place = directory / f"sentinel-{len(watchers)}"
            _write_sentinel_file(place, servers[0].port, sentinels // 2 + 1, down_after_ms)
            watchers.append(await Sentinel.start(place))
        group = SentinelGroup(servers, watchers)
        await until(group.is_whole)
        yield group
    finally:
        for server in (*watchers, *servers):
            server.kill()


def free_port() -> int:
    """A port that is free now, and so is the one of the Cluster's bus."""
    for _ in range(1000):
        port = random.choice(_PORTS)
        if _is_free(port) and _is_free(port + _CLUSTER_BUS):
            return port
    raise OSError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True


def _write_sentinel_file(place: Path, primary_port: int, quorum: int, down_after_ms: int) -> None:
    place.mkdir(parents=True)
    (place / "sentinel.conf").write_text(
        f"dir {place}\nbind {HOST}\n"
        f"sentinel monitor {SENTINEL_SERVICE} {HOST} {primary_port} {quorum}\n"
        f"sentinel down-after-milliseconds {SENTINEL_SERVICE} {down_after_ms}\n"
        f"sentinel failover-timeout {SENTINEL_SERVICE} 5000\n"
    )


def _create_cluster(nodes: list[RedisServer], replicas: int) -> None:
    command = ["redis-cli", "--cluster", "create", *(f"{HOST}:{node.port}" for node in nodes)]
    command += ["--cluster-replicas", str(replicas), "--cluster-yes"]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert made.returncode == 0, made.stdout.decode()[-2000:]


async def _is_content(node: RedisServer, ports: set[int]) -> bool:
    try:
        state = _facts(await node.ask("CLUSTER", "INFO"))
        known = {place[1] for _, _, *places in await node.ask("CLUSTER", "SLOTS") for place in places}
        in_step = await _is_in_step(node)
    except NoAnswerError:
        return False
    return state["cluster_state"] == "ok" and state["cluster_slots_ok"] == "16384" and known == ports and in_step


async def _is_in_step(server: RedisServer) -> bool:
    replication = await server.facts("replication")
    return replication["role"] == "master" or replication["master_link_status"] == "up"


def _facts(text: bytes) -> dict[str, str]:
    lines = (line.partition(":")[::2] for line in text.decode().splitlines() if ":" in line)
    return dict(lines)
