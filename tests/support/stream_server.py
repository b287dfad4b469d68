"""A server of asyncio streams of which nothing outlives its block.

`asyncio.start_server` begins the handler of a connection some turns of the event loop after it accepted it. One whose
loop ends before that leaves a stream that nobody can close. Here each connection is known from its first moment.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
# For a connection that was accepted to become known, and for one that was ended to be gone.
_TURNS = 10


class StreamServer:
    """The connections of one server; each handler ends when its peer hangs up, or is cancelled."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._is_over = False
        # 0 on a Unix socket.
        self.port = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: asyncio calls it at once."""
        if self._is_over:
            writer.transport.abort()
            return
        handler = asyncio.create_task(self._handle(reader, writer))
        self._handlers[handler] = writer
        handler.add_done_callback(self._handlers.pop)

    async def hang_up(self) -> None:
        """End every connection, whatever its handler is doing."""
        handlers = dict(self._handlers)
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        for writer in handlers.values():
            writer.close()  # of a handler that had not begun

    async def end(self) -> None:
        """Nobody is let in any more, and nothing of those who were is left."""
        self._is_over = True
        writers = list(self._handlers.values())
        await self.hang_up()
        for writer in writers:
            writer.transport.abort()
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # the other side hung up, or `hang_up` was called
        finally:
            writer.close()


@asynccontextmanager
async def stream_server(
    serve: Serve, *, port: int = 0, socket: Path | None = None, **options: Any
) -> AsyncIterator[StreamServer]:
    """One on this port, a free one, or a Unix socket."""
    made = StreamServer(serve)
    if socket is not None:
        listener = await asyncio.start_unix_server(made.accept, str(socket), **options)
    else:
        listener = await asyncio.start_server(made.accept, "127.0.0.1", port, **options)
        made.port = listener.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        for _ in range(_TURNS):  # asyncio loses a connection that it accepts while its listener closes
            await asyncio.sleep(0)
        listener.close()
        await made.end()
