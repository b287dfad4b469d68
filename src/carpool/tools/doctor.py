"""The doctor: looks at a Redis that gateways and batchers use, and tells what is wrong with it.

It asks every primary by itself, so that a server that hangs or refuses is named. It changes nothing: batchers count
again, and what gateways leave behind expires.
"""

import time

from redis.exceptions import NoPermissionError

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.fleet.servers import (
    FAILURES,
    Deployment,
    Inspection,
    NoWayInError,
    at,
    no_answer,
    node_facts,
    reason_of,
    replicas_disks,
)
from carpool.broker.redis.fleet.view import FleetView, read_view
from carpool.broker.redis.keys import Keys, Shard
from carpool.broker.redis.scripts import AUDIT
from carpool.core.finding import Finding
from carpool.tools.doctor_checks import (
    ShardFacts,
    Wants,
    check_counts,
    check_fleet,
    check_groups,
    check_letters,
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
        queues, is_complete = await self._queue_streams(deployment)
        # A stream that was made after the audit of its shard may have entries by now: look once more.
        listed = {stream.name for shard in shards for stream in shard.streams}
        if any(name not in listed for name in queues):
            shards = [await self._audit(deployment, shard) for shard in self._keys.shards]
            listed |= {stream.name for shard in shards for stream in shard.streams}
        unlisted = [name for name, length in queues.items() if length and name not in listed]
        findings = [
            check_fleet(view),
            check_waiting(shards, view),
            check_counts(shards),
            check_groups(shards, view),
            check_unlisted(unlisted),
            check_letters(shards),
        ]
        if not is_complete:
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

    async def _queue_streams(self, deployment: Deployment) -> tuple[dict[str, int], bool]:
        """The streams that hold requests, with their lengths, and whether there was time to find all of them."""
        found: dict[str, int] = {}
        prefixes = tuple(shard.stream(b"") for shard in self._keys.shards)
        give_up_at = time.monotonic() + SCAN_S_MAX
        for server in deployment.servers:
            cursor = None
            while cursor != b"0":
                if time.monotonic() > give_up_at:
                    return found, False
                cursor, names = await server.ask(
                    *("SCAN", cursor or b"0", "MATCH", _escaped(self._keys.namespace) + b":*"),
                    *("COUNT", KEYS_AT_ONCE, "TYPE", "stream"),
                )
                for name in names:
                    if name.startswith(prefixes):
                        found[name.decode(errors="replace")] = await server.ask("XLEN", name)
        return found, True


def _escaped(name: bytes) -> bytes:
    """A name in a pattern that stands for itself alone."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\" else bytes([c]) for c in name)
