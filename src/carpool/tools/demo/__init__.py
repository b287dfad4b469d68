"""The demo: a control panel on the live page, the load that it steers, and one by one beside carpool."""

import asyncio
import sys
from collections.abc import AsyncIterator


async def stdin_lines() -> AsyncIterator[bytes]:
    """What the demo says to a child process of its own, until it ends, however it does."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


def reachable(host: str) -> str:
    """What a URL calls a listener on this host by."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
