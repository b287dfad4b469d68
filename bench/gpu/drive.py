"""Measures Carpool in front of a real model on this machine's GPU: `make gpu`.

    python3 bench/gpu/drive.py --out DATA [--only curve,one-by-one,rate,mixed,redis] [--quick] [--redis-server PATH]

Every section writes DATA/SECTION.json; `bench/gpu/report.py DATA` makes docs/gpu.md of what is there. Sections:

curve       one call at a time straight to the server, 1 to 64 texts: why batching pays
one-by-one  1,000 requests a second, and saturation: straight to the server, Carpool with batches of 1, Carpool
rate        10,000 requests a second of 2 KB for 60 s, at plain defaults
mixed       texts of mixed lengths, `batching.fit` off and auto: saturation, and 80 % of what `off` can do
redis       the same over Redis: two gateways and a batcher

The server is bench/gpu/server.py. `carpool bench` sends what has a rate; at saturation it is bench/gpu/clients.py,
whose clients wait for their answers, with shedding off and patient timeouts, so that none is refused. Every answer is
verified.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from typing import Any
from urllib.request import urlopen

import msgspec

from figures import ALONE, SATURATION, Options, Point, Row, Section

sys.path.append(str(Path(__file__).parents[1]))

import distributed
import measuring
from distributed import Deployment
from measuring import CARPOOL, MACHINE, bench_all, console, cpu_seconds, free_port, process

HERE = Path(__file__).parent
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# A sentence or two, and what fills the model: 60 and 500 tokens.
SHORT_BYTES, LONG_BYTES = 240, 2000
# 60 tokens in the middle, 512 at most.
MIXED_SIZES = "lognormal:240,0.875,2048"
# Closed loop: few clients are enough to fill batches; fitting ones need a choice.
CLIENTS, MIXED_CLIENTS = 1024, 2048
# A client waits however long it takes: at saturation with batches of one that is seconds.
PATIENT = {
    "CARPOOL_SHEDDING_MODE": "off",
    "CARPOOL_BROKER_QUEUE_TIMEOUT_S": "15",
    "CARPOOL_BROKER_TOTAL_TIMEOUT_S": "20",
    "CARPOOL_UPSTREAM_TIMEOUT_S": "10",
}
ONE_AT_A_TIME = {"CARPOOL_BATCHING_MAX_BATCH": "1"}
# Importing PyTorch, finding the GPU, the first calls.
SERVER_START_S_MAX = 120.0
# For code and connections; and for what a size costs, which Carpool learns from some hundred calls.
WARM_UP_S, LEARN_S = 2.0, 8.0
LOAD_SHARE = 0.8


class Load(msgspec.Struct, frozen=True):
    """What the senders of a load saw, together."""

    rate: float
    p50_ms: float | None
    p99_ms: float | None
    errors: int
    wrong: int
    seconds: float
    generator_busy: float


def together(reports: Sequence[Mapping[str, Any]], seconds: float) -> Load:
    """Rates add up; p50 is the median of the senders', p99 the highest."""
    seen = [report["latency_ms"] for report in reports if report["latency_ms"]["p50"] is not None]
    p50, p99 = (median(each["p50"] for each in seen), max(each["p99"] for each in seen)) if seen else (None, None)
    rate, errors, wrong = (sum(report[name] for report in reports) for name in ("rate", "errors", "wrong"))
    return Load(rate, p50, p99, errors, wrong, seconds, max(report["generator_busy"] for report in reports))


