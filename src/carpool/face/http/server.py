"""The listener of one address: it accepts, sweeps out the slow, and drains."""

import asyncio
import ctypes
import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from carpool.core.clock import STOOD_STILL_S, Clock, monotonic
from carpool.core.timers import Every
from carpool.face.http.connection import LINGER_S, UNREAD_BYTES_MIN, Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.state import ErrorPace, ExtraLines, HttpLimits, HttpState

TICK_S = 0.05
# Each tick looks at one of so many parts of the connections, so that ten thousand cost no noticeable pause.
SWEEP_PARTS = 5
# A connection this young at the end of listening is not idle: its request is on the way.
NEW_S = 0.25
BACKLOG = 4096
# The event loop accepts one connection from a socket in a turn. At full load a turn takes ten milliseconds: a thousand
# new connections would wait for seconds unread. So it is given the same socket `accepted_a_turn` times. Where processes
# share it, each connection wakes all of them: there SHARED_LISTENERS times at most.
SHARED_LISTENERS = 4
# Connections with TLS that are accepted in one turn of the event loop; and the pause when no file is left for one.
ACCEPTED_AT_ONCE = 64
NO_FILES_PAUSE_S = 0.1
_NO_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
# At the end of listening, TLS handshakes under way have so long.
LAST_HANDSHAKES_S = 1.0
# So long that the event loop never cuts off a client that still reads the last answer: the sweep decides that.
TLS_SHUTDOWN_S = 86400.0
# A client with an unread answer must read so much of it in `write_timeout_s`.
READ_BYTES_MIN = 4096
# With TLS, the sweep asks the kernel what is unread after each so many bytes sent.
HIDDEN_BYTES_MIN = 64 * 1024
# What is needed of the kernel's struct tcp_info: segments not acknowledged, bytes acknowledged, bytes not sent yet.
_TCP_INFO = struct.Struct("24x I 92x Q 16x I")
# Linux: a filter of a socket's segments, which classic BPF describes. This one drops those that open a connection.
_SO_ATTACH_FILTER = 26
_DROP_SYN = b"".join(
    struct.pack("HBBI", *step)
    for step in (
        (0x30, 0, 0, 13),  # load the byte with TCP's flags
        (0x54, 0, 0, 0x12),  # of these SYN and ACK
        (0x15, 0, 1, 0x02),  # if it is SYN alone
        (0x06, 0, 0, 0),  # drop the segment
        (0x06, 0, 0, 0xFFFF_FFFF),  # else keep it
    )
)


