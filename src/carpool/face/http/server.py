"""The listener and what its connections share: limits, a coarse clock, the sweep for the slow, and the drain."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import msgspec

from carpool.core.clock import Clock, monotonic
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import JSON, REASONS, Exchange
from carpool.face.http.known_heads import KnownHeads

TICK_S = 0.05
# Each tick looks at one of so many parts of the connections, so that ten thousand cost no noticeable pause.
SWEEP_PARTS = 5
# A connection must take at least so many bytes in `write_timeout_s` while some wait for it.
DRAINED_BYTES_MIN = 65536
# A connection this young at the end of listening is not idle: its request is on the way.
NEW_S = 0.25


class HttpLimits(msgspec.Struct, frozen=True):
    """What is taken from a client; see GatewaySettings."""

    header_bytes_max: int = 16384
    header_count_max: int = 100
    body_bytes_max: int = 1024 * 1024
    # Bodies that are partly received, over all connections.
    receiving_bytes_max: int = 256 * 1024 * 1024
    # Responses that clients have not read yet, over all connections that are behind with reading.
    unread_bytes_max: int = 256 * 1024 * 1024
    receive_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 10.0
    pipeline_max: int = 32
    connections_max: int = 10_000


class HttpServer:
    """Serves one handler on one address. `handler` must answer every exchange, now or later."""

    def __init__(self, handler: Callable[[Exchange], None], limits: HttpLimits, clock: Clock = monotonic) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.coarse_now = clock()
        # The start of a response, with the date of this second: for any status, and ready-made for the usual one.
        self._heads: dict[tuple[int, bytes], bytes] = {}
        self.head_ok = self.head(200, JSON)
        self.known_heads = KnownHeads()
        self.connections: set[Connection] = set()
        # Bytes of bodies that are partly received, or wait in a connection's backlog.
        self.receiving_bytes = 0
        # Bytes of responses that wait for clients which are behind; worked out anew in each round of the sweep.
        self.unread_bytes = 0
        self._unread_seen = 0
        # Answers that were errors, by code, for metrics.
        self.problems: dict[str, int] = {}
        # While true, every response asks its client to go.
        self.draining = False
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        # Duplicates of the listening sockets, which still accept when the server's own are closed; and what they did.
        self._last_listeners: list[socket.socket] = []
        self._last_accepted: set[asyncio.Task[object]] = set()
        self._to_sweep: list[Connection] = []
        self._swept_at_once = 0
        self._tick_timer: asyncio.TimerHandle | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, listening: socket.socket | None = None
    ) -> int:
        """Listen, on a socket that others share if one is given; returns the port, which matters if 0 was asked for."""
        loop = asyncio.get_running_loop()
        where: dict[str, Any] = {"host": host, "port": port} if listening is None else {"sock": listening}
        self._server = await loop.create_server(
            lambda: Connection(self),
            **where,
            ssl=tls,
            ssl_handshake_timeout=self.limits.receive_timeout_s if tls else None,
            backlog=4096,
        )
        self._tls = tls
        self._last_listeners = [socket.socket(fileno=os.dup(listening.fileno())) for listening in self._server.sockets]
        self._tick()
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def head(self, status: int, content_type: bytes) -> bytes:
        """Status line, content type and date of a response."""
        head = self._heads.get((status, content_type))
        if head is None:
            head = b"HTTP/1.1 %d %b\r\nDate: %b\r\n" % (status, REASONS[status], formatdate(usegmt=True).encode())
            if content_type:
                head += b"Content-Type: %b\r\n" % content_type
            self._heads[status, content_type] = head
        return head

    def add(self, connection: Connection) -> bool:
        """Count a new connection in; false if there is no place left."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.connections_max

    def remove(self, connection: Connection) -> None:
        """Count a lost connection out."""
        self.connections.discard(connection)

    def stop_listening(self) -> None:
        """Accept no new connection; those there are go on."""
        if self._server is not None:
            self._server.close()
            self._server = None
            for listener in self._last_listeners:
                self._accept_last(listener)

    def _accept_last(self, listener: socket.socket) -> None:
        """Take what the kernel has accepted since the last turn of the event loop: closing would reset it."""
        loop = asyncio.get_running_loop()
        with listener:
            listener.setblocking(False)
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:  # no more
                    return
                adopt = loop.connect_accepted_socket(lambda: Connection(self), accepted, ssl=self._tls)
                self._last_accepted.add(loop.create_task(adopt))

    async def finish(self, deadline: float) -> None:
        """Close idle connections at once and the others as their last answer leaves; past `deadline` all of them."""
        if self._last_accepted:
            await asyncio.wait(self._last_accepted, timeout=max(0.0, deadline - self.clock()))
        while self.connections and self.clock() < deadline:
            for connection in list(self.connections):
                waited_for = connection.pending or connection.backlog or connection.receiving_since
                is_new = self.coarse_now - connection.idle_since < NEW_S
                if not waited_for and not connection.linger_until and not is_new:
                    self._close(connection)
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        await asyncio.sleep(0)  # let connection_lost run

    def _close(self, connection: Connection) -> None:
        if connection.transport is not None:
            connection.transport.close()

    def _tick(self) -> None:
        # First of all, so that a defect below does not end the sweeps for good.
        self._tick_timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        now = self.clock()
        if int(now) != int(self.coarse_now):
            self._heads.clear()
            self.head_ok = self.head(200, JSON)
        self.coarse_now = now
        if not self._to_sweep:
            self._to_sweep = list(self.connections)
            # Fixed for the round: if it fell with the connections, those at the end of the list would wait.
            self._swept_at_once = len(self._to_sweep) // SWEEP_PARTS + 1
            self.unread_bytes, self._unread_seen = self._unread_seen, 0
        for _ in range(min(len(self._to_sweep), self._swept_at_once)):
            self._sweep(self._to_sweep.pop(), now)

    def _sweep(self, connection: Connection, now: float) -> None:
        """Close what is too slow: a request trickling in, an idle connection, a client that does not read."""
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        limits = self.limits
        # A sweep comes every quarter second: act before the limit rather than after it.
        now += TICK_S * SWEEP_PARTS
        waiting = transport.get_write_buffer_size()
        if connection.writing_paused:
            self._unread_seen += waiting
        if connection.linger_until and waiting == 0:
            if now >= connection.linger_until:
                transport.abort()
            return
        if connection.receiving_since and now - connection.receiving_since >= limits.receive_timeout_s:
            if connection.reading_paused or connection.continue_owed:
                pass  # it is we who keep the client waiting
            else:
                connection.receive_timed_out()
                return
        if waiting == 0:
            connection.stalled_since = 0.0
            if (
                not connection.pending
                and not connection.receiving_since
                and now - connection.idle_since >= limits.idle_timeout_s
            ):
                transport.close()
            return
        drained = connection.bytes_out - waiting
        if connection.stalled_since == 0.0 or drained - connection.drained_then >= DRAINED_BYTES_MIN:
            connection.stalled_since = now
            connection.drained_then = drained
        elif now - connection.stalled_since >= limits.write_timeout_s:
            transport.abort()
