"""The doctor: looks at a Redis that gateways and batchers use, and tells what is wrong with it.

It asks every primary by itself, so that a server that hangs or refuses is named. It changes nothing unless told to
mend, and then only what no living process can miss: reply streams of gateways that are gone, and wrong counts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from carpool.broker.redis.address import BrokerAddress
from carpool.broker.redis.doctor_checks import (
    Finding,
    NodeFacts,
    ReplyStream,
    ShardFacts,
    Wants,
    check_cluster,
    check_counts,
    check_fleet,
    check_groups,
    check_letters,
    check_no_disk,
    check_reply_streams,
    check_sentinels,
    check_unlisted,
    check_waiting,
    merged,
    node_findings,
    orphans,
    parse_audit,
    parse_info,
    replicas_of,
)
from carpool.broker.redis.fleet_view import FleetView, read_view
from carpool.broker.redis.keys import Keys, Shard
from carpool.broker.redis.scripts import AUDIT, SWEEP

ANSWER_S_MAX = 5.0
PINGS = 5
PRIMARIES_MAX = 256
# A heartbeat older than this is that of one who is gone.
STALE_S = 1.5
# Longer than between two heartbeats: who just started is in the registry by then.
SECOND_LOOK_S = 1.5
KEYS_AT_ONCE = 1000
KEYS_LOOKED_AT_MAX = 5_000_000
SCAN_S_MAX = 30.0
STREAMS_FOUND_MAX = 50_000
REASON_CHARS_MAX = 200
# So long ago that no consumer and no dead letter is old enough for the sweep to touch it.
PARTS_OF_A_SWEEP_MAX = 1000
NEVER_MS = 10**13
NO_BOUND = 10**15
CONFIG_NAMES = ("appendfsync", "save", "min-replicas-to-write", "repl-diskless-sync", "repl-diskless-load")

T = TypeVar("T")
# What a server's silence or refusal raises.
FAILURES = (RedisError, OSError)


class Server:
    """One server and a connection to it."""

    def __init__(
        self, address: BrokerAddress, host: str, port: int, *, is_sentinel: bool = False, log_in: bool = True
    ) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        tls = {"ssl": True, "ssl_ca_certs": address.tls_ca or None} if address.tls else {}
        if address.tls and address.tls_cert:
            tls |= {"ssl_certfile": address.tls_cert, "ssl_keyfile": address.tls_key}
        self._client = Redis(
            host=host,
            port=port,
            db=0 if is_sentinel else address.db,
            username=address.username or None if log_in else None,
            password=address.password or None if log_in else None,
            socket_timeout=ANSWER_S_MAX,
            socket_connect_timeout=ANSWER_S_MAX,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **tls,  # type: ignore[arg-type]
        )
        # Replies as they come: what they mean is decided here.
        self._client.response_callbacks.clear()

    async def ask(self, *words: bytes | int | str) -> Any:
        """One command; raises one of FAILURES."""
        return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Hang up."""
        await self._client.aclose()


class Deployment:
    """The primaries of a Redis, and which of them serves a slot."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.servers: list[Server] = []
        # First and last slot, the number of the server in `servers`, its replicas.
        self.ranges: list[tuple[int, int, int, int]] = []

    def server_of(self, slot: int) -> Server | None:
        """None: nobody serves it."""
        if self.kind != "cluster":
            return self.servers[0]
        return next((self.servers[number] for first, last, number, _ in self.ranges if first <= slot <= last), None)

    def replicas_of(self, slot: int) -> int | None:
        """How many follow the slot's primary; None: nobody serves it."""
        return next((replicas for first, last, _, replicas in self.ranges if first <= slot <= last), None)


