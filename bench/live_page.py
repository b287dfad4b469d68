"""What it costs to be looked at: 20 viewers of the live page beside none, alternating, at the rate of the design."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from measuring import CARPOOL, bench, console, cpu_seconds, free_port, process, show, verdict

VIEWERS = 20
ROUNDS = 3
P99_MS_MORE_MAX = 5.0
# 40 GPUs of 200 ms, in the process itself: what is measured is the gateway.
UPSTREAM = "sim:?latency_ms=200&slots=40"


def read_on(viewer: socket.socket) -> None:
    try:
        while viewer.recv(1 << 20):
            pass
    except OSError:
        pass


@contextmanager
def viewers(admin_port: int, count: int) -> Iterator[None]:
    """So many look, and read what they get."""
    looking = [socket.create_connection(("127.0.0.1", admin_port)) for _ in range(count)]
    for viewer in looking:
        viewer.sendall(b"GET /internal/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        threading.Thread(target=read_on, args=(viewer,), daemon=True).start()
    try:
        yield
    finally:
        for viewer in looking:
            viewer.shutdown(socket.SHUT_RDWR)
            viewer.close()


def page(quick: bool) -> None:
    rate, seconds = (3_000, 5) if quick else (10_000, 15)
    port, admin_port = free_port(), free_port()
    flags = ["--port", str(port), "--admin-port", str(admin_port), "--no-journal"]
    command = [*CARPOOL, "serve", "--upstream", UPSTREAM, *flags]
    found: dict[int, list[tuple[float, float]]] = {0: [], VIEWERS: []}
    with process(command, port) as gateway:
        bench(port, "--rate", "1000", "--duration", "2s")  # connections and code warm
        for number in range(ROUNDS):
            for count, results in found.items():
                console.print(f"page, round {number + 1} of {ROUNDS}, {count} viewers ...")
                with viewers(admin_port, count):
                    before = cpu_seconds(gateway.pid)
                    report: dict[str, Any] = bench(port, "--rate", str(rate), "--duration", f"{seconds}s")
                    cpu_us = (cpu_seconds(gateway.pid) - before) / max(1, report["ok"]) * 1e6
                results.append((report["latency_ms"]["p99"], cpu_us))
    p99 = {count: median(each[0] for each in results) for count, results in found.items()}
    cpu = {count: median(each[1] for each in results) for count, results in found.items()}
    more = p99[VIEWERS] - p99[0]
    rows = [
        verdict(
            f"p99 with {VIEWERS} viewers",
            f"{p99[VIEWERS]:.1f} ms beside {p99[0]:.1f} ms: {more:+.1f} ms",
            f"<= + {P99_MS_MORE_MAX:g} ms",
            more <= P99_MS_MORE_MAX,
        ),
        ("CPU a request", f"{cpu[VIEWERS]:.1f} us beside {cpu[0]:.1f} us: {cpu[VIEWERS] / cpu[0] - 1:+.1%}", "", ""),
    ]
    show(f"the live page at {rate:,}/s, {UPSTREAM}; medians of {ROUNDS}, alternating", rows)
