"""The listener of one address: it accepts, sweeps out the slow, and drains."""

import asyncio
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Callable
from typing import Any, cast

from carpool.core.clock import STOOD_STILL_S, Clock, monotonic
from carpool.core.timers import Every
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.state import HttpLimits, HttpState

TICK_S = 0.05
# Each tick looks at one of so many parts of the connections, so that ten thousand cost no noticeable pause.
SWEEP_PARTS = 5
# A connection this young at the end of listening is not idle: its request is on the way.
NEW_S = 0.25
BACKLOG = 4096
# Connections with TLS that are accepted in one turn of the event loop.
ACCEPTED_AT_ONCE = 64


class HttpServer:
    """Serves one handler on one address. `handler` must answer every exchange, now or later."""

    def __init__(self, handler: Callable[[Exchange], None], limits: HttpLimits, clock: Clock = monotonic) -> None:
        self.state = HttpState(handler, limits, clock)
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        # Duplicates of the listening sockets: with TLS it is they that accept, and without they still do when the
        # server's own are closed.
        self._listeners: list[socket.socket] = []
        # Connections on their way from there.
        self._accepted: set[asyncio.Task[object]] = set()
        self._to_sweep: list[Connection] = []
        self._swept_at_once = 0
        self._unread_seen = 0
        self._ticks = Every(TICK_S, self._tick)

    @property
    def connections(self) -> set[Connection]:
        """Those that are open."""
        return cast(set[Connection], self.state.connections)

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, listening: socket.socket | None = None
    ) -> int:
        """Listen, on a socket that others share if one is given; returns the port, which matters if 0 was asked for."""
        loop = asyncio.get_running_loop()
        where: dict[str, Any] = {"host": host, "port": port} if listening is None else {"sock": listening}
        # With TLS we accept by ourselves: who has not agreed upon it yet must count, but asyncio does not tell of it.
        self._server = await loop.create_server(
            lambda: Connection(self.state), **where, backlog=BACKLOG, start_serving=tls is None
        )
        self._tls = tls
        self._listeners = [socket.socket(fileno=os.dup(listening.fileno())) for listening in self._server.sockets]
        if tls is not None:
            for listener in self._listeners:
                listener.listen(BACKLOG)
                listener.setblocking(False)
                loop.add_reader(listener, self._accept, listener, ACCEPTED_AT_ONCE)
        self._ticks.start_now()
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Accept no new connection; those there are go on."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for listener in self._listeners:
            if self._tls is not None:
                asyncio.get_running_loop().remove_reader(listener)
            listener.setblocking(False)
            # What the kernel has accepted since the last turn of the event loop: closing would reset it.
            self._accept(listener, BACKLOG)
            listener.close()

    def _accept(self, listener: socket.socket, most: int) -> None:
        """Take connections that the kernel has accepted; without a place for it one is closed at once."""
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                accepted, _ = listener.accept()
            except OSError:  # no more, or no files left
                return
            if self._tls is not None and not self.state.has_place():
                accepted.close()  # to say why would take a handshake
                continue
            adopt = loop.create_task(self._adopt(accepted))
            self._accepted.add(adopt)
            adopt.add_done_callback(self._accepted.discard)

    async def _adopt(self, accepted: socket.socket) -> None:
        timeout_s = self.state.limits.receive_timeout_s if self._tls is not None else None
        self.state.handshakes += 1
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self.state), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            accepted.close()  # it left, does not speak TLS, or took too long
        finally:
            self.state.handshakes -= 1

    async def finish(self, deadline: float) -> None:
        """Close idle connections at once and the others as their last answer leaves; past `deadline` all of them."""
        state = self.state
        if self._accepted:
            await asyncio.wait(self._accepted, timeout=max(0.0, deadline - state.clock()))
        while self.connections and state.clock() < deadline:
            for connection in list(self.connections):
                waited_for = connection.pending or connection.backlog or connection.receiving_since
                is_new = state.coarse_now - connection.idle_since < NEW_S
                if not waited_for and not connection.linger_until and not is_new and connection.transport is not None:
                    connection.transport.close()
            await asyncio.sleep(0.01)
        for task in self._accepted:
            task.cancel()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._ticks.stop()
        await asyncio.sleep(0)  # let connection_lost run

    def _tick(self) -> None:
        if self.state.tick() > STOOD_STILL_S:
            return  # what clients sent and read meanwhile is seen first
        if not self._to_sweep:
            self._to_sweep = list(self.connections)
            # Fixed for the round: if it fell with the connections, those at the end of the list would wait.
            self._swept_at_once = len(self._to_sweep) // SWEEP_PARTS + 1
            self.state.unread_bytes, self._unread_seen = self._unread_seen, 0
        for _ in range(min(len(self._to_sweep), self._swept_at_once)):
            self.sweep(self._to_sweep.pop())

    def sweep(self, connection: Connection) -> None:
        """Close what is too slow: a request trickling in, an idle connection, a client that does not read."""
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        limits = self.state.limits
        # A sweep comes every quarter second: act before the limit rather than after it.
        now = self.state.coarse_now + TICK_S * SWEEP_PARTS
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
        # What the kernel holds counts as unread: it takes much at a time, while a slow client reads little by little.
        read = connection.bytes_out - waiting - unsent_bytes(transport)
        if connection.stalled_since == 0.0 or read > connection.read_then:
            connection.stalled_since = now
            connection.read_then = read
        elif now - connection.stalled_since >= limits.write_timeout_s:
            transport.abort()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the kernel that the other end has not acknowledged; 0 if the kernel does not tell."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0
