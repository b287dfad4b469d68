"""Gateways and batchers over a real Redis: deployments to measure, and the sections `redis`, `redis-mixed` and
`redis-rate`.

A deployment is the processes of one system, by role, and the ports its gateways listen on. The floor is
bench/floor/redis_gateway.py and redis_batcher.py, which do the same work with no features.
"""

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from redis import Redis

from keyed import temporary_keys
from measuring import (
    CARPOOL,
    HERE,
    START_S_MAX,
    Load,
    bench,
    beside_kept,
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
MIXED = HERE / "mixed.lua"
# Results of tasks that nobody fetches: a few seconds of them, so that Redis does not grow with the length of a run.
SHORT_RESULTS = {"CARPOOL_TASKS_RESULT_TTL_S": "3"}
# Those who are under way when a round of wrk ends leave; what they leave behind is tidied up meanwhile.
BETWEEN_ROUNDS_S = 1.0


class Broker(msgspec.Struct, frozen=True):
    """A running Redis: its address, and its processes."""

    url: str
    ports: list[int]
    pids: list[int]


class Deployment(msgspec.Struct, frozen=True):
    """A running system: the ports that take requests, and its processes and admin ports by role."""

    ports: list[int]
    pids: dict[str, list[int]]
    admin_ports: dict[str, list[int]] = {}


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
    broker: Broker,
    gateways: int = 1,
    batchers: int = 1,
    upstream: str = SIMULATED,
    flags: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """Carpool's roles over one Redis or a Cluster, ready."""
    ports, pids = [], {"gateway": [], "batcher": [], "redis": broker.pids}
    admin_ports: dict[str, list[int]] = {"gateway": [], "batcher": []}
    with ExitStack() as stack:
        for _ in range(batchers):
            port = free_port()
            command = [*CARPOOL, "batcher", "--broker", broker.url, "--upstream", upstream, "--port", str(port), *flags]
            # It takes no requests: only its admin port listens.
            pids["batcher"].append(stack.enter_context(process(command, port + 1, environment)).pid)
            admin_ports["batcher"].append(port + 1)
        for _ in range(gateways):
            port = free_port()
            command = [*CARPOOL, "gateway", "--broker", broker.url, "--port", str(port), *flags]
            pids["gateway"].append(stack.enter_context(process(command, port, environment)).pid)
            ports.append(port)
            admin_ports["gateway"].append(port + 1)
        for port in ports:
            _wait_until_ready(port)
        # Every batcher, not only the first, before the load comes.
        time.sleep(1.0)
        yield Deployment(ports, pids, admin_ports)


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
        beside_kept("redis: share of the floor", share, more_is_better=True),
        beside_kept("redis: CPU, times the floor's", cost, more_is_better=False),
    ]
    for role in (*PYTHON_ROLES, "redis"):
        used = {name: median(load.cpu_us[role] for load in each) for name, each in loads.items()}
        rows.append((f"CPU a request, {role}", f"{used['carpool']:.1f} us of {used['floor']:.1f} us", "", ""))
    latency = {name: median(load.p99_ms for load in each) for name, each in loads.items()}
    rows.append(("p99", f"{latency['carpool']:.0f} ms (floor {latency['floor']:.0f} ms)", "", ""))
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, one gateway, one batcher, one Redis, {SIMULATED}; medians of three", rows)


