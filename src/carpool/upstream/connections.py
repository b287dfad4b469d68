"""HTTP/1.1 connections to a server: what comes in on one is the answer to the call under way on it, or no call gets it.

An answer of HTTP/1.1 carries no id: it belongs to the last call on its connection. So:

1. A connection rests, or one call is under way on it. Bytes that come while it rests are stray: the connection is cut
   off and counted. Empty lines are no bytes (RFC 9112, 2.2).
2. An answer ends where its length says. What follows it in the same read is stray too. The first answer of its
   connection is good even so; a later one may be the answer to the call before, again, and its call fails.
3. Before a request is written the socket is looked at. A connection with unread bytes, or one that the other side has
   closed, is not used.
4. Outputs cannot come before the inputs were sent. An answer that begins before the request has been written whole is
   stray, unless it is an error: servers may refuse a long request early.
5. A server that sent stray bytes gets a connection of its own for each call, for `CAUGHT_S`: there is no next call that
   could get a repeated answer.
6. When a connection is found dead, those that rest beside it are closed: a server that restarts has closed them all.
7. A connection is used again only after an answer that was read whole and did not end it. One that has rested for
   `KEEPALIVE_S` is closed.
8. A server may repeat an answer while the next call is under way: that call would get it, the call after that the next
   one, and so on. So outputs that are those of the call before on the connection, which was another, are in doubt: the
   call is made once more, and as in rule 5 each call has a connection of its own. If another call than the one before
   has the same outputs there, the server does say so (a stub, a model that says little): for `CAUGHT_S` nothing is
   doubted. Short outputs are not compared: "yes" is a common one.
"""

import asyncio
import logging
import random
import select
import ssl
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from math import inf
from socket import AF_INET, AF_INET6, SOCK_STREAM
from typing import NoReturn, cast
from zlib import crc32

import httptools
from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from carpool.core.tensors import Data
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError, UpstreamResponse
from carpool.upstream.load import parse_load

logger = logging.getLogger("carpool.upstream")

CAUGHT_S = 600.0
KEEPALIVE_S = 60.0
# A host with addresses of both families: the next one is tried beside the last after this time (RFC 8305).
NEXT_ADDRESS_S = 0.25
# Turns that the event loop gets to read what lies in the socket of a new connection; it needs two.
TURNS_MAX = 8
# A longer request is written in pieces, so that the event loop gets its turn in between, and no copy is made of it.
PLAIN_BYTES_MAX = 256 * 1024
PIECE_BYTES = 128 * 1024
# Of reads that brought nothing of the body: those of heads, trailers and the frames of chunks.
FRAMING_BYTES_MAX = 64 * 1024
# Rule 8.
COMPARED_BYTES_MIN = 64
# How long the addresses of a name are believed.
ADDRESSES_S = 10.0
_EMPTY_LINES = b"\r\n"

# What inputs and outputs were like: the size of each, and a sum of all its bytes, for long ones may differ anywhere.
Exchange = tuple[tuple[int, int], tuple[int, int]]


