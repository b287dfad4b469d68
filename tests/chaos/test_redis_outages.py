"""F3, F4, F5 and direct mode: Redis itself is terminated, killed, stopped, loses its memory, or fails over."""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.client import Connection, ask_once, inference_body
from support.processes import until
from support.redis_fleet import ASYNC, Clients, Fleet, Place, fleet_over
from support.redis_servers import RedisServer, running_cluster, running_redis, running_sentinels
from support.upstreams import MIB, ScriptedUpstream, scripted_upstream

AOF = ("--appendonly", "yes", "--appendfsync")
# Inputs so large that a queue without a bound would show: 4 MB a second come in while Redis is away.
LARGE_BYTES = 40_000
SAMPLE_S = 0.02

# A gateway without upstreams while Redis is away, or has come back without a request.
AWAY = {"": {503, 504}}


class Outage:
    """One way for Redis to be away."""

    def __init__(self, server: RedisServer, how: str) -> None:
        self._server = server
        self._how = how

    def begin(self) -> None:
        """From now on nothing is answered."""
        {"terminated": self._server.terminate, "killed": self._server.kill, "stopped": self._server.stop}[self._how]()

    async def end(self) -> float:
        """Redis is back; the time at which it was."""
        if self._how == "stopped":
            self._server.go_on()
            return time.monotonic()
        self._server.launch()
        await self._server.wait_until_ready()
        return time.monotonic()


class Away(NamedTuple):
    """What was seen while Redis was away, and after."""

    verdict: Verdict
    checker: Checker
    # Seconds after the return in which the last request or task that came then was refused.
    back_s: float
    # The most memory above that before, of all processes together.
    growth_mib: float
    # Requests answered with 200 after the return.
    served_after: int
    refusal_ms: float
    errors: list[str]


async def redis_is_away(directory: Path, how: str, seconds: float) -> Away:
    """F3: Redis that writes everything at once is away for a while, under load."""
    checker = Checker(f"F3-{how}", AWAY)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis", *AOF, "always"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.03
        await fleet.add("gateway")
        for _ in range(2):
            await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports, LARGE_BYTES))
        clients.start(asks_per_s=60, tasks_per_s=40)
        await asyncio.sleep(2.0)
        before = most = fleet.resident_bytes()
        outage = Outage(server, how)
        outage.begin()
        away_at = time.monotonic()
        while time.monotonic() < away_at + seconds:
            await asyncio.sleep(0.1)
            most = max(most, fleet.resident_bytes())
        returned_at = await outage.end()
        await asyncio.sleep(6.0)
        most = max(most, fleet.resident_bytes())
        await clients.stop()
        await clients.read_again()
        after = [answer for answer in (*clients.answers, *clients.task_answers) if answer.began >= returned_at]
        refused = [answer.ended - returned_at for answer in after if answer.status not in (200, 202)]
        # Once it is known that Redis is away, refusals are quick.
        quick = [
            (answer.ended - answer.began) * 1000
            for answer in clients.answers
            if away_at + 1.5 < answer.began < away_at + seconds - 0.5
        ]
        return Away(
            checker.verdict(upstream.seen),
            checker,
            max(refused, default=0.0),
            (most - before) / MIB,
            sum(answer.status == 200 for answer in after),
            sorted(quick)[int(len(quick) * 0.99)],
            fleet.errors(),
        )


class Losses(NamedTuple):
    """What a crash of Redis cost."""

    verdict: Verdict
    accepted: int
    # Results that had been told and are unknown now.
    results_gone: int
    # How long before the crash the first of all these had been accepted; 0 if there is none.
    back_to_s: float
    # Seconds after the return in which the last request or task that came then was refused.
    back_s: float