class HttpServer:
    """Serves one handler on one address. `handler` must answer every exchange, now or later."""

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: HttpLimits,
        clock: Clock = monotonic,
        extra_lines: ExtraLines | None = None,
    ) -> None:
        self.state = HttpState(handler, limits, clock, extra_lines)
        # Those that are open.
        self.connections = self.state.connections
        self._servers: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None
        # Duplicates of the listening sockets: with TLS these accept; without, they accept the last connections when
        # the server's own are closed.
        self._listeners: list[socket.socket] = []
        self._accept_timers: dict[socket.socket, asyncio.TimerHandle] = {}
        # Whether other processes go on with these sockets when this one closes them.
        self._is_shared = False
        # Connections accepted from these, until their protocol is set up.
        self._accepted: set[asyncio.Task[object]] = set()
        self._to_sweep: list[Connection] = []
        self._swept_at_once = 0
        self._unread_seen = 0
        self._round_began = 0.0
        self._ticks = Every(TICK_S, self.tick)

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, listening: socket.socket | None = None
    ) -> int:
        """Listen, on a socket shared with other processes if one is given; returns the port, for a `port` of 0."""
        loop = asyncio.get_running_loop()
        self.state.error_pace = ErrorPace()
        where: dict[str, Any] = {"host": host, "port": port} if listening is None else {"sock": listening}
        # With TLS we accept by ourselves: connections in their handshake must count, but asyncio does not show them.
        make = partial(Connection, self.state)
        self._servers = [await loop.create_server(make, **where, backlog=BACKLOG, start_serving=tls is None)]
        self._tls = tls
        self._is_shared = listening is not None
        own = self._servers[0].sockets
        self._listeners = [duplicate(each) for each in own]
        if tls is None:
            times = self.state.limits.accepted_a_turn
            if listening is not None:
                times = min(times, SHARED_LISTENERS)
            others = [duplicate(each) for each in own for _ in range(times - 1)]
            self._servers += [await loop.create_server(make, sock=each, backlog=BACKLOG) for each in others]
        else:
            for listener in self._listeners:
                listener.listen(BACKLOG)
                listener.setblocking(False)
                self._accept_from(listener)
        self._ticks.start_now()
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    def change_certificate(self, tls: ssl.SSLContext) -> None:
        """Use this certificate for new connections, if there is TLS at all.

        A new context: one context keeps a certificate for each type of key, and clients might choose the old one.
        """
        if self._tls is not None:
            self._tls = tls

    def drain(self) -> None:
        """From now on the last answer of each connection says `Connection: close`."""
        self.state.draining = True

    def stop_listening(self) -> None:
        """Accept no new connection; those there are go on."""
        if not self._servers:
            return
        for server in self._servers:
            server.close()
        self._servers = []
        for timer in self._accept_timers.values():
            timer.cancel()
        for listener in self._listeners:
            if self._tls is not None:
                asyncio.get_running_loop().remove_reader(listener)
            if not self._is_shared:
                drop_newcomers(listener)
            for accepted in close_after_the_last(listener):
                self._begin(accepted)

    def _accept_from(self, listener: socket.socket) -> None:
        self._accept_timers.pop(listener, None)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, ACCEPTED_AT_ONCE)

    def _accept(self, listener: socket.socket, most: int) -> None:
        """Take connections that the kernel has accepted; those beyond `connections_max` are closed at once."""
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                accepted, _ = listener.accept()
            except OSError as failure:
                if failure.errno in _NO_FILES:
                    # The loop would call this again and again. The connections wait in the kernel.
                    loop.remove_reader(listener)
                    self._accept_timers[listener] = loop.call_later(NO_FILES_PAUSE_S, self._accept_from, listener)
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        state = self.state
        is_full = len(state.connections) + state.handshakes >= state.limits.connections_max
        if self._tls is not None and is_full:
            accepted.close()  # an error would take a handshake first
            return
        state.handshakes += 1
        adopt = asyncio.get_running_loop().create_task(self._adopt(accepted))
        self._accepted.add(adopt)
        adopt.add_done_callback(self._adopted)

    def _adopted(self, adopt: "asyncio.Task[None]") -> None:
        self._accepted.discard(adopt)
        self.state.handshakes -= 1

    async def _adopt(self, accepted: socket.socket) -> None:
        limits: dict[str, float] = {}
        if self._tls is not None:
            limits = {
                "ssl_handshake_timeout": self.state.limits.receive_timeout_s,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self.state), accepted, ssl=self._tls, **limits
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            accepted.close()  # it left, does not speak TLS, or took too long

    async def finish(self, deadline: float) -> None:
        """Close idle connections at once and the others as their last answer leaves; past `deadline` all of them."""
        state = self.state
        handshakes_until = min(deadline, state.clock() + LAST_HANDSHAKES_S)
        while state.clock() < deadline:
            if not self.connections and (not self._accepted or state.clock() >= handshakes_until):
                break
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

    def tick(self) -> None:
        """What a timer does: look at the clock, and sweep some of the connections."""
        if self.state.tick() > STOOD_STILL_S:
            return  # this process stood still: first see what clients sent and read meanwhile
        if not self._to_sweep:
            self._to_sweep = list(self.connections)
            # Fixed for the round: if it fell with the number of connections, those at the end of the list would wait.
            self._swept_at_once = len(self._to_sweep) // SWEEP_PARTS + 1
            self.state.unread_bytes, self._unread_seen = self._unread_seen, 0
            self._round_began = self.state.coarse_now
        part, self._to_sweep = self._to_sweep[: self._swept_at_once], self._to_sweep[self._swept_at_once :]
        is_tls, began = self._tls is not None, self._round_began
        for connection in part:
            # A client that waits for us, or was answered just now, is not too slow. At full load these are nearly all,
            # and a closer look at each would be 2 % of all work. With TLS more may be unread than is seen from here.
            is_lively = connection.pending or connection.idle_since > began
            is_watched = connection.receiving_since or connection.reading_paused or connection.linger_until
            if is_tls or is_watched or connection.kept_bytes or not is_lively:
                self.sweep(connection)

    def sweep(self, connection: Connection) -> None:
        """Close what is too slow: a request trickling in, an idle connection, a client that does not read."""
        transport = connection.transport
        if transport is None:
            return
        limits = self.state.limits
        # A sweep comes every quarter second: act before the limit rather than after it.
        now = self.state.coarse_now + TICK_S * SWEEP_PARTS
        # Only the client's reading of the last answer is left to wait for.
        is_ending = connection.linger_until > 0.0 or transport.is_closing()
        waiting = connection.waiting_bytes(transport)
        if is_ending or (self._tls is not None and connection.bytes_out - connection.read_then >= HIDDEN_BYTES_MIN):
            waiting = max(waiting, hidden_bytes(connection, transport))
        held = waiting + connection.kept_bytes
        if connection.writing_paused or held >= UNREAD_BYTES_MIN:
            if self.state.unread_bytes > limits.unread_bytes_max and held >= UNREAD_BYTES_MIN:
                self.state.unread_bytes -= held  # other clients may stay if that is enough
                transport.abort()
                return
            self._unread_seen += held
        if is_ending:
            if waiting or not connection.linger_until:
                connection.linger_until = now + LINGER_S
            elif now >= connection.linger_until:
                transport.abort()
        is_ours = connection.reading_paused or connection.continue_owed  # it is we who keep the client waiting
        is_late = connection.receiving_since and now - connection.receiving_since >= limits.receive_timeout_s
        if is_late and not is_ours:
            connection.receive_timed_out()
            return
        if waiting == 0:
            connection.stalled_since = 0.0
            if (
                not is_ending
                and not connection.pending
                and not connection.receiving_since
                and now - connection.idle_since >= limits.idle_timeout_s
            ):
                transport.close()
            return
        # What was acknowledged, not what left: the kernel takes much at a time, a slow client reads little by little.
        progress = tcp_progress(transport)
        acked = connection.bytes_out - waiting if progress is None else progress[0]
        if connection.stalled_since == 0.0 or acked - connection.acked_then >= READ_BYTES_MIN:
            connection.stalled_since = now
            connection.acked_then = acked
        elif now - connection.stalled_since >= limits.write_timeout_s:
            transport.abort()