class UpstreamConnection(asyncio.Protocol):
    """One connection: it rests among the server's (`ServerConnections`), or has a call."""

    def __init__(self, server: "ServerConnections", tls: ssl.SSLContext | None) -> None:
        self._server = server
        # What it was made with: after a change of certificates it is not used again.
        self.tls = tls
        self.rests_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        # What browsers and most clients take too: lines that end without CR, odd bytes in headers.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._poll = select.poll()
        # Calls so far, with the one under way.
        self._calls = 0
        # What the last inputs and outputs on it were like (rule 8).
        self._exchange: Exchange | None = None
        # Has its result when the call under way is over, None if it failed; None while the connection rests.
        self._answered: asyncio.Future[UpstreamResponse | None] | None = None
        # Has its result when the transport takes more; None while it does.
        self._resumed: asyncio.Future[None] | None = None

    # The call

    async def exchange(self, head: bytes, parts: Sequence[Data], body_bytes_max: int) -> UpstreamResponse:
        """Write one call and read its answer; raises AttemptFailedError.

        The connection rests afterwards, or is closed.
        """
        answered: asyncio.Future[UpstreamResponse | None] = asyncio.get_running_loop().create_future()
        self._answered = answered
        self._calls += 1
        self._body_bytes_max = body_bytes_max
        self._is_heard = self._has_head = self._is_framed = self._is_whole = self._keeps_alive = False
        self._fault, self._is_doubted = "", False
        self._input_bytes, self._input_sum = sum(map(len, parts)), 0
        self._status = 0
        self._load: float | None = None
        self._body: list[bytes] = []
        self._length = self._body_bytes = self._body_sum = self._framing_bytes = 0
        try:
            await self._write(head, parts)
            answer = await answered
        finally:
            if self._answered is answered:  # cancelled
                self._answered = None
                self.abort()
        if answer is not None:
            return answer
        if self._is_doubted or (self._calls > 1 and not self._is_heard):
            # Servers close connections that rest, and may do so just when one is used again; many do after a 500.
            self._server.close_resting()
            raise ConnectionWasDeadError(self._fault)
        raise AttemptFailedError(self._fault)

    async def _write(self, head: bytes, parts: Sequence[Data]) -> None:
        self._is_written = self._input_bytes <= PLAIN_BYTES_MAX
        if self._is_written:
            for part in parts:
                self._input_sum = crc32(part, self._input_sum)
            self._transport.write(b"".join((head, *parts)))
            return
        self._transport.write(head)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), PIECE_BYTES):
                if self._answered is None:
                    return  # refused before all was sent, or broken off
                piece = view[start : start + PIECE_BYTES]
                self._input_sum = crc32(piece, self._input_sum)
                self._transport.write(piece)
                if self._resumed is not None:
                    await self._resumed
        self._is_written = True

    def _end(self, answer: UpstreamResponse | None, *, is_kept: bool = False) -> None:
        """The call under way is over."""
        answered, self._answered = self._answered, None
        self._body = []
        if is_kept:
            self._server.rests(self)
        else:
            self.abort()
        self.resume_writing()
        if answered is not None and not answered.done():
            answered.set_result(answer)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer, or stray ones."""
        if self._answered is None:
            if data.strip(_EMPTY_LINES):
                self._server.caught()
                self.abort()
            return
        self._is_heard = True
        body_bytes, parts = self._body_bytes, len(self._body)
        is_in_order = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            is_in_order = False
        if len(self._body) - parts > 1:  # many chunks: as objects they could be many times as large
            self._body[parts:] = [b"".join(self._body[parts:])]
        if self._is_whole:
            self._ended(has_more=not is_in_order)
        elif not is_in_order:
            self._fault = self._fault or "the call broke off (its answer is no valid HTTP)"
            self._end(None)
        elif body_bytes == self._body_bytes:
            self._framing_bytes += len(data)
            if self._framing_bytes > FRAMING_BYTES_MAX:
                self._fault = f"the head of the answer is longer than {FRAMING_BYTES_MAX} bytes"
                self._end(None)

    def _ended(self, *, has_more: bool) -> None:
        """The answer was read whole; `has_more`: something came behind it (rule 2)."""
        if has_more:
            self._server.caught()
            if self._calls > 1:
                self._fault = "more than one answer came, and the first may be the one to the call before"
                self._end(None)
                return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if self._input_bytes and 200 <= self._status < 300 and len(body) >= COMPARED_BYTES_MIN:
            inputs, outputs = (self._input_bytes, self._input_sum), (self._body_bytes, self._body_sum)
            before, self._exchange = self._exchange, (inputs, outputs)
            if self._server.is_doubtful(self._exchange, before):
                self._is_doubted = True
                self._fault = "the answer is the one to the call before, again"
                self._end(None)
                return
        is_kept = self._keeps_alive and not has_more and self._is_sent()
        self._end(UpstreamResponse(self._status, body, self._load), is_kept=is_kept)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over; for an answer without a length that is its end."""
        del self._parser  # it refers back to here, and the collector that would free both runs rarely
        self._server.forget(self)
        if self._answered is None:
            return
        # An error may break off: its server has refused a long request, and reads no more of it.
        if self._has_head and (self._status >= 400 or (exc is None and not self._is_framed)):
            self._ended(has_more=False)
        else:
            self._fault = f"the call broke off ({type(exc).__name__ if exc else 'closed by the other side'})"
            self._end(None)

    def pause_writing(self) -> None:
        """The other side does not keep up with a long request."""
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """It has read on, or the rest need not be sent."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    # httptools' callbacks, in `data_received`

    def on_message_begin(self) -> None:
        """The first byte of an answer."""
        if self._is_whole:
            self._refuse("")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; also called for trailers, which say nothing."""
        if self._has_head:
            return
        name = name.lower()
        if name == b"content-length":
            self._is_framed = True
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._is_framed = True
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            # It could be a bomb.
            self._refuse("the answer is compressed, though that was not asked for")
        elif name == self._server.load_header:
            self._load = parse_load(value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """The head of an answer, or of an interim one, which the real one follows."""
        self._status = self._parser.get_status_code()
        self._has_head = self._status >= 200
        if not self._has_head:  # what it says of itself says nothing of the one that follows
            self._is_framed, self._length, self._load = False, 0, None
        if self._has_head and self._status < 300 and not self._is_sent():
            self._server.caught()  # rule 4
            self._refuse("an answer came before the call was sent")
        if self._length > self._body_bytes_max:
            self._refuse_long()

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(part)
        if self._body_bytes > self._body_bytes_max:
            self._refuse_long()
        self._body_sum = crc32(part, self._body_sum)
        self._body.append(part)

    def on_message_complete(self) -> None:
        """The end of an answer."""
        self._is_whole = self._has_head
        self._keeps_alive = self._parser.should_keep_alive()

    def _refuse_long(self) -> NoReturn:
        self._refuse(f"the answer is longer than {self._body_bytes_max} bytes")

    def _refuse(self, fault: str) -> NoReturn:
        """Stop the parser."""
        self._fault = fault
        raise ValueError

    # Its state

    def _is_sent(self) -> bool:
        return self._is_written and not self._transport.get_write_buffer_size()

    def has_unread_bytes(self) -> bool:
        """Whether the kernel has something for this connection, be it its end; also if it is closed."""
        return self._transport.is_closing() or bool(self._poll.poll(0))

    def close(self) -> None:
        """Close it in order."""
        self._server.forget(self)
        self._transport.close()

    def abort(self) -> None:
        """Cut it off."""
        self._server.forget(self)
        self._transport.abort()


class ServerConnections:
    """The connections to one server that rest, and what is known of all of them."""

    def __init__(self, name: str, url: URL, unix_socket: str = "", load_header: str = "") -> None:
        self._name = name
        self._host, self._port = url.raw_host or "", url.port
        self.is_tls = url.scheme == "https"
        self._unix_socket = unix_socket
        # In lower case. "": answers are not looked at for a load.
        self.load_header = load_header.lower().encode()
        # Connections that were cut off because of stray bytes.
        self.stray = 0
        self._caught_until = self._complained_at = self._says_same_until = self._alone_until = -inf
        # The last call whose outputs came again, and were in doubt (rule 8).
        self._repeated: Exchange | None = None
        # Its addresses, until when they are known, and the question for them that is out.
        self._addresses: Sequence[AddrInfoType] = address_of(self._host, self._port)
        self._is_address = bool(self._addresses)
        self._known_until = -inf
        self._asked: asyncio.Task[None] | None = None
        # The one that has rested longest first.
        self._resting: list[UpstreamConnection] = []
        self._old_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def take(self, tls: ssl.SSLContext | None) -> UpstreamConnection:
        """A connection for one call: the one that rested last, or a new one. Raises what `connect` does."""
        for connection in reversed(self._resting):
            # What is unread, the event loop reads next: stray bytes, or the end.
            if connection.tls is tls and not connection.has_unread_bytes():
                self._resting.remove(connection)
                return connection
        return await self.connect(tls)

    async def connect(self, tls: ssl.SSLContext | None) -> UpstreamConnection:
        """A new connection; raises OSError, ValueError or AttemptFailedError."""
        loop = asyncio.get_running_loop()
        make = partial(UpstreamConnection, self, tls)
        if self._unix_socket:
            _, connection = await loop.create_unix_connection(make, self._unix_socket)
        else:
            addresses = random.sample(known := await self._find(), len(known))  # a name may stand for several servers
            try:
                sock = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_S)
            except OSError:
                self._known_until = -inf  # the name may have moved
                raise
            host = self._host.rstrip(".") if tls else None  # certificates are for names without the last dot
            _, connection = await loop.create_connection(make, sock=sock, ssl=tls, server_hostname=host)
        # A server that speaks first answers no call: that is read before the call is written. TLS may have unread bytes
        # of its own.
        try:
            for _ in range(TURNS_MAX):
                if not connection.has_unread_bytes():
                    return connection
                await asyncio.sleep(0)
            raise AttemptFailedError("the connection was closed, or something came on it, before the call was sent")
        except BaseException:  # also if cancelled
            connection.abort()
            raise

    async def _find(self) -> Sequence[AddrInfoType]:
        """The server's addresses. One question at a time: while names do not resolve, each would hold a thread."""
        loop = asyncio.get_running_loop()
        if not self._is_address and loop.time() >= self._known_until:
            if self._asked is None or self._asked.done():
                self._asked = loop.create_task(self._resolve())
                self._asked.add_done_callback(_look_at)
            await asyncio.shield(self._asked)
        return self._addresses

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        self._addresses = await loop.getaddrinfo(self._host, self._port, type=SOCK_STREAM)
        self._known_until = loop.time() + ADDRESSES_S

    def is_doubtful(self, exchange: Exchange, before: Exchange | None) -> bool:
        """Whether the outputs of a call, on a connection that had another before, may be those of that (rule 8)."""
        now = asyncio.get_running_loop().time()
        if before is None:  # on a connection of its own
            if now < self._alone_until and is_alike(exchange, self._repeated):
                self._alone_until, self._says_same_until = -inf, now + CAUGHT_S
            return False
        if not is_alike(exchange, before) or now < self._says_same_until:
            return False
        self._repeated, self._alone_until = before, now + CAUGHT_S
        return True

    def rests(self, connection: UpstreamConnection) -> None:
        """A call is over, and another may have its connection."""
        loop = asyncio.get_running_loop()
        connection.rests_since = loop.time()
        if self._is_closed or connection.rests_since < max(self._caught_until, self._alone_until):
            connection.abort()
            return
        self._resting.append(connection)
        if self._old_timer is None:
            self._old_timer = loop.call_later(KEEPALIVE_S, self._close_old)

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is not used again."""
        if connection in self._resting:
            self._resting.remove(connection)

    def caught(self) -> None:
        """Stray bytes came (rule 5)."""
        now = asyncio.get_running_loop().time()
        self.stray += 1
        self._caught_until = now + CAUGHT_S
        self.close_resting()
        if now - self._complained_at >= CAUGHT_S / 2:  # not with every one
            self._complained_at = now
            fields = {"endpoint": self._name, "stray_answers": self.stray}
            logger.error("an endpoint sent bytes that were no answer to a call", extra={"fields": fields})

    def close_resting(self) -> None:
        """Close the connections without a call."""
        for connection in self._resting.copy():
            connection.abort()

    def close(self) -> None:
        """Close the connections without a call now, and the others after theirs."""
        self._is_closed = True
        self.close_resting()
        if self._old_timer is not None:
            self._old_timer.cancel()

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        while self._resting and self._resting[0].rests_since <= loop.time() - KEEPALIVE_S:
            self._resting[0].close()
        self._old_timer = None
        if self._resting:
            self._old_timer = loop.call_at(self._resting[0].rests_since + KEEPALIVE_S, self._close_old)


def is_alike(exchange: Exchange, other: Exchange | None) -> bool:
    """Whether two calls were different, and had the same outputs."""
    return other is not None and exchange[0] != other[0] and exchange[1] == other[1]


def address_of(host: str, port: int | None) -> Sequence[AddrInfoType]:
    """A host that is an address needs no look at names; () for any other."""
    try:
        address = ip_address(host)
    except ValueError:
        return ()
    if address.version == 4:
        return [(AF_INET, SOCK_STREAM, 0, "", (host, port or 0))]
    return [(AF_INET6, SOCK_STREAM, 0, "", (host, port or 0, 0, 0))] if "%" not in host else ()


def _look_at(asked: "asyncio.Task[None]") -> None:
    """Those who wait get the failure; but they may all have left, and then it must not be logged."""
    if not asked.cancelled():
        asked.exception()
