"""Connections that a server closes when they are used again: uvicorn does that after a 500, without saying so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from carpool.upstream.client import HttpEndpoint, make_session
from carpool.upstream.endpoint import AttemptFailedError, Call


class ShortServer:
    """Answers `answers` calls on each connection, and resets it at the next."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.calls = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(self.answers + 1):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            await reader.readexactly(int(head.lower().partition("content-length:")[2].split("\r\n")[0]))
            self.calls += 1
            if number < self.answers:
                writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}")
        writer.transport.abort()


@asynccontextmanager
async def endpoint_of(server: ShortServer) -> AsyncIterator[HttpEndpoint]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, make_session() as session:
        yield HttpEndpoint(session, f"http://127.0.0.1:{port}/infer", slots=1, answer_bytes_max=1000)


async def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    server = ShortServer(answers=1)
    async with endpoint_of(server) as endpoint:
        assert (await endpoint.post(Call(b"[1]"), 5.0)).status == 500
        assert (await endpoint.post(Call(b"[2]"), 5.0)).status == 500
    assert server.calls == 3


async def test_a_new_connection_that_breaks_is_a_failure() -> None:
    server = ShortServer(answers=0)
    async with endpoint_of(server) as endpoint:
        with pytest.raises(AttemptFailedError):
            await endpoint.post(Call(b"[1]"), 5.0)
    assert server.calls == 1


async def test_a_call_is_made_again_once_at_most() -> None:
    server = ShortServer(answers=1)
    async with endpoint_of(server) as endpoint:
        assert (await endpoint.post(Call(b"[1]"), 5.0)).status == 500
        server.answers = 0  # also the next connection
        with pytest.raises(AttemptFailedError):
            await endpoint.post(Call(b"[2]"), 5.0)
    assert server.calls == 3
