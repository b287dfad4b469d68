"""The load of the demo: a process of its own, which reads from stdin what to send, and leaves when stdin ends.

Each line is `BenchOptions` in JSON: from then on it sends that, or nothing where the line has no segments.
"""

import asyncio

import msgspec
import uvloop

from carpool.tools.bench.generator import LoadGenerator
from carpool.tools.bench.run import BenchOptions, make_load, raise_file_limit, resolve
from carpool.tools.demo import stdin_lines


async def send(generator: LoadGenerator) -> None:
    """Send until it is ended, and take the answers that are on their way."""
    try:
        await generator.open()
        await generator.run()
    except ConnectionError:
        pass  # the gateway leaves
    finally:
        await generator.close()


async def send_as_told() -> None:
    """Send what stdin said last, until it ends."""
    generator: LoadGenerator | None = None
    # The event loop holds its tasks only weakly.
    sending: set[asyncio.Task[None]] = set()
    async for line in stdin_lines():
        options = msgspec.json.decode(line, type=BenchOptions)
        if generator is not None:
            generator.end()
            generator = None
        if options.segments:
            raise_file_limit(options.connections)
            generator, _ = make_load(options, resolve(options.url))
            task = asyncio.get_running_loop().create_task(send(generator))
            sending.add(task)
            task.add_done_callback(sending.discard)


if __name__ == "__main__":
    uvloop.run(send_as_told())
