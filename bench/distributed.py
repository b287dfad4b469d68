"""Gateways and batchers over a real Redis: deployments to measure, and the sections `redis` and `redis-rate`.

A deployment is the processes of one system, by role, and the ports its gateways listen on. The floor is
bench/floor/redis_gateway.py and redis_batcher.py, which do the same work with no features.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from redis import Redis

from measuring import (
    CARPOOL,
    HERE,
    START_S_MAX,
    Load,
    bench,
    console,
    cpu_seconds,
    free_port,
    gpus,
    process,
    show,
    verdict,
    wrk,
)

SLOTS = 16384
# The pretend GPU of the floor, with more slots than any load here can fill.
SIMULATED = "sim:?latency_ms=50&slots=256"
NO_PERSISTENCE = ("--save", "", "--appendonly", "no")
EVERY_SECOND = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
CONNECTIONS = 2000
# What the ratio of CPU time is about: Redis is the same program on both sides.
PYTHON_ROLES = ("gateway", "batcher")


class Broker(msgspec.Struct, frozen=True):
    """A running Redis: its address, and its processes."""

    url: str
    ports: list[int]
    pids: list[int]


class Deployment(msgspec.Struct, frozen=True):
    """A running system: the ports that take requests, and its processes by role."""

    ports: list[int]
    pids: dict[str, list[int]]


@contextmanager
def redis_server(*flags: str) -> Iterator[Broker]:
    """One Redis."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = ["redis-server", "--port", str(port), "--dir", directory, *(flags or NO_PERSISTENCE)]
        with process(command, port) as server:
            yield Broker(f"redis://127.0.0.1:{port}", [port], [server.pid])


@contextmanager
def redis_cluster(primaries: int = 3) -> Iterator[Broker]:
    """A Cluster without replicas, the slots shared evenly."""
    with ExitStack() as stack:
        ports, buses, pids = [], [], []
        for _ in range(primaries):
            port, bus = free_port(), free_port()
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            command = ["redis-server", "--port", str(port), "--dir", directory, *NO_PERSISTENCE]
            command += ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
            pids.append(stack.enter_context(process(command, port)).pid)
            ports.append(port)
            buses.append(bus)
        nodes = [stack.enter_context(Redis(port=port)) for port in ports]
        for number, node in enumerate(nodes):
            first, last = SLOTS * number // primaries, SLOTS * (number + 1) // primaries - 1
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0], buses[0])
        deadline = time.monotonic() + START_S_MAX
        while not all(_is_whole(node, primaries) for node in nodes):
            if time.monotonic() > deadline:
                raise SystemExit("the Cluster did not form")
            time.sleep(0.1)
        yield Broker(f"redis+cluster://127.0.0.1:{ports[0]}", ports, pids)


def _is_whole(node: "Redis", primaries: int) -> bool:
    facts = node.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]  # redis-py has no types here
    return facts["cluster_state"] == "ok" and int(facts["cluster_size"]) == primaries


@contextmanager
def floor(broker: Broker, gateways: int = 1, batchers: int = 1) -> Iterator[Deployment]:
    """The floor over one Redis."""
    (redis_port,) = broker.ports
    folder = HERE / "floor"
    ports, pids = [], {"gateway": [], "batcher": [], "redis": broker.pids}
    with ExitStack() as stack, Redis(port=redis_port) as client:
        for number in range(batchers):
            command = [sys.executable, str(folder / "redis_batcher.py"), str(redis_port), f"b{number}"]
            pids["batcher"].append(stack.enter_context(process(command, None)).pid)
        # Nothing may be written before every batcher waits for it: their group begins at the end of the streams.
        deadline = time.monotonic() + START_S_MAX
        while client.info("clients")["blocked_clients"] < batchers:
            if time.monotonic() > deadline:
                raise SystemExit("the floor's batchers did not start")
            time.sleep(0.05)
        for number in range(gateways):
            port = free_port()
            command = [sys.executable, str(folder / "redis_gateway.py"), str(redis_port), str(port), f"gw{number}"]
            pids["gateway"].append(stack.enter_context(process(command, port)).pid)
            ports.append(port)
        yield Deployment(ports, pids)


