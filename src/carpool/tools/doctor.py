"""The doctor: looks at a Redis that gateways and batchers use, and tells what is wrong with it, and what to change.

1. It asks every primary by itself, so that a server that hangs or refuses is named. It changes nothing: batchers count
   again, and what gateways leave behind expires.
2. A problem loses or refuses requests, or soon will; a warning is a choice that the operator should know of.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from redis.exceptions import NoPermissionError

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.fleet.memory import SHARE_MAX
from carpool.broker.redis.fleet.servers import (
    FAILURES,
    Deployment,
    Inspection,
    NodeFacts,
    NoWayInError,
    at,
    check_no_disk,
    is_replica,
    no_answer,
    node_facts,
    reason_of,
    replicas_disks,
)
from carpool.broker.redis.fleet.view import FleetView, read_view
from carpool.broker.redis.keys import GROUP, Keys, Shard
from carpool.broker.redis.scripts import AUDIT
from carpool.broker.redis.types import LEASE_MS
from carpool.core.finding import Finding, Level, merged
from carpool.settings.schema import BrokerSettings

# A process whose heartbeat is older than this is gone.
STALE_S = 1.5
VERSION_MIN = (7, 0)
LATENCY_MS_MAX = 10.0
CLOCK_S_MAX = 1.0
MEMORY_SHARE_HIGH = 0.6
NAMED_MAX = 3
# What a crash loses, by `appendfsync`.
FSYNC: dict[str, tuple[Level, str, str]] = {
    "": ("warning", "AOF; how often it is synced cannot be read", "see that appendfsync is everysec or always"),
    "always": ("ok", "AOF, synced always: a crash loses nothing that was answered", ""),
    "everysec": (
        "ok",
        "AOF, synced every second: a power cut may lose about a second of accepted tasks, the end of the process alone "
        "nothing",
        "",
    ),
    "no": (
        "warning",
        "AOF without sync: a power cut loses what the system had not written",
        "CONFIG SET appendfsync everysec (or always), and the same in redis.conf",
    ),
}
# After the lease, a batcher claims at its next look.
CLAIM_SPARE_MS = 3000


class StreamFacts(msgspec.Struct, frozen=True):
    """One queue stream."""

    name: str
    model: str
    length: int
    # None: it has no group of batchers.
    pending: int | None
    # Name, pending entries, ms since it was heard of.
    consumers: tuple[tuple[str, int, int], ...] = ()

    @property
    def unread(self) -> int:
        """Entries that no batcher has taken."""
        return max(self.length - (self.pending or 0), 0)


class ShardFacts(msgspec.Struct, frozen=True):
    """One shard at one moment."""

    number: int
    held_counted: int
    unread_counted: int
    letter_bytes_counted: int
    letter_bytes: int
    letters: int
    # Bytes of tasks without a result, and of results, as counted.
    input_bytes: int
    result_bytes: int
    streams: tuple[StreamFacts, ...]

    @property
    def held(self) -> int:
        """Entries without an outcome."""
        return sum(stream.length for stream in self.streams)

    @property
    def unread(self) -> int:
        """Entries that no batcher has taken."""
        return sum(stream.unread for stream in self.streams)


class Doctor:
    """One examination of one deployment."""

    def __init__(self, address: BrokerAddress, keys: Keys, wants: BrokerSettings) -> None:
        self._inspection = Inspection(address, keys)
        self._keys = keys
        self._wants = wants

    async def examine(self) -> list[Finding]:
        """Every finding, in the order of the checks."""
        try:
            async with self._inspection.reach() as (deployment, found):
                return [*found, *await self._look(deployment)]
        except NoWayInError as failure:
            return [failure.finding]

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
            findings += [at(server, finding) for finding in found]
            if self._wants.persistence == "forbidden":
                of_replicas = await replicas_disks(self._inspection.address, facts)
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
                do = "let this user run EVAL, HGETALL and the stream commands on the keys of Carpool's namespace"
            findings.append(Finding("queue", "problem", says, do))
        return findings

    async def _look_at_queue(self, deployment: Deployment) -> list[Finding]:
        """What lies in the queue, and whether batchers are there to take it."""
        view = await self._fleet(deployment)
        shards = [await self._audit(deployment, shard) for shard in self._keys.shards]
        return [
            check_fleet(view),
            check_waiting(shards, view),
            check_counts(shards),
            check_groups(shards, view),
            check_letters(shards),
        ]

    async def _fleet(self, deployment: Deployment) -> FleetView:
        keys = self._keys
        server = deployment.server_of(keys.fleet_slot)
        seconds, micros = await server.ask("TIME")
        members = [await server.ask("HGETALL", key) for key in (keys.gateways, keys.batchers)]
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return read_view([now_ms, *members], seen_at=0.0, stale_s=STALE_S)

    async def _audit(self, deployment: Deployment, shard: Shard) -> ShardFacts:
        reply = await deployment.server_of(shard.slot).ask("EVAL", AUDIT.source, 1, shard.counts)
        return parse_audit(shard.number, shard.stream(b""), reply)


def node_findings(node: NodeFacts, wants: BrokerSettings, *, is_replicated: bool) -> list[Finding]:
    """All checks of one server."""
    return [
        check_answers(node),
        check_version(node.info),
        check_role(node.info),
        check_no_disk(node, is_replicated=is_replicated)
        if wants.persistence == "forbidden"
        else check_persistence(node.info, node.config),
        check_policy(node.info),
        check_memory(node.info),
        check_replicas(node.info, node.config, wants.replicas, is_replicated=is_replicated),
        check_clock(node.clock_ahead_s),
    ]


def check_answers(node: NodeFacts) -> Finding:
    """How long a round trip takes."""
    says = f"answers in {node.latency_ms:.1f} ms"
    if node.latency_ms > LATENCY_MS_MAX:
        do = "put Redis nearer, or look for what keeps it busy (SLOWLOG GET); every request pays this several times"
        return Finding("connection", "warning", says, do)
    return Finding("connection", "ok", says)


def check_version(info: Mapping[str, str]) -> Finding:
    """Sharded pub/sub came with 7.0."""
    text = info.get("redis_version", "")
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return Finding("version", "problem", "the server does not tell its version", "use Redis 7.0 or newer")
    if (int(parts[0]), int(parts[1])) < VERSION_MIN:
        return Finding("version", "problem", f"{text} has no sharded pub/sub", "use Redis 7.0 or newer")
    return Finding("version", "ok", text)


def check_role(info: Mapping[str, str]) -> Finding:
    """A replica takes no writes."""
    if info.get("role") == "master":
        return Finding("role", "ok", "a primary")
    do = "name the primary, or the Sentinels with redis+sentinel://"
    return Finding("role", "problem", "a replica: it takes no writes", do)


def check_persistence(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    """What a crash of the server loses."""
    failed = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(name, "ok") != "ok"]
    if failed:
        do = "look at the server's log and its disk; Redis refuses writes until this works again"
        return Finding("persistence", "problem", f"the last write to disk failed ({', '.join(failed)})", do)
    if info.get("aof_enabled") == "1":
        return Finding("persistence", *FSYNC.get((config or {}).get("appendfsync", ""), FSYNC[""]))
    if config is not None and not config.get("save"):
        do = "CONFIG SET appendonly yes, and the same in redis.conf; leave it if no payload may be on disk"
        return Finding("persistence", "warning", "none: when Redis ends, every accepted task and result is lost", do)
    do = "CONFIG SET appendonly yes, and the same in redis.conf"
    says = "snapshots at most: when Redis ends, the tasks since the last snapshot are lost"
    return Finding("persistence", "warning", says, do)


def check_policy(info: Mapping[str, str]) -> Finding:
    """Only without eviction does Redis keep what it accepted."""
    policy = info.get("maxmemory_policy", "")
    if policy == "noeviction":
        return Finding("eviction", "ok", "noeviction: a full Redis refuses, and forgets nothing")
    says = f"maxmemory-policy is {policy or 'not told'}: a full Redis would delete queues or results"
    do = "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
    return Finding("eviction", "problem", says, do)


def check_memory(info: Mapping[str, str]) -> Finding:
    """How much of its memory is in use."""
    used, limit = _number(info, "used_memory"), _number(info, "maxmemory")
    if not limit:
        do = "CONFIG SET maxmemory to what the machine can spare, and the same in redis.conf"
        return Finding("memory", "warning", f"{_size(used)} in use, and nothing limits it", do)
    share = used / limit
    says = f"{_size(used)} of {_size(limit)} in use ({share:.0%})"
    more = "give Redis more memory, add primaries, or let fewer requests wait (broker.waiting_max)"
    if share > SHARE_MAX:
        return Finding("memory", "problem", f"{says}: above {SHARE_MAX:.0%} requests get 429", more)
    if share > MEMORY_SHARE_HIGH:
        return Finding("memory", "warning", f"{says}: from {SHARE_MAX:.0%} on requests get 429", more)
    return Finding("memory", "ok", says)


def check_replicas(
    info: Mapping[str, str], config: Mapping[str, str] | None, wanted: int, *, is_replicated: bool
) -> Finding:
    """Whether there are the replicas that settings ask for, and what a failover loses."""
    online = sum(1 for name, value in info.items() if is_replica(name) and "state=online" in value.split(","))
    says = f"{online} online"
    add = "add a replica, or see why it is not in step (INFO replication)"
    minimum = _number(config or {}, "min-replicas-to-write")
    if wanted > online:
        says += f", and broker.replicas is {wanted}: no task is accepted"
        return Finding("replicas", "problem", says, f"{add}; or set broker.replicas = {online}")
    if minimum > online:
        says += f", and min-replicas-to-write is {minimum}: Redis refuses every write"
        return Finding("replicas", "problem", says, f"{add}; or lower min-replicas-to-write")
    if is_replicated and not online:
        return Finding("replicas", "warning", f"{says}: nobody takes over when this primary ends", add)
    if online and not wanted:
        says += "; broker.replicas is 0: a failover may lose what was accepted just before"
        return Finding("replicas", "warning", says, "set broker.replicas = 1, if that loss matters")
    if wanted:
        says += f"; a task is accepted once {wanted} of them have it"
    return Finding("replicas", "ok", says)


def check_clock(ahead_s: float) -> Finding:
    """Deadlines are on Redis's clock; times in logs and results are on those of several machines."""
    if abs(ahead_s) <= CLOCK_S_MAX:
        return Finding("clock", "ok", f"within {CLOCK_S_MAX:g} s of this machine's")
    direction = "ahead of" if ahead_s > 0 else "behind"
    says = f"{abs(ahead_s):.1f} s {direction} this machine's: no deadline suffers, but times in logs and results differ"
    return Finding("clock", "warning", says, "run NTP on both machines")


