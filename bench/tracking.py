"""The section `tracking`: what a row for each request and batch costs, in SQLite and in PostgreSQL; whether all come.

Alternating in one run, medians: a gateway without, one that writes to a file, one that writes to a PostgreSQL of its
own. Then that one at 10,000 a second.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from subprocess import run
from urllib.request import urlopen

from measuring import CARPOOL, ROOT, Load, bench, console, cpu_seconds, free_port, process, show, verdict, wrk

sys.path.insert(0, str(ROOT / "tests"))
from support.postgres import PostgresServer, running_postgres

SIMULATED = "sim:?latency_ms=50&slots=256"
CONNECTIONS = 1000
SHARE_MAX = 0.05
RATE = 10_000


class Gateway:
    """One process with everything in it."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def rows(self, what: str) -> int:
        """`carpool_tracking_…` of both kinds of rows; `waiting` has no kinds."""
        with urlopen(f"http://127.0.0.1:{self.port + 1}/metrics") as page:
            text = page.read().decode()
        lines = re.findall(rf"^carpool_tracking_{what}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M)
        return sum(int(float(each)) for each in lines)

    def wait_until_written(self) -> None:
        give_up_at = time.monotonic() + 60
        while self.rows("waiting") and time.monotonic() < give_up_at:
            time.sleep(0.1)


@contextmanager
def gateway(upstream: str, **tracking: str) -> Iterator[Gateway]:
    port = free_port()
    environment = {f"CARPOOL_TRACKING_{name.upper()}": value for name, value in tracking.items()}
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", upstream, "--port", str(port), "--data-dir", data]
        with process(command, port, environment) as child:
            yield Gateway(child.pid, port)


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """A server with the tables made."""
    with running_postgres() as server:
        environment = {"CARPOOL_TRACKING_STORE": "postgres", "CARPOOL_TRACKING_URL": server.url}
        run([*CARPOOL, "tracking", "init"], check=True, env={**os.environ, **environment}, cwd=ROOT)
        yield server


def tracking(quick: bool) -> None:
    seconds = 3 if quick else 10
    loads: dict[str, list[Load]] = {"off": [], "sqlite": [], "postgres": []}
    dropped: dict[str, int] = {}
    with ExitStack() as opened:
        server = opened.enter_context(postgres())
        gateways = {
            "off": opened.enter_context(gateway(SIMULATED)),
            "sqlite": opened.enter_context(gateway(SIMULATED, store="sqlite")),
            "postgres": opened.enter_context(gateway(SIMULATED, store="postgres", url=server.url)),
        }
        for number in range(3):
            for name, each in gateways.items():
                console.print(f"tracking, round {number + 1} of 3, {name} ...")
                loads[name].append(wrk([each.port], {"gateway": [each.pid]}, seconds, CONNECTIONS))
                each.wait_until_written()
        for name in ("sqlite", "postgres"):
            dropped[name] = gateways[name].rows("dropped")
    cpu = {name: median(load.cpu_us["gateway"] for load in each) for name, each in loads.items()}
    rows = []
    for name in ("sqlite", "postgres"):
        more = cpu[name] / cpu["off"] - 1
        figure = f"{cpu[name]:.1f} us of {cpu['off']:.1f} us: {more:+.1%}"
        if name == "postgres":
            rows.append(verdict(f"{name}: CPU a request", figure, f"<= {SHARE_MAX:.0%} more", more <= SHARE_MAX))
        else:  # the database is in this process: its work is ours
            rows.append((f"{name}: CPU a request", figure, "", ""))
        rows.append((f"{name}: rows dropped at full load", str(dropped[name]), "", ""))
    show("wrk -t1 -c1000, 2 KB, sim:?latency_ms=50&slots=256, journal on; medians of three", rows)
    at_a_rate(quick)


def at_a_rate(quick: bool) -> None:
    seconds = "8s" if quick else "60s"
    console.print(f"tracking, {RATE:,}/s to PostgreSQL ...")
    with postgres() as server, gateway(SIMULATED, store="postgres", url=server.url) as tracked:
        began = cpu_seconds(tracked.pid)
        report = bench(tracked.port, "--rate", str(RATE), "--duration", seconds)
        used = cpu_seconds(tracked.pid) - began
        tracked.wait_until_written()
        written, lost = tracked.rows("written"), tracked.rows("dropped")
        rows = [
            verdict("errors", str(report["errors"]), "0", report["errors"] == 0),
            verdict("rows dropped", str(lost), "0", lost == 0),
            ("rows written, of requests and batches", f"{written:,}", "", ""),
            ("rate, p99", f"{report['rate']:,.0f}/s, {report['latency_ms']['p99']:.0f} ms", "", ""),
            ("CPU of the gateway", f"{used:.1f} s", "", ""),
        ]
    show(f"carpool bench --rate {RATE} --duration {seconds}, tracking in PostgreSQL", rows)