class Server:
    """The model server, while it runs."""

    def __init__(self, shape: str, port: int, options: Options) -> None:
        self.shape, self.options = shape, options
        self.ports = [port + number for number in range(options.processes)]
        last = f"-{self.ports[-1]}" if len(self.ports) > 1 else ""
        self.url = f"http://127.0.0.1:{port}{last}/infer"
        self.device = str(self.ask("stats")[0]["name"])

    def ask(self, path: str) -> list[Any]:
        """What each of its processes says."""
        return [json.load(urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10)) for port in self.ports]

    def totals(self) -> dict[str, float]:
        each = self.ask("stats")
        return {name: sum(stats[name] for stats in each) for name in each[0] if name != "name"}

    def row(self, system: str, load: str, send: Callable[[], Load], pids: Sequence[int] = ()) -> Row:
        """Send a load, and see what it took."""
        before, cpu_before, began = self.totals(), [cpu_seconds(pid) for pid in pids], time.monotonic()
        with kernels_seen() as kernels:
            seen = send()
        elapsed_s = time.monotonic() - began
        cpu = [cpu_seconds(pid) - then for pid, then in zip(pids, cpu_before, strict=True)]
        took = {name: total - before[name] for name, total in self.totals().items()}
        row = Row(
            *(self.shape, system, load, round(seen.rate, 1), seen.p50_ms, seen.p99_ms, seen.errors, seen.wrong),
            busy=round(took["busy_s"] / self.options.processes / seen.seconds, 3),
            kernels=round(mean(kernels) / 100, 3) if kernels else None,
            batch=round(took["inputs"] / max(took["calls"], 1), 1),
            padding=round(took["padded_tokens"] / max(took["real_tokens"], 1), 2),
            carpool_busy=round(max(cpu, default=0.0) / elapsed_s, 3),
            generator_busy=seen.generator_busy,
        )
        console.print(", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(row).items()))
        return row


@contextmanager
def server(shape: str, options: Options) -> Iterator[Server]:
    """The model server, warm."""
    port = free_port()
    command = [sys.executable, str(HERE / "server.py"), "--shape", shape, "--port", str(port), "--echo"]
    command += ["--processes", str(options.processes), "--device", options.device]
    command += ["--weights", options.weights] if options.weights else []
    measuring.START_S_MAX = SERVER_START_S_MAX
    with process(command, port) as child, tempfile.TemporaryFile() as log:
        for number in range(1, options.processes):
            measuring.wait_for_port(port + number, child, log)
        yield Server(shape, port, options)


@contextmanager
def kernels_seen() -> Iterator[list[float]]:
    """Per cent of the time that a kernel ran, as nvidia-smi samples it; the list is filled at the end."""
    found: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "250"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            yield found
        finally:
            child.terminate()
            text = child.communicate()[0]
        # The first and the last fall outside of the load.
        found += [float(line) for line in text.split()[2:-2] if line.isdigit()]


@contextmanager
def embedded(server: Server, environment: Mapping[str, str]) -> Iterator[Deployment]:
    """One process of Carpool."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", server.url, "--port", str(port), "--data-dir", data]
        with process([*command, "--slots", str(server.options.slots)], port, environment) as child:
            yield Deployment([port], {"carpool": [child.pid]})


@contextmanager
def over_redis(server: Server, environment: Mapping[str, str]) -> Iterator[Deployment]:
    """Gateways and a batcher."""
    settings = {**environment, "CARPOOL_UPSTREAM_SLOTS": str(server.options.slots)}
    with (
        distributed.redis_server() as broker,
        distributed.carpool(broker, server.options.gateways, upstream=server.url, environment=settings) as system,
    ):
        yield system


def pids_of(system: Deployment) -> list[int]:
    return [pid for role, pids in system.pids.items() if role != "redis" for pid in pids]


def closed(urls: Sequence[str], seconds: float, clients: int, *flags: str) -> Load:
    """Clients that send again once they have their answer, shared evenly among processes, one for each URL."""
    command = [sys.executable, str(HERE / "clients.py")]
    flags = ("--clients", str(max(1, clients // len(urls))), "--seconds", str(seconds), *flags)
    children = [
        subprocess.Popen([*command, url, "--seed", str(number), *flags], stdout=subprocess.PIPE)
        for number, url in enumerate(urls)
    ]
    outputs = [child.communicate(timeout=seconds + 60)[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"clients.py failed: {urls} {flags}")
    reports = [json.loads(output) for output in outputs]
    return together(reports, max(report["elapsed_s"] for report in reports))


def at_rate(ports: Sequence[int], rate: float, seconds: float, *flags: str) -> Load:
    """`carpool bench`, one for each port, which share the rate."""
    flags = ("--rate", f"{rate / len(ports):g}", "--duration", f"{seconds:g}s", "--timeout", "15s", *flags)
    reports = bench_all(ports, *flags)
    # Above the capacity the last answers come after the last request was sent.
    return together(reports, max(seconds, *((each["ok"] + each["wrong"]) / max(each["rate"], 1) for each in reports)))


def doors_of(system: Deployment, options: Options) -> list[int]:
    """A port for each generator."""
    return list(islice(cycle(system.ports), options.generators))


def urls_of(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}/v1/inference" for port in ports]


def curve(options: Options) -> Section:
    points, device = [], ""
    for shape in options.shapes:
        with server(shape, options) as model:
            device = model.device
            for size in (SHORT_BYTES, LONG_BYTES):
                for batch in BATCHES:
                    before = model.totals()
                    seen = closed([model.url], options.curve_s, 1, "--batch", str(batch), "--sizes", str(size))
                    took = {name: total - before[name] for name, total in model.totals().items()}
                    gpu_ms = 1000 * took["busy_s"] / max(took["calls"], 1)
                    points.append(Point(shape, size, batch, seen.p50_ms or 0.0, round(gpu_ms, 3), seen.rate))
                    console.print(f"{shape}, {size} bytes, {batch}: {seen.p50_ms} ms, {seen.rate:,.0f} texts/s")
    return Section(device, MACHINE, options, points=points)


def one_by_one(options: Options) -> Section:
    rows, device = [], ""
    rate, clients = 1000 * options.scale, max(8, int(CLIENTS * options.scale))
    texts, payload = ("--sizes", str(SHORT_BYTES)), ("--payload-bytes", str(SHORT_BYTES))

    def both(model: Server, name: str, ports: Sequence[int], pids: Sequence[int] = ()) -> list[Row]:
        urls = urls_of(ports)
        closed(urls, WARM_UP_S, clients, *texts)
        open_loop = partial(at_rate, ports, rate, options.seconds, *payload)
        closed_loop = partial(closed, urls, options.seconds, clients, *texts)
        return [model.row(name, f"{rate:,g}/s", open_loop, pids), model.row(name, SATURATION, closed_loop, pids)]

    for shape in options.shapes:
        with server(shape, options) as model:
            device = model.device
            rows += both(model, ALONE, model.ports)
            for name, settings in (("Carpool, batches of 1", ONE_AT_A_TIME), ("Carpool, batches of 64", {})):
                with embedded(model, {**PATIENT, **settings}) as system:
                    rows += both(model, name, doors_of(system, options), pids_of(system))
    return Section(device, MACHINE, options, rows=rows)


def at_a_rate(options: Options) -> Section:
    rate = 10_000 * options.scale
    size = ("--payload-bytes", str(LONG_BYTES))
    with server(options.shapes[0], options) as model, embedded(model, {}) as system:
        ports = doors_of(system, options)
        at_rate(ports, rate / 5, WARM_UP_S, *size)
        send = partial(at_rate, ports, rate, options.long_s, *size)
        row = model.row("Carpool", f"{rate:,g}/s of 2 KB", send, pids_of(system))
        return Section(model.device, MACHINE, options, rows=[row])


def fits(options: Options, run: Callable[[Server, Mapping[str, str]], Any], name: str, *, alone: bool) -> Section:
    """`batching.fit` off and auto, through this system; each beside the server alone with the very same batches."""
    rows: list[Row] = []
    for shape in options.shapes:
        with server(shape, options) as model:
            rows += fits_of(model, run, name, alone=alone)
    return Section(model.device, MACHINE, options, rows=rows)


def fits_of(model: Server, run: Callable[[Server, Mapping[str, str]], Any], name: str, *, alone: bool) -> list[Row]:
    rows: list[Row] = []
    options = model.options
    in_flight, clients = options.slots * options.processes, max(64, int(MIXED_CLIENTS * options.scale))
    mixed = ("--sizes", MIXED_SIZES)
    with tempfile.TemporaryDirectory() as folder:

        def directly(what: str, *flags: str) -> Row:
            flags = ("--batch", "64", *mixed, *flags)
            return model.row(ALONE, what, partial(closed, [model.url], options.seconds, in_flight, *flags))

        if alone:
            rows = [directly("as they come"), directly("sorted among 1,024", "--sort-among", "1024")]
        capacity = 0.0
        for fit in ("off", "auto"):
            label, batches = f"{name}, fit {fit}", Path(folder) / f"{fit}.json"
            with run(model, {**PATIENT, "CARPOOL_BATCHING_FIT": fit}) as system:
                ports, pids = doors_of(system, options), pids_of(system)
                urls = urls_of(ports)
                closed(urls, LEARN_S, clients, *mixed)
                model.ask("batches")
                rows.append(model.row(label, SATURATION, partial(closed, urls, options.seconds, clients, *mixed), pids))
                batches.write_text(json.dumps([batch for part in model.ask("batches") for batch in part]))
                capacity = capacity or rows[-1].rate
                steady = partial(at_rate, ports, LOAD_SHARE * capacity, options.seconds, *mixed)
                rows.append(model.row(label, f"{LOAD_SHARE:.0%}", steady, pids))
            rows.append(directly(f"the batches of fit {fit}", "--replay", str(batches)))
    return rows


MEASURE: dict[str, Callable[[Options], Section]] = {
    "curve": curve,
    "one-by-one": one_by_one,
    "rate": at_a_rate,
    "mixed": lambda options: fits(options, embedded, "Carpool", alone=True),
    "redis": lambda options: fits(options, over_redis, "Carpool over Redis", alone=False),
}


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the data")
    parser.add_argument("--only", default=",".join(MEASURE), help="sections, by name")
    parser.add_argument("--quick", action="store_true", help="half of the time")
    parser.add_argument("--shapes", default="minilm,bert", help="`rate` has the first alone")
    parser.add_argument("--device", default="", help="cpu: without a GPU, to try it")
    parser.add_argument("--weights", default="", help="a folder for the server, in place of random weights")
    parser.add_argument("--processes", type=int, default=1, help="of the server, which share the GPU")
    parser.add_argument("--slots", type=int, default=2, help="calls at once for each: one runs, one waits")
    parser.add_argument("--generators", type=int, default=4, help="processes that send the load")
    parser.add_argument("--gateways", type=int, default=2, help="over Redis")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rates and clients, for small machines")
    parser.add_argument("--redis-server", type=Path, help="by default the one on the PATH")
    flags = parser.parse_args()
    if not flags.device and not has_gpu():
        print("This needs PyTorch and a GPU; `--device cpu --shapes tiny --scale 0.02` tries it without one.")
        return 1
    if flags.redis_server:
        os.environ["PATH"] = f"{flags.redis_server.resolve().parent}:{os.environ['PATH']}"
    times = (5.0, 0.6, 30.0) if flags.quick else (10.0, 1.0, 60.0)
    load = (flags.processes, flags.slots, flags.generators, flags.gateways, *times, flags.scale)
    options = Options(flags.shapes.split(","), flags.device, flags.weights, *load)
    measuring.raise_file_limit()
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in flags.only.split(","):
        began = time.monotonic()
        section = MEASURE[name](options)
        (flags.out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(section)) + b"\n")
        console.print(f"{name}: {time.monotonic() - began:.0f} s")
    for failure in measuring.failures:
        console.print(f"does not hold: {failure}")
    return 1 if measuring.failures else 0


if __name__ == "__main__":
    sys.exit(main())
