"""A fixed API that misbehaves on command: a real HTTP server on raw streams, in the test's own event loop.

It answers like the simulated GPU, every string reversed, unless `behave` says otherwise for a call. It keeps every
input that it was sent, so that a test can tell what reached the GPU, and how often.
"""

import asyncio
import gzip
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache

from support.client import ask_once
from support.stream_server import StreamServer, stream_server

MIB = 1024 * 1024
# Linger for zero seconds: closing then sends RST in place of FIN.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ResetError(Exception):
    """End the connection with a reset."""


def outputs_body(outputs: object) -> bytes:
    return json.dumps({"outputs": outputs}).encode()


def reverse(inputs: list[str]) -> list[str]:
    """What the simulated GPU makes of strings."""
    return [text[::-1] for text in inputs]


# Wrong answers with status 200 and a right length: each must be a fault for every member of the batch.
WRONG_BODIES: dict[str, Callable[[list[str]], bytes]] = {
    "short": lambda inputs: outputs_body(reverse(inputs)[:-1]),
    "long": lambda inputs: outputs_body([*reverse(inputs), "one more"]),
    "empty array": lambda inputs: outputs_body([]),
    "null array": lambda inputs: outputs_body(None),
    "no array": lambda inputs: b"{}",
    "object in place of the array": lambda inputs: outputs_body({str(n): o for n, o in enumerate(reverse(inputs))}),
    "array at the top": lambda inputs: json.dumps(reverse(inputs)).encode(),
    "garbage": lambda inputs: b'{"outputs": [<!doctype html>',
    "two answers": lambda inputs: outputs_body(reverse(inputs)) * 2,
    "cut off": lambda inputs: outputs_body(reverse(inputs))[:-3],
    "NaN": lambda inputs: outputs_body([float("nan")] * len(inputs)),
    "infinity": lambda inputs: outputs_body([float("inf")] * len(inputs)),
    "invalid UTF-8": lambda inputs: outputs_body(["?"] * len(inputs)).replace(b"?", b"\xff\xfe"),
    "too deep": lambda inputs: b'{"outputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "HTML": lambda inputs: b"<!doctype html><title>Welcome</title><h1>It works</h1>",
    "nothing": lambda inputs: b"",
}


# This alone is answered well, however the upstream behaves.
WORKS = "works"


class ScriptedUpstream:
    """One endpoint. `behave(inputs, writer)` writes the answer to one call."""

    inputs_field = "inputs"

    def __init__(self) -> None:
        self.seen: list[str] = []
        # Of each call: its `traceparent`, or "".
        self.traceparents: list[str] = []
        self.calls = 0
        self.in_flight = 0
        self.latency_s = 0.0
        # Calls wait here before they are answered; cleared, they hang.
        self.gate = asyncio.Event()
        self.gate.set()
        self.behaviour = "good"
        # A batch with an input that contains this is answered with 500, whole; "" for none.
        self.poison = ""
        # Further lines of a good answer's head.
        self.headers = ""
        self.most_in_flight = 0
        # Of the hundred parts of a huge answer, the most that somebody took.
        self.parts_taken_max = 0
        # Once it runs.
        self.server: StreamServer

    @property
    def url(self) -> str:
        """The address for `--upstream`."""
        return f"http://127.0.0.1:{self.server.port}/infer"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: calls one after the other."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get "):  # a probe of its health
                    await send(writer, b"{}")
                    continue
                given = head.partition(b"\r\ntraceparent: ")[2].partition(b"\r\n")[0]
                self.traceparents.append(given.decode())
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                inputs = json.loads(await reader.readexactly(length))[self.inputs_field]
                self.seen += inputs
                self.calls += 1
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await asyncio.sleep(self.latency_s)
                    await self.gate.wait()
                    await self.answer(inputs, writer)
                finally:
                    self.in_flight -= 1
        except ResetError:
            connected: socket.socket = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        """Answer one call as the script says."""
        behaviour = "good" if inputs == [WORKS] else self.behaviour
        if behaviour == "any":
            behaviour = random.choice(["good", *WRONG_BODIES, "null element", "reset", "status 500", "close"])
        if behaviour in WRONG_BODIES:
            await send(writer, WRONG_BODIES[behaviour](inputs))
        elif behaviour == "null element":
            await send(writer, outputs_body([*reverse(inputs)[:-1], None]))
        elif behaviour == "good" and self.poison and any(self.poison in text for text in inputs):
            await send(writer, b'{"error":"out of memory"}', 500)
        elif behaviour == "good":
            await send(writer, outputs_body(reverse(inputs)), headers=self.headers)
        elif behaviour.startswith("status "):
            await send(writer, b'{"error":"no"}', int(behaviour.removeprefix("status ")))
        elif behaviour in HUGE:
            await self._send_parts(writer, *HUGE[behaviour])
        else:
            await MISBEHAVIOURS[behaviour](writer)

    async def _send_parts(self, writer: asyncio.StreamWriter, head: bytes, form: bytes) -> None:
        """A hundred parts of a mebibyte, as fast as they are taken."""
        writer.write(head)
        part = form % (b" " * MIB)
        for number in range(100):
            writer.write(part)
            await writer.drain()
            self.parts_taken_max = max(self.parts_taken_max, number + 1)

    async def hang_up(self) -> None:
        """End every connection, whatever it is doing."""
        await self.server.hang_up()