async def redis_forgets(directory: Path, fsync: str, how: str, cut_s: float) -> Losses:
    """F4: Redis crashes; with `cut_s`, the machine lost the last writes too. `fsync` "" means: nothing on disk."""
    forgets = not fsync or cut_s > 0
    checker = Checker(f"F4-{fsync}-{how}-{cut_s:g}", AWAY, may_tell_again=forgets)
    async with AsyncExitStack() as stack:
        files = (*AOF, fsync) if fsync else ()
        server = await stack.enter_async_context(running_redis(directory / "redis", *files))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.3
        await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url, "--slots", "4")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=20, tasks_per_s=60)
        sizes: list[tuple[float, int]] = []
        sampling = asyncio.create_task(watch_size(server, sizes))
        await asyncio.sleep(3.0)
        outage = Outage(server, how)
        outage.begin()
        crashed_at = time.monotonic()
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        if cut_s:
            cut_off(server, max(size for at, size in sizes if at <= crashed_at - cut_s))
        await asyncio.sleep(1.0)
        returned_at = await outage.end()
        await asyncio.sleep(4.0)
        await clients.stop()
        lost = set(clients.missing)
        await clients.read_again()
        if forgets:
            checker.may_be_lost(clients.missing)
        refused = [
            answer.ended - returned_at
            for answer in (*clients.answers, *clients.task_answers)
            if answer.began >= returned_at and answer.status not in (200, 202)
        ]
        return Losses(
            checker.verdict(upstream.seen),
            len(clients.inputs),
            len(clients.missing - lost),
            max((crashed_at - clients.accepted[text] for text in clients.missing), default=0.0),
            max(refused, default=0.0),
        )


async def watch_size(server: RedisServer, sizes: list[tuple[float, int]]) -> None:
    """How long the file of the last writes was, and when."""
    while True:
        sizes.append((time.monotonic(), sum(path.stat().st_size for path in last_writes(server))))
        await asyncio.sleep(SAMPLE_S)


def last_writes(server: RedisServer) -> list[Path]:
    """The file that Redis appends to."""
    return list((server.directory / "appendonlydir").glob("*.incr.aof"))


def cut_off(server: RedisServer, size: int) -> None:
    """As if what was written later had never reached the disk."""
    [path] = last_writes(server)
    with path.open("r+b") as file:
        file.truncate(size)


class Failovers(NamedTuple):
    """What was seen while primaries were killed."""

    verdict: Verdict
    checker: Checker
    accepted: int
    # Seconds from each kill until a task was accepted in a shard of the dead primary.
    resumed_s: list[float]
    errors: list[str]

    def figures(self) -> str:
        usually, at_most = median(self.resumed_s), max(self.resumed_s)
        return f"{self.accepted} tasks, writes resumed after {usually:.1f} s (at most {at_most:.1f} s)"


async def primaries_of_a_cluster_die(directory: Path, runs: int) -> Failovers:
    """F5: a primary is killed, its replica takes over, the dead one comes back as a replica; again and again."""
    checker = Checker("F5", AWAY, may_tell_again=True)
    keys = Keys()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(directory / "redis", node_timeout_ms=500))
        fleet = await stack.enter_async_context(fleet_over(directory, cluster.url, {"broker.replicas": 1}))
        clients, upstream = await fleet_with_load(stack, fleet, checker)
        resumed_s = []
        for run in range(runs):
            shard = keys.shards[run % len(keys.shards)]
            victim = await cluster.primary_of(shard.slot)
            shards = {each.number for each in keys.shards if (await cluster.primary_of(each.slot)) is victim}
            await asyncio.sleep(random.uniform(0.2, 0.5))
            victim.kill()
            killed_at = time.monotonic()

            async def is_replaced(slot: int = shard.slot, victim: RedisServer = victim) -> bool:
                return (await cluster.primary_of(slot)) is not victim

            await until(is_replaced, within_s=20)
            # The new primary has no replica that could confirm anything before the old one is back.
            victim.launch()
            await victim.wait_until_ready()
            resumed_s.append(await resumption(clients, shards, killed_at))
            await cluster.wait_until_whole()
        return await finish(clients, checker, resumed_s, fleet, upstream)


