"""Real Prometheus and Alertmanager for tests: started on free ports, ended by their own process id."""

import asyncio
import json
import math
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from support.client import ask_once
from support.processes import PATIENCE_S, until
from support.redis_servers import free_port

JOB = "carpool"
# So often processes are looked at, and rules are tried.
SCRAPE_S = 1


def launch(directory: Path, name: str, *flags: str) -> "subprocess.Popen[bytes]":
    """Start a program of Debian's; it may not serve yet."""
    program = shutil.which(name)
    assert program is not None, f"there is no {name} here: run `make eyes`"
    with (directory / f"{name}.log").open("wb") as output:
        return subprocess.Popen([program, *flags], stdout=output, stderr=output, cwd=directory)


def write_config(file: Path, config: object) -> Path:
    """Write a configuration as JSON, of which YAML has all, in a directory of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))
    return file


@asynccontextmanager
async def running_program(directory: Path, name: str, ready: str, *flags: str) -> AsyncIterator[int]:
    """A program of Debian's on a free port, which says by the page `ready` that it serves; killed at the end."""
    port = free_port()
    process = launch(directory, name, f"--web.listen-address=127.0.0.1:{port}", *flags)

    async def is_ready() -> bool:
        assert process.poll() is None, f"{name} did not start; its log is in {directory}"
        try:
            return (await ask_once(port, "GET", ready)).status == 200
        except OSError:
            return False

    try:
        await until(is_ready)
        yield port
    finally:
        process.kill()
        process.wait(PATIENCE_S)


class Prometheus:
    """One that looks at some processes."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, query: str) -> list[Any]:
        """The series that a query finds now, without those of which nothing is known (NaN)."""
        answer = await ask_once(self._port, "GET", f"/api/v1/query?query={quote(query)}")
        found = json.loads(answer.body)
        assert found["status"] == "success", (query, found)
        return [each for each in found["data"]["result"] if not math.isnan(float(each["value"][1]))]

    async def examples(self, query: str) -> list[Any]:
        """The examples of a series, of the last hour."""
        now = time.time()
        page = f"/api/v1/query_exemplars?query={quote(query)}&start={now - 3600}&end={now + 60}"
        found = json.loads((await ask_once(self._port, "GET", page)).body)
        assert found["status"] == "success", (query, found)
        return [example for series in found["data"] for example in series["exemplars"]]

    async def until_found(self, query: str, within_s: float = PATIENCE_S) -> None:
        """Wait until a query finds something."""

        async def is_found() -> bool:
            if await self.ask(query):
                return True
            await asyncio.sleep(SCRAPE_S / 2)
            return False

        await until(is_found, within_s=within_s)


@asynccontextmanager
async def running_prometheus(
    directory: Path, admin_ports: Iterable[int], rules: Sequence[Path] = (), alertmanager: int | None = None
) -> AsyncIterator[Prometheus]:
    """Looks at the admin ports of some processes once a second, and tries these rules."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": JOB, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in admin_ports]}]}
        ],
    }
    if alertmanager is not None:
        targets = [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
        config["alerting"] = {"alertmanagers": targets}
    file = write_config(directory / "prometheus.yml", config)
    flags = (f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}", "--enable-feature=exemplar-storage")
    async with running_program(directory, "prometheus", "/-/ready", *flags) as port:
        yield Prometheus(port)


@asynccontextmanager
async def running_alertmanager(directory: Path, webhook: str) -> AsyncIterator[int]:
    """Sends every alert to a webhook at once; yields its port."""
    route = {"receiver": "hook", "group_wait": "0s", "group_interval": "1s", "group_by": ["..."]}
    hook = {"name": "hook", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
    file = write_config(directory / "alertmanager.yml", {"route": route, "receivers": [hook]})
    flags = (f"--config.file={file}", f"--storage.path={directory / 'data'}", "--cluster.listen-address=")
    async with running_program(directory, "prometheus-alertmanager", "/-/ready", *flags) as port:
        yield port
