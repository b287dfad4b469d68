"""HTTP connections to endpoints: what comes in on one is the answer to the call under way on it, or no call gets it.

An answer of HTTP/1.1 carries no id: it belongs to the last call on its connection. Left alone, aiohttp keeps what comes
between two calls, and hands it to the next as its answer. So:

1. A connection rests, is taken by a call, or has been asked. Only when asked may it answer. Bytes that come before are
   stray: the connection is cut off, never used again, and counted. Empty lines are no bytes (RFC 9112, 9.2).
2. An answer ends where its length says. What follows, in the same read or later, is stray. The first answer of its
   connection is good even so. A later one, not yet handed out, is in doubt: it may be the repeated answer to the call
   before.
3. Right before a request is written the socket is looked at. What lies there unread is read first: stray bytes fall
   under rule 1, and on a connection that the other side has closed nothing is written.
4. Outputs cannot come before the inputs were sent. An answer that begins before the request has been written whole is
   stray, unless it is an error: servers may refuse a long request early.
5. An answer that comes while the next call is under way looks like that call's. An answer that is the same as the
   answer before it is in doubt, and not believed (`repeats.py`).
6. An endpoint that was caught, or whose answer is in doubt, gets a connection of its own for each call, for `CAUGHT_S`:
   there is no next call that could get a repeated answer.
7. After a connection was found dead, connections that have rested since before that moment are not used either.

aiohttp offers no place for this but its protocol class. All that is aiohttp's own business stands in this file:
`_factory` and `_parser`, and the order in which it calls. `tests/integration/test_stray_answers.py` holds it.
"""

import asyncio
import functools
import logging
import select
from collections.abc import Sequence
from contextvars import ContextVar
from math import inf
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from carpool.core.tensors import Data
from carpool.upstream.repeats import END_BYTES, CallAndAnswer, Repeats, fingerprint_of, fingerprint_of_end

logger = logging.getLogger("carpool.upstream")

CAUGHT_S = 600.0
# Turns that the event loop gets to read what lies in a socket; it needs two.
TURNS_MAX = 8
_EMPTY_LINES = b"\r\n"


class EarlyAnswerError(aiohttp.ClientError):
    """An answer came before the request had been written (rule 4)."""


