"""Real `carpool` processes for tests: started, watched and ended by their own process id."""

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

from support.client import Response, ask_once, inference_body
from support.forks import NO_CONSTANTS, Started, constants_in, settings_in, start_carpool

# How long a test waits for what must come: it is over by then only if something hangs. How quick something is, no test
# here says: that depends on what else the machine has to do.
PATIENCE_S = 60.0
_SERVING = re.compile(r"(?:serving on 127\.0\.0\.1:(\d+)|batching), admin on 127\.0\.0\.1:(\d+)")
_GRPC = re.compile(r"gRPC on 127\.0\.0\.1:(\d+)")
_NAME = re.compile(r'"role": "[a-z]+", "name": "([^"]+)"')
# No setting of whoever runs the tests.
CLEAN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Settings that `tests/integration` gives every process: a request may wait as long as a test does, so that a machine
# that stands still changes no answer. A test about one of these times sets its own; None is the default of Carpool.
PATIENT: dict[str, object] = {}


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Wait until the condition is true; TimeoutError if that does not come."""
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.001)


class CpuShare:
    """How much of this machine's cores was left over since this was made."""

    def __init__(self) -> None:
        self._began = self._read()

    def idle(self) -> float:
        """A share of all cores: where it is near 0, others may have been in the way."""
        idle, total = (now - then for now, then in zip(self._read(), self._began, strict=True))
        return idle / total if total else 1.0

    @staticmethod
    def _read() -> tuple[int, int]:
        """Idle and all time so far, waiting for a disk being idle too."""
        times = [int(number) for number in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return times[3] + times[4], sum(times)


class GatewayProcess:
    """One `carpool serve`, or another role, on free ports."""

    def __init__(self, process: Started, log: Path) -> None:
        self.process = process
        self.log = log
        self.port = 0
        self.admin_port = 0

    async def wait_until_serving(self) -> None:
        """Learn the ports from the line that says so."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := _SERVING.search(self.log.read_text())):
            assert self.process.poll() is None, f"the gateway did not start: {self.log.read_text()}"
            assert time.monotonic() < give_up_at, "the gateway did not start in time"
            await asyncio.sleep(0.02)
        self.port, self.admin_port = int(found[1] or 0), int(found[2])

    async def health(self) -> dict[str, Any]:
        """`/internal/health`."""
        health: dict[str, Any] = (await ask_once(self.admin_port, "GET", "/internal/health")).json
        return health

    async def fleet(self, model: str = "default") -> dict[str, Any]:
        """What `/internal/fleet` shows of a model."""
        fleet: dict[str, Any] = (await ask_once(self.admin_port, "GET", "/internal/fleet")).json["models"][model]
        return fleet

    async def until_ready(self) -> None:
        """Until it says that it can serve."""

        async def is_ready() -> bool:
            return (await ask_once(self.admin_port, "GET", "/internal/ready")).status == 200

        await until(is_ready)

    async def ask(self, text: str, headers: str = "") -> Response:
        return await ask_once(self.port, "POST", "/v1/inference", inference_body(text), headers)

    async def submit(self, text: str, headers: str = "") -> str:
        """A task with this input, which is accepted; its id."""
        accepted = await self.ask(text, f"Prefer: respond-async\r\n{headers}")
        assert accepted.status == 202, accepted.body
        task_id: str = accepted.json["task_id"]
        return task_id

    async def result(self, task_id: str, headers: str = "") -> dict[str, Any]:
        """What became of a task, once that is known."""
        found: dict[str, Any] = {"status": "PENDING"}
        while found["status"] == "PENDING":
            found = (await ask_once(self.port, "GET", f"/v1/result/{task_id}?wait_ms=30000", b"", headers)).json
        return found

    async def state(self, request_id: str) -> Any:
        """What `/internal/requests/{id}` says; the status of the answer where that is no 200."""
        response = await ask_once(self.admin_port, "GET", f"/internal/requests/{request_id}")
        return response.json if response.status == 200 else response.status

    @property
    def name(self) -> str:
        """By which the others in a fleet know it; from the line that says that it serves."""
        found = _NAME.search(self.log.read_text())
        assert found is not None
        return found[1]

    @property
    def grpc_port(self) -> int:
        """Of one that serves gRPC; from the line that says so."""
        found = _GRPC.search(self.log.read_text())
        assert found is not None
        return int(found[1])

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    async def metric(self, name: str) -> float:
        """The sum of one metric over its labels; 0 if there is none yet."""
        text = (await ask_once(self.admin_port, "GET", "/metrics")).body.decode()
        lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, lines))

    async def dead_letters(self) -> int:
        listed = await ask_once(self.admin_port, "GET", "/internal/dead-letters?limit=1")
        total: int = listed.json["total"]
        return total

    def resident_bytes(self) -> int:
        """Memory that the process occupies now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def log_messages(self, level: str) -> list[str]:
        """What was logged at this level."""
        entries = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [entry["message"] for entry in entries if entry["level"] == level]

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self, within_s: float = PATIENCE_S) -> int:
        """The exit code, once it has left by itself."""
        give_up_at = time.monotonic() + within_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < give_up_at, f"still running after {within_s:g} s: {self.log.read_text()[-2000:]}"
            await asyncio.sleep(0.005)
        return code


