"""The batching policies on virtual time: production's own engine, one lane, a simulated GPU.

    .venv/bin/python bench/policy.py [--quick] [--seed N]

Every policy meets the same arrivals. Nothing is measured but waits for a slot: virtual time passes while somebody
waits, not while something is computed. The same seed gives the same tables. Exit 1 if a criterion fails.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import cast

from rich.console import Console
from rich.table import Table

from carpool.batching.policy import PolicyName
from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.settings import Model, Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, SheddingSettings, UpstreamSettings
from carpool.upstream.fleet import MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings
from carpool.virtual_time import VirtualClock

MODEL = "m"
POLICIES = ("fixed", "eager", "adaptive", "pid")
# Requests that arrive within one turn of the event loop are seen together.
TURN_S = 0.0001

RATES = (50, 500, 2_000, 5_000, 8_000, 9_500)
QUIET_RATE_MAX = 2_000
P99_SLACK_MS = 2.0
THROUGHPUT_SHARE = 0.995


@dataclass(frozen=True)
class Scenario:
    name: str
    # (seconds, rate at the start, rate at the end) one after the other; between the two the rate is linear.
    segments: tuple[tuple[float, float, float], ...]
    slots: int = 32
    service_s: float = 0.2
    # Each batch takes service_s times a uniform draw from 1 - jitter to 1 + jitter.
    jitter: float = 0.0


@dataclass
class Result:
    waits_ms: list[float] = field(default_factory=list)
    batches: int = 0
    sent_in_time: int = 0
    slots_busy_max_share: float = 0.0

    def percentile(self, share: float) -> float:
        return self.waits_ms[min(len(self.waits_ms) - 1, int(share * len(self.waits_ms)))]

    def cell(self) -> str:
        mean = len(self.waits_ms) / self.batches
        waits = f"{self.percentile(0.5):.1f} / {self.percentile(0.99):.1f}"
        return f"{waits}, {mean:.3g}, {self.slots_busy_max_share:.0%}"


def draw_arrivals(scenario: Scenario, rng: random.Random) -> list[float]:
    """Poisson arrivals, thinned where the rate is not constant."""
    arrivals: list[float] = []
    start = 0.0
    for duration, rate, rate_end in scenario.segments:
        highest = max(rate, rate_end)
        at = start + rng.expovariate(highest)
        while at < start + duration:
            rate_now = rate + (rate_end - rate) * (at - start) / duration
            if rate_now == highest or rng.random() * highest < rate_now:
                arrivals.append(at)
            at += rng.expovariate(highest)
        start += duration
    return arrivals


class Simulation:
    """Production's own engine with one lane, to a simulated GPU, with one policy."""

    def __init__(self, batching: BatchingSettings, scenario: Scenario, arrivals: Sequence[float], seed: int) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        start = self.clock()
        self.arrivals = [start + at for at in arrivals]
        self.seconds = arrivals[-1]
        self.rng = random.Random(seed)
        self.settings = Settings(
            model=MODEL,
            batching=batching,
            broker=BrokerSettings(waiting_max=len(arrivals)),
            shedding=SheddingSettings(mode="off"),
            upstream=UpstreamSettings(endpoints=["sim:"], slots=scenario.slots),
        )
        self.result = Result()
        self.arrived = 0

    def run(self) -> Result:
        self.clock.run(self._run())
        self.result.waits_ms.sort()
        return self.result

    def _endpoints(self, model: Model) -> MakeEndpoint:
        scenario = self.scenario

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds * (1.0 + self.rng.uniform(-scenario.jitter, scenario.jitter)))

        gpu = SimulationSettings(
            latency_ms=scenario.service_s * 1000, slots=scenario.slots, max_batch=self.settings.batching.max_batch
        )
        return lambda address: SimulatedEndpoint(address.url, gpu, sleep, self.clock)

    async def _run(self) -> None:
        self.engine = Engine(Runtime(self.settings, self.clock, self.rng.random, self._endpoints))
        (self.service,) = self.engine.serving.services
        self.all_settled = asyncio.Event()
        self._await_next_turn()
        await self.engine.run(self.all_settled.wait())
        self.result.batches = sum(self.service.loop.batches.values())

    def _await_next_turn(self) -> None:
        """Have the requests of the next turn arrive together, when the last of them does."""
        arrivals, end = self.arrivals, self.arrived
        turn_ends = arrivals[end] + TURN_S
        while end < len(arrivals) and arrivals[end] <= turn_ends:
            end += 1
        asyncio.get_running_loop().call_at(arrivals[end - 1], self._arrive, end)

    def _arrive(self, end: int) -> None:
        for number in range(self.arrived, end):
            at = self.arrivals[number]
            refusal = self.engine.admit(Request(str(number), MODEL, b"", b"1", 1, 0, at, at, inf, inf, self))
            assert refusal is None, refusal
        self.arrived = end
        if end < len(self.arrivals):
            self._await_next_turn()
        else:
            self.result.slots_busy_max_share = self.service.pool.busy_seconds() / (self.scenario.slots * self.seconds)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Note how long a request waited for its slot."""
        assert isinstance(outcome, Output), outcome
        result = self.result
        result.waits_ms.append((request.taken - request.arrived) * 1000)
        result.sent_in_time += request.taken <= self.arrivals[-1]
        if len(result.waits_ms) == len(self.arrivals):
            self.all_settled.set()


def run_one(name: str, scenario: Scenario, seed: int) -> Result:
    """Run one policy; all of them meet the same arrivals and the same draws of service time."""
    arrivals = draw_arrivals(scenario, random.Random(seed))
    # The baseline that never waits.
    batching = BatchingSettings(policy="fixed", max_wait_ms=0.0)
    if name != "eager":
        batching = BatchingSettings(policy=cast(PolicyName, name))
    return Simulation(batching, scenario, arrivals, seed).run()


def run_all(workers: Executor, scenario: Scenario, seed: int) -> dict[str, Result]:
    """Run every policy, on all cores."""
    results = workers.map(run_one, POLICIES, [scenario] * len(POLICIES), [seed] * len(POLICIES))
    return dict(zip(POLICIES, results, strict=True))


def steady(seconds: float, jitter: float) -> list[Scenario]:
    """DESIGN.md's rates: 32 slots of 200 ms."""
    return [Scenario(f"{rate:,}/s", ((seconds, float(rate), float(rate)),), jitter=jitter) for rate in RATES]


