"""HTTP/1.1 on one connection: bytes in, exchanges out, responses in order.

Rules, each with a test:

1. Responses leave in the order of their requests, whatever order the outcomes come in.
2. At most `pipeline_max` exchanges are with the routes at once. What one read brought beyond that waits in
   `backlog`, and reading pauses; so a connection holds at most one read (256 KiB) more than it may.
3. A client that does not read gets no new work done: while the transport's buffer is over its mark, reading
   and the backlog stand still. The server's sweep cuts it off when it stands still for `write_timeout_s`.
4. A request that cannot be parsed is answered after those before it, and the connection closes. It closes
   gently: the end of our side is sent and what still comes is thrown away for a moment, since closing on
   unread bytes would reset the connection and destroy the answer on its way.
5. End of file is a hang-up: whoever works on an exchange of this connection is told at once.
6. An `Upgrade` is ignored, as HTTP allows: the request is answered as the HTTP/1.1 request it also is.
"""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from carpool.core.errors import (
    CarpoolError,
    ExpectationFailed,
    HeadersTooLarge,
    HttpVersionNotSupported,
    InternalError,
    Malformed,
    QueueFull,
    ReceiveTimeout,
    TooLarge,
)
from carpool.face.http.exchange import Exchange
from carpool.face.http.problem import respond_problem

if TYPE_CHECKING:
    from carpool.face.http.server import HttpServer

logger = logging.getLogger("carpool.http")

ONLY_ONCE = frozenset((b"host", b"authorization", b"content-type", b"content-length"))
# How long a connection that was refused is still read from and thrown away (rule 4).
LINGER_S = 1.0


class RefusedError(Exception):
    """Stops the parser in the middle of a message; carries what the client is told."""

    def __init__(self, error: CarpoolError) -> None:
        super().__init__(error.detail)
        self.error = error


