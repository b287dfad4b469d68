"""Batches that fit: the section `fit` of `make bench`. `batching.fit` off and auto, embedded and over Redis, with
simulated GPUs that pad; beside what virtual time says; and with GPUs of constant time, where `auto` changes nothing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import distributed
from measuring import CARPOOL, HERE, ROOT, console, free_port, process, show, verdict

sys.path.append(str(ROOT / "tests"))

from carpool.batching.policy import Fit
from carpool.upstream.simulated import parse_sim_url
from support.fitting import run

# Slow enough for two cores, whatever is gained.
PADDED = "sim:?latency_ms=8&padded_ms_per_kb=0.6&slots=2"
CONSTANT = "sim:?latency_ms=40&slots=2"
SIZES, CLIENTS, WARM_S = "lognormal:240,0.875,2048", 1024, 10
PATIENT = {
    "CARPOOL_SHEDDING_MODE": "off",
    "CARPOOL_BROKER_QUEUE_TIMEOUT_S": "15",
    "CARPOOL_BROKER_TOTAL_TIMEOUT_S": "20",
}


@contextmanager
def embedded(upstream: str, fit: Fit) -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", upstream, "--port", str(port), "--data-dir", data]
        with process(command, port, {**PATIENT, "CARPOOL_BATCHING_FIT": fit}):
            yield port


@contextmanager
def over_redis(upstream: str, fit: Fit) -> Iterator[int]:
    environment = {**PATIENT, "CARPOOL_BATCHING_FIT": fit}
    with (
        distributed.redis_server() as broker,
        distributed.carpool(broker, upstream=upstream, environment=environment) as system,
    ):
        yield system.ports[0]


def closed(port: int, seconds: int) -> dict[str, Any]:
    """Clients that send again once they have their answer."""
    command = [sys.executable, str(HERE / "gpu" / "clients.py"), f"http://127.0.0.1:{port}/v1/inference"]
    command += ["--clients", str(CLIENTS), "--seconds", str(seconds), "--sizes", SIZES]
    report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return report


def fit(quick: bool) -> None:
    seconds = 6 if quick else 15
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for name, deployment, upstream in (
        ("embedded", embedded, PADDED),
        ("over Redis", over_redis, PADDED),
        ("constant time", embedded, CONSTANT),
    ):
        for how in ("off", "auto"):
            console.print(f"fit {how}, {name} ...")
            with deployment(upstream, how) as port:
                closed(port, WARM_S)
                seen[name, how] = closed(port, seconds)
    gpu = parse_sim_url(PADDED)
    told = run(gpu, "auto", warm_s=10.0, seconds=10.0).rate / run(gpu, "off", warm_s=2.0, seconds=10.0).rate
    gains = {name: seen[name, "auto"]["rate"] / seen[name, "off"]["rate"] for name, _ in seen}

    def figure(name: str) -> str:
        off, auto = seen[name, "off"], seen[name, "auto"]
        p99s = f"p99 {off['latency_ms']['p99']:.0f} and {auto['latency_ms']['p99']:.0f} ms"
        return f"{off['rate']:,.0f}/s, {auto['rate']:,.0f}/s: {gains[name]:.2f} ({p99s})"

    wrong = sum(report["wrong"] + report["errors"] for report in seen.values())
    share = (gains["over Redis"] - 1) / (gains["embedded"] - 1)
    show(
        f"{CLIENTS:,} clients, {SIZES}, {PADDED}: fit off, auto",
        [
            verdict("embedded", figure("embedded"), f"{told:.2f} +- 15 %", abs(gains["embedded"] / told - 1) < 0.15),
            verdict("over Redis", figure("over Redis"), ">= 2/3 of the gain", share >= 2 / 3),
            verdict("constant time", figure("constant time"), "1 +- 2 %", abs(gains["constant time"] - 1) < 0.02),
            verdict("wrong answers, errors", str(wrong), "0", wrong == 0),
        ],
    )