class NoWayInError(Exception):
    """Redis cannot be reached at all; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.says)
        self.finding = finding


class Doctor:
    """One examination of one deployment."""

    def __init__(self, address: BrokerAddress, keys: Keys, wants: Wants) -> None:
        self._address = address
        self._keys = keys
        self._wants = wants

    async def examine(self, *, mend: bool = False) -> list[Finding]:
        """Every finding, in the order of the checks; with `mend`, what is found after mending."""
        try:
            async with self._reach() as (deployment, found):
                done = await self._mend(deployment) if mend else []
                return [*found, *await self._look(deployment), *done]
        except NoWayInError as failure:
            return [failure.finding]

    async def find_disks(self) -> list[Finding]:
        """The problems with `broker.persistence = "forbidden"`, at all primaries and the replicas that can be seen."""
        findings: list[Finding] = []
        try:
            async with self._reach() as (deployment, _):
                for server in deployment.servers:
                    try:
                        facts = await node_facts(server)
                    except FAILURES as failure:
                        findings.append(no_answer(server, failure))
                        continue
                    found = check_no_disk(facts, is_replicated=deployment.kind != "single")
                    findings += [_at(server, found), *await self._replicas_disks(facts)]
        except NoWayInError as failure:
            return [failure.finding]
        return [finding for finding in findings if finding.level == "problem"]

    # Ways in

    @asynccontextmanager
    async def _reach(self) -> AsyncIterator[tuple[Deployment, list[Finding]]]:
        """Connections to all primaries; raises NoWayInError."""
        async with AsyncExitStack() as opened:

            def server(host: str, port: int, **how: bool) -> Server:
                made = Server(self._address, host, port, **how)
                opened.push_async_callback(made.close)
                return made

            deployment, findings = Deployment(self._address.kind), []
            if self._address.kind == "sentinel":
                findings.append(await self._ask_sentinels(deployment, server))
            elif self._address.kind == "cluster":
                findings.append(await self._ask_cluster(deployment, server))
            else:
                deployment.servers.append(server(*self._address.hosts[0]))
            yield deployment, findings

    async def _ask_sentinels(self, deployment: Deployment, make: Callable[..., Server]) -> Finding:
        """Find the primary."""
        answering, reason, facts = 0, "", dict[bytes, bytes]()
        for host, port in self._address.hosts:
            sentinel = make(host, port, is_sentinel=True)
            command = ("SENTINEL", "MASTER", self._address.service)
            try:
                try:
                    flat = await sentinel.ask(*command)
                except AuthenticationError:  # Sentinels often have no password where the servers have one
                    flat = await make(host, port, is_sentinel=True, log_in=False).ask(*command)
                found = dict(zip(flat[::2], flat[1::2], strict=True))
                place = found[b"ip"].decode(), int(found[b"port"])
            except FAILURES as failure:
                reason = f"{sentinel.name}: {reason_of(failure)}"
                continue
            except (KeyError, TypeError, ValueError):
                reason = f"{sentinel.name}: no Sentinel's answer"
                continue
            answering += 1
            if not facts:
                facts = found
                deployment.servers.append(make(*place))
        if not facts:
            do = "name Sentinels that run, and the service as they know it: redis+sentinel://host:26379/service"
            raise NoWayInError(Finding("sentinels", "problem", f"no Sentinel names the primary ({reason})", do))
        quorum, others = (int(facts.get(name, b"0")) for name in (b"quorum", b"num-other-sentinels"))
        return check_sentinels(answering, len(self._address.hosts), quorum, others + 1)

    async def _ask_cluster(self, deployment: Deployment, make: Callable[..., Server]) -> Finding:
        """Find the primaries, from the first node that tells."""
        reason = ""
        for host, port in self._address.hosts:
            node = make(host, port)
            try:
                state = parse_info(await node.ask("CLUSTER", "INFO"))
                ranges = await node.ask("CLUSTER", "SLOTS")
            except ResponseError as failure:
                if "cluster support disabled" not in str(failure):
                    reason = f"{node.name}: {reason_of(failure)}"
                    continue
                says, do = f"{node.name} is no node of a Cluster", "write redis:// in place of redis+cluster://"
                raise NoWayInError(Finding("cluster", "problem", says, do)) from None
            except FAILURES as failure:
                reason = f"{node.name}: {reason_of(failure)}"
                continue
            self._note_ranges(deployment, ranges, host, make)
            return check_cluster(state, [deployment.replicas_of(shard.slot) for shard in self._keys.shards])
        do = "see that the nodes run and can be reached from here, and that user and password are right"
        raise NoWayInError(Finding("cluster", "problem", f"no node answers ({reason})", do))

    def _note_ranges(
        self, deployment: Deployment, ranges: Sequence[Any], asked_host: str, make: Callable[..., Server]
    ) -> None:
        numbers: dict[tuple[str, int], int] = {}
        for first, last, primary, *replicas in ranges:
            # A node that does not know its own address leaves it empty: then it is the one that was asked.
            place = (primary[0].decode() if primary[0] else asked_host, primary[1])
            if place not in numbers and len(numbers) < PRIMARIES_MAX:
                numbers[place] = len(deployment.servers)
                deployment.servers.append(make(*place))
            if place in numbers:
                deployment.ranges.append((first, last, numbers[place], len(replicas)))

    # Looking

    async def _look(self, deployment: Deployment) -> list[Finding]:
        findings: list[Finding] = []
        answering, looked_at = [], len(deployment.servers)
        for server in deployment.servers:
            try:
                facts = await node_facts(server)
            except FAILURES as failure:
                findings.append(no_answer(server, failure))
                continue
            answering.append(server)
            found = node_findings(facts, self._wants, is_replicated=deployment.kind != "single")
            if deployment.kind != "cluster" and facts.info.get("cluster_enabled") == "1":
                says, do = "this is a node of a Cluster", "write redis+cluster:// in place of redis://"
                found.append(Finding("cluster", "problem", says, do))
            findings += [_at(server, finding) for finding in found]
            if self._wants.persistence == "forbidden":
                of_replicas = await self._replicas_disks(facts)
                looked_at += len(of_replicas)
                findings += of_replicas
        findings = merged(findings, looked_at)
        if len(answering) < len(deployment.servers):
            return findings  # half of a queue would be judged wrongly
        try:
            findings += await self._look_at_queue(deployment)
        except FAILURES as failure:
            says = f"the queue cannot be looked at: {reason_of(failure)}"
            do = "see the other findings; then run this again"
            if isinstance(failure, NoPermissionError):
                do = "let this user run EVAL, SCAN, HGETALL and the stream commands on the keys of Carpool's namespace"
            findings.append(Finding("queue", "problem", says, do))
        return findings

    async def _replicas_disks(self, primary: NodeFacts) -> list[Finding]:
        """Whether the replicas that a primary knows write to a disk; one that cannot be reached is a warning."""
        findings = []
        for host, port in replicas_of(primary.info):
            server = Server(self._address, host, port)
            try:
                found = check_no_disk(await node_facts(server), is_replicated=True)
            except FAILURES as failure:
                says = f"this replica cannot be asked whether it writes to a disk: {reason_of(failure)}"
                do = "see that it runs, and that this machine can reach it under the address that its primary knows"
                found = Finding("persistence", "warning", says, do)
            finally:
                await server.close()
            findings.append(_at(server, found))
        return findings

    async def _look_at_queue(self, deployment: Deployment) -> list[Finding]:
        """What lies in the queue, and who is there to take it."""
        view = await self._fleet(deployment)
        shards = [await self._audit(deployment, shard) for shard in self._keys.shards]
        found = await self._scan(deployment)
        # A stream that came after its shard was looked at may have entries by now: see once more.
        listed = {stream.name for shard in shards for stream in shard.streams}
        if any(name not in listed for name in found.queues):
            shards = [await self._audit(deployment, shard) for shard in self._keys.shards]
            listed |= {stream.name for shard in shards for stream in shard.streams}
        unlisted = [name for name, length in found.queues.items() if length and name not in listed]
        findings = [
            check_fleet(view),
            check_waiting(shards, view),
            check_counts(shards),
            check_groups(shards, view, self._wants.lease_ms),
            check_unlisted(unlisted),
            check_reply_streams(found.replies, view),
            check_letters(shards),
        ]
        if not found.is_complete:
            says = "there are too many keys to look at all of them: streams may have been missed"
            findings.append(Finding("keys", "warning", says, "give Carpool a Redis of its own"))
        return findings

    async def _fleet(self, deployment: Deployment) -> FleetView:
        keys = self._keys
        server = _served(deployment, keys.fleet_slot)
        seconds, micros = await server.ask("TIME")
        members = [await server.ask("HGETALL", key) for key in (keys.gateways, keys.batchers)]
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return read_view([now_ms, *members], seen_at=0.0, stale_s=STALE_S)

    async def _audit(self, deployment: Deployment, shard: Shard) -> ShardFacts:
        server = _served(deployment, shard.slot)
        reply = await server.ask("EVAL", AUDIT.source, 1, shard.counts)
        return parse_audit(shard.number, shard.stream(b""), reply)

    async def _scan(self, deployment: Deployment) -> "Found":
        """The streams in Carpool's namespace, within bounds."""
        found = Found()
        give_up_at = time.monotonic() + SCAN_S_MAX
        for server in deployment.servers:
            cursor, looked = b"0", 0
            while True:
                cursor, names = await server.ask(
                    *("SCAN", cursor, "MATCH", _escaped(self._keys.namespace) + b":*"),
                    *("COUNT", KEYS_AT_ONCE, "TYPE", "stream"),
                )
                for name in names:
                    await self._note_stream(server, name, found)
                looked += KEYS_AT_ONCE
                if cursor == b"0":
                    break
                full = len(found.queues) + len(found.replies) > STREAMS_FOUND_MAX
                if full or looked >= KEYS_LOOKED_AT_MAX or time.monotonic() > give_up_at:
                    found.is_complete = False
                    break
        return found

    async def _note_stream(self, server: Server, name: bytes, found: "Found") -> None:
        replies = self._keys.namespace + b":replies:{"
        if name.startswith(replies) and name.endswith(b"}"):
            ttl_s = await server.ask("TTL", name)
            if ttl_s != -2:  # else it is gone by now
                gateway = name[len(replies) : -1].decode(errors="replace")
                found.replies.append(ReplyStream(name, gateway, ttl_s if ttl_s >= 0 else None))
        elif any(name.startswith(shard.stream(b"")) for shard in self._keys.shards):
            found.queues[name.decode(errors="replace")] = await server.ask("XLEN", name)

    # Mending

    async def _mend(self, deployment: Deployment) -> list[Finding]:
        """Remove orphaned reply streams, count again; each failure is a finding."""
        findings = []
        for what, work in (("reply streams", self._remove_orphans), ("counts", self._count_again)):
            try:
                findings.append(Finding("mended", "ok", await work(deployment)))
            except FAILURES as failure:
                do = "see the other findings; then run this again"
                findings.append(Finding("mended", "problem", f"{what} were not mended: {reason_of(failure)}", do))
        return findings

    async def _remove_orphans(self, deployment: Deployment) -> str:
        suspects = orphans((await self._scan(deployment)).replies, await self._fleet(deployment))
        if suspects:
            await asyncio.sleep(SECOND_LOOK_S)
            suspects = orphans(suspects, await self._fleet(deployment))
        for stream in suspects:
            await _served(deployment, self._keys.slot_of(stream.key)).ask("UNLINK", stream.key)
        return f"reply streams removed, of gateways that are gone: {len(suspects)}"

    async def _count_again(self, deployment: Deployment) -> str:
        for shard in self._keys.shards:
            server, cursor = _served(deployment, shard.slot), 0
            for _ in range(PARTS_OF_A_SWEEP_MAX):
                letters = (NO_BOUND, NO_BOUND, 0, NEVER_MS, 0)  # none is dropped; all are counted
                arguments = (cursor, b"", NEVER_MS, *letters)
                cursor, *_ = await server.ask("EVAL", SWEEP.source, 1, shard.counts, *arguments)
                if not cursor:
                    break
        return f"shards counted again: {len(self._keys.shards)}"


