"""O3: three times what the upstream can do, with bodies of 64 KB. Memory stays flat, refusals are quick, and whoever
is admitted succeeds.
"""

import asyncio
import time
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, inference_body
from support.processes import running_gateway

# One slot, 16 inputs a batch of 200 ms: 80 requests a second.
UPSTREAM = "sim:?latency_ms=200&slots=1"
FLAGS = ("--max-batch", "16")
CAPACITY_PER_S = 80
OVERLOAD = 3
BODY_BYTES = 64_000
# Those that wait are served within 2.5 s, or a few times that on a busy machine: before their queue timeout.
WAITING_MAX = 200
SETTINGS = {"broker.waiting_max": WAITING_MAX, "broker.queue_timeout_s": 60, "broker.total_timeout_s": 90}
MIB = 1024 * 1024
# An idle gateway has some 60 MiB, 200 waiting requests of 64 KB another 13, as many of their connections' buffers more.
RESIDENT_MIB_MAX = 160


class Overload(NamedTuple):
    """What was seen."""

    verdict: Verdict
    statuses: dict[str, int]
    refusal_ms_p99: float
    # Resident MiB: the most in the first third after the warm-up, and the most in the last third.
    resident_then: float
    resident_last: float
    # The most that the gateway held.
    held_max: int
    held_bytes_max: int


class OpenLoop:
    """Sends at a fixed rate, whatever comes back; idle connections are used again."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self._idle: list[Connection] = []
        self.refusal_ms: list[float] = []

    async def run(self, per_s: float, seconds: float) -> None:
        """All requests of the run."""
        started = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(started + number / per_s - time.monotonic())
            task = asyncio.create_task(self._ask())
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        for connection in self._idle:
            await connection.close()

    async def _ask(self) -> None:
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        text = self._checker.new_input(BODY_BYTES)
        self._checker.accepted(text)
        started = time.monotonic()
        try:
            response = await connection.ask("POST", "/v1/inference", inference_body(text))
        except ConnectionBrokenError:
            self._checker.broke_off(text)
            return
        if response.status == 200:
            self._checker.output(text, response.json["output"])
        else:
            self._checker.failed(text, response.status)
            self.refusal_ms.append((time.monotonic() - started) * 1000)
        self._idle.append(connection)


async def overload(directory: Path, warm_up_s: float, seconds: float) -> Overload:
    """Warm up under the same load, then watch the memory for `seconds`."""
    checker = Checker("O3", {"": {503}})
    async with running_gateway(directory, UPSTREAM, *FLAGS, settings=SETTINGS) as gateway:
        load = OpenLoop(gateway.port, checker)
        running = asyncio.ensure_future(load.run(CAPACITY_PER_S * OVERLOAD, warm_up_s + seconds))
        await asyncio.sleep(warm_up_s)
        samples: list[float] = []
        held, held_bytes = [0.0], [0.0]
        while not running.done():
            samples.append(gateway.resident_bytes() / MIB)
            held.append(await gateway.metric("carpool_held_requests"))
            held_bytes.append(await gateway.metric("carpool_held_bytes"))
            await asyncio.sleep(0.05)
        await running
        assert await gateway.metric("carpool_held_requests") == 0
        assert await gateway.metric("carpool_held_bytes") == 0
    third = len(samples) // 3
    return Overload(
        checker.verdict(),
        dict(checker.tally),
        quantiles(load.refusal_ms, n=100)[-1],
        max(samples[:third]),
        max(samples[-third:]),
        round(max(held)),
        round(max(held_bytes)),
    )
