"""HTTP/1.1 on one connection: bytes in, exchanges out, responses in order.

Rules, each with a test:

1. Responses leave in the order of their requests, whatever order the outcomes come in.
2. At most `pipeline_max` exchanges are with the routes at once. What one read brought beyond that waits in
   `backlog`, and reading pauses; so a connection holds at most one read (256 KiB) more than it may.
3. A client that does not read gets no new work done: while the transport's buffer is over its mark, reading
   and the backlog stand still. The server's sweep cuts it off when it stands still for `write_timeout_s`; and it is
   cut off at once if all such clients together leave more unread than `unread_bytes_max`. A response of which a part is
   unread counts whole: the transport keeps all of it until its last byte has left.
   A client that we do not read from is never too slow: the receive deadline stands still with reading.
4. A request that cannot be parsed is answered after those before it, and the connection closes. Every connection
   closes gently: the end of our side is sent and what still comes is thrown away for a moment, since closing on
   unread bytes would reset the connection and destroy the answer on its way.
5. End of file is a hang-up: the workers of all open exchanges of this connection are called at once (`client_left`),
   also if earlier answers are still on their way.
6. A path with an upgrade handler (`state.upgrades`) takes the connection over: it gets what comes from then on, and its
   answer comes in parts (rule 10), so the rules here for clients that do not read, or leave, hold for it too.
   Any other `Upgrade` is ignored, as HTTP allows: the request is answered as the HTTP/1.1 request it also is.
7. While the server drains, the last response of a connection says `Connection: close`; a response does not if a
   further request was received, whole or in part. So a read is parsed to its end before its requests are handled.
8. Nothing is written after the last response, and what a client sends after its last request is thrown away.
9. Memory is counted or bounded: bodies of which not all has come, and those in the backlog, count against the
   server's `receiving_bytes_max`; headers, trailers and chunk framing may have `header_bytes_max` and one read.
10. A response may come in parts. They leave as they come once those before it have left; until then, and while the
   client does not keep up, its writer has to wait (`write` returns false) and is called when there is room again.
11. A request with a long body waits until there is time for it (`state.turns`): of bodies that end together one is read
   in a turn of the event loop, so that other clients do not wait for all of them. Until then its bytes and time count
   as those of a partly received body; after `receive_timeout_s` it is refused.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

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
from carpool.core.ports import Peer
from carpool.core.tensors import Data
from carpool.face.http.exchange import AWAITS_TURN, JSON, LEFT, Body, Exchange
from carpool.face.http.known_heads import NO_HEAD
from carpool.face.http.problem import respond_problem
from carpool.face.http.state import LONG_BODY_BYTES, HttpState
from carpool.face.intake import new_request_id

logger = logging.getLogger("carpool.http")

ONLY_ONCE = frozenset((b"host", b"authorization", b"content-type", b"content-length"))
# What a request in the backlog costs beside its body.
BACKLOG_ENTRY_BYTES = 1024
# Beyond `connections_max`, so many connections at a time get an error, each with an open file; more are aborted.
TOLD_MAX = 64
# A client with less than this unread is never cut off for what other clients leave unread.
UNREAD_BYTES_MIN = 256 * 1024
# A shorter response counts as unread without the part of it that has left. More than a transport collects before it
# writes, so that right after a longer one it is known whether all of it has left.
COUNTED_WHOLE_BYTES = 128 * 1024
# So much of a response in parts may wait for its turn before its writer has to wait.
UNSENT_PARTS_MAX = 64 * 1024
# What still comes is read and thrown away for so long after the client has got its last answer (rule 4).
LINGER_S = 1.0


class RefusedError(Exception):
    """Stops the parser in the middle of a message; carries the error for the client."""

    def __init__(self, error: CarpoolError) -> None:
        super().__init__(error.detail)
        self.error = error


class Connection(asyncio.Protocol):
    """One client connection. Times are the server's coarse clock: a quarter of a second is exact enough here."""

    __slots__ = (
        "acked_ahead",
        "acked_then",
        "backlog",
        "began",
        "body",
        "body_buffer",
        "body_bytes",
        "body_bytes_then",
        "bytes_out",
        "continue_owed",
        "framing_bytes",
        "headers",
        "headers_done",
        "idle_since",
        "input_ended",
        "is_held",
        "is_http_1_0",
        "keep_alive",
        "kept_bytes",
        "known_head",
        "known_heads",
        "limits",
        "linger_until",
        "messages",
        "pairs",
        "parser",
        "peer",
        "pending",
        "pumping",
        "read_size",
        "read_then",
        "reading_paused",
        "receiving_since",
        "stalled_since",
        "state",
        "target",
        "transport",
        "unfinished_reads",
        "upgraded",
        "writing_paused",
    )

    def __init__(self, state: HttpState) -> None:
        self.state = state
        self.limits = state.limits
        self.known_heads = state.known_heads
        self.known_head = NO_HEAD
        self.transport: asyncio.Transport | None = None
        self.peer = Peer()
        self.parser = httptools.HttpRequestParser(self)
        # Exchanges with the routes, oldest first, and complete requests that wait for a place among them.
        self.pending: deque[Exchange] = deque()
        self.backlog: deque[Exchange] = deque()
        # The message now being received.
        self.target = b""
        self.pairs: list[tuple[bytes, bytes]] = []
        self.headers: dict[bytes, bytes] = {}
        self.read_size = 0
        # Complete messages of this read.
        self.messages = 0
        # When the first read of this message ended inside it; how many reads did, and the bytes of those that brought
        # nothing of its body.
        self.began = 0.0
        self.unfinished_reads = 0
        self.framing_bytes = 0
        self.headers_done = False
        self.keep_alive = True
        self.is_http_1_0 = False
        self.body = b""
        # A body that came in more than one part; the server counts its bytes.
        self.body_buffer: bytearray | None = None
        self.body_bytes = 0
        self.body_bytes_then = 0
        # 0.0 when no message is partly received.
        self.receiving_since = 0.0
        self.idle_since = state.coarse_now
        self.reading_paused = False
        self.writing_paused = False
        self.pumping = False
        # No more input is parsed: a request was refused, or the last request of this connection has come.
        self.input_ended = False
        # The upgrade handler's function for received bytes, once it has taken the connection over (rule 6).
        self.upgraded: Callable[[bytes], None] | None = None
        # When a connection that closes gently is cut off (rule 4); 0.0 while it is open.
        self.linger_until = 0.0
        self.continue_owed = False
        # An error waits for its turn (`error_pace`); later requests wait behind it: a connection has one place there.
        self.is_held = False
        # For the sweep: bytes handed to the transport; below, when and at which acknowledged byte it last went on.
        self.bytes_out = 0
        # Size of the longest response that did not leave at once: of the first response in its buffer the transport
        # keeps also the part that has left (rule 3).
        self.kept_bytes = 0
        self.stalled_since = 0.0
        self.acked_then = 0
        # `bytes_out` when the client had last read everything, and how much more it had acknowledged: TLS adds some.
        self.read_then = 0
        self.acked_ahead = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it if `connections_max` are open."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        self.peer.address = address_of(transport)
        self.state.connections.add(self)
        beyond = len(self.state.connections) - self.limits.connections_max
        if beyond > TOLD_MAX:
            self.transport.abort()
        elif beyond > 0:
            self.refuse(QueueFull("too many connections are open; try again soon", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        """Feed the parser; it calls the on_… methods below."""
        if self.input_ended:
            self.received_behind(data)
            return
        if not self.receiving_since:
            known = self.known_head
            head = known.whole.get(len(data))
            if head is None or not data.startswith(head):
                known, head = self.known_heads.match(data, known)
                self.known_head = known
            if head:
                body = data[len(head) :]
                exchange = Exchange(self, known.method, known.target, known.headers, body, True, known.is_plain)
                state = self.state
                if self.pending or self.reading_paused or state.draining:
                    self.accept(exchange)
                    if self.backlog:
                        self.after_read(len(data))
                    return
                self.pending.append(exchange)
                try:
                    handler = state.handler
                    handler(exchange)
                except Exception:
                    self.handler_failed(exchange)
                return
        at_boundary = not self.receiving_since
        self.messages = 0
        while True:  # once more for each request that asks for an upgrade
            self.read_size = len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.take_over(data):
                    return
                data = self.without_upgrade(data)
                continue
            except httptools.HttpParserError as failure:
                self.refuse_because(failure)
                return
            break
        if self.receiving_since or self.backlog:
            self.after_read(len(data))
        elif at_boundary and self.messages == 1 and not self.input_ended and not self.is_http_1_0:
            self.known_heads.keep(data, self.parser.get_method(), self.target, self.headers)

    def eof_received(self) -> bool:
        """The client hung up (rule 5). The transport closes when it has sent what it still has: that may take long."""
        self.abandon()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: drop its exchanges."""
        self.transport = None
        del self.parser  # it refers back to here, and the collector that would free both runs rarely
        self.state.connections.discard(self)
        self.abandon()

    def abandon(self) -> None:
        """Take no more requests, and tell the workers of open exchanges that their client has left."""
        self.input_ended = True
        self.upgraded = None
        self.receiving_since = 0.0
        self.continue_owed = False
        self.drop_body()
        while self.backlog:
            self.next_in_backlog()
        abandoned, self.pending = self.pending, deque()
        for exchange in abandoned:
            is_unanswered = exchange.response is None or exchange.is_unfinished
            if exchange.context is AWAITS_TURN:
                self.state.receiving_bytes -= len(exchange.body)
                exchange.body = b""
            if is_unanswered and exchange.worker is not None:
                exchange.worker.client_left(exchange)
            exchange.let_go()
            if is_unanswered:
                exchange.context = LEFT

    def pause_writing(self) -> None:
        """The client does not keep up with its responses (rule 3)."""
        self.writing_paused = True
        self.pause_reading()

    def resume_writing(self) -> None:
        """The client has read on."""
        self.writing_paused = False
        is_told = False
        if self.transport is not None and self.pending and self.pending[0].is_unfinished:
            is_told = self.upgraded is not None and self.pending[0].is_told_to_wait
            self.write_part(self.transport, self.pending[0])
        if not is_told:  # else the upgrade's handler reads on when it has handled what came before
            self.pump()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self.input_ended:
            raise EOFError("nothing is taken behind the last request")  # which answered itself while a read was parsed
        self.receiving_since = self.state.coarse_now
        self.target = b""
        self.pairs = []
        self.headers_done = False
        self.unfinished_reads = 0
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
            (self.unfinished_reads or self.read_size > limits.header_bytes_max)
            and self.header_bytes() > limits.header_bytes_max
        ):
            raise RefusedError(self.headers_too_large())
        self.headers_done = True
        headers = self.headers = {name.lower(): value for name, value in pairs}
        if len(headers) != len(pairs):
            self.join_repeated(pairs)
            headers = self.headers
        keep_alive = self.keep_alive = self.parser.should_keep_alive()
        self.is_http_1_0 = False
        # Asking for the version is slow; every request that is not plain HTTP/1.1 has one of these marks.
        if not keep_alive or b"host" not in headers or b"connection" in headers:
            self.check_version()
        if b"transfer-encoding" in headers and headers[b"transfer-encoding"].lower() != b"chunked":
            raise RefusedError(Malformed("the only Transfer-Encoding that is supported is chunked"))
        length = headers.get(b"content-length")
        # Without its zeros it has 20 digits at most, which the parser made sure of: int() raises at thousands.
        if length is not None and int(length.lstrip(b"0") or 0) > limits.body_bytes_max:
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
        if self.body_buffer is None:
            self.keep_body()
        cast(bytearray, self.body_buffer).extend(part)
        self.state.receiving_bytes += len(part)
        if self.state.receiving_bytes > self.limits.receiving_bytes_max:
            raise RefusedError(self.too_many_bodies())

    def on_message_complete(self) -> None:
        """A whole request."""
        parser = self.parser
        if parser.should_upgrade():
            return  # feed_data is about to raise HttpParserUpgrade
        self.receiving_since = 0.0
        self.continue_owed = False
        self.messages += 1
        if self.body_buffer is not None:
            self.body = bytes(self.body_buffer)
            self.state.receiving_bytes -= len(self.body)
            self.body_buffer = None
        exchange = Exchange(self, parser.get_method(), self.target, self.headers, self.body, self.keep_alive)
        exchange.is_unframed = self.is_http_1_0
        if self.unfinished_reads:
            exchange.received_s = self.state.clock() - self.began
        self.body = b""
        if not self.keep_alive:
            self.input_ended = True
        self.accept(exchange)

    # Requests

    def accept(self, exchange: Exchange) -> None:
        """Hand a whole request to the routes, or keep it until there is room (rule 2)."""
        pending = self.pending
        state = self.state
        is_held = self.is_held or self.writing_paused or state.draining
        if len(pending) >= self.limits.pipeline_max or self.backlog or is_held:
            state.receiving_bytes += len(exchange.body) + BACKLOG_ENTRY_BYTES
            self.backlog.append(exchange)
            self.pause_reading()
            return
        pending.append(exchange)
        self.handle(exchange)

    def handle(self, exchange: Exchange) -> None:
        """Give one request to the routes, or let it wait for a turn if its body is long (rule 11)."""
        state, size = self.state, len(exchange.body)
        if size > LONG_BODY_BYTES and state.receiving_bytes + size > self.limits.receiving_bytes_max:
            exchange.body = b""
            respond_problem(exchange, self.too_many_bodies())
        elif size > LONG_BODY_BYTES:
            state.receiving_bytes += size
            exchange.context = AWAITS_TURN
            # In turn by connection: a client that sends many does not keep the others waiting.
            state.turns.now(partial(self.handle_long, exchange, size, state.clock()), self)
        else:
            self.handle_now(exchange)

    def handle_long(self, exchange: Exchange, size: int, since: float) -> None:
        """It is the turn of a request with a long body."""
        state = self.state
        if exchange.has_left:
            return
        state.receiving_bytes -= size
        exchange.context = None
        waited_s = state.clock() - since
        exchange.received_s += waited_s
        if waited_s > self.limits.receive_timeout_s:
            exchange.body = b""
            respond_problem(exchange, self.too_many_bodies())
        else:
            self.handle_now(exchange)

    def handle_now(self, exchange: Exchange) -> None:
        """Give one request to the routes; a defect there costs this request alone."""
        try:
            self.state.handler(exchange)
        except Exception:
            self.handler_failed(exchange)

    def handler_failed(self, exchange: Exchange) -> None:
        """Log a defect of a route, and answer the request if the route did not."""
        logger.exception("a route failed on a request")
        if exchange.response is None or exchange.is_unfinished:
            respond_problem(exchange, InternalError("the gateway failed on this request"))

    def after_read(self, size: int) -> None:
        """A read ended inside a message, or brought more requests than are handled at once."""
        if self.receiving_since:
            if not self.unfinished_reads:
                self.began = self.state.clock()
            if self.body and self.body_buffer is None:
                self.keep_body()
            if self.headers_done and self.body_bytes != self.body_bytes_then:
                self.body_bytes_then = self.body_bytes
                self.framing_bytes = 0
            elif self.unfinished_reads:
                # The parser keeps an unfinished line by itself, out of sight of on_header.
                self.framing_bytes += size
            else:
                # How much of its first read belongs to this message is not known.
                self.body_bytes_then = self.framing_bytes = 0
            self.unfinished_reads += 1
            if self.framing_bytes > self.limits.header_bytes_max:
                self.refuse(self.headers_too_large())
                return
        if self.state.receiving_bytes > self.limits.receiving_bytes_max:
            self.refuse(self.too_many_bodies())
        else:
            self.pump()

    def received_behind(self, data: bytes) -> None:
        """Give bytes behind the last request to the upgrade's handler, else throw them away (rules 6 and 8)."""
        if self.upgraded is not None:
            self.upgraded(data)

    def take_over(self, rest: bytes) -> bool:
        """Give the connection to the handler of the upgrade that is asked for (rule 6); false if there is none."""
        headers, method = self.headers, self.parser.get_method()
        if method == b"CONNECT":
            self.refuse(Malformed("CONNECT is not supported; this is not a proxy"))
            return True
        handler = self.state.upgrades.get((self.target.partition(b"?")[0], headers.get(b"upgrade", b"").lower()))
        is_bare = b"content-length" not in headers and b"transfer-encoding" not in headers and not self.is_http_1_0
        # An upgrade behind other requests would have to wait for them.
        if handler is None or not is_bare or self.pending or self.backlog or method != b"GET":
            return False
        exchange = Exchange(self, b"GET", self.target, headers, b"", False)
        exchange.is_unframed = True
        self.input_ended = True
        self.receiving_since = 0.0
        self.pending.append(exchange)
        try:
            self.upgraded = handler(exchange)
        except Exception:
            self.handler_failed(exchange)
        if rest:
            self.received_behind(rest)
        return True

    def without_upgrade(self, rest: bytes) -> bytes:
        """The request that the parser stopped at, without its Upgrade header (rule 6), and what came after it."""
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.target, parser.get_http_version().encode())]
        lines += [b"%b: %b" % pair for pair in self.headers.items() if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def refuse_because(self, failure: Exception) -> None:
        """The parser stopped: by its own judgement, by ours, or by a defect of ours."""
        if self.input_ended:
            self.pump()  # bytes after the last request (rule 8), which may wait in the backlog
            return
        cause = failure.__context__
        if not isinstance(failure, httptools.HttpParserCallbackError):
            self.refuse(self.parse_error(failure))
        elif isinstance(cause, RefusedError):
            self.refuse(cause.error)
        else:
            logger.error("the HTTP face failed on a request", exc_info=cause)
            self.refuse(InternalError("the gateway failed on this request"))

    def refuse(self, error: CarpoolError) -> None:
        """Answer what could not be received, after the requests before it, and close (rule 4)."""
        self.input_ended = True
        self.receiving_since = 0.0
        self.continue_owed = False
        self.drop_body()
        refused = Exchange(self, b"", b"", {}, b"", False)
        if self.state.extra_lines is not None and self.headers_done:
            refused.extra_lines = self.state.extra_lines(self.headers)
        if self.backlog:
            self.state.receiving_bytes += BACKLOG_ENTRY_BYTES
            self.backlog.append(refused)
        else:
            self.pending.append(refused)
        respond_problem(refused, error)

    def receive_timed_out(self) -> None:
        """The sweep found a request that did not arrive whole in time."""
        self.refuse(
            ReceiveTimeout(f"the request did not arrive within {self.limits.receive_timeout_s:g} s; send it faster")
        )

    # Responses

    def respond(self, exchange: Exchange, status: int, body: Body, content_type: bytes, headers: bytes) -> None:
        """Take a whole response."""
        if exchange.is_unfinished:
            self.break_off()  # the head of another response is out
            return
        exchange.response = self.whole_response(exchange, status, body, content_type, headers)
        pace = self.state.error_pace
        if status < 400 or pace is None or pace.is_now(self.error_may_leave):
            self.flush()
        else:
            self.is_held = True

    def error_may_leave(self) -> None:
        """It is the turn of an error of this connection."""
        self.is_held = False
        self.flush()

    def answer(self, exchange: Exchange, pieces: tuple[bytes, Data, bytes], headers: bytes) -> None:
        """Take the usual response, on the hot path: each block of memory of its size costs as much as all else here."""
        state = self.state
        if not exchange.is_plain or state.draining or exchange.is_unfinished:
            self.respond(exchange, 200, b"".join(pieces), JSON, headers)
            return
        before, output, after = pieces
        length = len(before) + len(output) + len(after)
        if headers:
            head = b"%b%bContent-Length: %d\r\n\r\n" % (state.start_ok, headers, length)
        else:
            head = state.head_ok % length
        response = exchange.response = b"".join((head, before, output, after))
        pending, transport = self.pending, self.transport
        if transport is None or self.reading_paused or not pending or pending[0] is not exchange:
            self.flush()
            return
        # The short form of `flush`, where nothing is paused and it is the turn of this exchange. It skips `let_go`: the
        # exchange holds nothing but its request, which forgets the exchange.
        pending.popleft()
        self.bytes_out += len(response)
        transport.write(response)
        if (self.writing_paused or length >= COUNTED_WHOLE_BYTES) and self.reads_too_little(transport, len(response)):
            transport.abort()
        elif pending or self.continue_owed:
            self.flush()
        else:
            self.idle_since = state.coarse_now

    def answer_error(self, exchange: Exchange, error: CarpoolError) -> None:
        """Take an error that many clients get: a flood of refusals must cost little."""
        state = self.state
        if not exchange.is_plain or state.draining or exchange.is_unfinished:
            respond_problem(exchange, error)
            return
        own_id = new_request_id().encode()
        ready = state.ready_problems.get(error)
        if ready is None or ready.id_bytes != len(own_id):
            ready = state.make_ready(error, len(own_id))
        _, head, before, after = ready
        exchange.response = b"".join((head, exchange.limit_lines, before, own_id, after))
        exchange.body = b""  # it may wait for its turn, and many with it
        state.count_problem(error.code)
        if state.traces is not None and exchange.context is None:
            state.traces.refused(exchange.method, exchange.target, exchange.headers, error)
        pace = state.error_pace
        if pace is None or pace.is_now(self.error_may_leave):
            self.flush()
        else:
            self.is_held = True

    def whole_response(self, exchange: Exchange, status: int, body: Body, content_type: bytes, headers: bytes) -> bytes:
        """The bytes of a response, for any status, type and request."""
        state = self.state
        if state.draining or not exchange.keep_alive or b"connection" in exchange.headers:
            headers += self.connection_line(exchange)
        headers += exchange.extra_lines
        if status == 204:
            return b"%b%b\r\n" % (state.head(204, b""), headers)
        parts = body if isinstance(body, tuple) else (body,)
        length = b"Content-Length: %d\r\n\r\n" % sum(map(len, parts))
        sent = () if exchange.method == b"HEAD" else parts
        return b"".join((state.head(status, content_type), headers, length, *sent))

    def begin(self, exchange: Exchange, status: int, content_type: bytes, headers: bytes) -> None:
        """Take the head of a response that comes in parts; to HTTP/1.0 the end of the connection is its end."""
        if self.transport is None:
            return
        if exchange.is_unframed:
            exchange.keep_alive = False
            self.input_ended = True
        else:
            headers += b"Transfer-Encoding: chunked\r\n"
        if status != 101:  # which says itself what becomes of the connection
            headers += self.connection_line(exchange) + exchange.extra_lines
        exchange.response = b"%b%b\r\n" % (self.state.head(status, content_type), headers)
        exchange.is_unfinished = True
        self.flush()

    def write(self, exchange: Exchange, part: bytes) -> bool:
        """Take a part of its body; it waits here while responses before it have not left (rule 10)."""
        exchange.is_told_to_wait = False
        if self.transport is None:
            return False
        if part and exchange.method != b"HEAD":  # an empty chunk would be the end
            chunk = part if exchange.is_unframed else b"%x\r\n%b\r\n" % (len(part), part)
            exchange.response = (exchange.response or b"") + chunk
            self.flush()
        exchange.is_told_to_wait = self.writing_paused or len(exchange.response or b"") >= UNSENT_PARTS_MAX
        return not exchange.is_told_to_wait

    def end(self, exchange: Exchange) -> None:
        """That was the last part."""
        if self.transport is None:
            return
        last = b"" if exchange.is_unframed or exchange.method == b"HEAD" else b"0\r\n\r\n"
        exchange.response = (exchange.response or b"") + last
        exchange.is_unfinished = False
        self.flush()

    def break_off(self) -> None:
        """End the connection at once: what was promised in the head of a response will not come."""
        if self.transport is not None:
            self.transport.abort()

    def is_gone(self) -> bool:
        """Whether the connection is gone."""
        return self.transport is None

    def note_problem(self, exchange: Exchange, error: CarpoolError) -> None:
        """The response to an exchange is an error."""
        state = self.state
        state.count_problem(error.code)
        # An exchange that came in has its request, or its requests, as context, and is traced with these.
        came_in = exchange.context is not None and getattr(exchange.context, "came_in", True)
        if state.traces is not None and not came_in:
            state.traces.refused(exchange.method, exchange.target, exchange.headers, error)

    def connection_line(self, exchange: Exchange) -> bytes:
        """What a response says of the connection: that it closes, or, to a client that asked, that it stays open."""
        if self.state.draining and exchange.keep_alive:
            exchange.keep_alive = not self.make_last(exchange)
        if not exchange.keep_alive:
            return b"Connection: close\r\n"
        # An HTTP/1.0 client that asked to keep the connection needs this line; an HTTP/1.1 client does not.
        return b"Connection: keep-alive\r\n" if b"connection" in exchange.headers else b""

    def flush(self) -> None:
        """Write the responses whose turn it is (rule 1), then go on with what waited for room."""
        transport = self.transport
        pending = self.pending
        if transport is None:
            return
        while pending and (response := pending[0].response) is not None:
            exchange = pending[0]
            if exchange.is_unfinished:
                self.write_part(transport, exchange)
                return
            pending.popleft()
            exchange.let_go()
            self.bytes_out += len(response)
            transport.write(response)
            if self.reads_too_little(transport, len(response)):
                transport.abort()
                return
            if not exchange.keep_alive:
                self.finish_output(transport)
                return
        if not pending:
            self.idle_since = self.state.coarse_now
            if self.continue_owed and not self.backlog:
                self.send_continue()
        if self.backlog or self.reading_paused:
            self.pump()

    def write_part(self, transport: asyncio.Transport, exchange: Exchange) -> None:
        """It is the turn of a response of which more is to come (rule 10); its writer may go on if it was to wait."""
        part = exchange.response
        if part:
            exchange.response = b""
            self.bytes_out += len(part)
            transport.write(part)
            if self.reads_too_little(transport, len(part)):
                transport.abort()
        if exchange.is_told_to_wait and not self.writing_paused:
            exchange.is_told_to_wait = False
            if exchange.worker is not None:
                exchange.worker.writable(exchange)

    def reads_too_little(self, transport: asyncio.Transport, size: int) -> bool:
        """Whether all clients together leave too much unread, and this one UNREAD_BYTES_MIN or more (rule 3).

        Called after `size` bytes were written.
        """
        if size < COUNTED_WHOLE_BYTES and not self.writing_paused:
            return False
        waiting = self.waiting_bytes(transport)
        if not waiting:
            return False
        if size >= COUNTED_WHOLE_BYTES:
            self.kept_bytes = max(self.kept_bytes, size)
        self.state.unread_bytes += size
        if self.state.unread_bytes <= self.limits.unread_bytes_max:
            return False
        return waiting + self.kept_bytes >= UNREAD_BYTES_MIN

    def waiting_bytes(self, transport: asyncio.Transport) -> int:
        """What waits in the transport's buffer. With the last of it, all that the transport kept is gone."""
        waiting = transport.get_write_buffer_size()
        if not waiting:
            self.kept_bytes = 0
        return waiting

    def pump(self) -> None:
        """Move complete requests from the backlog to the routes while there is room; then read on."""
        if self.pumping or self.transport is None:
            return  # a route that answers at once calls flush, and so pump, again: the loop below goes on instead
        self.pumping = True
        pipeline_max = self.limits.pipeline_max
        while self.backlog and len(self.pending) < pipeline_max and not self.writing_paused and not self.is_held:
            exchange = self.next_in_backlog()
            self.pending.append(exchange)
            if exchange.response is None:
                self.handle(exchange)
            else:
                self.flush()
        self.pumping = False
        if self.transport is None or self.backlog or self.writing_paused:
            return
        if self.reading_paused and (len(self.pending) < self.limits.pipeline_max or self.upgraded is not None):
            self.resume_reading(self.transport)

    def next_in_backlog(self) -> Exchange:
        """Take the oldest request of the backlog; the server no longer counts its body."""
        exchange = self.backlog.popleft()
        self.state.receiving_bytes -= len(exchange.body) + BACKLOG_ENTRY_BYTES
        return exchange

    def pause_reading(self) -> None:
        """Take no more bytes until `pump` says so."""
        if not self.reading_paused and self.transport is not None:
            self.reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self, transport: asyncio.Transport) -> None:
        """Read on; the time in which we did not read is not the client's."""
        self.reading_paused = False
        if self.receiving_since:
            self.receiving_since = self.state.coarse_now
        if not transport.is_closing():
            transport.resume_reading()

    def send_continue(self) -> None:
        """Permit the client to send its body."""
        self.continue_owed = False
        self.receiving_since = self.state.coarse_now
        if self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def finish_output(self, transport: asyncio.Transport) -> None:
        """The last response is written: close gently, for the client may still be sending (rule 4)."""
        self.abandon()  # drops requests behind a response that only the end of the connection can end
        self.linger_until = self.state.coarse_now + LINGER_S
        if not transport.can_write_eof():
            transport.close()  # TLS has an end of its own to send, and throws away what still comes by itself
            return
        transport.write_eof()
        if self.reading_paused:
            self.resume_reading(transport)

    def make_last(self, exchange: Exchange) -> bool:
        """While draining: let this response be the last, if no further request has been received (rule 7)."""
        if self.backlog or self.receiving_since or not self.pending or self.pending[-1] is not exchange:
            return False
        self.input_ended = True
        return True

    # Small helpers

    def expect(self, expectation: bytes) -> None:
        """Permit the client to send its body, when it waits for that."""
        if expectation.lower() != b"100-continue":
            raise RefusedError(ExpectationFailed("the only Expect that is supported is 100-continue"))
        if self.parser.should_upgrade():
            return  # these headers come once more, without the Upgrade
        # HTTP/1.0 has no interim responses; and the permission must not overtake an earlier response.
        self.continue_owed = self.parser.get_http_version() != "1.0"
        if self.continue_owed and not self.pending and not self.backlog:
            self.send_continue()

    def check_version(self) -> None:
        """Refuse what is neither HTTP/1.1 with a Host nor HTTP/1.0."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RefusedError(version_not_supported())
        self.is_http_1_0 = version == "1.0"
        if version == "1.1" and b"host" not in self.headers:
            raise RefusedError(Malformed("an HTTP/1.1 request needs a Host header"))
        if version == "1.0" and b"transfer-encoding" in self.headers:
            # A proxy of that age does not know chunks: it and we would not agree where this request ends.
            raise RefusedError(Malformed("an HTTP/1.0 request cannot have a Transfer-Encoding; send Content-Length"))

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

    def keep_body(self) -> None:
        """More of the body is to come: let the server count what is here."""
        self.body_buffer = bytearray(self.body)
        self.state.receiving_bytes += len(self.body)

    def drop_body(self) -> None:
        """Forget a body of which not all has come."""
        self.body = b""
        if self.body_buffer is not None:
            self.state.receiving_bytes -= len(self.body_buffer)
            self.body_buffer = None

    def too_many_bodies(self) -> CarpoolError:
        """The error when all connections together hold too many bytes of bodies."""
        return QueueFull("too many large bodies are being received; try again soon", retry_after_s=1)

    def headers_too_large(self) -> CarpoolError:
        """The error for too many or too long headers."""
        limits = self.limits
        return HeadersTooLarge(
            f"at most {limits.header_count_max} headers and {limits.header_bytes_max} bytes of request line and "
            "headers are taken; send fewer or shorter ones"
        )

    def too_large(self) -> CarpoolError:
        """The error for too long a body."""
        return TooLarge(f"a body may have {self.limits.body_bytes_max} bytes at most; send a shorter one")

    def parse_error(self, failure: Exception) -> CarpoolError:
        """The error for bytes that are not HTTP/1.1; llhttp's reasons never quote them."""
        reason = str(failure)
        # The second is the beginning of HTTP/2 without an upgrade.
        if reason in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
            return version_not_supported()
        return Malformed(f"not a valid HTTP/1.1 request: {reason}" if reason else "not a valid HTTP/1.1 request")


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of the other end; "" if it has none (a Unix socket), or has left already."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


def version_not_supported() -> CarpoolError:
    """The error for another HTTP version."""
    return HttpVersionNotSupported("this server speaks HTTP/1.1 and HTTP/1.0")
