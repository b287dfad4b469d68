"""The benchmark of `make bench`: Carpool beside the floor in one run, and what one machine holds.

    .venv/bin/python bench/run.py [--quick] [--only throughput,rate,…] [--keep RELEASE]

Every figure is a ratio or a limit from one run on one machine; absolute times depend on the machine. Ratios are also
compared with those of the last release (bench/kept.json). Sections:

throughput  wrk, 3,000 connections, bench/floor/embedded.py and Carpool alternating, medians of three
rate        10,000 requests a second for 30 s against 40 simulated GPUs of 200 ms, with `fixed` and with `adaptive`
policy      `adaptive` against `fixed`, real processes, same arrivals, 32 slots of 200 ms, six rates
fit         `batching.fit` off and auto with GPUs that pad, embedded and over Redis, beside virtual time
memory      20,000 requests of 2 KB waiting, above idle
soak        5 minutes at 5,000 requests a second: is the memory flat?
resilience  what breaker, retries and isolation cost when nothing fails: beside a gateway without them, alternating
poison      1 input in 1,000 fails its batch, half of the slots idle: what the others notice, and what the GPUs do
cache       results that are kept: on and never hit beside off, and a hit beside a miss, alone and over Redis
tracking    a row for each request, in SQLite and PostgreSQL, beside none, alternating
redis       a gateway and a batcher over a real Redis beside bench/floor/redis_*.py, alternating, medians of three
redis-mixed the same with three tiers, tasks and eight lanes beside one of each, alternating, medians of three
redis-rate  10,000 requests a second for 60 s through the same, Redis with `appendfsync everysec`
door        keys, limits, tiers, fairness and shedding on, beside all off, alternating, embedded and over Redis
refusal     CPU of a request that is refused (shed; over its limit) as a share of a served one's
tracing     tracing at its default, and of every request, beside off, alternating
faces       OpenAI's embeddings of one text (384 floats, base64) beside /v1/inference, same upstream, alternating
grpc        Predict beside a bare echo of grpcio, PredictStream beside Predict: CPU of the server per answer
stream      a WebSocket beside /v1/inference and gRPC's Predict: CPU of the gateway per answer
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import caching
import distributed
import door
import embeddings
import fit
import grpc_face
import live_page
import measuring
import stream_face
import tracing
import tracking
from measuring import (
    CARPOOL,
    HERE,
    ROOT,
    bench,
    beside_kept,
    console,
    failures,
    free_port,
    gpus,
    process,
    resident_mb,
    show,
    verdict,
)


@contextmanager
def carpool(upstream: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A gateway with everything on, the journal too."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", upstream, "--port", str(port), "--data-dir", data, *flags]
        with process(command, port) as child:
            yield child, port


def wrk(port: int, pid: int, seconds: int) -> tuple[float, float]:
    """Requests a second, and CPU microseconds of the server for each."""
    load = measuring.wrk([port], {"server": [pid]}, seconds, 3000)
    return load.rate, load.cpu_us["server"]


def throughput(quick: bool) -> None:
    seconds = 4 if quick else 10
    runs: dict[str, list[tuple[float, float]]] = {"floor": [], "carpool": []}
    floor_port = free_port()
    floor_command = [sys.executable, str(HERE / "floor" / "embedded.py"), str(floor_port)]
    with process(floor_command, floor_port) as floor, carpool("sim:?latency_ms=50&slots=256") as (gateway, port):
        for number in range(3):
            console.print(f"throughput, round {number + 1} of 3 ...")
            runs["floor"].append(wrk(floor_port, floor.pid, seconds))
            runs["carpool"].append(wrk(port, gateway.pid, seconds))
    rate = {name: median(run[0] for run in each) for name, each in runs.items()}
    cpu = {name: median(run[1] for run in each) for name, each in runs.items()}
    share, cost = rate["carpool"] / rate["floor"], cpu["carpool"] / cpu["floor"]
    figure = f"{rate['carpool']:,.0f}/s of {rate['floor']:,.0f}/s: {share:.0%}"
    rows = [
        verdict("throughput, share of the floor", figure, ">= 60 % (aim 70 %)", share >= 0.6),
        verdict(
            "CPU a request, times the floor's",
            f"{cpu['carpool']:.1f} us of {cpu['floor']:.1f} us: {cost:.2f}",
            "<= 1.7",
            cost <= 1.7,
        ),
        beside_kept("embedded: share of the floor", share, more_is_better=True),
        beside_kept("embedded: CPU, times the floor's", cost, more_is_better=False),
    ]
    show("wrk -t1 -c3000, 2 KB, sim:?latency_ms=50&slots=256, journal on; medians of three", rows)


def rate(quick: bool) -> None:
    seconds = "10s" if quick else "30s"
    rows = []
    with gpus(40) as upstream:
        for policy in ("fixed", "adaptive"):
            console.print(f"10,000/s with {policy} ...")
            with carpool(upstream, "--policy", policy) as (_, port):
                bench(port, "--rate", "1000", "--duration", "2s")  # connections and code warm
                report = bench(port, "--rate", "10000", "--duration", seconds)
            latency = report["latency_ms"]
            rows += [
                verdict(f"{policy}: errors", str(report["errors"]), "0", report["errors"] == 0),
                verdict(f"{policy}: wrong answers", str(report["wrong"]), "0", report["wrong"] == 0),
                verdict(f"{policy}: rate", f"{report['rate']:,.0f}/s", ">= 9,800/s", report["rate"] >= 9800),
                verdict(
                    f"{policy}: p99",
                    f"{latency['p99']:.0f} ms (p50 {latency['p50']:.0f})",
                    "< 300 ms",
                    latency["p99"] < 300,
                ),
            ]
            size = report["batch_mean"]
            if policy == "fixed":
                rows.append(verdict("fixed: mean batch", f"{size:.1f}", ">= 55", size >= 55))
            else:
                rows.append((f"{policy}: mean batch", f"{size:.1f}", "", ""))
    show(f"carpool bench --rate 10000 --duration {seconds}, 40 simulated GPUs of 200 ms", rows)


def policy(quick: bool) -> None:
    seconds = "8s" if quick else "20s"
    rows = []
    with gpus(32) as upstream:
        for each in (50, 500, 2000, 5000, 8000, 9500):
            reports = {}
            for name in ("fixed", "adaptive"):
                console.print(f"{each}/s with {name} ...")
                with carpool(upstream, "--policy", name) as (_, port):
                    bench(port, "--rate", str(each), "--duration", "2s")
                    reports[name] = bench(port, "--rate", str(each), "--duration", seconds, "--seed", "7")
            fixed, adaptive = (reports[name]["queue_ms"] for name in ("fixed", "adaptive"))
            if each <= 2000:
                figure = f"{adaptive['p50']:.1f} ms of {fixed['p50']:.1f} ms"
                rows.append(
                    verdict(f"{each}/s: p50 of queue_ms", figure, "<= a third", adaptive["p50"] <= fixed["p50"] / 3)
                )
            figure = f"{adaptive['p99']:.1f} ms of {fixed['p99']:.1f} ms"
            rows.append(
                verdict(f"{each}/s: p99 of queue_ms", figure, "<= fixed + 2 ms", adaptive["p99"] <= fixed["p99"] + 2)
            )
            kept = reports["adaptive"]["rate"] / reports["fixed"]["rate"]
            figure = f"{kept:.1%}, {reports['adaptive']['errors'] + reports['adaptive']['wrong']} errors"
            rows.append(verdict(f"{each}/s: throughput kept", figure, ">= 99 %", kept >= 0.99))
    show("adaptive beside fixed, same arrivals, 32 simulated GPUs of 200 ms", rows)


def memory(quick: bool) -> None:
    """20,000 requests wait behind one slot that takes its time; how much more memory than at idle?"""
    count = 20_000
    flags = ["--policy", "fixed"]
    environment = {"CARPOOL_BROKER_QUEUE_TIMEOUT_S": "60", "CARPOOL_BROKER_TOTAL_TIMEOUT_S": "60"}
    os.environ.update(environment)
    try:
        with carpool("sim:?latency_ms=3000&slots=1", *flags) as (gateway, port):
            idle = resident_mb(gateway.pid)
            clients = subprocess.Popen(
                [sys.executable, str(HERE / "waiting_clients.py"), str(port), str(count)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
            )
            waiting, deadline = 0.0, time.monotonic() + 60
            while waiting < count - 200 and time.monotonic() < deadline:
                time.sleep(0.25)
                text = urlopen(f"http://127.0.0.1:{port + 1}/metrics").read().decode()
                waiting = float(re.findall(r"^carpool_held_requests (\S+)", text, re.M)[0])
            used = resident_mb(gateway.pid) - idle
            clients.kill()
            clients.wait()
    finally:
        for name in environment:
            del os.environ[name]
    rows = [
        verdict("requests waiting", f"{waiting:,.0f}", f">= {count - 200:,}", waiting >= count - 200),
        verdict("memory above idle", f"{used:.0f} MB (idle {idle:.0f} MB)", "<= 200 MB", used <= 200),
    ]
    show("20,000 waiting requests of 2 KB on 10,000 connections", rows)


def soak(quick: bool) -> None:
    seconds = 60 if quick else 300
    samples: list[float] = []
    with gpus(40) as upstream, carpool(upstream) as (gateway, port):
        console.print(f"soak, {seconds} s at 5,000/s ...")
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [*CARPOOL, "bench", f"http://127.0.0.1:{port}", "--quiet", "--json", report.name]
            load = subprocess.Popen([*command, "--rate", "5000", "--duration", f"{seconds}s"], cwd=ROOT)
            while load.poll() is None:
                samples.append(resident_mb(gateway.pid))
                time.sleep(1)
            result = json.loads(Path(report.name).read_bytes())
    warm = samples[len(samples) // 3 :]
    growth = median(warm[-10:]) - median(warm[:10])
    bad = result["errors"] + result["wrong"]
    rows = [
        verdict("errors and wrong answers", str(bad), "0", bad == 0),
        verdict("growth after the first third", f"{growth:+.1f} MB of {median(warm):.0f} MB", "<= 5 MB", growth <= 5),
    ]
    show(f"{seconds} s at 5,000/s: memory", rows)


def resilience(quick: bool) -> None:
    seconds = 4 if quick else 8
    upstream = "sim:?latency_ms=50&slots=256"
    runs: dict[str, list[float]] = {"bare": [], "carpool": []}
    bare_port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, str(HERE / "bare_gateway.py"), upstream, str(bare_port), data]
        with process(command, bare_port) as bare, carpool(upstream) as (gateway, port):
            for number in range(5):
                console.print(f"resilience, round {number + 1} of 5 ...")
                runs["bare"].append(wrk(bare_port, bare.pid, seconds)[0])
                runs["carpool"].append(wrk(port, gateway.pid, seconds)[0])
    with_it, without = median(runs["carpool"]), median(runs["bare"])
    figure = f"{with_it:,.0f}/s of {without:,.0f}/s: {1 - with_it / without:.1%} less"
    rows = [verdict("cost of resilience when nothing fails", figure, "<= 5 %", with_it >= 0.95 * without)]
    show("wrk -t1 -c3000, with and without resilience, medians of five", rows)


def poison(quick: bool) -> None:
    seconds = "8s" if quick else "20s"
    reports, calls = {}, {}
    for name, every in (("clean", "0"), ("poisoned", "1000")):
        console.print(f"poison: {name} ...")
        with gpus(32, poison="POISON") as upstream, carpool(upstream, "--policy", "fixed") as (_, port):
            flags = ["--rate", "5000", "--duration", seconds, "--seed", "7", "--poison", "POISON"]
            reports[name] = bench(port, *flags, "--poison-every", every)
            stats = json.loads(urlopen("http://127.0.0.1:9400/stats").read())
            calls[name] = stats["total"]["calls"]
    clean, poisoned = reports["clean"], reports["poisoned"]
    sent = poisoned["sent"]
    innocents = sent - (sent + 999) // 1000
    kept = poisoned["rate"] / clean["rate"]
    times = calls["poisoned"] / calls["clean"]
    refused = poisoned["status"].get("422", 0)
    share = poisoned["ok"] / innocents
    rows = [
        verdict("throughput beside the clean run", f"{kept:.1%}", ">= 90 %", kept >= 0.9),
        verdict("upstream calls, times the clean run's", f"{times:.2f}", "<= 1.8", times <= 1.8),
        verdict("innocents answered", f"{share:.2%}", ">= 99.9 %", share >= 0.999),
        verdict("poison refused with 422", f"{refused} of {sent - innocents}", "all", refused >= sent - innocents - 1),
        verdict("wrong answers", str(poisoned["wrong"]), "0", poisoned["wrong"] == 0),
    ]
    show("1 input in 1,000 is poison, 5,000/s, 32 simulated GPUs of 200 ms (half idle)", rows)


SECTIONS: dict[str, Callable[[bool], None]] = {
    "throughput": throughput,
    "rate": rate,
    "policy": policy,
    "fit": fit.fit,
    "memory": memory,
    "soak": soak,
    "resilience": resilience,
    "poison": poison,
    "cache": caching.cache,
    "tracking": tracking.tracking,
    "redis": distributed.beside_the_floor,
    "redis-mixed": distributed.mixed_beside_single,
    "redis-rate": distributed.at_a_rate,
    "door": door.door,
    "refusal": door.refusal,
    "tracing": tracing.tracing,
    "page": live_page.page,
    "faces": embeddings.faces,
    "grpc": grpc_face.grpc_face,
    "stream": stream_face.stream_face,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs: for a look, not for figures")
    parser.add_argument("--keep", metavar="RELEASE", help="write this run's ratios to bench/kept.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run")
    options = parser.parse_args()
    measuring.install("wrk", "wrk")
    measuring.raise_file_limit()
    for name in options.only.split(","):
        SECTIONS[name](options.quick)
    if options.keep:
        measuring.keep(options.keep)
    for failure in failures:
        console.print(f"does not hold: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
