"""What every benchmark needs: child processes, their CPU time, load from wrk and `carpool bench`, and verdicts."""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
CARPOOL = [sys.executable, "-m", "carpool"]
# wrk's script for requests that are all the same.
ONE_REQUEST = HERE / "floor" / "post.lua"
TICKS = os.sysconf("SC_CLK_TCK")
START_S_MAX = 20.0
STOP_S_MAX = 20.0
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}
# Below the ports that the kernel gives to clients: thousands of connections take those. Every second one.
_PORTS = range(12_000, 32_000, 2)
_given_ports: set[int] = set()
console = Console(width=120)
failures: list[str] = []
# Ratios of the last release, in the repository; and those of this run, for `--keep`.
KEPT = HERE / "kept.json"
MACHINE = f"{os.cpu_count()} cores"
# Two runs on one machine differ by less than this, mostly.
KEPT_TOLERANCE = 0.15
measured: dict[str, float] = {}


def verdict(name: str, figure: str, wanted: str, holds: bool) -> tuple[str, str, str, str]:
    if not holds:
        failures.append(f"{name}: {figure}, wanted {wanted}")
    return name, figure, wanted, "yes" if holds else "NO"


class Kept(msgspec.Struct, frozen=True):
    """The figures of a release: ratios only. They differ with the cores that server and load share."""

    release: str
    by_machine: dict[str, dict[str, float]]


def beside_kept(name: str, ratio: float, *, more_is_better: bool) -> tuple[str, str, str, str]:
    """The same ratio at the last release: a row that fails where this one is clearly worse."""
    measured[name] = round(ratio, 3)
    kept = read_kept()
    then = kept.by_machine.get(MACHINE, {}).get(name)
    if then is None:
        return (f"{name}, at the last release", f"not kept for {MACHINE}", "", "")
    worst = then * (1 - KEPT_TOLERANCE if more_is_better else 1 + KEPT_TOLERANCE)
    wanted = f"{'>=' if more_is_better else '<='} {worst:.2f} ({kept.release}: {then:.2f})"
    return verdict(name, f"{ratio:.2f}", wanted, ratio >= worst if more_is_better else ratio <= worst)


def keep(release: str) -> None:
    """Make what this run has measured the figures that later runs are compared with; the others stay."""
    by_machine = read_kept().by_machine
    figures = by_machine.get(MACHINE, {}) | measured
    kept = Kept(release, by_machine | {MACHINE: dict(sorted(figures.items()))})
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")


def read_kept() -> Kept:
    return msgspec.json.decode(KEPT.read_bytes(), type=Kept) if KEPT.exists() else Kept("none", {})