@asynccontextmanager
async def running_gateway(
    directory: Path, upstream: str, *flags: str, settings: Mapping[str, object] | None = None
) -> AsyncIterator[GatewayProcess]:
    """A gateway with its journal in `directory`; killed at the end if it has not left by itself.

    Without an `upstream`, the endpoints are those of `carpool.toml` in that directory.

    `settings` are further ones by their key, such as `{"tasks.timeout_s": 3}`.
    """
    gateway = start_gateway(directory, upstream, flags, settings or {})
    try:
        await gateway.wait_until_serving()
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.kill()


@asynccontextmanager
async def running_role(
    directory: Path, role: str, *flags: str, settings: Mapping[str, object] | None = None
) -> AsyncIterator[GatewayProcess]:
    """One `carpool gateway`, `batcher` or `serve` until the block ends; killed then if it has not left by itself."""
    process = start_role(directory, role, flags, settings or {})
    try:
        await process.wait_until_serving()
        yield process
    finally:
        if process.process.poll() is None:
            process.kill()


def start_gateway(
    directory: Path, upstream: str, flags: Sequence[str], settings: Mapping[str, object]
) -> GatewayProcess:
    """Start the process; it may not serve yet."""
    endpoint = ["--upstream", upstream] if upstream else []
    return start_role(directory, "serve", [*endpoint, "--data-dir", str(directory), *flags], settings)


def start_role(directory: Path, role: str, flags: Sequence[str], settings: Mapping[str, object]) -> GatewayProcess:
    """Start a process of this role; it may not serve yet."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{role}-{time.monotonic_ns()}.log"
    wanted = PATIENT | dict(settings)
    said = {variable(key): str(value) for key, value in settings_in(wanted).items() if value is not None}
    with log.open("wb") as output:
        command = [role, "--port", "0", "--log-format", "json", *flags]
        files = (output.fileno(), output.fileno())
        process = start_carpool(command, *files, CLEAN_ENVIRONMENT | said, directory, constants_in(wanted))
    return GatewayProcess(process, log)


def variable(key: str) -> str:
    """The environment's name of a setting; OpenTelemetry's variables stand for themselves."""
    return key if key.startswith("OTEL_") else "CARPOOL_" + key.upper().replace(".", "_")


def carpool(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of `carpool` to its end, in a wide terminal."""
    return carpool_for(PATIENCE_S, arguments, cwd, environment)


def carpool_for(
    seconds: float,
    arguments: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    constants: Mapping[str, object] = NO_CONSTANTS,
) -> "subprocess.CompletedProcess[str]":
    """The same for a command that may take so long."""
    wanted = CLEAN_ENVIRONMENT | {"COLUMNS": "200"} | dict(environment or {})
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = start_carpool(arguments, stdout.fileno(), stderr.fileno(), wanted, cwd, constants)
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, status, _text_of(stdout), _text_of(stderr))


@contextmanager
def telling(*arguments: str, **environment: str) -> Iterator[tuple[Started, IO[str]]]:
    """A command of `carpool` that runs, and what it prints as it comes; killed at the end if it is still there."""
    reading, writing = os.pipe()
    with open(reading) as told:
        process = start_carpool(arguments, writing, 2, CLEAN_ENVIRONMENT | {"COLUMNS": "200"} | environment)
        os.close(writing)
        try:
            yield process, told
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