def check_fleet(view: FleetView) -> Finding:
    """Which gateways and batchers live."""
    gateways, batchers = view.live_gateways(), view.live_batchers()
    silent = len(view.gateways) + len(view.batchers) - len(gateways) - len(batchers)
    says = f"{_counted(len(gateways), 'gateway')} and {_counted(len(batchers), 'batcher')} live"
    if silent:
        says += f", {silent} fell silent in the last minute"
    if view.unreadable:
        do = "run the same version of Carpool everywhere"
        return Finding("fleet", "warning", f"{says}; {_counted(view.unreadable, 'heartbeat')} cannot be read", do)
    if not batchers:
        return Finding("fleet", "warning", says, "start `carpool batcher --broker … --upstream …`")
    if not gateways:
        return Finding("fleet", "warning", says, "start `carpool gateway --broker …`")
    return Finding("fleet", "ok", says)


def check_waiting(shards: Sequence[ShardFacts], view: FleetView) -> Finding:
    """Whether live batchers serve the models of waiting requests."""
    waiting: Counter[str] = Counter()
    for stream in _streams(shards):
        waiting[stream.model] += stream.length
    total = sum(waiting.values())
    served = set(view.models())
    stuck = {model: number for model, number in waiting.items() if number and model not in served}
    if stuck:
        named = _listed([f"{number} for {model}" for model, number in stuck.items()])
        return Finding(
            "waiting",
            "problem",
            f"requests that no live batcher serves: {named}",
            "start a batcher with an upstream for this model, or name the model as the batchers do",
        )
    unread = sum(shard.unread for shard in shards)
    inputs, results = sum(shard.input_bytes for shard in shards), sum(shard.result_bytes for shard in shards)
    says = f"{unread} waiting, {total - unread} taken and not finished"
    if inputs or results:
        says += f"; of tasks {_size(inputs)} without a result, {_size(results)} of results"
    return Finding("waiting", "ok", says)