def show(title: str, rows: list[tuple[str, str, str, str]]) -> None:
    table = Table("what", "measured", "wanted", "holds", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def install(program: str, package: str) -> None:
    """Where a program is missing, its Debian package."""
    if shutil.which(program) is None:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", package], check=True)


def raise_file_limit() -> None:
    """As many open files as this user may have: load takes thousands of connections. Children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    """A port, given once, whose successor is free too (for the admin port)."""
    while True:
        port = random.choice(_PORTS)
        if port in _given_ports:
            continue
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        _given_ports.add(port)
        return port


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    return sum(_cpu_times(pid))


def _cpu_times(pid: int) -> tuple[float, float]:
    """The same, apart."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def resident_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


@contextmanager
def process(
    command: list[str], port: int | None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child, once it listens on `port` (None: at once); ended by its id. `environment`: in addition to ours."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **(environment or {})})
        try:
            if port is not None:
                wait_for_port(port, child, log)
            yield child
            if child.poll() is not None:
                log.seek(0)
                failures.append(f"{command}: ended by itself with {child.returncode}: {log.read().decode()[-500:]}")
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_for_port(port: int, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S_MAX
    while child.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    log.seek(0)
    raise SystemExit(f"did not start: {log.read().decode()}")


@contextmanager
def gpus(workers: int, port: int = 9400, poison: str = "") -> Iterator[str]:
    command = [*CARPOOL, "sim-gpu", "--port", str(port), "--workers", str(workers)]
    command += ["--poison", poison] if poison else []
    with process(command, port + workers - 1):
        yield f"http://127.0.0.1:{port}-{port + workers - 1}/infer"


def bench(port: int, *flags: str) -> dict[str, Any]:
    """One run of `carpool bench`; its JSON report."""
    return bench_all([port], *flags)[0]


def bench_all(ports: Sequence[int], *flags: str) -> list[dict[str, Any]]:
    """A `carpool bench` for each port, at the same time; their JSON reports."""
    with tempfile.TemporaryDirectory() as directory:
        reports = [Path(directory) / f"{number}.json" for number in range(len(ports))]
        children = [
            subprocess.Popen(
                [*CARPOOL, "bench", f"http://127.0.0.1:{port}", "--quiet", "--json", str(report), *seed, *flags],
                cwd=ROOT,
            )
            # Each with a seed of its own: the same arrivals in all of them would be bursts.
            for port, report, seed in zip(ports, reports, (("--seed", str(seed)) for seed in count()), strict=False)
        ]
        for child in children:
            child.wait(600)
        return [json.loads(report.read_bytes()) for report in reports]


class Load(msgspec.Struct, frozen=True):
    """What wrk saw, and what the servers used meanwhile."""

    rate: float
    requests: int
    p50_ms: float
    # The highest of the generators'.
    p99_ms: float
    # ReplyWriter other than 2xx and 3xx, broken connections, answers after 2 s.
    errors: int
    # Microseconds for each request, summed over the processes of a role.
    cpu_us: dict[str, float]
    # Of that, outside the kernel.
    user_us: dict[str, float]
    # Of a core, the busiest process of each role.
    busiest: dict[str, float]
    # Of a core, each generator: near 1 the rate is wrk's and not the servers'.
    generator_busy: float


def wrk(
    ports: Sequence[int],
    pids: Mapping[str, Sequence[int]],
    seconds: int,
    connections: int,
    script: Path = ONE_REQUEST,
    *arguments: str,
    may_refuse: bool = False,
) -> Load:
    """One wrk for each port, at the same time; `pids` are the processes of each role, `arguments` are the script's.

    An answer other than 2xx and 3xx is a failure of the benchmark, unless the server `may_refuse`.
    """
    options = ["-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script)]
    before = {pid: _cpu_times(pid) for role in pids.values() for pid in role}
    start, ended_before = time.monotonic(), _ended_children_seconds()
    generators = [
        subprocess.Popen(
            ["wrk", *options, f"http://127.0.0.1:{port}/v1/inference", "--", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for port in ports
    ]
    outputs = [generator.communicate(timeout=seconds + 60)[0] for generator in generators]
    elapsed_s = time.monotonic() - start
    after = {pid: _cpu_times(pid) for pid in before}
    user = {pid: after[pid][0] - then[0] for pid, then in before.items()}
    used = {pid: sum(after[pid]) - sum(then) for pid, then in before.items()}
    generators_s = _ended_children_seconds() - ended_before
    requests = sum(int(re.findall(r"(\d+) requests in", output)[0]) for output in outputs)
    errors = sum(_wrk_errors(output) for output in outputs)
    if errors and not may_refuse:
        failures.append(f"wrk saw errors: {outputs}")
    return Load(
        rate=sum(float(re.findall(r"Requests/sec:\s+([\d.]+)", output)[0]) for output in outputs),
        requests=requests,
        p50_ms=median(_wrk_percentile(output, 50) for output in outputs),
        p99_ms=max(_wrk_percentile(output, 99) for output in outputs),
        errors=errors,
        cpu_us={role: sum(used[pid] for pid in each) / max(requests, 1) * 1e6 for role, each in pids.items()},
        user_us={role: sum(user[pid] for pid in each) / max(requests, 1) * 1e6 for role, each in pids.items()},
        busiest={role: max(used[pid] for pid in each) / elapsed_s for role, each in pids.items()},
        generator_busy=generators_s / len(ports) / elapsed_s,
    )


def _ended_children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wrk_percentile(output: str, percent: int) -> float:
    value, unit = re.findall(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m)\s*$", output, re.MULTILINE)[0]
    return float(value) * _UNITS_MS[unit]


def _wrk_errors(output: str) -> int:
    refused = re.findall(r"Non-2xx or 3xx responses: (\d+)", output)
    broken = re.findall(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    return sum(map(int, refused)) + sum(int(count) for counts in broken for count in counts)
