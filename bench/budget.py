"""Where the time of a request goes, from a client behind Envoy to the GPU and back: `make budget`.

    .venv/bin/python bench/budget.py [--seconds 30] [--rate 300]

Clients (open loop, random gaps), Envoy as deploy/envoy configures it, a gateway, Redis, a batcher, and simulated GPUs
that take 55 ms for a call. Writes the table of docs/observe.md, behind its mark, beside the budget to plan with.

Every request is followed by its id: Envoy logs its own times, and Carpool's answer has `queue_ms` and `upstream_ms`. Of
the rest, `carpool_stage_seconds` has means. No metric parts the way through Redis from the wait for company: so a run
in which no request waits (`max_wait_ms` 0, a slot for each) goes before, and its queue is the way.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from distributed import Deployment, carpool, numbers, redis_server
from measuring import MACHINE, ROOT, console, failures, free_port, process, raise_file_limit

sys.path.insert(0, str(ROOT / "tests"))
from support.client import Connection, inference_body

PAGE = ROOT / "docs" / "observe.md"
MARK = "<!-- `make budget` writes what follows; changes made below are lost. -->\n"
ENVOY = ROOT / ".venv-interop" / "envoy" / "bin" / "envoy"
CONFIGURATION = ROOT / "deploy" / "envoy" / "carpool.yaml"
# Envoy's own microseconds until it sends to the gateway, what it waits there, and until it has sent to the client.
PARTS = (("DS_RX_BEG", "US_TX_BEG"), ("US_TX_BEG", "US_RX_END"), ("US_RX_END", "DS_TX_END"))
LOGGED = " ".join(f"%COMMON_DURATION({begin}:{end}:us)%" for begin, end in PARTS)
CALL_MS, MAX_WAIT_MS, INPUT_BYTES = 55, 40, 2000
WARM_S = 3.0
# Stages as one plans them, in milliseconds.
PLAN = {
    "balancer": "2",
    "face and admission": "1",
    "the queue's way": "5",
    "wait": "0 to 40",
    "call": "55",
    "reply": "8",
}
CONTENT = {
    "balancer": "inside Envoy, both ways",
    "face and admission": "bytes, credential, limits, shedding",
    "the queue's way": "gateway, Redis, batcher",
    "wait": "company, or a slot",
    "call": "the GPU, and the way there and back",
    "reply": "batcher, Redis, gateway",
    "client": "its own sockets, and the load generator",
}


class Told(NamedTuple):
    """One request, in milliseconds: as its client saw it, and as Carpool's answer says."""

    request_id: str
    total: float
    queue: float
    call: float
    batch_size: int


class Row(NamedTuple):
    """A stage over all requests, in milliseconds; where only its mean is known, that alone."""

    mean: float
    p50: float | None = None
    p99: float | None = None


