"""The last answer of a connection, with and without TLS: who reads it late gets all of it, who does not is cut off."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest
import uvloop

from carpool.face.http.exchange import Exchange
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from support.certificates import Certificates
from support.processes import PATIENCE_S, until

# More than the kernel takes for the clients below.
LONG = b"x" * 900_000
LAST = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
with_and_without_tls = pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """As in production: how a connection ends is up to the event loop."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(test(**fixtures))

    return run


def answer_long(exchange: Exchange) -> None:
    exchange.respond(200, LONG)


@asynccontextmanager
async def serving(
    certificates: Certificates | None, limits: HttpLimits, handler: Callable[[Exchange], None] = answer_long
) -> AsyncIterator[tuple[HttpServer, Callable[[], socket.socket]]]:
    """A server, and who makes blocking connections to it, for which the kernel holds little."""
    server = HttpServer(handler, limits)
    port = await server.start("127.0.0.1", 0, certificates.of_server() if certificates else None)

    def connect() -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", port))
        if certificates is None:
            return client
        trusted = ssl.create_default_context(cafile=certificates.pem("ca"))
        return trusted.wrap_socket(client, server_hostname="localhost", suppress_ragged_eofs=False)

    try:
        yield server, connect
    finally:
        server.stop_listening()
        await server.finish(0.0)


async def ask(connect: Callable[[], socket.socket], request: bytes) -> socket.socket:
    def connect_and_send() -> socket.socket:
        client = connect()
        client.sendall(request)
        return client

    return await asyncio.to_thread(connect_and_send)


async def read_all(client: socket.socket) -> bytes:
    """All up to the end; raises if that is no end in order."""

    def read() -> bytes:
        with client:
            return b"".join(iter(lambda: client.recv(65536), b""))

    return await asyncio.to_thread(read)


@with_and_without_tls
@on_uvloop
async def test_who_does_not_read_is_cut_off(certificates: Certificates, has_tls: bool) -> None:
    async with serving(certificates if has_tls else None, HttpLimits(write_timeout_s=0.5)) as (server, connect):
        client = await ask(connect, LAST)
        await until(lambda: len(server.connections) == 1)
        await until(lambda: not server.connections)
        client.close()


@on_uvloop
async def test_who_ends_its_side_and_does_not_read_is_cut_off() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200, LONG[:16384])

    def is_behind() -> bool:
        return any(each.transport and each.transport.get_write_buffer_size() for each in server.connections)

    async with serving(None, HttpLimits(write_timeout_s=0.5), answer) as (server, connect):
        client = await ask(connect, b"")
        while not is_behind():  # by so little that it is still read from, and its end is seen
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await asyncio.sleep(0.01)
        client.shutdown(socket.SHUT_WR)
        await until(lambda: not server.connections)
        client.close()


@on_uvloop
async def test_who_reads_late_gets_all(certificates: Certificates) -> None:
    async with serving(certificates, HttpLimits()) as (server, connect):
        client = await ask(connect, LAST)
        await asyncio.sleep(3.0)  # longer than a second to linger, and than two for the end of TLS
        assert (await read_all(client)).endswith(b"\r\n\r\n" + LONG)
        await until(lambda: not server.connections)


@on_uvloop
async def test_who_reads_late_in_a_drain_gets_all() -> None:
    async with serving(None, HttpLimits()) as (server, connect):
        client = await ask(connect, LAST.replace(b"close", b"keep-alive"))
        await until(lambda: any(connection.bytes_out for connection in server.connections))
        server.stop_listening()
        drained = asyncio.ensure_future(server.finish(server.state.clock() + PATIENCE_S))
        await asyncio.sleep(3.0)
        assert (await read_all(client)).endswith(b"\r\n\r\n" + LONG)
        await drained


@on_uvloop
async def test_what_comes_behind_the_last_request_does_no_harm() -> None:
    answered = asyncio.Event()

    def answer(exchange: Exchange) -> None:
        answer_long(exchange)
        answered.set()

    async with serving(None, HttpLimits(), answer) as (_, connect):
        client = await ask(connect, LAST)
        await answered.wait()
        client.sendall(b"\r\n")
        assert (await read_all(client)).endswith(b"\r\n\r\n" + LONG)


@with_and_without_tls
@on_uvloop
async def test_an_end_of_a_connection_that_ends_an_answer_is_in_order(
    certificates: Certificates, has_tls: bool
) -> None:
    def answer_in_parts(exchange: Exchange) -> None:
        exchange.begin(200, b"text/plain")
        exchange.write(b"one")
        exchange.end()

    async with serving(certificates if has_tls else None, HttpLimits(), answer_in_parts) as (_, connect):
        client = await ask(connect, b"GET / HTTP/1.0\r\n\r\n")
        assert (await read_all(client)).endswith(b"\r\n\r\none")


@on_uvloop
async def test_what_tls_adds_is_not_taken_for_what_a_client_has_read(certificates: Certificates) -> None:
    parts = 20_000

    def answer(exchange: Exchange) -> None:
        if exchange.target == b"/long":
            exchange.respond(200, LONG[:300_000])
            return
        exchange.begin(200, b"text/plain")
        for _ in range(parts):
            exchange.write(b"x")
        exchange.end()

    async with serving(certificates, HttpLimits(write_timeout_s=0.5), answer) as (server, connect):
        client = await ask(connect, b"GET /parts HTTP/1.1\r\nHost: h\r\n\r\n")

        def read_parts_and_ask_for_more() -> None:
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                tail = (tail + client.recv(65536))[-16:]
            client.sendall(b"GET /long HTTP/1.1\r\nHost: h\r\n\r\n")

        await asyncio.to_thread(read_parts_and_ask_for_more)
        await until(lambda: not server.connections)
        client.close()
