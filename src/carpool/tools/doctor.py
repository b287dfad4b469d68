"""The doctor: looks at a Redis that gateways and batchers use, and tells what is wrong with it.

It asks every primary by itself, so that a server that hangs or refuses is named. It changes nothing: batchers count
again, and what gateways leave behind expires.
"""

import time

from redis.exceptions import NoPermissionError

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.fleet.persistence import replicas_disks
from carpool.broker.redis.fleet.servers import (
    FAILURES,
    Deployment,
    Inspection,
    NoWayInError,
    RedisServer,
    at,
    no_answer,
    node_facts,
    reason_of,
)
from carpool.broker.redis.fleet.view import FleetView, read_view
from carpool.broker.redis.keys import Keys, Shard
from carpool.broker.redis.scripts import AUDIT
from carpool.core.finding import Finding
from carpool.tools.doctor_checks import (
    ReplyStream,
    ShardFacts,
    Wants,
    check_counts,
    check_fleet,
    check_groups,
    check_letters,
    check_reply_streams,
    check_unlisted,
    check_waiting,
    merged,
    node_findings,
    parse_audit,
)

# A process whose heartbeat is older than this is gone.
STALE_S = 1.5
KEYS_AT_ONCE = 1000
SCAN_S_MAX = 30.0


class Doctor:
    """One examination of one deployment."""

    def __init__(self, address: BrokerAddress, keys: Keys, wants: Wants) -> None:
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
                do = "let this user run EVAL, SCAN, HGETALL and the stream commands on the keys of Carpool's namespace"
            findings.append(Finding("queue", "problem", says, do))
        return findings

    async def _look_at_queue(self, deployment: Deployment) -> list[Finding]:
        """What lies in the queue, and whether batchers are there to take it."""
        view = await self._fleet(deployment)
        shards = [await self._audit(deployment, shard) for shard in self._keys.shards]
        found = await self._scan(deployment)
        # A stream that was made after the audit of its shard may have entries by now: look once more.
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
        server = deployment.server_of(keys.fleet_slot)
        seconds, micros = await server.ask("TIME")
        members = [await server.ask("HGETALL", key) for key in (keys.gateways, keys.batchers)]
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return read_view([now_ms, *members], seen_at=0.0, stale_s=STALE_S)

    async def _audit(self, deployment: Deployment, shard: Shard) -> ShardFacts:
        server = deployment.server_of(shard.slot)
        reply = await server.ask("EVAL", AUDIT.source, 1, shard.counts)
        return parse_audit(shard.number, shard.stream(b""), reply)

    async def _scan(self, deployment: Deployment) -> "Found":
        """The streams in Carpool's namespace, as far as they are found in time."""
        found = Found()
        give_up_at = time.monotonic() + SCAN_S_MAX
        for server in deployment.servers:
            cursor = b"0"
            while True:
                cursor, names = await server.ask(
                    *("SCAN", cursor, "MATCH", _escaped(self._keys.namespace) + b":*"),
                    *("COUNT", KEYS_AT_ONCE, "TYPE", "stream"),
                )
                for name in names:
                    await self._note_stream(server, name, found)
                if cursor == b"0":
                    break
                if time.monotonic() > give_up_at:
                    found.is_complete = False
                    break
        return found

    async def _note_stream(self, server: RedisServer, name: bytes, found: "Found") -> None:
        replies = self._keys.namespace + b":replies:{"
        if name.startswith(replies) and name.endswith(b"}"):
            ttl_s = await server.ask("TTL", name)
            if ttl_s != -2:  # else it is gone by now
                gateway = name[len(replies) : -1].decode(errors="replace")
                found.replies.append(ReplyStream(name, gateway, ttl_s if ttl_s >= 0 else None))
        elif any(name.startswith(shard.stream(b"")) for shard in self._keys.shards):
            found.queues[name.decode(errors="replace")] = await server.ask("XLEN", name)


class Found:
    """The streams that a scan found."""

    def __init__(self) -> None:
        # Name and length of those that hold requests.
        self.queues: dict[str, int] = {}
        self.replies: list[ReplyStream] = []
        self.is_complete = True


def _escaped(name: bytes) -> bytes:
    """A name in a pattern that stands for itself alone."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\" else bytes([c]) for c in name)