@contextmanager
def envoy(gateway: int, log: Path) -> Iterator[int]:
    """Envoy in front of one gateway, with the times of each request in a log."""
    port = free_port()
    # The second gateway of the configuration is the first; of gRPC there is none.
    ports = {"8080": port, "8000": gateway, "8010": gateway, "8002": free_port(), "8012": free_port()}
    text = re.sub(r"port_value: (\d+)", lambda found: f"port_value: {ports[found[1]]}", CONFIGURATION.read_text())
    access_log = {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(log),
            "log_format": {"text_format_source": {"inline_string": f"%REQ(X-REQUEST-ID)% {LOGGED}\n"}},
        },
    }
    place = "stat_prefix: clients\n"
    assert text.count(place) == 1, CONFIGURATION
    configuration = log.with_suffix(".yaml")
    configuration.write_text(text.replace(place, f"{place}          access_log: [{json.dumps(access_log)}]\n"))
    command = [str(ENVOY), "-c", str(configuration), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    with process(command, port):
        yield port


async def load(port: int, rate: float, seconds: float, name: str) -> list[Told]:
    """Requests with random gaps, each on a connection that is free; latency counts from when a request was due."""
    loop, draw = asyncio.get_running_loop(), random.Random(0)
    free: list[Connection] = []
    told: list[Told] = []

    async def ask(request_id: str, due: float) -> None:
        connection = free.pop() if free else await Connection.open(port)
        body = inference_body(request_id.ljust(INPUT_BYTES, "x"))
        answer = await connection.ask("POST", "/v1/inference", body, f"X-Request-Id: {request_id}\r\n")
        total_ms = (loop.time() - due) * 1000
        if answer.status != 200 or answer.json["output"] != request_id.ljust(INPUT_BYTES, "x")[::-1]:
            raise SystemExit(f"an answer that should not be: {answer.status} {answer.body[:300]!r}")
        facts = answer.json["metadata"]
        told.append(Told(request_id, total_ms, facts["queue_ms"], facts["upstream_ms"], facts["batch_size"]))
        free.append(connection)

    due, end = loop.time(), loop.time() + seconds
    async with asyncio.TaskGroup() as asked:
        for number in count():
            due += draw.expovariate(rate)
            if due > end:
                break
            await asyncio.sleep(due - loop.time())
            asked.create_task(ask(f"{name}-{number}", due))
    for connection in free:
        await connection.close()
    return told


def stage_seconds(system: Deployment) -> dict[str, tuple[float, float]]:
    """Sum and count of each stage so far, at the gateway."""
    sums, counts = (
        dict(numbers(system, "gateway", rf'carpool_stage_seconds_{what}\{{stage="([^"]+)"\}}'))
        for what in ("sum", "count")
    )
    return {stage: (total, counts[stage]) for stage, total in sums.items()}


class Run(NamedTuple):
    """One run: what clients were told, Envoy's times by request in milliseconds, and the mean of face and admission."""

    told: list[Told]
    logged: dict[str, list[float]]
    face_ms: float


def measure(slots: int, max_wait_ms: int, rate: float, seconds: float) -> Run:
    """Load through Envoy on a gateway, Redis, a batcher and so many GPUs."""
    settings = {"CARPOOL_BATCHING_MAX_WAIT_MS": str(max_wait_ms), "CARPOOL_GATEWAY_TRUSTED_PROXIES": "127.0.0.1"}
    upstream = f"sim:?latency_ms={CALL_MS}&slots={slots}"
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "envoy.log"
        with (
            redis_server() as broker,
            carpool(broker, upstream=upstream, environment=settings) as system,
            envoy(system.ports[0], log) as port,
        ):
            asyncio.run(load(port, rate, WARM_S, "warm"))
            before = stage_seconds(system)
            told = asyncio.run(load(port, rate, seconds, "request"))
            after = stage_seconds(system)
        lines = [line.split(" ") for line in log.read_text().splitlines()]
    logged = {line[0]: [int(each) / 1000 for each in line[1:]] for line in lines if line[0].startswith("request-")}
    face_s = 0.0
    for stage in ("receive", "admit"):
        (total_then, count_then), (total, number) = before[stage], after[stage]
        face_s += (total - total_then) / max(1, number - count_then)
    return Run(told, logged, face_s * 1000)


def row(values: Sequence[float]) -> Row:
    """By nearest rank."""
    ordered = sorted(values)
    return Row(fmean(ordered), *(ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.99)))


def rows_of(empty: Run, usual: Run) -> dict[str, Row]:
    """By stage; their means sum up to that of the total."""
    way = row([each.queue for each in empty.told])
    envoy_ms = {name: (before + after, inside) for name, (before, inside, after) in usual.logged.items()}
    by_request = [(each, *envoy_ms[each.request_id]) for each in usual.told]
    return {
        "balancer": row([hop for _, hop, _ in by_request]),
        "face and admission": Row(usual.face_ms),
        "the queue's way": way,
        "wait": row([each.queue - way.mean for each in usual.told]),
        "call": row([each.call for each in usual.told]),
        "reply": row([inside - each.queue - each.call - usual.face_ms for each, _, inside in by_request]),
        "client": row([each.total - hop - inside for each, hop, inside in by_request]),
        "in all": row([each.total for each in usual.told]),
    }


def table(rows: dict[str, Row]) -> str:
    """As in docs/observe.md."""
    lines = ["| stage | what it is | to plan with | mean | p50 | p99 |", "|---|---|---|---|---|---|"]
    for stage, measured in rows.items():
        cells = [f"{max(each, 0.0):.1f}" if each is not None else "" for each in measured]
        plan = PLAN.get(stage, "71 to 111" if stage == "in all" else "")
        lines.append("| " + " | ".join((stage, CONTENT.get(stage, ""), plan, *cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and put it into docs/observe.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    asked = parser.parse_args()
    raise_file_limit()
    console.print(f"nobody waits: {asked.seconds:g} s at {asked.rate:g}/s ...")
    empty = measure(256, 0, asked.rate, asked.seconds)
    console.print(f"four GPUs, {MAX_WAIT_MS} ms at most: {asked.seconds:g} s at {asked.rate:g}/s ...")
    usual = measure(4, MAX_WAIT_MS, asked.rate, asked.seconds)
    text = table(rows_of(empty, usual))
    batch = len(usual.told) / sum(1 / each.batch_size for each in usual.told)
    told = (
        f"Measured on {datetime.now(UTC):%Y-%m-%d}, {MACHINE} for all of it: {len(usual.told):,} requests, "
        f"{asked.rate:g} a second, {batch:.1f} in a batch."
    )
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(f"{page.partition(MARK)[0]}{MARK}\n{told}\n\n{text}\n", encoding="utf-8")
    console.print(told, text, f"It stands in {PAGE.relative_to(ROOT)} now.", sep="\n\n")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
