"""A small HTTP/1.1 client over raw streams: a test sees every close, reset and header as it comes."""

import asyncio
import json
from typing import Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")
READ_S_MAX = 60.0


class ConnectionBrokenError(Exception):
    """The connection ended before a whole response had come."""


class Response(NamedTuple):
    """One whole response."""

    status: int
    # Names in lower case.
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def read_as(self, kind: type[T]) -> T:
        """The body as this type, which leaves out nothing of it."""
        read = msgspec.json.decode(self.body, type=kind)
        assert json.loads(msgspec.json.encode(read)) == self.json
        return read

    @property
    def is_last(self) -> bool:
        """Whether the server asked for the connection to be closed."""
        return self.headers.get("connection", "").lower() == "close"


class Connection:
    """One client connection; requests one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect to a port of this machine; raises OSError when refused."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, method: str, target: str, body: bytes = b"", headers: str = "") -> Response:
        """Send one request and read its response; raises ConnectionBrokenError."""
        self.send(method, target, body, headers)
        return await self.read()

    def send(self, method: str, target: str, body: bytes = b"", headers: str = "") -> None:
        """Send one request; `headers` are further lines, each with its line end."""
        head = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.send_part(head.encode() + body)

    def send_part(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self) -> Response:
        try:
            async with asyncio.timeout(READ_S_MAX):
                head = await self._reader.readuntil(b"\r\n\r\n")
                status_line, *lines = head.decode("latin-1").split("\r\n")[:-2]
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        except (asyncio.IncompleteReadError, OSError) as failure:
            if isinstance(failure, TimeoutError):
                raise AssertionError(f"no response within {READ_S_MAX:g} s: the gateway hangs") from None
            raise ConnectionBrokenError(str(failure)) from None
        return Response(int(status_line.split(" ")[1]), headers, body)

    async def close(self) -> None:
        """Hang up, and wait until the socket is closed."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:  # the other side may have reset it before
            pass

    async def abort(self) -> None:
        """Hang up with a reset where something is unread."""
        self._writer.transport.abort()
        await self.close()


async def ask_once(port: int, method: str, target: str, body: bytes = b"", headers: str = "") -> Response:
    """One request on a connection of its own."""
    connection = await Connection.open(port)
    try:
        return await connection.ask(method, target, body, headers)
    finally:
        await connection.close()


def inference_body(text: str) -> bytes:
    """The body of `POST /v1/inference` for one input."""
    return json.dumps({"input": text}).encode()