async def primary_under_sentinels_dies(directory: Path) -> Failovers:
    """F5 with Sentinels: the primary is killed once, one of two replicas takes over."""
    checker = Checker("F5-sentinel", AWAY, may_tell_again=True)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(running_sentinels(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, group.url, {"broker.replicas": 1}))
        clients, upstream = await fleet_with_load(stack, fleet, checker)
        await asyncio.sleep(1.0)
        (await group.primary()).kill()
        resumed_s = [await resumption(clients, set(range(16)), time.monotonic())]
        await asyncio.sleep(1.0)
        return await finish(clients, checker, resumed_s, fleet, upstream)


async def fleet_with_load(stack: AsyncExitStack, fleet: Fleet, checker: Checker) -> tuple[Clients, ScriptedUpstream]:
    """A gateway, two batchers, and clients that have begun."""
    upstream = await stack.enter_async_context(scripted_upstream())
    upstream.latency_s = 0.05
    await fleet.add("gateway")
    for _ in range(2):
        await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
    await fleet.wait_until_ready()
    clients = await stack.enter_async_context(Clients(checker, fleet.ports))
    clients.start(asks_per_s=30, tasks_per_s=80)
    return clients, upstream


async def resumption(clients: Clients, shards: set[int], killed_at: float) -> float:
    """Seconds from the kill until a task was accepted in one of these shards."""
    # What was on its way at the kill may be told a moment later.
    since = max(killed_at + 0.2, time.monotonic())

    def is_accepted_there() -> bool:
        for task_id, text in reversed(clients.inputs.items()):
            if clients.accepted[text] < since:
                return False
            if int(task_id[-1], 16) in shards:
                return True
        return False

    await until(is_accepted_there, within_s=20)
    return time.monotonic() - killed_at


async def finish(
    clients: Clients, checker: Checker, resumed_s: list[float], fleet: Fleet, upstream: ScriptedUpstream
) -> Failovers:
    await clients.stop()
    await clients.read_again()
    return Failovers(checker.verdict(upstream.seen), checker, len(clients.inputs), resumed_s, fleet.errors())