def duplicate(listening: Any) -> socket.socket:
    """The same socket, with a file of its own."""
    return socket.socket(fileno=os.dup(listening.fileno()))


def drop_newcomers(listener: socket.socket) -> None:
    """Let the kernel drop what would open a connection: a client asks again a second later, and is refused then.

    It has sent nothing, and may go elsewhere; a client that is reset cannot know what became of its request. Where the
    kernel knows no such filter, a few microseconds are left in which that happens.
    """
    steps = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    with suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(steps))
        )


def close_after_the_last(listener: socket.socket) -> list[socket.socket]:
    """Close a listening socket, and return what the kernel has accepted since the last turn of the event loop.

    The kernel resets clients that connect between the last accept and the close: call `drop_newcomers` first.
    """
    accepted: list[socket.socket] = []
    accept, close, add = listener.accept, listener.close, accepted.append
    listener.setblocking(False)
    try:
        while True:
            add(accept()[0])
    except OSError:
        close()
    return accepted


def hidden_bytes(connection: Connection, transport: asyncio.Transport) -> int:
    """About how much a client has not read, with what the kernel and the transport below TLS hold unseen."""
    progress = tcp_progress(transport)
    if progress is None:
        return 0
    acked, is_all = progress
    if is_all:
        connection.read_then = connection.bytes_out
        connection.acked_ahead = acked - connection.bytes_out
        return 0
    # At least one: what TLS added since then counts as read, and a client may have collected much of that.
    return max(1, connection.bytes_out + connection.acked_ahead - acked)


def tcp_progress(transport: asyncio.Transport) -> tuple[int, bool] | None:
    """Bytes that the other end has acknowledged so far, and whether the kernel holds no others; None if unknown."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return None
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        unacked, acked, unsent = _TCP_INFO.unpack(info)
    except (OSError, struct.error, AttributeError):
        return None
    return acked, not unacked and not unsent
