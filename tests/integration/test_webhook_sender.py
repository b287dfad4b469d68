"""The way out of webhooks, against servers that misbehave: what is connected to, and what is read."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from yarl import URL

from carpool.broker.webhooks.rules import Answered
from carpool.broker.webhooks.sender import Sender
from support.certificates import Certificates
from support.processes import PATIENCE_S, until
from support.stream_server import stream_server
from support.upstreams import answer_bytes

# What asyncio has at most.
ASYNCIO_THREADS_MAX = 32


@asynccontextmanager
async def sender(
    is_allowed: Callable[[str], bool] = lambda address: True, timeout_s: float = 60
) -> AsyncIterator[Sender]:
    made = Sender(is_allowed, timeout_s)
    try:
        yield made
    finally:
        await made.close()


class Server:
    """Answers each request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.connections = 0
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            self.bodies.append(await reader.readexactly(length))
            writer.write(self._answer)


async def test_what_counts_is_the_address_when_it_is_connected_to() -> None:
    """A name that was public a moment ago, and is not now."""
    asked: list[str] = []
    server = Server(answer_bytes(b"", 200, "Connection: close\r\n"))

    def first_time_only(address: str) -> bool:
        asked.append(address)
        return len(asked) == 1

    async with stream_server(server.serve) as listening, sender(first_time_only) as way:
        url = URL(f"http://127.0.0.1:{listening.port}/")
        assert await way.send(url, {}, b"1") == Answered(200)
        assert await way.send(url, {}, b"2") == Answered(0, "the address is not allowed")
        by_name = URL(f"http://localhost:{listening.port}/")
        assert (await way.send(by_name, {}, b"3")).failure == "the address is not allowed"
        assert server.bodies == [b"1"] and server.connections == 1
        assert set(asked) <= {"127.0.0.1", "::1"}


async def test_a_certificate_that_nobody_knows(certificates: Certificates) -> None:
    server = Server(answer_bytes(b"", 200))
    async with stream_server(server.serve, ssl=certificates.of_server()) as listening, sender() as way:
        assert await way.send(URL(f"https://localhost:{listening.port}/"), {}, b"x") == Answered(0, "TLS failed")
        assert server.bodies == []


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"
    server = Server(endless)
    async with stream_server(server.serve) as listening, sender() as way:
        url = URL(f"http://127.0.0.1:{listening.port}/")
        assert await way.send(url, {}, b"1") == Answered(200)
        assert await way.send(url, {}, b"2" * 3_000_000) == Answered(200)
        assert server.connections == 2  # the first could not be used again


async def test_nothing_there_and_no_answer() -> None:
    async with stream_server(Server(b"").serve) as listening, sender(timeout_s=0.3) as way:
        url = URL(f"http://127.0.0.1:{listening.port}/")
        assert await way.send(url, {}, b"x") == Answered(0, "no answer in time")
    async with sender() as way:
        assert await way.send(url, {}, b"x") == Answered(0, "no connection")
        assert (await way.send(URL("http://no-such-name.invalid/"), {}, b"x")).failure == "the name cannot be resolved"


async def test_names_that_no_server_answers_for_take_no_threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop resolves names of upstreams and of Redis, too, in threads of which it has a few."""
    over = threading.Event()
    looked_up: list[str] = []
    resolve = socket.getaddrinfo

    def slow(host: str, *rest: Any, **named: Any) -> Any:
        if not host.endswith(".test"):
            return resolve(host, *rest, **named)
        looked_up.append(host)
        over.wait()
        raise OSError("nobody answers")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    async with sender() as way:
        names = [f"https://dead-{number}.test/" for number in range(ASYNCIO_THREADS_MAX + 1)]
        under_way = [asyncio.ensure_future(way.send(URL(name), {}, b"1")) for name in names]
        try:
            await until(lambda: len(looked_up) == len(names))
            assert await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80), PATIENCE_S)
        finally:
            over.set()
        assert {each.failure for each in await asyncio.gather(*under_way)} == {"the name cannot be resolved"}