def mixed_beside_single(quick: bool) -> None:
    seconds = 4 if quick else 10
    loads: dict[str, list[Load]] = {"single": [], "mixed": []}
    with (
        temporary_keys() as keys,
        redis_server() as first,
        redis_server() as second,
        carpool(first, flags=("--config", str(keys.config)), environment=SHORT_RESULTS) as calm,
        carpool(second, flags=("--config", str(keys.config)), environment=SHORT_RESULTS) as varied,
        Redis(port=second.ports[0]) as client,
    ):
        systems = {"single": calm, "mixed": varied}
        for number in range(3):
            for name, system in systems.items():
                console.print(f"redis-mixed, round {number + 1} of 3, {name} ...")
                arguments = (name, *map(str, keys.files.values()))
                loads[name].append(wrk(system.ports, system.pids, seconds, CONNECTIONS, MIXED, *arguments))
                time.sleep(BETWEEN_ROUNDS_S)
        outcomes = {name: outcomes_of(system) for name, system in systems.items()}
        batch = {name: mean_batch(system) for name, system in systems.items()}
        tasks = outcomes_of(varied, "batcher").get("ok", 0)
        memory_mb = client.info("memory")["used_memory_peak"] / 1024**2
    rate = {name: median(load.rate for load in each) for name, each in loads.items()}
    share = rate["mixed"] / rate["single"]
    figure = f"{rate['mixed']:,.0f}/s of {rate['single']:,.0f}/s: {share:.0%}"
    rows = [
        verdict("throughput, share of the single stream's", figure, ">= 80 %", share >= 0.8),
        beside_kept("redis, mixed: share of the single stream's", share, more_is_better=True),
    ]
    for name, each in loads.items():
        refused = sum(load.errors for load in each)
        # Those who were under way when wrk ended have left.
        failed = {code: count for code, count in outcomes[name].items() if code not in ("ok", "client-left")}
        figure = f"{refused} seen by wrk (not 2xx, broken, late), outcomes {failed or 'all ok'}"
        rows.append(verdict(f"errors, {name}", figure, "0", not refused and not failed))
    rows.append(verdict("tasks done", f"{tasks:,}", "> 0", tasks > 0))
    for what, roles in (("gateway and batcher", PYTHON_ROLES), *((role, (role,)) for role in (*PYTHON_ROLES, "redis"))):
        used = {name: median(sum(load.cpu_us[role] for role in roles) for load in each) for name, each in loads.items()}
        times = used["mixed"] / used["single"]
        rows.append(
            (f"CPU a request, {what}", f"{used['mixed']:.1f} us of {used['single']:.1f} us: {times:.2f}", "", "")
        )
    busy = {name: median(load.generator_busy for load in each) for name, each in loads.items()}
    latency = {name: median(load.p99_ms for load in each) for name, each in loads.items()}
    rows += [
        ("generator", f"{busy['mixed']:.0%} of a core (single {busy['single']:.0%})", "", ""),
        ("mean batch", f"{batch['mixed']:.1f} (single {batch['single']:.1f})", "", ""),
        ("p99", f"{latency['mixed']:.0f} ms (single {latency['single']:.0f} ms)", "", ""),
        ("memory of Redis, most", f"{memory_mb:.0f} MB", "", ""),
    ]
    title = "three tiers (70, 25, 5 %), 5 % tasks, eight lanes beside one of each"
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, {title}, {SIMULATED}; medians of three", rows)


def outcomes_of(system: Deployment, *roles: str) -> dict[str, int]:
    """How many requests had which outcome. Gateways count synchronous requests, batchers tasks."""
    outcomes: dict[str, int] = {}
    for role in roles or PYTHON_ROLES:
        for code, count in numbers(system, role, r'carpool_requests_total\{outcome="([^"]+)"\}'):
            outcomes[code] = outcomes.get(code, 0) + int(count)
    return outcomes


def mean_batch(system: Deployment) -> float:
    """Requests in a batch."""
    total, batches = (
        sum(count for _, count in numbers(system, "batcher", rf"carpool_batch_size_{what}(\{{.*\}})"))
        for what in ("sum", "count")
    )
    return total / max(batches, 1)


def numbers(system: Deployment, role: str, series: str) -> list[tuple[str, float]]:
    """The metrics of a role that match, by what is in the brackets of the pattern."""
    found = []
    for port in system.admin_ports[role]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            found += re.findall(rf"^{series} (\S+)$", page.read().decode(), re.MULTILINE)
    return [(label, float(value)) for label, value in found]


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
