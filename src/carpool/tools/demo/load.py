"""The load of the demo: a process of its own, which reads from stdin what to send, and leaves when stdin ends.

Each line is JSON: `{"url": …, "parts": [{"name", "rate", "key"}, …]}`. From then on it sends that.
"""

import asyncio
import secrets
import sys
from random import Random
from typing import Any

import msgspec

from carpool.tools.bench.connection import Part
from carpool.tools.bench.generator import LoadGenerator
from carpool.tools.bench.payload import RUN_ID_DIGITS, Payload
from carpool.tools.bench.run import default_connections, raise_file_limit, resolve
from carpool.tools.bench.schedule import Segment, arrivals, poisson_gaps
from carpool.tools.bench.tally import Tally
from carpool.tools.bench.tiers import TierLoad, turns

PAYLOAD_BYTES = 200
TIMEOUT_S = 10.0
# A load goes on for so long.
FOREVER_S = 30 * 24 * 3600.0


class LoadPart(msgspec.Struct, frozen=True):
    """Requests with one key."""

    name: str
    rate: float
    key: str


class LoadOrder(msgspec.Struct, frozen=True):
    """What to send."""

    url: str
    parts: list[LoadPart]


class DemoLoad:
    """Sends what was ordered last."""

    def __init__(self) -> None:
        self._generator: LoadGenerator | None = None
        # The event loop holds its tasks only weakly.
        self._tasks: set[asyncio.Task[Any]] = set()

    def order(self, order: LoadOrder) -> None:
        """Send this from now on. Answers to what was sent before are still taken."""
        if self._generator is not None:
            self._generator.stop()
            self._generator = None
        parts = [part for part in order.parts if part.rate > 0]
        if parts:
            task = asyncio.get_running_loop().create_task(self._send(order.url, parts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, url: str, parts: list[LoadPart]) -> None:
        target, run_id = resolve(url), secrets.token_hex(RUN_ID_DIGITS // 2)
        rate = sum(part.rate for part in parts)
        segments = [Segment(rate, rate, FOREVER_S)]
        tally, random = Tally(), Random(run_id)
        kinds = [
            Part(
                Payload(host=target.host, base_path=target.base_path, run_id=run_id, size=PAYLOAD_BYTES, key=part.key),
                tally,
            )
            for part in parts
        ]
        mix = [TierLoad(part.name, part.rate, part.key) for part in parts]
        connections = default_connections(segments)
        raise_file_limit(connections)
        generator = self._generator = LoadGenerator(
            target=target,
            tally=tally,
            parts=[kinds[place] for place in turns(mix, 1)],
            arrivals=arrivals(segments, poisson_gaps(random.random)),
            connections=connections,
            timeout_s=TIMEOUT_S,
            tasks=False,
        )
        try:
            await generator.open()
            if self._generator is generator:
                await generator.run()
                await asyncio.sleep(TIMEOUT_S / 2)  # for the answers that are on their way
        except ConnectionError:
            pass  # the gateway leaves
        finally:
            await generator.close()


async def send_as_told() -> None:
    """Send what stdin says, until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    load = DemoLoad()
    while line := await reader.readline():
        load.order(msgspec.json.decode(line, type=LoadOrder))