@contextmanager
def carpool(
    broker: Broker, gateways: int = 1, batchers: int = 1, upstream: str = SIMULATED, flags: tuple[str, ...] = ()
) -> Iterator[Deployment]:
    """Carpool's roles over one Redis or a Cluster, ready."""
    ports, pids = [], {"gateway": [], "batcher": [], "redis": broker.pids}
    with ExitStack() as stack:
        for _ in range(batchers):
            port = free_port()
            command = [*CARPOOL, "batcher", "--broker", broker.url, "--upstream", upstream, "--port", str(port), *flags]
            # It takes no requests: only its admin port listens.
            pids["batcher"].append(stack.enter_context(process(command, port + 1)).pid)
        for _ in range(gateways):
            port = free_port()
            command = [*CARPOOL, "gateway", "--broker", broker.url, "--port", str(port), *flags]
            pids["gateway"].append(stack.enter_context(process(command, port)).pid)
            ports.append(port)
        for port in ports:
            _wait_until_ready(port)
        # Every batcher, not only the first, before the load comes.
        time.sleep(1.0)
        yield Deployment(ports, pids)


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    answer = ""
    while time.monotonic() < deadline:
        try:
            urlopen(f"http://127.0.0.1:{port + 1}/internal/ready", timeout=2).close()
            return
        except (URLError, OSError) as fault:
            answer = str(fault)
            time.sleep(0.1)
    raise SystemExit(f"the gateway on port {port} is not ready: {answer}")


def beside_the_floor(quick: bool) -> None:
    seconds = 4 if quick else 10
    loads: dict[str, list[Load]] = {"floor": [], "carpool": []}
    with redis_server() as first, redis_server() as second, floor(first) as bare, carpool(second) as real:
        for number in range(3):
            console.print(f"redis, round {number + 1} of 3 ...")
            loads["floor"].append(wrk(bare.ports, bare.pids, seconds, CONNECTIONS))
            loads["carpool"].append(wrk(real.ports, real.pids, seconds, CONNECTIONS))
    rate = {name: median(load.rate for load in each) for name, each in loads.items()}
    cpu = {
        name: median(sum(load.cpu_us[role] for role in PYTHON_ROLES) for load in each) for name, each in loads.items()
    }
    share, cost = rate["carpool"] / rate["floor"], cpu["carpool"] / cpu["floor"]
    rows = [
        verdict(
            "throughput, share of the floor",
            f"{rate['carpool']:,.0f}/s of {rate['floor']:,.0f}/s: {share:.0%}",
            ">= 50 % (aim 70 %)",
            share >= 0.5,
        ),
        verdict(
            "CPU a request, gateway and batcher, times the floor's",
            f"{cpu['carpool']:.1f} us of {cpu['floor']:.1f} us: {cost:.2f}",
            "<= 2",
            cost <= 2.0,
        ),
    ]
    for role in (*PYTHON_ROLES, "redis"):
        used = {name: median(load.cpu_us[role] for load in each) for name, each in loads.items()}
        rows.append((f"CPU a request, {role}", f"{used['carpool']:.1f} us of {used['floor']:.1f} us", "", ""))
    latency = {name: median(load.p99_ms for load in each) for name, each in loads.items()}
    rows.append(("p99", f"{latency['carpool']:.0f} ms (floor {latency['floor']:.0f} ms)", "", ""))
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, one gateway, one batcher, one Redis, {SIMULATED}; medians of three", rows)


def at_a_rate(quick: bool) -> None:
    seconds = 10 if quick else 60
    with gpus(40) as upstream, redis_server(*EVERY_SECOND) as broker, carpool(broker, upstream=upstream) as system:
        (port,) = system.ports
        bench(port, "--rate", "1000", "--duration", "2s")  # connections and code warm
        console.print(f"redis-rate, {seconds} s at 10,000/s ...")
        before = {role: sum(map(cpu_seconds, pids)) for role, pids in system.pids.items()}
        start = time.monotonic()
        report = bench(port, "--rate", "10000", "--duration", f"{seconds}s")
        elapsed_s = time.monotonic() - start
        used = {role: (sum(map(cpu_seconds, pids)) - before[role]) / elapsed_s for role, pids in system.pids.items()}
    latency, size = report["latency_ms"], report["batch_mean"] or 0.0
    lost = report["errors"] + report["unanswered"]
    rows = [
        verdict("lost", f"{lost} of {report['sent']:,} {report['status']}", "0", lost == 0),
        verdict("wrong answers", str(report["wrong"]), "0", report["wrong"] == 0),
        verdict("rate", f"{report['rate']:,.0f}/s", ">= 9,800/s", report["rate"] >= 9800),
        verdict(
            "p99", f"{latency['p99'] or 0:.0f} ms (p50 {latency['p50'] or 0:.0f})", "< 500 ms", _below(latency["p99"])
        ),
        verdict("mean batch", f"{size:.1f}", ">= 50", size >= 50),
    ]
    rows += [(f"CPU, {role}", f"{share:.0%} of a core", "", "") for role, share in used.items()]
    rows.append(("CPU, generator", f"{report['generator_busy']:.0%} of a core", "", ""))
    show(f"carpool bench --rate 10000 --duration {seconds}s, Redis everysec, 40 simulated GPUs of 200 ms", rows)


def _below(p99_ms: float | None) -> bool:
    return p99_ms is not None and p99_ms < 500
