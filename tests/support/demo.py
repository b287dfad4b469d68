"""A running `carpool demo`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from support.client import Response
from support.forks import Started
from support.gateway import ask
from support.processes import PATIENCE_S, telling


class Demo:
    """A running `carpool demo`."""

    def __init__(self, process: Started, port: int, admin_port: int) -> None:
        self.process = process
        self.port = port
        self.admin_port = admin_port

    def infer(self, text: str) -> Response:
        return ask(self.port, "POST", "/v1/inference", {"input": text}, "Content-Type: application/json")

    def wish(self, **wish: Any) -> Response:
        return ask(self.admin_port, "POST", "/internal/demo", wish)

    def grant(self, **wish: Any) -> dict[str, Any]:
        answer = self.wish(**wish)
        assert answer.status == 200, answer.body
        state: dict[str, Any] = answer.json
        return state

    def metric(self, name: str) -> float:
        text = ask(self.admin_port, "GET", "/metrics").body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def letters(self) -> set[int]:
        page = ask(self.admin_port, "GET", "/internal/dead-letters").json
        return {letter["id"] for letter in page["dead_letters"]}

    def states(self) -> list[str]:
        fleet = ask(self.admin_port, "GET", "/internal/fleet").json
        return [endpoint["state"] for endpoint in fleet["models"]["default"]["endpoints"]]


@contextmanager
def running_demo(gpus: int, *, latency_ms: int = 20) -> Iterator[Demo]:
    """On free ports, until the block ends; it must end well."""
    flags = ("--port=0", "--gpu-port=0", f"--workers={gpus}", f"--latency-ms={latency_ms}")
    with telling("demo", *flags) as (process, told):
        banner = "".join(takewhile(lambda line: "Ctrl-C" not in line, told))
        port = int(re.findall(r"ready: http://127\.0\.0\.1:(\d+)", banner)[0])
        page = int(re.findall(r"http://127\.0\.0\.1:(\d+)/\n", banner)[0])
        yield Demo(process, port, page)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
