"""Every server of a Redis by itself, for checks that look at each one: what it tells, and what is wrong with that.

One of the checks goes on while a process runs: whether Redis writes to a disk although `broker.persistence` forbids it.
An operator may turn that on at any time.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from carpool.broker.redis.client.address import BrokerAddress, HostPort
from carpool.broker.redis.client.topology import SlotRange, connection_options, login_of, parse_slots
from carpool.broker.redis.keys import Keys
from carpool.core.finding import Finding

logger = logging.getLogger("carpool.broker")

ANSWER_S_MAX = 5.0
PINGS = 5
SENTINELS_MIN = 3
REASON_CHARS_MAX = 200
CONFIG_NAMES = ("appendfsync", "save", "min-replicas-to-write", "repl-diskless-sync", "repl-diskless-load")

T = TypeVar("T")
# What a server's silence or refusal raises.
FAILURES = (RedisError, OSError)


class NodeFacts(msgspec.Struct, frozen=True):
    """What one server told."""

    name: str
    info: Mapping[str, str]
    # None where CONFIG may not be read, as at some hosters.
    config: Mapping[str, str] | None
    latency_ms: float
    # Its clock minus this machine's.
    clock_ahead_s: float


class RedisServer:
    """One server and a connection to it."""

    def __init__(
        self, address: BrokerAddress, host: str, port: int, *, is_sentinel: bool = False, log_in: bool = True
    ) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = connection_options(address, ANSWER_S_MAX) | (login_of(address) if log_in else {})
        self._client = Redis(host=host, port=port, db=0 if is_sentinel else address.db, **options)
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

    def __init__(self, kind: str, ranges: Sequence[SlotRange], make: Callable[..., RedisServer]) -> None:
        self.kind = kind
        self._ranges = ranges
        self._by_place = {at: make(*at) for at in dict.fromkeys(part.at for part in ranges)}
        self.servers = list(self._by_place.values())

    def server_of(self, slot: int) -> RedisServer:
        """Raises ResponseError if no server serves it."""
        part = range_of(self._ranges, slot)
        if part is None:
            raise ResponseError(f"nobody serves slot {slot}")
        return self._by_place[part.at]


def range_of(ranges: Sequence[SlotRange], slot: int) -> SlotRange | None:
    """Where a slot lies."""
    return next((part for part in ranges if part.first <= slot <= part.last), None)


class NoWayInError(Exception):
    """Redis cannot be reached at all; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.says)
        self.finding = finding


class Inspection:
    """A way to every primary of a deployment, for checks that look at each of them."""

    def __init__(self, address: BrokerAddress, keys: Keys) -> None:
        self.address = address
        self._keys = keys

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[tuple[Deployment, list[Finding]]]:
        """Connections to all primaries; raises NoWayInError."""
        async with AsyncExitStack() as opened:

            def server(host: str, port: int, **how: bool) -> RedisServer:
                made = RedisServer(self.address, host, port, **how)
                opened.push_async_callback(made.close)
                return made

            kind, place, findings = self.address.kind, self.address.hosts[0], list[Finding]()
            if kind == "cluster":
                ranges, finding = await self._ask_cluster(server)
                findings.append(finding)
            else:
                if kind == "sentinel":
                    place, finding = await self._ask_sentinels(server)
                    findings.append(finding)
                ranges = [SlotRange(0, SLOTS - 1, place)]
            yield Deployment(kind, ranges, server), findings

    async def _ask_sentinels(self, make: Callable[..., RedisServer]) -> tuple[HostPort, Finding]:
        """Find the primary."""
        answers: list[tuple[dict[bytes, bytes], HostPort]] = []
        reason = ""
        for host, port in self.address.hosts:
            sentinel = make(host, port, is_sentinel=True)
            command = ("SENTINEL", "MASTER", self.address.service)
            try:
                try:
                    flat = await sentinel.ask(*command)
                except AuthenticationError:  # Sentinels often have no password where the servers have one
                    flat = await make(host, port, is_sentinel=True, log_in=False).ask(*command)
                facts = dict(_pairs(flat))
                answers.append((facts, (facts[b"ip"].decode(), int(facts[b"port"]))))
            except FAILURES as failure:
                reason = f"{sentinel.name}: {reason_of(failure)}"
            except (KeyError, TypeError, ValueError):
                reason = f"{sentinel.name}: no Sentinel's answer"
        if not answers:
            do = "name Sentinels that run, and the service as they know it: redis+sentinel://host:26379/service"
            raise NoWayInError(Finding("sentinels", "problem", f"no Sentinel names the primary ({reason})", do))
        facts, primary = answers[0]
        quorum, others = (int(facts.get(name, b"0")) for name in (b"quorum", b"num-other-sentinels"))
        return primary, check_sentinels(len(answers), len(self.address.hosts), quorum, others + 1)

    async def _ask_cluster(self, make: Callable[..., RedisServer]) -> tuple[list[SlotRange], Finding]:
        """Find the primaries, from the first node that tells."""
        reason = ""
        for host, port in self.address.hosts:
            node = make(host, port)
            try:
                state = parse_info(await node.ask("CLUSTER", "INFO"))
                ranges = parse_slots(await node.ask("CLUSTER", "SLOTS"), host)
            except FAILURES as failure:
                if "cluster support disabled" in str(failure):
                    says, do = f"{node.name} is no node of a Cluster", "write redis:// in place of redis+cluster://"
                    raise NoWayInError(Finding("cluster", "problem", says, do)) from None
                reason = f"{node.name}: {reason_of(failure)}"
            except (ValueError, TypeError, IndexError):
                reason = f"{node.name}: no Cluster's answer"
            else:
                of_shards = [range_of(ranges, shard.slot) for shard in self._keys.shards]
                return ranges, check_cluster(state, [None if part is None else part.replicas for part in of_shards])
        do = "see that the nodes run and can be reached from here, and that user and password are right"
        raise NoWayInError(Finding("cluster", "problem", f"no node answers ({reason})", do))


