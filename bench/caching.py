"""The section `cache`: what results that are kept cost where nobody asks twice, and what they spare where all do.

Alternating in one run, medians of three: a gateway without, the same load on one with, and one input again and again.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import distributed
from measuring import CARPOOL, HERE, Load, console, free_port, process, show, verdict, wrk

DISTINCT = HERE / "distinct.lua"
# So small that it is full within a second: while it grows, the kernel's work for fresh memory is measured.
CACHED = {"CARPOOL_UPSTREAM_CACHE": "true", "CARPOOL_CACHE_BYTES_MAX": "16777216"}
CONNECTIONS = 1000
# What each kind of load is sent to: the gateway, and the inputs.
KINDS = {"off": ("off", "distinct"), "miss": ("on", "distinct"), "hit": ("on", "same")}


@contextmanager
def embedded(environment: Mapping[str, str]) -> Iterator[distributed.Deployment]:
    """A gateway with everything in one process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", distributed.SIMULATED, "--port", str(port), "--data-dir", data]
        with process(command, port, {**os.environ, **environment}) as child:
            yield distributed.Deployment([port], {"gateway": [child.pid]})


@contextmanager
def over_redis(environment: Mapping[str, str]) -> Iterator[distributed.Deployment]:
    """A gateway, a batcher and a Redis."""
    with distributed.redis_server() as broker, distributed.carpool(broker, environment=environment) as system:
        yield system


def cache(quick: bool) -> None:
    seconds = 3 if quick else 10
    for name, system, more_max in (("embedded", embedded, 0.10), ("over Redis", over_redis, 0.15)):
        loads: dict[str, list[Load]] = {kind: [] for kind in KINDS}
        with system({}) as off, system(CACHED) as on:
            systems = {"off": off, "on": on}
            for number in range(3):
                for kind, (which, inputs) in KINDS.items():
                    console.print(f"cache, {name}, round {number + 1} of 3, {kind} ...")
                    chosen = systems[which]
                    loads[kind].append(wrk(chosen.ports, chosen.pids, seconds, CONNECTIONS, DISTINCT, inputs))
                    time.sleep(distributed.BETWEEN_ROUNDS_S)
        cpu = {kind: median(sum(load.cpu_us.values()) for load in each) for kind, each in loads.items()}
        rate = {kind: median(load.rate for load in each) for kind, each in loads.items()}
        more, times = cpu["miss"] / cpu["off"] - 1, rate["hit"] / rate["miss"]
        figure = f"{cpu['miss']:.1f} us of {cpu['off']:.1f} us: {more:+.1%}"
        rows = [
            verdict("on and never hit: CPU a request", figure, f"<= {more_max:.0%} more", more <= more_max),
            verdict("a hit: throughput, times a miss's", f"{times:.2f}", ">= 1.5", times >= 1.5),
            ("a hit: CPU a request", f"{cpu['hit']:.1f} us", "", ""),
        ]
        rates = ", ".join(f"{kind} {each:,.0f}/s" for kind, each in rate.items())
        rows.append(("throughput", rates, "", ""))
        show(f"cache, {name}: wrk -t1 -c{CONNECTIONS}, 2 KB, {distributed.SIMULATED}; medians of three", rows)
