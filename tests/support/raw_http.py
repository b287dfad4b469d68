"""An upstream that a test writes byte by byte: HTTP/1.1 as no server should speak it, on TCP, TLS or a Unix socket."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from carpool.upstream.endpoint import UpstreamCall
from support.stream_server import stream_server


class RawCall:
    """One call that came in, and the way back."""

    def __init__(self, number: int, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        # From 1, on its connection.
        self.number = number
        self.target = target
        self.body = body
        self._writer = writer

    async def send(self, *parts: bytes, pause_s: float = 0.01) -> None:
        """Send these, each in a segment of its own."""
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(pause_s)
            self._writer.write(part)
            await self._writer.drain()

    def write_if_open(self, data: bytes) -> None:
        """Send this, if there is still somebody there."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def close(self) -> None:
        """End the connection in order."""
        self._writer.close()
        await self._writer.wait_closed()

    def reset(self) -> None:
        """Break the connection off, with a reset."""
        own = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.transport.abort()


Script = Callable[[RawCall], Awaitable[None]]


def answer_to(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """The right answer to the body of a call of the plain JSON protocol: every string reversed."""
    outputs = [text[::-1] for text in json.loads(body)["inputs"]] if body else []
    content = json.dumps({"outputs": outputs}).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def chunked_answer_to(body: bytes) -> bytes:
    """The same in chunks."""
    _, _, content = answer_to(body).partition(b"\r\n\r\n")
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)


def call_with(text: str) -> UpstreamCall:
    """A call of the plain JSON protocol with one input."""
    return UpstreamCall(json.dumps({"inputs": [text]}).encode())


def output_for(text: str) -> bytes:
    """The body of the answer to it."""
    return json.dumps({"outputs": [text[::-1]]}).encode()


class RawUpstream:
    """Reads whole calls, and does with each what the script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        # The bodies of the calls, in the order in which they came.
        self.bodies: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        self.connections += 1
        await self.converse(reader, writer)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Calls, one after the other."""
        number = 0
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            body = await reader.readexactly(int(length)) if length else b""
            number += 1
            self.bodies.append(body)
            await self.script(RawCall(number, head.split(b" ")[1].decode(), body, writer))


class HastyUpstream(RawUpstream):
    """Says something before it has read what it is asked."""

    def __init__(self, answer: bytes, *, reads_head: bool) -> None:
        super().__init__(_nothing)
        self.answer = answer
        self.reads_head = reads_head

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """At once, or after the head of the first call."""
        if self.reads_head:
            await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        await asyncio.sleep(60)


async def _nothing(call: RawCall) -> None:
    """No answer."""


@asynccontextmanager
async def raw_upstream(
    served: Script | RawUpstream, tls: ssl.SSLContext | None = None, path: Path | None = None
) -> AsyncIterator[RawUpstream]:
    """One on a free port, or on a Unix socket."""
    upstream = served if isinstance(served, RawUpstream) else RawUpstream(served)
    async with stream_server(upstream.serve, socket=path, ssl=tls) as server:
        scheme = "https" if tls else "http"
        upstream.url = f"unix:{path}:/infer" if path else f"{scheme}://127.0.0.1:{server.port}/infer"
        yield upstream
