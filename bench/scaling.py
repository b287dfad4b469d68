"""How Carpool grows with processes: N gateways and N batchers over one Redis and over a 3-primary Cluster.

    .venv/bin/python bench/scaling.py [--systems floor,single,cluster] [--sizes 1,2,4] [--pin] [--json FILE]

For each system and size: wrk at full load (one generator and 2,000 connections a gateway, 2 KB, a pretend GPU of 50 ms
in the batcher), the median of three rounds; then `carpool bench` at 70 % of that rate, which arrives whatever the
answers do and verifies each one. Prints a Markdown table, a row as soon as it is known. Nothing is left running.

single-io is one Redis with `--io-threads 4`. The floor (bench/floor/) knows no Cluster. A rate is bound by the role
whose busiest process is near 100 % of a core.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import ceil
from pathlib import Path

import msgspec

import distributed
import measuring
from distributed import NO_PERSISTENCE, Broker, Deployment, redis_cluster, redis_server
from measuring import Load, bench_all, failures, wrk

ROLES = ("gateway", "batcher", "redis")
OPEN_LOOP_SHARE = 0.7
# One `carpool bench` verifies this many answers a second with most of its core to spare.
RATE_PER_GENERATOR_MAX = 8000
WARM_S = 2
HEAD = (
    "system",
    "gateways + batchers",
    "requests/s",
    "p50 / p99 ms",
    "CPU us a request: gateway, batcher, Redis",
    "busiest of a core: gateway, batcher, Redis, wrk",
    "at 70 %: p50 / p99 ms, mean batch",
    "errors, wrong",
)


class OpenLoop(msgspec.Struct, frozen=True):
    """What `carpool bench` saw at a part of the full rate."""

    rate: float
    p50_ms: float
    # The highest of the generators'.
    p99_ms: float
    batch_mean: float
    errors: int
    wrong: int
    # Of a core; near 1 the latencies are the generator's own.
    generator_busy: float


class Row(msgspec.Struct, frozen=True):
    """One system at one size."""

    system: str
    size: int
    is_pinned: bool
    rounds: list[Load]
    open_loop: OpenLoop | None

    @property
    def typical(self) -> Load:
        """The round with the median rate."""
        return sorted(self.rounds, key=lambda load: load.rate)[len(self.rounds) // 2]

    def cells(self) -> list[str]:
        load, calm = self.typical, self.open_loop
        errors = sum(each.errors for each in self.rounds) + (calm.errors if calm else 0)
        busy = [*(load.busiest[role] for role in ROLES), load.generator_busy]
        return [
            f"{self.system}, pinned" if self.is_pinned else self.system,
            f"{self.size} + {self.size}",
            f"{load.rate:,.0f}",
            f"{load.p50_ms:.0f} / {load.p99_ms:.0f}",
            ", ".join(f"{load.cpu_us[role]:.1f}" for role in ROLES),
            ", ".join(f"{share:.0%}" for share in busy),
            f"{calm.p50_ms:.0f} / {calm.p99_ms:.0f}, {calm.batch_mean:.0f}" if calm else "",
            f"{errors}, {calm.wrong if calm else 0}",
        ]


def open_loop(system: Deployment, rate: float, seconds: int) -> OpenLoop:
    """As many generators as the rate needs, the same number at each gateway."""
    each = ceil(rate / len(system.ports) / RATE_PER_GENERATOR_MAX)
    ports = system.ports * each
    reports = bench_all(ports, "--rate", f"{rate / len(ports):.0f}", "--duration", f"{seconds}s")
    latencies = [report["latency_ms"] for report in reports]
    return OpenLoop(
        rate=sum(report["rate"] for report in reports),
        p50_ms=max(latency["p50"] or 0.0 for latency in latencies),
        p99_ms=max(latency["p99"] or 0.0 for latency in latencies),
        batch_mean=sum(report["batch_mean"] or 0.0 for report in reports) / len(reports),
        errors=sum(report["errors"] + report["unanswered"] for report in reports),
        wrong=sum(report["wrong"] for report in reports),
        generator_busy=max(report["generator_busy"] for report in reports),
    )


@contextmanager
def pinned(system: Deployment, wanted: bool) -> Iterator[bool]:
    """A core for each process and the rest for the generators, if asked for and if there are so many."""
    everywhere = os.sched_getaffinity(0)
    cores = sorted(everywhere)
    pids = [pid for role in ROLES for pid in system.pids[role]]
    if not wanted or len(cores) < len(pids) + len(system.ports):
        yield False
        return
    for pid, core in zip(pids, cores, strict=False):
        os.sched_setaffinity(pid, {core})
    os.sched_setaffinity(0, cores[len(pids) :])
    try:
        yield True
    finally:
        os.sched_setaffinity(0, everywhere)


def measure(name: str, size: int, options: argparse.Namespace) -> Row:
    start_broker, start_system = SYSTEMS[name]
    with start_broker() as broker, start_system(broker, size, size) as system, pinned(system, options.pin) as is_pinned:
        wrk(system.ports, system.pids, WARM_S, options.connections)
        rounds = [wrk(system.ports, system.pids, options.seconds, options.connections) for _ in range(options.rounds)]
        row = Row(name, size, is_pinned, rounds, None)
        # The floor's answers are the inputs: there is nothing in them to verify.
        if options.calm_seconds and name != "floor":
            time.sleep(1.0)
            calm = open_loop(system, OPEN_LOOP_SHARE * row.typical.rate, options.calm_seconds)
            row = Row(name, size, is_pinned, rounds, calm)
    return row


SYSTEMS: dict[
    str,
    tuple[
        Callable[[], AbstractContextManager[Broker]],
        Callable[[Broker, int, int], AbstractContextManager[Deployment]],
    ],
] = {
    "floor": (redis_server, distributed.floor),
    "single": (redis_server, distributed.carpool),
    "single-io": (lambda: redis_server(*NO_PERSISTENCE, "--io-threads", "4"), distributed.carpool),
    "cluster": (redis_cluster, distributed.carpool),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="floor,single,cluster", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--sizes", default="1,2,4", help="gateways, and as many batchers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6, help="of a round of wrk")
    parser.add_argument("--calm-seconds", type=int, default=8, help="at 70 %% of the rate; 0 leaves it out")
    parser.add_argument("--connections", type=int, default=distributed.CONNECTIONS, help="at each gateway")
    parser.add_argument("--pin", action="store_true", help="a core for each process, where there are so many")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    for program in ("wrk", "redis-server"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed")
    measuring.raise_file_limit()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    rows: list[Row] = []
    for name in options.systems.split(","):
        for size in map(int, options.sizes.split(",")):
            rows.append(measure(name, size, options))
            print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
            if options.json:
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    for failure in failures:
        print(f"does not hold: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