class SteadyClient:
    """One client that asks all the time, and knows how long it went without an answer."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self.served_at: list[float] = []
        self.stopped = False

    async def run(self) -> None:
        connection = await Connection.open(self._port)
        while not self.stopped:
            text = self._checker.new_input()
            self._checker.accepted(text, within_s=10)
            response = await connection.ask("POST", "/v1/inference", inference_body(text))
            if response.status == 200:
                self.served_at.append(time.monotonic())
                self._checker.output(text, response.json["output"])
            else:
                self._checker.failed(text, response.status)
            await asyncio.sleep(random.uniform(0.01, 0.03))
        await connection.close()

    def longest_gap_s(self, since: float, until_: float) -> float:
        """The longest time without an answer around these times."""
        times = [at for at in self.served_at if since - 1.0 < at < until_]
        return max(later - earlier for earlier, later in pairwise(times))


class Direct(NamedTuple):
    """What was seen while gateways did without Redis."""

    verdict: Verdict
    checker: Checker
    longest_gap_s: float
    mean_batch: float
    # Statuses of tasks, and of a gateway without upstreams, while Redis was away; and how long the latter took.
    task_statuses: set[int]
    without_upstreams: set[int]
    refusal_ms: float
    back_s: float
    served_direct: int


async def gateways_go_direct(directory: Path, how: str, seconds: float) -> Direct:
    """Gateways with upstreams of their own serve on while Redis is away; the one without refuses at once."""
    checker = Checker(f"direct-{how}")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.05
        endpoint = ("--upstream", upstream.url, "--slots", "4")
        await fleet.add("batcher", *endpoint)
        direct = [await fleet.add("gateway", *endpoint) for _ in range(2)]
        bare = await fleet.add("gateway")
        await fleet.wait_until_ready()
        clients = [SteadyClient(place.port, checker) for place in direct for _ in range(15)]
        running = [asyncio.create_task(client.run()) for client in clients]
        await asyncio.sleep(2.0)
        outage = Outage(server, how)
        outage.begin()
        away_at = time.monotonic()
        await asyncio.sleep(1.2)
        sent, calls = len(upstream.seen), upstream.calls
        assert await modes(direct) == [2, 2]
        tasks, refusals, took = set(), set(), []
        while time.monotonic() < away_at + seconds:
            tasks.add((await ask_once(direct[0].port, "POST", "/v1/inference", inference_body("t"), ASYNC)).status)
            began = time.monotonic()
            refusals.add((await ask_once(bare.port, "POST", "/v1/inference", inference_body("b"))).status)
            took.append((time.monotonic() - began) * 1000)
            await asyncio.sleep(0.05)
        mean_batch = (len(upstream.seen) - sent) / (upstream.calls - calls)
        served = sum(at > away_at for client in clients for at in client.served_at)
        returned_at = await outage.end()

        async def all_back() -> bool:
            return await modes([*direct, bare]) == [1, 1, 1]

        await until(all_back, within_s=10)
        back_s = time.monotonic() - returned_at
        await asyncio.sleep(1.5)
        for client in clients:
            client.stopped = True
        await asyncio.gather(*running)
        gap_s = max(client.longest_gap_s(away_at, returned_at + 1.5) for client in clients)
        return Direct(
            checker.verdict(upstream.seen),
            checker,
            gap_s,
            mean_batch,
            tasks,
            refusals,
            max(took),
            back_s,
            served,
        )


async def modes(places: list[Place]) -> list[float]:
    """`carpool_broker_mode` of each."""
    return [await place.process.metric("carpool_broker_mode") for place in places]


class Emptied(NamedTuple):
    """What was seen while keys of a Redis that is well were deleted."""

    verdict: Verdict
    # What clients who wait were told.
    statuses: Counter[int]
    slowest_s: float


async def keys_are_deleted(directory: Path, times: int) -> Emptied:
    """Somebody deletes the gateway's stream of replies, or everything (FLUSHALL), in turn."""
    checker = Checker("R6")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.05
        gateway = await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=50, tasks_per_s=0)
        for number in range(times):
            await asyncio.sleep(random.uniform(1.5, 2.5))
            if number % 2:
                await server.ask("FLUSHALL")
            else:
                await server.ask("DEL", Keys().replies(gateway.process.name.encode()).decode())
        await asyncio.sleep(2.0)
        await clients.stop()
        return Emptied(
            checker.verdict(upstream.seen),
            Counter(answer.status for answer in clients.answers),
            max(answer.ended - answer.began for answer in clients.answers),
        )


AWAY_S, BACK_S_MAX = 10.0, 5.0
GROWTH_MIB_MAX = 32.0
CLUSTER_RUNS = 20
REFUSAL_MS_MAX = 50.0


