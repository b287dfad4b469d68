"""O1, O2, O4, O5: more than the GPUs can do, from clients of three tiers. Those admitted are served in time, the others
are told so at once, and who pays hardly notices.

Each is compared with a run far from the limit at the same gateway, just before.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from carpool.cli.sim import simulated_gpus
from carpool.tools.bench.run import Answered, TierLoad
from support.checker import Verdict
from support.keyed_load import MIX, TIER_KEYS, Key, Keys, Loaded, p99_ms, send_load
from support.processes import until
from support.stage import Broker, Stage, stage

SLOTS = 32
# Ten times as much is what load and gateway can do beside one another on two cores.
BATCH, CALL_MS = 2, 200.0
CAPACITY = SLOTS * BATCH * 1000 / CALL_MS
# 1,430 a second, as in the numbers of the design.
LARGE_BATCH, LARGE_CALL_MS = 9, 201.4
# Far from the limit; after this long the gateway knows its capacity.
CALM, WARM_UP_S, CALM_S = 0.5, 3, 8
# From then on too much is no burst any more.
STANDING_S = 3.0
# As in the default settings: how long each tier may be expected to wait.
WAIT_MAX_MS = {"enterprise": 1000.0, "paid": 500.0, "free": 250.0}


class Compared(NamedTuple):
    """The same clients far from the limit, and with too much."""

    calm: Loaded
    much: Loaded

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were in the way of one of them."""
        return self.calm.is_disturbed or self.much.is_disturbed

    @property
    def verdict(self) -> Verdict:
        return added(self.calm.verdict, self.much.verdict)

    def ratio(self, *names: str) -> float:
        """The p99 of these clients, times what it was."""
        return p99_ms(self.much.answers, *names) / max(p99_ms(self.calm.answers, *names), 0.001)

    def standing_ratio(self) -> float:
        """The same of all, without the first seconds: until then it is a burst, which is served."""
        return p99_ms(self.much.between(STANDING_S)) / max(p99_ms(self.calm.answers), 0.001)

    @property
    def about(self) -> str:
        return f"{self.much.about} (before: {self.calm.about})"


def added(*verdicts: Verdict) -> Verdict:
    """What the checker found in several runs, together."""
    return Verdict(*(sum(each) for each in zip(*verdicts, strict=True)))


@asynccontextmanager
async def overloadable(
    directory: Path,
    broker: Broker,
    *,
    batch: int = BATCH,
    call_ms: float = CALL_MS,
    clients: Mapping[str, Key] = TIER_KEYS,
) -> AsyncIterator[tuple[Stage, Keys]]:
    """Carpool in front of GPUs with a known capacity, warm."""
    keys = Keys(directory, f"[batching]\nmax_batch = {batch}", clients)
    flags = ["--upstream", f"sim:?latency_ms={call_ms:g}&slots={SLOTS}"]
    async with stage(directory / "stage", flags, broker, {"config": keys.config}) as running:
        capacity = SLOTS * batch * 1000 / call_ms
        await send_load(running.gateway.port, f"{CALM * capacity}:{WARM_UP_S}s", keys.load(MIX))
        yield running, keys


async def times_capacity(directory: Path, broker: Broker, times: float, seconds: float) -> Compared:
    """Half of the capacity, then so many times of it."""
    async with overloadable(directory, broker) as (running, keys):
        port, clients = running.gateway.port, keys.load(MIX)
        calm = await send_load(port, f"{CALM * CAPACITY}:{CALM_S}s", clients)
        return Compared(calm, await send_load(port, f"{times * CAPACITY}:{seconds}s", clients))