def check_cluster(state: Mapping[str, str], replicas_of_shards: Sequence[int | None]) -> Finding:
    """Whether every shard's slot is served, and by more than one server."""
    if state.get("cluster_state") != "ok":
        do = "look at CLUSTER NODES; `redis-cli --cluster fix` repairs what lost its owner"
        return Finding("cluster", "problem", f"cluster_state is {state.get('cluster_state', 'not told')}", do)
    unserved = [str(number) for number, replicas in enumerate(replicas_of_shards) if replicas is None]
    if unserved:
        do = "assign their slots (`redis-cli --cluster fix`)"
        return Finding("cluster", "problem", f"nobody serves shards {', '.join(unserved)}", do)
    single = [str(number) for number, replicas in enumerate(replicas_of_shards) if replicas == 0]
    if single:
        says = f"ok, but shards {', '.join(single)} are on primaries without a replica: they stop when these end"
        return Finding("cluster", "warning", says, "add replicas (`redis-cli --cluster add-node … --cluster-slave`)")
    return Finding("cluster", "ok", f"ok; each of {len(replicas_of_shards)} shards is served and has a replica")


def check_sentinels(answering: int, named: int, quorum: int, known: int) -> Finding:
    """Whether the Sentinels can agree on a failover."""
    says = f"{answering} of the {named} named answer; {known} watch the primary, {quorum} must agree"
    if known < max(quorum, SENTINELS_MIN):
        return Finding(
            "sentinels", "warning", f"{says}: the end of one may keep a failover from happening", "run three or more"
        )
    if answering < named:
        return Finding("sentinels", "warning", says, "start those that are missing, or name others in the URL")
    return Finding("sentinels", "ok", says)


