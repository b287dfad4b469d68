"""The load of the demo: a process of its own, which reads from stdin what to send, and leaves when stdin ends.

Each line is `BenchOptions` in JSON: from then on it sends that, or nothing where the line has no segments.
"""

import asyncio

import msgspec
import uvloop

from carpool.tools.bench.generator import LoadGenerator
from carpool.tools.bench.options import BenchOptions, raise_file_limit, resolve
from carpool.tools.bench.run import make_load
from carpool.tools.demo import stdin_lines


class DemoLoad:
    """Sends what was ordered last."""

    def __init__(self) -> None:
        self._generator: LoadGenerator | None = None
        # The event loop holds its tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def order(self, options: BenchOptions) -> None:
        """Send this from now on. Answers to what was sent before are still taken."""
        if self._generator is not None:
            self._generator.stop()
            self._generator = None
        if options.segments:
            raise_file_limit(options.connections)
            self._generator, _ = make_load(options, resolve(options.url))
            task = asyncio.get_running_loop().create_task(self._send(self._generator))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, generator: LoadGenerator) -> None:
        try:
            await generator.open()
            if self._generator is generator:
                await generator.run()
                await asyncio.sleep(generator.timeout_s / 2)  # for the answers that are on their way
        except ConnectionError:
            pass  # the gateway leaves
        finally:
            await generator.close()


async def send_as_told() -> None:
    """Send what stdin says, until it ends."""
    load = DemoLoad()
    async for line in stdin_lines():
        load.order(msgspec.json.decode(line, type=BenchOptions))


if __name__ == "__main__":
    uvloop.run(send_as_told())