class Connection(asyncio.Protocol):
    """One client connection. Times are the server's coarse clock: a quarter of a second is exact enough here."""

    def __init__(self, server: "HttpServer") -> None:
        self.server = server
        self.limits = server.limits
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        # Exchanges with the routes, oldest first, and complete requests that wait for a place among them.
        self.pending: deque[Exchange] = deque()
        self.backlog: deque[Exchange] = deque()
        # The message now being received.
        self.target = b""
        self.pairs: list[tuple[bytes, bytes]] = []
        self.headers: dict[bytes, bytes] = {}
        # Bytes of the reads that the headers came in, an upper bound for them.
        self.read_bytes = 0
        self.headers_done = False
        self.body = b""
        # The parts of a body that came in more than one read; the server counts their bytes.
        self.body_parts: list[bytes] | None = None
        self.body_bytes = 0
        # 0.0 when no message is partly received.
        self.receiving_since = 0.0
        self.idle_since = server.coarse_now
        self.reading_paused = False
        self.writing_paused = False
        self.pumping = False
        # No more input is parsed: a request was refused, or the last request of this connection has come.
        self.input_ended = False
        # The client may still be sending when the last response is written.
        self.close_gently = False
        self.linger_until = 0.0
        self.continue_owed = False
        # For the sweep: bytes handed to the transport, and its last sight of a buffer that does not empty.
        self.bytes_out = 0
        self.stalled_since = 0.0
        self.drained_then = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the place of one connection, or be refused for want of places."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        if not self.server.add(self):
            self.refuse(QueueFull("too many connections are open; try again soon", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        """Feed the parser; it calls the on_… methods below."""
        if self.input_ended:
            return
        if self.receiving_since and not self.headers_done:
            # The parser keeps an unfinished header line by itself, out of sight of on_header.
            self.read_bytes += len(data)
            began_before = True
        else:
            self.read_bytes = len(data)
            began_before = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as failure:
            cause = failure.__context__
            if isinstance(cause, RefusedError):
                self.refuse(cause.error)
            else:
                logger.error("the HTTP face failed on a request", exc_info=cause)
                self.refuse(InternalError("the gateway failed on this request"))
            return
        except httptools.HttpParserError as failure:
            self.refuse(self.parse_error(failure))
            return
        if began_before and not self.headers_done and self.read_bytes > self.limits.header_bytes_max:
            self.refuse(self.headers_too_large())

    def eof_received(self) -> bool:
        """The client hung up (rule 5); the transport closes and connection_lost does the rest."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everyone who works for this client that it is gone."""
        self.transport = None
        self.input_ended = True
        self.drop_body()
        self.server.remove(self)
        self.backlog.clear()
        abandoned, self.pending = self.pending, deque()
        for exchange in abandoned:
            if exchange.when_client_leaves is not None:
                exchange.when_client_leaves(exchange)

    def pause_writing(self) -> None:
        """The client does not keep up with its responses (rule 3)."""
        self.writing_paused = True
        self.pause_reading()

    def resume_writing(self) -> None:
        """The client has read on."""
        self.writing_paused = False
        self.pump()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.receiving_since = self.server.coarse_now
        self.target = b""
        self.pairs = []
        self.headers_done = False
        self.body_bytes = 0

    def on_url(self, part: bytes) -> None:
        """A part of the request target."""
        self.target = self.target + part if self.target else part
        if len(self.target) > self.limits.header_bytes_max:
            raise RefusedError(self.headers_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; also called for trailers, which are thrown away."""
        self.pairs.append((name, value))
        if self.headers_done and len(self.pairs) > self.limits.header_count_max:
            raise RefusedError(self.headers_too_large())

    def on_headers_complete(self) -> None:
        """Refuse what can be refused before the body comes."""
        pairs = self.pairs
        limits = self.limits
        # Headers that came in one read shorter than their limit need not be measured.
        if len(pairs) > limits.header_count_max or (
            self.read_bytes > limits.header_bytes_max and self.header_bytes() > limits.header_bytes_max
        ):
            raise RefusedError(self.headers_too_large())
        self.headers_done = True
        headers = self.headers = {name.lower(): value for name, value in pairs}
        if len(headers) != len(pairs):
            self.join_repeated(pairs)
        if b"host" not in headers and self.parser.get_http_version() == "1.1":
            raise RefusedError(Malformed("an HTTP/1.1 request needs a Host header"))
        length = headers.get(b"content-length")
        if length is not None and int(length) > limits.body_bytes_max:
            raise RefusedError(self.too_large())
        if b"expect" in headers:
            self.expect(headers[b"expect"])

    def on_body(self, part: bytes) -> None:
        """A part of the body; usually the whole."""
        self.body_bytes += len(part)
        if self.body_bytes > self.limits.body_bytes_max:
            raise RefusedError(self.too_large())
        if not self.body:
            self.body = part
            return
        if self.body_parts is None:
            self.body_parts = [self.body]
            self.server.receiving_bytes += len(self.body)
        self.body_parts.append(part)
        self.server.receiving_bytes += len(part)
        if self.server.receiving_bytes > self.limits.receiving_bytes_max:
            raise RefusedError(QueueFull("too many large bodies are being received; try again soon", retry_after_s=1))

    def on_message_complete(self) -> None:
        """A whole request: hand it to the routes, or keep it until there is room (rule 2)."""
        parser = self.parser
        if parser.should_upgrade():
            return  # feed_data is about to raise HttpParserUpgrade
        self.receiving_since = 0.0
        self.continue_owed = False
        if self.body_parts is not None:
            self.body = b"".join(self.body_parts)
            self.drop_body()
        keep_alive = parser.should_keep_alive()
        exchange = Exchange(self, parser.get_method(), self.target, self.headers, self.body, keep_alive)
        self.body = b""
        if not keep_alive:
            self.input_ended = True
        if len(self.pending) >= self.limits.pipeline_max or self.backlog or self.writing_paused:
            self.backlog.append(exchange)
            self.pause_reading()
            return
        self.pending.append(exchange)
        self.handle(exchange)

    # Requests

    def handle(self, exchange: Exchange) -> None:
        """Give one request to the routes; a defect there costs this request alone."""
        try:
            self.server.handler(exchange)
        except Exception:
            logger.exception("a route failed on a request")
            if exchange.response is None:
                respond_problem(exchange, InternalError("the gateway failed on this request"))

    def ignore_upgrade(self, rest: bytes) -> None:
        """Parse the same request again without its Upgrade header (rule 6), then what came after it."""
        if self.parser.get_method() == b"CONNECT":
            self.refuse(Malformed("CONNECT is not supported; this is not a proxy"))
            return
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.target)]
        lines += [b"%b: %b" % pair for pair in self.headers.items() if pair[0] not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def refuse(self, error: CarpoolError) -> None:
        """Answer what could not be received, after the requests before it, and close (rule 4)."""
        self.input_ended = True
        self.close_gently = True
        self.receiving_since = 0.0
        self.continue_owed = False
        self.drop_body()
        refused = Exchange(self, b"", b"", {}, b"", False)
        (self.backlog or self.pending).append(refused)
        respond_problem(refused, error)
        self.server.refused += 1

    def receive_timed_out(self) -> None:
        """The sweep found a request that did not arrive whole in time."""
        self.refuse(
            ReceiveTimeout(f"the request did not arrive within {self.limits.receive_timeout_s:g} s; send it faster")
        )

    # Responses

    def flush(self) -> None:
        """Write the responses whose turn it is (rule 1), then go on with what waited for room."""
        transport = self.transport
        pending = self.pending
        if transport is None:
            return
        while pending and (response := pending[0].response) is not None:
            exchange = pending.popleft()
            self.bytes_out += len(response)
            transport.write(response)
            if not exchange.keep_alive:
                self.finish_output(transport)
                return
        if not pending:
            self.idle_since = self.server.coarse_now
            if self.continue_owed:
                self.send_continue()
        if self.backlog or self.reading_paused:
            self.pump()

    def pump(self) -> None:
        """Move complete requests from the backlog to the routes while there is room; then read on."""
        if self.pumping or self.transport is None:
            return  # a route that answers at once calls flush, and so pump, again: the loop below goes on instead
        self.pumping = True
        while self.backlog and len(self.pending) < self.limits.pipeline_max and not self.writing_paused:
            exchange = self.backlog.popleft()
            self.pending.append(exchange)
            if exchange.response is None:
                self.handle(exchange)
            else:
                self.flush()
        self.pumping = False
        if self.transport is None or self.backlog or self.writing_paused:
            return
        if self.reading_paused and len(self.pending) < self.limits.pipeline_max:
            self.reading_paused = False
            self.transport.resume_reading()

    def pause_reading(self) -> None:
        """Take no more bytes until `pump` says so."""
        if not self.reading_paused and self.transport is not None:
            self.reading_paused = True
            self.transport.pause_reading()

    def send_continue(self) -> None:
        """Permit the client to send its body."""
        self.continue_owed = False
        if self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def finish_output(self, transport: asyncio.Transport) -> None:
        """The last response is written: close, gently if the client may still be sending (rule 4)."""
        if not self.close_gently:
            transport.close()
            return
        self.linger_until = self.server.coarse_now + LINGER_S
        if transport.can_write_eof():
            transport.write_eof()
        if self.reading_paused:
            self.reading_paused = False
            transport.resume_reading()

    def make_last(self, exchange: Exchange) -> bool:
        """While draining: let this response be the last, if no further request has been received."""
        if self.backlog or not self.pending or self.pending[-1] is not exchange:
            return False
        self.input_ended = True
        self.close_gently = True
        return True

    # Small helpers

    def expect(self, expectation: bytes) -> None:
        """Permit the client to send its body, when it waits for that."""
        if expectation.lower() != b"100-continue":
            raise RefusedError(ExpectationFailed("the only Expect that is supported is 100-continue"))
        # HTTP/1.0 has no interim responses; and the permission must not overtake an earlier response.
        self.continue_owed = self.parser.get_http_version() != "1.0"
        if self.continue_owed and not self.pending:
            self.send_continue()

    def join_repeated(self, pairs: list[tuple[bytes, bytes]]) -> None:
        """Join repeated headers by a comma; those that must not be repeated are refused."""
        joined: dict[bytes, bytes] = {}
        for name, value in pairs:
            name = name.lower()
            if name in joined:
                if name in ONLY_ONCE:
                    raise RefusedError(Malformed(f"the header {name.decode('latin-1')} may be sent only once"))
                value = joined[name] + b", " + value
            joined[name] = value
        self.headers = joined

    def header_bytes(self) -> int:
        """Bytes of the request line and headers, about."""
        return len(self.target) + sum(len(name) + len(value) + 4 for name, value in self.pairs)

    def drop_body(self) -> None:
        """Forget a body of several parts and give its bytes back to the server's count."""
        if self.body_parts is not None:
            self.server.receiving_bytes -= sum(map(len, self.body_parts))
            self.body_parts = None

    def headers_too_large(self) -> CarpoolError:
        """What a client with too many or too long headers is told."""
        limits = self.limits
        return HeadersTooLarge(
            f"at most {limits.header_count_max} headers and {limits.header_bytes_max} bytes of request line and "
            "headers are taken; send fewer or shorter ones"
        )

    def too_large(self) -> CarpoolError:
        """What a client with too long a body is told."""
        return TooLarge(f"a body may have {self.limits.body_bytes_max} bytes at most; send a shorter one")

    def parse_error(self, failure: Exception) -> CarpoolError:
        """What a client that does not speak HTTP/1.1 is told; llhttp's reasons never quote its bytes."""
        reason = str(failure)
        if "version" in reason.lower():
            return HttpVersionNotSupported("this server speaks HTTP/1.1 and HTTP/1.0")
        return Malformed(f"not a valid HTTP/1.1 request: {reason}" if reason else "not a valid HTTP/1.1 request")