async def node_facts(server: RedisServer) -> NodeFacts:
    """Ask one server what the checks need; raises one of FAILURES."""
    await server.ask("PING")  # the first one connects
    latencies = [(await _timed(server.ask("PING")))[1] for _ in range(PINGS)]
    info = parse_info(await server.ask("INFO"))
    (seconds, micros), took_s = await _timed(server.ask("TIME"))
    ahead_s = int(seconds) + int(micros) / 1e6 - (time.time() - took_s / 2)
    config = await _config(server)
    return NodeFacts(server.name, info, config, sorted(latencies)[PINGS // 2] * 1000, ahead_s)


def no_answer(server: RedisServer, failure: Exception) -> Finding:
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


def at(server: RedisServer, finding: Finding) -> Finding:
    """A finding, with the server it was found at."""
    return msgspec.structs.replace(finding, where=(server.name,))


async def _config(server: RedisServer) -> dict[str, str] | None:
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


def parse_info(text: bytes) -> dict[str, str]:
    """INFO and CLUSTER INFO as names and values."""
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


# How often it is looked whether Redis writes to a disk, and how many findings are told.
INTERVAL_S = 5.0
TOLD_MAX = 3


class PersistenceWatch:
    """Says, and logs, what writes to a disk; health and metrics show `found`."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        # What writes to a disk; empty if nothing does.
        self.found = ""

    async def faults(self) -> str:
        """Why this Redis must not be used; empty if it may."""
        return sentence(await find_disks(self._inspection))

    async def look(self) -> None:
        """Look again: every INTERVAL_S."""
        findings = await find_disks(self._inspection)
        disks = [finding for finding in findings if finding.check == "persistence"]
        if not disks and findings:
            return  # it does not answer: what was known stays
        if (found := sentence(disks)) != self.found:
            self.found = found
            if found:
                logger.error("payloads may reach a disk: %s", found)
            else:
                logger.warning("Redis writes to no disk any more")


def sentence(findings: Sequence[Finding]) -> str:
    """Findings in one line."""
    told = [f"{', '.join(each.where) or 'Redis'}: {each.says}; {each.do}" for each in findings[:TOLD_MAX]]
    return " | ".join(told)


async def find_disks(inspection: Inspection) -> list[Finding]:
    """The problems with `broker.persistence = "forbidden"`, at all primaries and the replicas that can be seen."""
    findings: list[Finding] = []
    try:
        async with inspection.reach() as (deployment, _):
            for server in deployment.servers:
                try:
                    facts = await node_facts(server)
                except FAILURES as failure:
                    findings.append(no_answer(server, failure))
                    continue
                found = check_no_disk(facts, is_replicated=deployment.kind != "single")
                findings += [at(server, found), *await replicas_disks(inspection.address, facts)]
    except NoWayInError as failure:
        return [failure.finding]
    return [finding for finding in findings if finding.level == "problem"]


async def replicas_disks(address: BrokerAddress, primary: NodeFacts) -> list[Finding]:
    """Whether the replicas that a primary knows write to a disk; one that cannot be reached is a warning."""
    findings = []
    for host, port in replicas_of(primary.info):
        server = RedisServer(address, host, port)
        try:
            found = check_no_disk(await node_facts(server), is_replicated=True)
        except FAILURES as failure:
            says = f"this replica cannot be asked whether it writes to a disk: {reason_of(failure)}"
            do = "see that it runs, and that this machine can reach it under the address that its primary knows"
            found = Finding("persistence", "warning", says, do)
        finally:
            await server.close()
        findings.append(at(server, found))
    return findings


def check_no_disk(node: NodeFacts, *, is_replicated: bool) -> Finding:
    """Whether a server keeps its data off its disk, where `broker.persistence` is "forbidden"."""
    config = node.config
    if config is None:
        says = (
            'broker.persistence is "forbidden", and CONFIG GET is refused here: nobody can tell what reaches the disk'
        )
        do = 'let this user run CONFIG GET (ACL: +config|get); else only broker.persistence = "allowed" is true'
        return Finding("persistence", "problem", says, do)
    # What writes, and the setting of Redis that ends it.
    disks: list[tuple[str, str]] = []
    if node.info.get("aof_enabled") != "0":
        disks.append(("the AOF", "appendonly no"))
    if config.get("save"):
        disks.append((f"snapshots (save {config['save']})", 'save ""'))
    has_replicas = is_replicated or node.info.get("role") != "master" or bool(replicas_of(node.info))
    if has_replicas and config.get("repl-diskless-sync") != "yes":
        disks.append(("a file for each replica that attaches", "repl-diskless-sync yes"))
    if has_replicas and config.get("repl-diskless-load") in ("disabled", "on-empty-db"):
        disks.append(("a file when it attaches as a replica", "repl-diskless-load swapdb"))
    if not disks:
        return Finding(
            "persistence", "ok", 'nothing is written to a disk, as broker.persistence = "forbidden" wants it'
        )
    says = f'broker.persistence is "forbidden", and this server writes {" and ".join(what for what, _ in disks)}'
    do = f"CONFIG SET {', CONFIG SET '.join(setting for _, setting in disks)}, and the same in redis.conf"
    return Finding("persistence", "problem", says, f"{do}; remove the files that there are")


def replicas_of(info: Mapping[str, str]) -> list[tuple[str, int]]:
    """Host and port of the replicas that a server knows."""
    facts = [dict(pair.split("=", 1) for pair in text.split(",")) for name, text in info.items() if is_replica(name)]
    return [(fact["ip"], int(fact["port"])) for fact in facts]


def is_replica(name: str) -> bool:
    """Whether a name of INFO tells of a replica."""
    return name.startswith("slave") and name.removeprefix("slave").isdigit()
