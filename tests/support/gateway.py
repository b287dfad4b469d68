"""A gateway process for tests that are not async, and a client of plain sockets for what no HTTP client would send."""

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.client import Response
from support.processes import PATIENCE_S, GatewayProcess, running_gateway
from support.threads import in_a_thread
from support.upstreams import ScriptedUpstream, scripted_upstream

SIM = "sim:?latency_ms=20&slots=64"
# How many malformed frames or messages a face is sent; `make fuzz` sends 10,000 to each.
MALFORMED = int(os.environ.get("CARPOOL_TEST_FUZZ", "400"))


@contextmanager
def serving(
    directory: Path, upstream: str = SIM, *flags: str, settings: dict[str, Any] | None = None
) -> Iterator[GatewayProcess]:
    """`carpool serve` on free ports until the block ends."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        running = running_gateway(directory, upstream, *flags, settings=settings)
        gateway = runner.run(running.__aenter__())
        try:
            yield gateway
        finally:
            runner.run(running.__aexit__(None, None, None))


class HeldGpu:
    """A scripted upstream in a thread of its own: it answers when the test lets it."""

    def __init__(self) -> None:
        self._upstream = ScriptedUpstream()
        # Of its thread.
        self._loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """The address for `--upstream`."""
        return self._upstream.url

    @property
    def calls(self) -> int:
        return self._upstream.calls

    @property
    def in_flight(self) -> int:
        return self._upstream.in_flight

    def hold(self) -> None:
        """From now on no call is answered."""
        self._loop.call_soon_threadsafe(self._upstream.gate.clear)

    def answer_held(self) -> None:
        """Answer those that came; later ones are held."""

        def open_for_a_moment() -> None:
            self._upstream.gate.set()
            self._upstream.gate.clear()

        self._loop.call_soon_threadsafe(open_for_a_moment)

    def release(self) -> None:
        """Answer those that came, and from now on at once."""
        self._loop.call_soon_threadsafe(self._upstream.gate.set)

    @contextmanager
    def running(self) -> Iterator["HeldGpu"]:
        with in_a_thread(scripted_upstream(self._upstream)) as (_, self._loop):
            yield self


class Peer:
    """One client connection, byte by byte if need be."""

    def __init__(self, port: int, timeout_s: float = PATIENCE_S, tls: ssl.SSLContext | None = None) -> None:
        connection = socket.create_connection(("127.0.0.1", port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = tls.wrap_socket(connection, server_hostname="localhost") if tls else connection
        # What came and was not asked for yet.
        self.unread = b""

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_until_refused(self, data: bytes) -> int:
        """Send as much as the other side takes before it resets the connection; how many bytes that was."""
        sent = 0
        try:
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + 65536])
        except OSError:
            pass
        return sent

    def read(self, heads_only: bool = False) -> Response:
        while b"\r\n\r\n" not in self.unread:
            self._more()
        head, _, self.unread = self.unread.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        length = 0 if heads_only else int(headers.get("content-length", 0))
        while len(self.unread) < length:
            self._more()
        body, self.unread = self.unread[:length], self.unread[length:]
        return Response(int(line.split(" ")[1]), headers, body)

    def ask(self, method: str, target: str, body: bytes = b"", *headers: str) -> Response:
        """Send one request and read its response."""
        self.send(request_bytes(method, target, body, *headers))
        return self.read(heads_only=method == "HEAD")

    def ended(self) -> bool:
        """Whether the other side ends the connection, with nothing more to say, before the timeout."""
        try:
            return self.unread == b"" and self.socket.recv(65536) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    def _more(self) -> None:
        received = self.socket.recv(1 << 20)
        if not received:
            raise ConnectionError(f"the connection ended after {self.unread!r}")
        self.unread += received


def request_bytes(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    """One request as a client would send it."""
    lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(port: int, method: str, target: str, body: Any = b"", *headers: str) -> Response:
    """One request on a connection of its own; a body that is not bytes is sent as JSON."""
    with Peer(port) as peer:
        return peer.ask(method, target, body if isinstance(body, bytes) else json.dumps(body).encode(), *headers)


def eventually(condition: Any, within_s: float = PATIENCE_S) -> bool:
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def metric(gateway: GatewayProcess, name: str) -> float:
    """The sum of one metric over its labels; `name` may have labels in it."""
    text = ask(gateway.admin_port, "GET", "/metrics").body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
