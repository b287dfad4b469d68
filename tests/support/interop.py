"""Real model servers for tests, each from an environment of its own, and clients that verify who got whose output."""

import asyncio
import http.client
import json
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.client import Connection, Response

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-interop"
START_S_MAX = 90.0
STOP_S_MAX = 30.0
CLIENTS = 200


class Case(NamedTuple):
    """One request, and whether an output is the one that belongs to it."""

    body: bytes
    is_own: Callable[[Any], bool]
    target: str = "/v1/inference"
    headers: str = ""


class Findings:
    """What became of the requests of a run."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.foreign = 0
        self.seconds = 0.0

    def add(self, case: Case, response: Response) -> None:
        """Count one answer, and look whether it is this client's own."""
        self.statuses[response.status] += 1
        if response.status == 200:
            answer = response.json
            self.foreign += not case.is_own(answer["output"])
            self.batch_sizes[answer.get("metadata", {}).get("batch_size", 0)] += 1

    @property
    def batch_size_max(self) -> int:
        """The largest batch that a client was told of."""
        return max(self.batch_sizes, default=0)

    def report(self, what: str) -> None:
        """One line with all of it."""
        count = self.statuses.total()
        # Each request tells the size of its own batch, so a batch of n is told n times.
        calls = sum(told / size for size, told in self.batch_sizes.items() if size)
        batches = f", mean batch {count / calls:.1f}, largest {self.batch_size_max}" if calls else ""
        show(
            f"{what}: {count:,} requests, {self.foreign} foreign outputs, by status {dict(self.statuses)}"
            f"{batches}, {count / self.seconds:,.0f} requests/s"
        )


async def verify(port: int, cases: Sequence[Case], clients: int = CLIENTS) -> Findings:
    """Send every case, `clients` at a time, each client on a connection of its own."""
    findings = Findings()
    remaining = iter(cases)

    async def client() -> None:
        connection = await Connection.open(port)
        try:
            for case in remaining:
                findings.add(case, await connection.ask("POST", case.target, case.body, case.headers))
        finally:
            await connection.close()

    started = time.monotonic()
    async with asyncio.TaskGroup() as running:
        for _ in range(min(clients, len(cases))):
            running.create_task(client())
    findings.seconds = time.monotonic() - started
    assert findings.statuses.total() == len(cases)
    return findings


def environment_python(name: str) -> Path:
    """The interpreter of a server's environment, which `make interop` makes."""
    python = ENVIRONMENTS / name / "bin" / "python"
    assert python.exists(), "run `make interop`: it installs the servers that these tests start"
    return python


def ask_python(python: Path, expression: str) -> str:
    """What an expression is in another interpreter."""
    code = f"import importlib.metadata, sys, sysconfig; print({expression})"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def show(line: str) -> None:
    """Print a line for a person, and for docs/interop.md."""
    print(f"\n{line}")  # noqa: T201


def show_version(python: Path, package: str) -> None:
    """Print which version of a server is tested."""
    show(f"{package} {ask_python(python, f'importlib.metadata.version({package!r})')}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


@contextmanager
def running_server(
    command: Sequence[str | Path], environment: Mapping[str, str], ready: tuple[int, str], log: Path
) -> Iterator[None]:
    """A server as a child process, from the moment when its page for that (port and path) says that it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=log.parent, stdout=output, stderr=output
        )
    try:
        give_up_at = time.monotonic() + START_S_MAX
        while not _is_ready(*ready):
            assert process.poll() is None, f"the server did not start: {log.read_text()[-4000:]}"
            assert time.monotonic() < give_up_at, f"the server did not start in time: {log.read_text()[-4000:]}"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def get_json(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def post_json(port: int, path: str, body: object) -> Any:
    """Ask a server itself, without a gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return json.loads(response.read())
    finally:
        connection.close()


def inference(value: object, is_own: Callable[[Any], bool]) -> Case:
    """`POST /v1/inference` with this input."""
    return Case(json.dumps({"input": value}).encode(), is_own)
