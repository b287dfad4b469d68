"""The batching policies on virtual time: the production classes, one lane, simulated slots.

    .venv/bin/python bench/policy.py [--quick] [--seed N]

Every policy meets the same arrivals. The lane is planned again by the rules of the batching loop: when requests
arrive (once for all of one event-loop turn), when a slot frees, and when a `WaitUntil` has passed. Exit 1 if a
criterion fails.
"""

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from rich.console import Console
from rich.table import Table

from carpool.batching.policy import Idle, Plan, Policy, PolicyName, Send, View, WaitUntil, make_policy
from carpool.batching.rate import ArrivalRate
from carpool.settings.schema import BatchingSettings

SETTINGS = BatchingSettings()
MAX_WAIT_S = SETTINGS.max_wait_ms / 1000
# Requests that arrive within one turn of the event loop are seen together.
TURN_S = 0.0001
# What the batching loop assumes of the upstream before the first batch has ended, and how it learns.
SERVICE_PRIOR_S = 0.2
SERVICE_WEIGHT = 0.1

RATES = (50, 500, 2_000, 5_000, 8_000, 9_500)
QUIET_RATE_MAX = 2_000
P99_SLACK_MS = 2.0
THROUGHPUT_SHARE = 0.995


class Eager:
    """The baseline that never waits."""

    def plan(self, view: View, now: float) -> Plan:
        return Send(min(view.waiting, view.max_batch), "idle") if view.free else Idle()

    def sent(self, size: int, max_batch: int) -> None:
        pass


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
    busy_s: float = 0.0
    sent_in_time: int = 0
    busy_share: float = 0.0

    def percentile(self, share: float) -> float:
        return self.waits_ms[min(len(self.waits_ms) - 1, int(share * len(self.waits_ms)))]

    def cell(self) -> str:
        mean = len(self.waits_ms) / self.batches
        waits = f"{self.percentile(0.5):.1f} / {self.percentile(0.99):.1f}"
        return f"{waits}, {mean:.3g}, {self.busy_share:.0%}"


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
    """One lane and its slots, driven by one policy."""

    def __init__(self, policy: Policy, scenario: Scenario, arrivals: Sequence[float], seed: int) -> None:
        self.policy = policy
        self.scenario = scenario
        self.arrivals = arrivals
        self.rng = random.Random(seed)
        self.result = Result()
        self.rate = ArrivalRate()
        self.service_s: float | None = None
        self.waiting: deque[float] = deque()
        self.arrived = 0
        self.running: list[tuple[float, float]] = []  # (ends, took)
        self.timer = inf

    def run(self) -> Result:
        arrivals, running, waiting = self.arrivals, self.running, self.waiting
        while self.arrived < len(arrivals) or waiting:
            arrival = arrivals[self.arrived] if self.arrived < len(arrivals) else inf
            now = min(arrival, running[0][0] if running else inf, self.timer)
            if arrival <= now:
                turn_ends = arrival + TURN_S
                while self.arrived < len(arrivals) and arrivals[self.arrived] <= turn_ends:
                    now = arrivals[self.arrived]
                    waiting.append(now)
                    self.arrived += 1
            while running and running[0][0] <= now:
                took = heapq.heappop(running)[1]
                known = self.service_s
                self.service_s = took if known is None else known + SERVICE_WEIGHT * (took - known)
            self.plan(now)
        self.result.waits_ms.sort()
        self.result.busy_share = self.result.busy_s / (self.scenario.slots * arrivals[-1])
        return self.result

    def plan(self, now: float) -> None:
        self.timer = inf
        slots = self.scenario.slots
        rate = self.rate.update(self.arrived, now)
        service_s = SERVICE_PRIOR_S if self.service_s is None else self.service_s
        while self.waiting:
            free = slots - len(self.running)
            oldest, count = self.waiting[0], len(self.waiting)
            view = View(count, oldest, rate, free, slots, service_s, SETTINGS.max_batch, MAX_WAIT_S)
            plan = self.policy.plan(view, now)
            if isinstance(plan, Send):
                self.send(plan.count, now)
                continue
            if isinstance(plan, WaitUntil):
                self.timer = plan.at
            return

    def send(self, count: int, now: float) -> None:
        result, last_arrival = self.result, self.arrivals[-1]
        for _ in range(count):
            result.waits_ms.append((now - self.waiting.popleft()) * 1000)
        self.policy.sent(count, SETTINGS.max_batch)
        jitter = self.scenario.jitter
        took = self.scenario.service_s * (1.0 + self.rng.uniform(-jitter, jitter))
        heapq.heappush(self.running, (now + took, took))
        result.batches += 1
        result.busy_s += max(0.0, min(took, last_arrival - now))
        if now <= last_arrival:
            result.sent_in_time += count


def run_all(scenario: Scenario, seed: int) -> dict[str, Result]:
    """Run every policy on the same arrivals and the same draws of service time."""
    arrivals = draw_arrivals(scenario, random.Random(seed))
    names: tuple[PolicyName, ...] = ("fixed", "adaptive", "pid")
    policies: dict[str, Policy] = {
        name: make_policy(name, busy_share=SETTINGS.busy_share, fill_target=SETTINGS.fill_target) for name in names
    }
    policies["eager"] = Eager()
    return {name: Simulation(policy, scenario, arrivals, seed).run() for name, policy in policies.items()}


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
    columns = ("", "fixed", "eager", "adaptive", "pid")
    table = Table(*columns, title=title, title_justify="left", min_width=110)
    for column in table.columns[1:]:
        column.no_wrap = True
    return table


def row(scenario: Scenario, results: dict[str, Result]) -> list[str]:
    return [scenario.name, *(results[name].cell() for name in ("fixed", "eager", "adaptive", "pid"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="The batching policies on virtual time.")
    parser.add_argument("--quick", action="store_true", help="5 virtual seconds in place of 30")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 30.0
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print("Cells: wait p50 / p99 in ms, mean batch, busy share of the slots.\n")

    failed = 0
    for jitter in (0.0, 0.2):
        service = "200 ms" + (f" +- {jitter:.0%}" if jitter else "")
        table = new_table(f"One lane, 32 slots of {service}, Poisson arrivals, {seconds:.0f} s")
        table.add_column("adaptive against fixed")
        for rate, scenario in zip(RATES, steady(seconds, jitter), strict=True):
            results = run_all(scenario, options.seed)
            checks = verdicts(rate, results)
            failed += sum(not holds for _, holds in checks)
            shown = ", ".join(text if holds else f"[bold red]FAILS: {text}[/]" for text, holds in checks)
            table.add_row(*row(scenario, results), shown)
        console.print(table)

    table = new_table("Changing load and other pools (not judged)")
    for scenario in harder(seconds / 2):
        table.add_row(*row(scenario, run_all(scenario, options.seed)))
    jittered = replace(harder(seconds / 2)[0], name="spike, service time +- 20%", jitter=0.2)
    table.add_row(*row(jittered, run_all(jittered, options.seed)))
    console.print(table)
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
