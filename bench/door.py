"""What the door costs: credentials, limits, tiers, fairness and shedding on, beside all off; and what a refusal costs.

The same requests go to both: where nobody asks for a key, it is a header like any other.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

import distributed
from keyed import Keyed, keyed
from measuring import CARPOOL, HERE, Load, bench, beside_kept, console, free_port, process, show, verdict, wrk

KEYED = HERE / "keyed.lua"
Broker = Literal["embedded", "redis"]
SIMULATED = distributed.SIMULATED
CONNECTIONS = 2000
ROUNDS = 5
OWNERS = 10
# More than any load here: everybody is looked at, nobody is refused.
PLENTY_PER_MINUTE = 1_000_000_000
ALL_ON = """
[shedding]
mode = "predicted"
"""
ALL_OFF = """
[shedding]
mode = "off"
[auth]
mode = "off"
"""
# One slot of half a second for one request: everybody else is refused at the door.
SCARCE = "sim:?latency_ms=500&slots=1&max_batch=1"
SCARCE_FLAGS = ("--max-batch", "1")


@contextmanager
def gateway(
    broker: Broker, config: Path, upstream: str = SIMULATED, flags: Sequence[str] = ()
) -> Iterator[distributed.Deployment]:
    """A gateway with this configuration; over Redis with a batcher beside it."""
    flags = ("--config", str(config), *flags)
    if broker == "redis":
        with (
            distributed.redis_server() as server,
            distributed.carpool(server, upstream=upstream, flags=tuple(flags)) as running,
        ):
            yield running
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", upstream, "--port", str(port), "--data-dir", data, *flags]
        with process(command, port) as child:
            yield distributed.Deployment([port], {"gateway": [child.pid]})


def door(quick: bool) -> None:
    for broker in ("embedded", "redis"):
        _door(broker, 4 if quick else 8, 3 if quick else ROUNDS)


def _door(broker: Broker, seconds: int, rounds: int) -> None:
    loads: dict[str, list[Load]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        off = directory / "off.toml"
        off.write_text(ALL_OFF)
        keys = keyed(directory, ALL_ON, owners=OWNERS, per_minute=PLENTY_PER_MINUTE)
        with gateway(broker, off) as without, gateway(broker, keys.config) as with_all:
            for number in range(rounds):
                console.print(f"door, {broker}, round {number + 1} of {rounds} ...")
                loads["off"].append(_keyed_wrk(without, keys, seconds))
                loads["on"].append(_keyed_wrk(with_all, keys, seconds))
    rate = {name: median(load.rate for load in each) for name, each in loads.items()}
    cpu = {name: median(sum(load.cpu_us.values()) for load in each) for name, each in loads.items()}
    share, cost = rate["on"] / rate["off"], cpu["on"] / cpu["off"]
    figure = f"{rate['on']:,.0f}/s of {rate['off']:,.0f}/s: {1 - share:.1%} less"
    rows = [
        verdict("throughput with all of the door", figure, "<= 15 % less", share >= 0.85),
        ("CPU a request", f"{cpu['on']:.1f} us of {cpu['off']:.1f} us: {cost:.2f}", "", ""),
        beside_kept(f"door, {broker}: share of all off", share, more_is_better=True),
    ]
    if broker == "redis":
        for role in (*distributed.PYTHON_ROLES, "redis"):
            used = {name: median(load.cpu_us[role] for load in each) for name, each in loads.items()}
            rows.append((f"CPU a request, {role}", f"{used['on']:.1f} us of {used['off']:.1f} us", "", ""))
    what = f"keys ({3 * OWNERS} owners), limits, tiers, fairness, shedding beside none of them, {broker}"
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, {what}, {SIMULATED}; medians of {rounds}", rows)


def _keyed_wrk(system: distributed.Deployment, keys: Keyed, seconds: int, *, may_refuse: bool = False) -> Load:
    return wrk(system.ports, system.pids, seconds, CONNECTIONS, KEYED, str(keys.mixed), may_refuse=may_refuse)


def refusal(quick: bool) -> None:
    """What the gateway uses for a request that it refuses, beside one that it serves."""
    seconds, rounds = 4 if quick else 8, 3
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plenty = keyed(directory / "admitted", ALL_ON, owners=OWNERS, per_minute=PLENTY_PER_MINUTE)
        strict = keyed(directory / "limited", ALL_ON, owners=OWNERS, per_minute=1, burst=1)
        loads: dict[str, list[Load]] = {"admitted": [], "shed": [], "limited": []}
        with (
            gateway("embedded", plenty.config) as serving,
            gateway("embedded", plenty.config, SCARCE, SCARCE_FLAGS) as shedding,
            gateway("embedded", strict.config) as limiting,
        ):
            # Until eight batches were seen nobody is shed.
            bench(shedding.ports[0], "--rate", "6", "--duration", "6s", "--tiers", plenty.tiers)
            for number in range(rounds):
                console.print(f"refusal, round {number + 1} of {rounds} ...")
                loads["admitted"].append(_keyed_wrk(serving, plenty, seconds))
                loads["shed"].append(_keyed_wrk(shedding, plenty, seconds, may_refuse=True))
                loads["limited"].append(_keyed_wrk(limiting, strict, seconds, may_refuse=True))
    rows = []
    for name, what in (("shed", "shed (503)"), ("limited", "over its limit (429)")):
        refused = min(load.errors / max(load.requests, 1) for load in loads[name])
        rows.append(verdict(f"{what}: of all requests", f"{refused:.1%}", ">= 99 %", refused >= 0.99))
        for kind, most in (("user CPU", 0.40), ("CPU", 0.55)):
            used = {each: [_gateway_us(load, kind) for load in loads[each]] for each in (name, "admitted")}
            # Of runs that follow each other: the machine is not as fast at all times.
            share = median(own / served for own, served in zip(used[name], used["admitted"], strict=True))
            figure = f"{median(used[name]):.1f} us of {median(used['admitted']):.1f} us: {share:.0%}"
            rows.append(verdict(f"{what}: {kind}, share of an admitted one's", figure, f"<= {most:.0%}", share <= most))
    show(
        f"wrk -t1 -c{CONNECTIONS}, 2 KB, embedded: a refusal beside a request that is served; medians of {rounds}", rows
    )


def _gateway_us(load: Load, kind: str) -> float:
    return (load.user_us if kind == "user CPU" else load.cpu_us)["gateway"]