class Burst(NamedTuple):
    """A load with a burst in it."""

    load: Loaded
    # Due before the burst, and 5 s or more after it.
    before: list[Answered]
    after: list[Answered]

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were in the way."""
        return self.load.is_disturbed

    @property
    def ratio(self) -> float:
        """p99 after the burst, times what it was."""
        return p99_ms(self.after) / max(p99_ms(self.before), 0.001)


async def burst_with_retries(
    directory: Path, broker: Broker, times: float, seconds: float, recovery_s: float = 5.0
) -> Burst:
    """Half of the capacity, so many times of it for `seconds`, half again. Who is told to come again does, up to three
    times, as clients of most libraries do.
    """
    calm = CALM * CAPACITY
    schedule = f"{calm}:{CALM_S}s,{times * CAPACITY}:{seconds}s,{calm}:{recovery_s + CALM_S}s"
    async with overloadable(directory, broker) as (running, keys):
        load = await send_load(running.gateway.port, schedule, keys.load(MIX), retries=3)
    over_s = CALM_S + seconds
    return Burst(load, load.between(0, CALM_S - 0.5), load.between(over_s + recovery_s))


# 10 a second.
QUOTA = Key("paid", per_minute=600, burst=10)


async def over_the_quota(directory: Path, broker: Broker, times: float, seconds: float) -> Compared:
    """Everybody at half of the capacity; then one more client, who asks for so many times its quota."""
    async with overloadable(directory, broker, clients={**TIER_KEYS, "greedy": QUOTA}) as (running, keys):
        port, calm_per_s = running.gateway.port, CALM * CAPACITY
        calm = await send_load(port, f"{calm_per_s}:{seconds}s", keys.load(MIX))
        greedy_per_s = times * QUOTA.per_minute / 60
        shares = {name: share / 100 * calm_per_s for name, share in MIX.items()}
        clients = keys.load({**shares, "greedy": greedy_per_s})
        return Compared(calm, await send_load(port, f"{calm_per_s + greedy_per_s}:{seconds}s", clients))


async def free_flood(directory: Path, broker: Broker, times: float, seconds: float) -> Compared:
    """The paying at 30 % of the capacity and a few free ones; then so many times the capacity of free ones."""
    paying = {"enterprise": 0.05 * CAPACITY, "paid": 0.25 * CAPACITY}
    runs = []
    async with overloadable(directory, broker) as (running, keys):
        for free in (0.2 * CAPACITY, times * CAPACITY):
            clients = keys.load({**paying, "free": free})
            per_s = sum(paying.values()) + free
            runs.append(await send_load(running.gateway.port, f"{per_s}:{seconds}s", clients))
    return Compared(*runs)


class Halved(NamedTuple):
    """A run in which half of the GPUs were killed."""

    load: Loaded
    # Seconds after its start.
    killed_s: float
    # Due 5 s or more after that.
    after: list[Answered]

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were in the way."""
        return self.load.is_disturbed

    @property
    def outcomes_after(self) -> dict[str, int]:
        found = [answer.outcome for answer in self.after]
        return {outcome: found.count(outcome) for outcome in sorted(set(found))}

    def waited_ms(self, tier: str) -> float:
        """p99 of what those of a tier took beside the call itself."""
        return p99_ms(self.after, tier) - CALL_MS


async def half_of_the_gpus(directory: Path, broker: Broker, recovery_s: float = 5.0) -> Halved:
    """All of the capacity is used; then one of two GPU servers, each with half of the slots, is killed."""
    keys = Keys(directory, f"[batching]\nmax_batch = {BATCH}")
    options = {"--port": 0, "--workers": 1, "--slots": SLOTS // 2, "--latency-ms": CALL_MS}
    with ExitStack() as stack:
        servers = [stack.enter_context(simulated_gpus(options)) for _ in range(2)]
        flags = ["--slots", str(SLOTS // 2)]
        for server in servers:
            assert server.address is not None
            flags += ["--upstream", server.address]
        async with stage(directory / "stage", flags, broker, {"config": keys.config}) as running:
            clients = keys.load(MIX)
            await send_load(running.gateway.port, f"{CALM * CAPACITY}:{WARM_UP_S}s", clients)
            schedule = f"{CAPACITY}:{CALM_S + recovery_s + CALM_S}s"
            sending = asyncio.create_task(send_load(running.gateway.port, schedule, clients))
            await until(lambda: is_busy(running))
            began = time.monotonic()
            await asyncio.sleep(CALM_S)
            servers[0].process.kill()
            killed_s = time.monotonic() - began
            load = await sending
    return Halved(load, killed_s, load.between(killed_s + recovery_s))


async def is_busy(running: Stage) -> bool:
    return await running.gateway.metric("carpool_held_requests") > 0


async def peaks(directory: Path, broker: Broker, mean: float, peak: float, seconds: float) -> Loaded:
    """So many a second on average with peaks of a second in every ten, on a capacity of 1,430 a second."""
    async with overloadable(directory, broker, batch=LARGE_BATCH, call_ms=LARGE_CALL_MS) as (running, keys):
        schedule = ",".join([f"{(10 * mean - peak) / 9}:9s,{peak}:1s"] * round(seconds / 10))
        clients: list[TierLoad] = keys.load(MIX)
        return await send_load(running.gateway.port, schedule, clients)