@pytest.mark.parametrize("how", ["terminated", "killed", "stopped"])
async def test_nothing_is_lost_while_redis_is_away(tmp_path: Path, how: str) -> None:
    seen = await redis_is_away(tmp_path, how, AWAY_S)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() <= {"ok", "503", "504"}
        and seen.growth_mib < GROWTH_MIB_MAX
        and seen.back_s < BACK_S_MAX
        and seen.served_after > 0
        and seen.refusal_ms < REFUSAL_MS_MAX
        and seen.errors == []
    )
    what = (
        f"Redis {how} for {AWAY_S:g} s (appendfsync always): back to normal {seen.back_s:.2f} s after its return, "
        f"refusals within {seen.refusal_ms:.1f} ms (p99), {seen.growth_mib:.0f} MiB more, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F3", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.parametrize(
    ("fsync", "how", "cut_s"),
    [("everysec", "terminated", 0.0), ("everysec", "killed", 0.0), ("everysec", "killed", 1.0), ("", "killed", 0.0)],
)
async def test_what_a_crash_of_redis_costs(tmp_path: Path, fsync: str, how: str, cut_s: float) -> None:
    seen = await redis_forgets(tmp_path, fsync, how, cut_s)
    is_bounded = {
        # What was accepted in the last second is forgotten; a shutdown, or a crash of the process alone, costs nothing.
        "everysec": seen.back_to_s < cut_s + 0.2 and (seen.verdict.lost > 0) == (cut_s > 0),
        # Everything is forgotten.
        "": seen.verdict.lost > 0 and seen.results_gone > 0,
    }[fsync]
    passed = seen.verdict.wrong == 0 and seen.verdict.late == 0 and is_bounded and seen.back_s < BACK_S_MAX
    kept = f"appendfsync {fsync}" if fsync else "nothing on disk"
    cut = f", its last {cut_s:g} s of writes cut off" if cut_s else ""
    what = (
        f"Redis {how} ({kept}{cut}): of {seen.accepted} accepted tasks {seen.verdict.lost} are lost, and results of "
        f"{seen.results_gone} that had been told; accepted up to {seen.back_to_s:.2f} s before"
    )
    seen.verdict.report("F4", what, passed=passed)
    assert passed


def is_nothing_lost(seen: Failovers) -> bool:
    """A result that a replica did not have yet may be told twice. But nobody is given up: no batcher died."""
    verdict = seen.verdict
    has_no_fault = verdict.lost == verdict.wrong == verdict.late == 0 and seen.errors == []
    return has_no_fault and seen.checker.tally.keys() <= {"ok", "503", "504"}


@pytest.mark.timeout(300)
async def test_nothing_is_lost_when_primaries_of_a_cluster_die(tmp_path: Path) -> None:
    seen = await primaries_of_a_cluster_die(tmp_path, CLUSTER_RUNS)
    passed = is_nothing_lost(seen)
    what = f"{CLUSTER_RUNS} x primary of a 3+3 Cluster killed (WAIT 1): {seen.figures()}, {dict(seen.checker.tally)}"
    seen.verdict.report("F5", what, passed=passed)
    assert passed, seen.errors


async def test_nothing_is_lost_when_a_primary_under_sentinels_dies(tmp_path: Path) -> None:
    seen = await primary_under_sentinels_dies(tmp_path)
    passed = is_nothing_lost(seen)
    what = f"primary under Sentinels killed (WAIT 1): {seen.figures()}, {dict(seen.checker.tally)}"
    seen.verdict.report("F5", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_gateways_with_upstreams_serve_on_without_redis(tmp_path: Path, how: str) -> None:
    seen = await gateways_go_direct(tmp_path, how, seconds=6.0)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.longest_gap_s < 1.0
        and seen.mean_batch > 1.0
        and seen.task_statuses == {503}
        and seen.without_upstreams == {503}
        and seen.refusal_ms < REFUSAL_MS_MAX
        and seen.back_s < BACK_S_MAX
        and seen.served_direct > 0
    )
    what = (
        f"direct mode, Redis {how}: longest gap of a client {seen.longest_gap_s:.2f} s, mean batch "
        f"{seen.mean_batch:.1f}, tasks {seen.task_statuses}, without upstreams {seen.without_upstreams} within "
        f"{seen.refusal_ms:.1f} ms, normal {seen.back_s:.2f} s after the return, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F3", what, passed=passed)
    assert passed


async def test_who_waits_is_served_when_keys_are_deleted(tmp_path: Path) -> None:
    seen = await keys_are_deleted(tmp_path, times=6)
    passed = seen.verdict.is_clean and seen.statuses.keys() == {200} and seen.slowest_s < 1.5
    what = f"3 x reply stream deleted, 3 x FLUSHALL: {dict(seen.statuses)}, the slowest {seen.slowest_s:.2f} s"
    seen.verdict.report("R6", what, passed=passed)
    assert passed
