"""Four typical troubles, made on purpose, for docs/observe.md: pictures of the page, and what the commands print.

`make pictures` draws them.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import FloatRect, sync_playwright

from carpool.cli.sim import simulated_gpus
from support.gateway import serving
from support.processes import GatewayProcess, carpool

WIDTH = 1280
# So long a trouble lasts before it is drawn.
SEEN_S = 20.0


class Clients:
    """One client, by its address: so many requests a second, whatever comes back, until the block ends."""

    def __init__(self, port: int, rate: float, address: str = "127.0.0.2", parameter_sets: int = 1) -> None:
        self._port, self._rate, self._address, self._sets = port, rate, address, parameter_sets
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    async def _run(self) -> None:
        sent: set[asyncio.Task[None]] = set()
        number, began = 0, time.monotonic()
        while not self._is_over.is_set():
            await asyncio.sleep(0.01)
            while number < (time.monotonic() - began) * self._rate:
                number += 1
                task = asyncio.ensure_future(self._ask(number))
                sent.add(task)
                task.add_done_callback(sent.discard)
        await asyncio.gather(*sent)

    async def _ask(self, number: int) -> None:
        body: dict[str, Any] = {"input": f"input {number}"}
        if self._sets > 1:
            body["parameters"] = {"temperature": number % self._sets / 100}
        data = json.dumps(body).encode()
        head = f"POST /v1/inference HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(self._address, 0))
        writer.write(head.encode() + data)
        await reader.read()
        writer.close()


@contextmanager
def running(directory: Path, latencies_ms: list[int], **settings: object) -> Iterator[GatewayProcess]:
    """A gateway with a GPU for each of these, that keeps records."""
    with ExitStack() as stack:
        urls = []
        for latency_ms in latencies_ms:
            options = {"--port": 0, "--workers": 1, "--slots": 1, "--latency-ms": latency_ms, "--max-batch": 32}
            address = stack.enter_context(simulated_gpus(options)).address
            assert address is not None
            urls.append(address)
        given = {"tracking.store": "sqlite", "batching.max_batch": 32, **settings}
        others = [part for url in urls[1:] for part in ("--upstream", url)]
        directory.mkdir()
        yield stack.enter_context(serving(directory, urls[0], *others, settings=given))


def draw(gateway: GatewayProcess, pictures: dict[Path, list[str]]) -> None:
    """Pictures of some sections of the page, each from the first to the last of these."""
    with sync_playwright() as playwright:  # no longer than this: it has an event loop that runs
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=0.8)
        page.goto(f"http://127.0.0.1:{gateway.admin_port}/")
        time.sleep(SEEN_S)
        for file, sections in pictures.items():
            boxes = [page.locator(section).first.bounding_box() for section in sections]
            tops = [box["y"] for box in boxes if box is not None]
            ends = [box["y"] + box["height"] for box in boxes if box is not None]
            clip = FloatRect(x=0, y=min(tops) - 8, width=WIDTH, height=max(ends) - min(tops) + 16)
            page.screenshot(path=file, full_page=True, clip=clip)
        browser.close()


def said(*command: str, cwd: Path) -> str:
    """What a command prints that knows where records are kept."""
    kept = {"CARPOOL_TRACKING_STORE": "sqlite", "CARPOOL_TASKS_DATA_DIR": str(cwd)}
    done = carpool(*command, cwd=cwd, **kept)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tell(*command: str, cwd: Path) -> None:
    print(f"$ carpool {' '.join(command)}\n{said(*command, cwd=cwd)}")  # noqa: T201


def tell_slowest(gateway: GatewayProcess, directory: Path) -> None:
    """The stories of the slowest request that is kept."""
    found = said("requests", "--since", "1m", "--limit", "10000", "--json", cwd=directory)
    slowest = max(json.loads(found)["requests"], key=lambda each: float(each["latency_ms"]))
    tell("why", slowest["id"], "--admin", f"http://127.0.0.1:{gateway.admin_port}", cwd=directory)


def main(pictures: Path) -> int:
    slow_requests = ["section:has(#slow)"]
    with TemporaryDirectory() as temporary:
        directory = Path(temporary) / "lanes"
        with running(directory, [200] * 6) as gateway, Clients(gateway.port, 120, parameter_sets=40):
            draw(gateway, {pictures / "trouble-lanes.png": [".tiles", "#cars-panel"]})
        directory = Path(temporary) / "gpu"
        with running(directory, [200] * 5 + [1500]) as gateway, Clients(gateway.port, 250):
            draw(gateway, {pictures / "trouble-gpu.png": slow_requests})
            tell_slowest(gateway, directory)
        directory = Path(temporary) / "request"
        with (
            running(directory, [200] * 3 + [3000], **{"upstream.timeout_s": 1}) as gateway,
            Clients(gateway.port, 150),
        ):
            draw(gateway, {pictures / "trouble-request.png": slow_requests})
            tell_slowest(gateway, directory)
        directory = Path(temporary) / "owner"
        with (
            running(directory, [200] * 4) as gateway,
            Clients(gateway.port, 20, "127.0.0.3"),
            Clients(gateway.port, 20, "127.0.0.4"),
            Clients(gateway.port, 300, "127.0.0.9"),
        ):
            draw(gateway, {pictures / "trouble-owner.png": [".tiles", "#cars-panel"]})
            tell("usage", "--since", "10m", cwd=directory)
            tell("requests", "--since", "10m", "--owner", "127.0.0.9", "--limit", "3", cwd=directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
