"""A server on an event loop in a thread of its own, for tests that are not async."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from support.processes import PATIENCE_S

Served = TypeVar("Served")


@contextmanager
def in_a_thread(serving: AbstractAsyncContextManager[Served]) -> Iterator[tuple[Served, asyncio.AbstractEventLoop]]:
    """Until the block ends: what the other block gives, and the loop on which it runs."""
    found: list[tuple[Served, asyncio.AbstractEventLoop]] = []
    is_serving, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving as served:
            found.append((served, asyncio.get_running_loop()))
            is_serving.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_serving.wait(PATIENCE_S)
    [(served, loop)] = found
    try:
        yield served, loop
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