class EndpointConnections:
    """What is known of all connections to one endpoint."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Connections that were cut off because of stray bytes.
        self.stray = 0
        # On the event loop's clock: a connection that came to rest before this is not used again.
        self.reuse_from = -inf
        # Until then rule 6 holds, whatever else is learned.
        self._caught_until = -inf
        self._repeats = Repeats()
        self._complained_at = -inf

    def caught(self, now: float) -> None:
        """Stray bytes came (rule 6)."""
        self.stray += 1
        self.reuse_from = self._caught_until = now + CAUGHT_S
        if now - self._complained_at >= CAUGHT_S / 2:  # not with every one
            self._complained_at = now
            fields = {"endpoint": self.name, "stray_answers": self.stray}
            logger.error("an endpoint sent bytes that were no answer to a call", extra={"fields": fields})

    def found_dead(self, now: float) -> None:
        """A connection that had rested was closed by the other side (rule 7)."""
        self.reuse_from = max(self.reuse_from, now)

    def is_doubtful(self, exchange: CallAndAnswer, before: CallAndAnswer | None, now: float) -> bool:
        """Whether an answer is not to be believed; `before` is what its connection had before (rule 5)."""
        if before is not None and self._repeats.is_doubtful(exchange, before, now):
            self.reuse_from = now + CAUGHT_S
            logger.warning("an endpoint gave two calls the same answer", extra={"fields": {"endpoint": self.name}})
            return True
        verdict = self._repeats.seen_alone(exchange, now) if before is None else "nothing"
        if verdict == "answers so":
            self.reuse_from = max(now, self._caught_until)
        elif verdict == "repeats":
            self.caught(now)
        return False


class CallContext:
    """What is known of the way that one call takes. aiohttp makes it on one connection, or on none."""

    __slots__ = ("connection", "is_doubtful", "is_heard", "is_reused", "is_sent", "line", "print", "unwritten_bytes")

    def __init__(self, line: EndpointConnections, body: bytes = b"", tail: Sequence[Data] = ()) -> None:
        self.line = line
        self.print = fingerprint_of(body, tail)
        self.connection: UpstreamConnection | None = None
        # The connection had been used before.
        self.is_reused = False
        # The first byte of the request is given to an open connection. Until then the endpoint cannot have received it.
        self.is_sent = False
        # A byte of an answer came.
        self.is_heard = False
        # The answer is whole, but may be that of the call before.
        self.is_doubtful = False
        self.unwritten_bytes = self.print.size


# The call that the running task makes: aiohttp takes no argument as far as its connections.
current_call: ContextVar[CallContext] = ContextVar("trip_now")


class UpstreamConnection(ResponseHandler):
    """One connection, in the pool of aiohttp's connector or in use."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        # "resting", "taken" or "asked" (rule 1).
        self._state: str = "resting"
        self._rests_since = inf
        self._is_cut_off = False
        # The last bytes that came: those of an answer, where nothing but empty lines comes behind it.
        self._end = b""
        # The last call here that had an output, with its answer.
        self._exchange: CallAndAnswer | None = None
        # Its call, or while it rests its last one; None before the first.
        self._trip: CallContext | None = None
        # The endpoint for which stray bytes count, also before the first call.
        self._line = current_call.get().line

    def set_response_params(self, **params: Any) -> None:
        """Called by aiohttp when a call has the connection, before it writes."""
        context = current_call.get()
        context.connection, context.is_reused = self, self._trip is not None
        self._trip, self._line, self._state = context, context.line, "taken"
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Asked by aiohttp's connector: False makes it throw a resting connection away."""
        is_trusted = self._state != "resting" or self._rests_since >= self._line.reuse_from
        return super().is_connected() and is_trusted

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is over. Its last call and it refer to each other: that call lets go of it."""
        super().connection_lost(exc)
        if self._trip is not None:
            self._trip.connection = None

    async def before_writing(self) -> None:
        """The next thing that happens is the first write of a request (rule 3)."""
        turns = 0
        while self._has_unread_bytes():
            if turns == TURNS_MAX:
                self.abort()  # the loop does not read it; whatever it is, it came before the request
                return
            turns += 1
            await asyncio.sleep(0)
        if self._trip is not None and self.transport is not None and not self.transport.is_closing():
            self._state = "asked"
            self._trip.is_sent = True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer, or stray ones; none at all when aiohttp goes on with those it has."""
        if self._state == "asked" and self._trip is not None:
            self._trip.is_heard = self._trip.is_heard or bool(data)
            self._end = (self._end + data[-END_BYTES:])[-END_BYTES:]
            super().data_received(data)
            if self._state == "resting" and self._further_message_has_begun():  # rule 2
                self._cut_off()
        elif data.strip(_EMPTY_LINES):
            self._cut_off()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """The head of a message was read, in `data_received`."""
        message, payload = data
        if self._state != "asked":  # rule 2: the one before it was whole
            self._cut_off()
            return
        if message.code >= 200 or message.code == 101:  # any other is followed by the real one
            if message.code < 300 and self._is_unwritten():
                self._state = "resting"  # nothing that follows counts either
                self._cut_off()
                self.set_exception(EarlyAnswerError("an answer came before the call was sent"))
                return
            # Before aiohttp does, which gives the connection back then.
            payload.on_eof(functools.partial(self._answer_ended, message, payload))
        super().feed_data(data, size)

    def _answer_ended(self, message: RawResponseMessage, payload: StreamReader) -> None:
        now = self._rests_since = self._loop.time()
        self._state = "resting"
        if self._trip is not None and 200 <= message.code < 300:
            before = self._exchange
            end = self._end.rstrip(_EMPTY_LINES)
            self._exchange = CallAndAnswer(self._trip.print, fingerprint_of_end(payload.total_bytes, end))
            self._trip.is_doubtful = self._line.is_doubtful(self._exchange, before, now)
        if now < self._line.reuse_from:
            self.force_close()

    def _further_message_has_begun(self) -> bool:
        """Whether the parser has read anything behind the answer. It is not used any more: each call has its own."""
        try:
            return self._parser is not None and self._parser.feed_eof() is not None
        except Exception:  # something has begun that is no message either
            return True

    def _is_unwritten(self) -> bool:
        transport = self.transport
        is_buffered = transport is not None and transport.get_write_buffer_size() > 0
        return is_buffered or (self._trip is not None and self._trip.unwritten_bytes > 0)

    def _has_unread_bytes(self) -> bool:
        """Whether the kernel has something for this connection, be it its end."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return False
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _cut_off(self) -> None:
        if not self._is_cut_off:  # one read may have several messages behind the answer
            self._is_cut_off = True
            self._line.caught(self._loop.time())
        if self._trip is not None and self._trip.is_reused:
            self._trip.is_doubtful = True  # rule 2; of no effect once the answer is handed out
        self.abort()


def watched(connector: aiohttp.BaseConnector) -> aiohttp.BaseConnector:
    """Have a connector make connections that keep these rules."""
    factory = functools.partial(_make_connection, asyncio.get_running_loop())
    connector._factory = factory  # noqa: SLF001 - aiohttp has no public way
    return connector


def _make_connection(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return UpstreamConnection(loop)


def make_trace() -> aiohttp.TraceConfig:
    """aiohttp says when it writes, right before it does."""
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_before_head)
    trace.on_request_chunk_sent.append(_before_chunk)
    return trace


async def _before_head(session: object, context: object, params: object) -> None:
    """The head is written now, unless a body follows: then with that."""
    context = current_call.get()
    if context.connection is not None and not context.unwritten_bytes:
        await context.connection.before_writing()


async def _before_chunk(session: object, context: object, params: aiohttp.TraceRequestChunkSentParams) -> None:
    context = current_call.get()
    if context.connection is not None and not context.is_sent:
        await context.connection.before_writing()
    context.unwritten_bytes -= len(params.chunk)