def harder(seconds: float) -> list[Scenario]:
    """What a steady rate does not show."""
    third = seconds / 3
    return [
        Scenario("spike 500, 8,000, 500/s", ((third, 500, 500), (third, 8_000, 8_000), (third, 500, 500))),
        Scenario("ramp 50 to 9,500/s", ((seconds, 50, 9_500),)),
        Scenario("cold start at 9,500/s, first 2 s", ((2.0, 9_500, 9_500),)),
        Scenario("1 slot of 200 ms, 100/s", ((seconds, 100, 100),), slots=1),
        Scenario("1 slot of 200 ms, 250/s", ((seconds, 250, 250),), slots=1),
        Scenario("4 slots of 20 ms, 1,000/s", ((seconds, 1_000, 1_000),), slots=4, service_s=0.02),
        Scenario("4 slots of 20 ms, 8,000/s", ((seconds, 8_000, 8_000),), slots=4, service_s=0.02),
        Scenario("4 slots of 200 ms, 1,000/s", ((seconds, 1_000, 1_000),), slots=4),
    ]


def verdicts(rate: int, results: dict[str, Result]) -> list[tuple[str, bool]]:
    """Judge `adaptive` against `fixed`: what was measured, and whether it holds."""
    fixed, adaptive = results["fixed"], results["adaptive"]
    checks: list[tuple[str, bool]] = []
    if rate <= QUIET_RATE_MAX:
        p50, p50_max = adaptive.percentile(0.5), fixed.percentile(0.5) / 3
        checks.append((f"p50 {p50:.1f} <= {p50_max:.1f}", p50 <= p50_max))
    p99, p99_max = adaptive.percentile(0.99), fixed.percentile(0.99) + P99_SLACK_MS
    checks.append((f"p99 {p99:.1f} <= {p99_max:.1f}", p99 <= p99_max))
    share = adaptive.sent_in_time / fixed.sent_in_time
    checks.append((f"sent {share:.1%}", share >= THROUGHPUT_SHARE))
    return checks


def new_table(title: str) -> Table:
    columns = ("", *POLICIES)
    table = Table(*columns, title=title, title_justify="left", min_width=110)
    for column in table.columns[1:]:
        column.no_wrap = True
    return table


def row(scenario: Scenario, results: dict[str, Result]) -> list[str]:
    return [scenario.name, *(results[name].cell() for name in POLICIES)]


def show_judged(console: Console, workers: Executor, seconds: float, seed: int) -> int:
    """The steady rates; returns how many criteria fail."""
    failed = 0
    for jitter in (0.0, 0.2):
        service = "200 ms" + (f" +- {jitter:.0%}" if jitter else "")
        table = new_table(f"One lane, 32 slots of {service}, Poisson arrivals, {seconds:.0f} s")
        table.add_column("adaptive against fixed")
        for rate, scenario in zip(RATES, steady(seconds, jitter), strict=True):
            results = run_all(workers, scenario, seed)
            checks = verdicts(rate, results)
            failed += sum(not holds for _, holds in checks)
            shown = ", ".join(text if holds else f"[bold red]FAILS: {text}[/]" for text, holds in checks)
            table.add_row(*row(scenario, results), shown)
        console.print(table)
    return failed


def show_others(console: Console, workers: Executor, seconds: float, seed: int) -> None:
    """What a steady rate does not show."""
    table = new_table("Changing load and other pools (not judged)")
    scenarios = harder(seconds)
    scenarios.append(replace(scenarios[0], name="spike, service time +- 20%", jitter=0.2))
    for scenario in scenarios:
        table.add_row(*row(scenario, run_all(workers, scenario, seed)))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="The batching policies on virtual time.")
    parser.add_argument("--quick", action="store_true", help="5 virtual seconds in place of 30")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 30.0
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print("Cells: wait p50 / p99 in ms, mean batch, busy share of the slots.\n")

    with ProcessPoolExecutor() as workers:
        failed = show_judged(console, workers, seconds, options.seed)
        show_others(console, workers, seconds / 2, options.seed)
    if failed:
        console.print(f"[bold red]{failed} criteria fail[/]")
    else:
        console.print(
            f"Every criterion holds: adaptive p50 <= fixed / 3 up to {QUIET_RATE_MAX:,}/s, "
            f"p99 <= fixed + {P99_SLACK_MS:g} ms, the same throughput."
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