def check_counts(shards: Sequence[ShardFacts]) -> Finding:
    """Whether the counts that limit the queue are true."""
    wrong = [
        s
        for s in shards
        if (s.held_counted, s.unread_counted, s.letter_bytes_counted) != (s.held, s.unread, s.letter_bytes)
    ]
    if not wrong:
        return Finding("counts", "ok", "the counts of every shard are true")
    named = _listed(
        [
            f"shard {s.number} says {s.held_counted}/{s.unread_counted}/{s.letter_bytes_counted}, "
            f"has {s.held}/{s.unread}/{s.letter_bytes}"
            for s in wrong
        ]
    )
    return Finding(
        "counts",
        "warning",
        f"wrong counts (held/unread/bytes of dead letters): {named}; the limits are off by that much",
        "a batcher counts again within ten minutes; see that one lives",
    )


def check_groups(shards: Sequence[ShardFacts], view: FleetView) -> Finding:
    """Whether every stream is read by the group of batchers, and no entry is stuck at a batcher that is gone."""
    group = GROUP.decode()
    without = [stream.name for stream in _streams(shards) if stream.pending is None and stream.length]
    if without:
        do = f"XGROUP CREATE <stream> {group} 0"
        return Finding("groups", "problem", f"streams that no batcher can read: {_listed(without)}", do)
    live = {member.name for member in view.live_batchers()}
    stuck = sum(
        pending
        for stream in _streams(shards)
        for name, pending, idle_ms in stream.consumers
        if name not in live and idle_ms > LEASE_MS + CLAIM_SPARE_MS
    )
    if stuck:
        says = f"{_counted(stuck, 'request')} of batchers that are gone, not claimed by others though the lease is over"
        if live:
            do = "see whether the batchers that live serve these models and have free slots"
            return Finding("groups", "warning", says, do)
        return Finding("groups", "problem", says, "start `carpool batcher --broker … --upstream …`: it claims them")
    return Finding("groups", "ok", "every stream is read, and nothing is left at batchers that are gone")


def check_letters(shards: Sequence[ShardFacts]) -> Finding:
    """Requests given up on."""
    total = sum(shard.letters for shard in shards)
    if total:
        says = f"{total} kept, {_size(sum(shard.letter_bytes for shard in shards))}"
        return Finding("dead letters", "warning", says, "look at them with `carpool dlq list`")
    return Finding("dead letters", "ok", "none")


def parse_audit(number: int, prefix: bytes, reply: list[Any]) -> ShardFacts:
    """The reply of the audit script."""
    streams = (
        StreamFacts(
            _text(prefix + field),
            _text(model),
            length,
            pending if pending >= 0 else None,
            tuple((_text(name), count, idle_ms) for name, count, idle_ms in consumers),
        )
        for field, model, length, pending, _, consumers in reply[7:]
    )
    facts: list[Any] = [number, *reply[:7], tuple(streams)]
    return ShardFacts(*facts)


def _streams(shards: Sequence[ShardFacts]) -> list[StreamFacts]:
    return [stream for shard in shards for stream in shard.streams]


def _number(values: Mapping[str, str], name: str) -> int:
    text = values.get(name, "0")
    return int(text) if text.isdigit() else 0


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: list[str]) -> str:
    """Some of the names, and how many more there are."""
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