class Found:
    """The streams that a scan found."""

    def __init__(self) -> None:
        # Name and length of those that hold requests.
        self.queues: dict[str, int] = {}
        self.replies: list[ReplyStream] = []
        self.is_complete = True


async def node_facts(server: Server) -> NodeFacts:
    """Ask one server what the checks need; raises one of FAILURES."""
    await server.ask("PING")  # the first one connects
    latencies = [(await _timed(server.ask("PING")))[1] for _ in range(PINGS)]
    info = parse_info(await server.ask("INFO"))
    (seconds, micros), took_s = await _timed(server.ask("TIME"))
    ahead_s = int(seconds) + int(micros) / 1e6 - (time.time() - took_s / 2)
    config = await _config(server)
    return NodeFacts(server.name, info, config, sorted(latencies)[PINGS // 2] * 1000, ahead_s)


def no_answer(server: Server, failure: Exception) -> Finding:
    """What it means that a server cannot be asked."""
    do = "see that it runs and that this machine can reach it"
    if isinstance(failure, AuthenticationError | AuthorizationError):
        do = "give the right user and password in the URL, or broker.password_file"
    elif isinstance(failure, NoPermissionError):
        do = "let this user run PING, INFO, TIME and CONFIG GET"
    return Finding("connection", "problem", reason_of(failure), do, (server.name,))


def reason_of(failure: Exception) -> str:
    """A failure in one short line that can be printed."""
    if isinstance(failure, RedisTimeoutError | TimeoutError):
        return f"no answer within {ANSWER_S_MAX:g} s"
    text = " ".join(str(failure).split())
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shown[:REASON_CHARS_MAX] or type(failure).__name__


def _at(server: Server, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, where=(server.name,))


def _served(deployment: Deployment, slot: int) -> Server:
    server = deployment.server_of(slot)
    if server is None:
        raise ResponseError(f"nobody serves slot {slot}")
    return server


async def _config(server: Server) -> dict[str, str] | None:
    """The settings that the checks need; None where they may not be read, as at some hosters."""
    found: dict[str, str] = {}
    for name in CONFIG_NAMES:
        try:
            flat = await server.ask("CONFIG", "GET", name)
        except ResponseError:
            return None
        found |= {key.decode(): value.decode(errors="replace") for key, value in _pairs(flat)}
    return found


async def _timed(work: Awaitable[T]) -> tuple[T, float]:
    started = time.monotonic()
    return await work, time.monotonic() - started


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _escaped(name: bytes) -> bytes:
    """A name in a pattern that stands for itself alone."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\" else bytes([c]) for c in name)