class OpenAiUpstream(ScriptedUpstream):
    """Speaks `openai_embeddings`: the "embedding" of a text is the text reversed. The last one is answered first."""

    inputs_field = "input"

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        data = [{"index": index, "embedding": text} for index, text in enumerate(reverse(inputs))]
        await send(writer, json.dumps({"data": data[::-1]}).encode())


def answer_bytes(body: bytes, status: int = 200, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def send(writer: asyncio.StreamWriter, body: bytes, status: int = 200, headers: str = "") -> None:
    writer.write(answer_bytes(body, status, headers))
    await writer.drain()


async def reset(writer: asyncio.StreamWriter) -> None:
    raise ResetError


async def reset_in_body(writer: asyncio.StreamWriter) -> None:
    """The beginning of an answer, then a reset."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"outputs":["')
    await writer.drain()
    await asyncio.sleep(0.02)
    raise ResetError


async def close(writer: asyncio.StreamWriter) -> None:
    raise asyncio.IncompleteReadError(b"", 1)


async def not_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100)
    await writer.drain()
    raise ResetError


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(10_000):
        writer.write(b"X-%d: %b\r\n" % (number, b"x" * 1000))
        await writer.drain()
    raise ResetError


async def gzip_bomb(writer: asyncio.StreamWriter) -> None:
    """A little that would unpack to 128 MiB."""
    await send(writer, bomb(), headers="Content-Encoding: gzip\r\n")


async def gzip_bomb_in_transfer(writer: asyncio.StreamWriter) -> None:
    """The same as a transfer coding."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(bomb()), bomb()))
    await writer.drain()


async def trickle(writer: asyncio.StreamWriter) -> None:
    """An answer that comes a byte at a time, for longer than anybody waits."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def redirect(writer: asyncio.StreamWriter) -> None:
    """A place that must not be followed."""
    await send(writer, b"", 307, "Location: http://127.0.0.1:9/infer\r\n")


@cache
def bomb() -> bytes:
    """128 KB that unpack to 128 MiB."""
    return gzip.compress(b" " * (128 * MIB), compresslevel=6)


# The head and the form of each part; one says at once how long it is.
HUGE = {
    "100 MB": (b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n", b"%b"),
    "100 MB in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100000\r\n%b\r\n"),
}
MISBEHAVIOURS = {
    "reset": reset,
    "reset in the body": reset_in_body,
    "close": close,
    "not HTTP": not_http,
    "endless headers": endless_headers,
    "gzip bomb": gzip_bomb,
    "gzip bomb as a transfer coding": gzip_bomb_in_transfer,
    "trickle": trickle,
    "hang": hang,
    "redirect": redirect,
}


async def let_work_once(port: int) -> None:
    """Have one request answered through the gateway at this port: before that nobody's input is blamed."""
    body = json.dumps({"input": WORKS}).encode()
    answer = await ask_once(port, "POST", "/v1/inference", body, "Content-Type: application/json\r\n")
    assert answer.status == 200, answer.body


@asynccontextmanager
async def scripted_upstream(upstream: ScriptedUpstream | None = None, port: int = 0) -> AsyncIterator[ScriptedUpstream]:
    """A scripted upstream, or this kind of one, on this port or a free one."""
    upstream = upstream or ScriptedUpstream()
    async with stream_server(upstream.serve, port=port, limit=64 * MIB, backlog=1024) as upstream.server:
        yield upstream
