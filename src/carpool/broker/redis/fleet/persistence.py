"""Whether Redis writes to a disk although `broker.persistence` forbids it: an operator may turn that on at any time."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.fleet.servers import (
    FAILURES,
    Inspection,
    NodeFacts,
    NoWayInError,
    RedisServer,
    at,
    no_answer,
    node_facts,
    reason_of,
)
from carpool.core.finding import Finding
from carpool.core.timers import repeat

logger = logging.getLogger("carpool.broker")

INTERVAL_S = 5.0
TOLD_MAX = 3


class PersistenceWatch:
    """Looks from time to time, and logs what writes to a disk; health and metrics show `found`."""

    def __init__(self, inspection: Inspection, interval_s: float = INTERVAL_S) -> None:
        self._inspection = inspection
        self._interval_s = interval_s
        # What writes to a disk; empty if nothing does.
        self.found = ""
        self._task: asyncio.Task[None] | None = None

    async def faults(self) -> str:
        """Why this Redis must not be used; empty if it may."""
        return sentence(await find_disks(self._inspection))

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_looking(self) -> None:
        await asyncio.sleep(self._interval_s)  # `faults` has just looked
        await repeat(lambda: self._interval_s, self._look)

    async def _look(self) -> None:
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
