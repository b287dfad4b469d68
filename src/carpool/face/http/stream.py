"""A WebSocket at `/v1/stream`: many requests in flight on one connection.

Rules, each with a test:

1. A message has a request, or a list of them, each with an id that the client chose. They may be answered in any
   order, each with that id and an `output` or an `error`; the outcomes of one turn of the event loop leave in one
   message, of MESSAGE_BYTES bytes about.
2. An error of one request, a defect too, is the answer to that request alone: a problem object in `error`. So is that
   of one that cannot be understood: it harms none of those beside it.
3. The credential is shown once, with the upgrade or by a ticket. It counts for each request, and is checked once a
   second: when it is revoked or expired, the stream ends (3000), and so do the requests that it has in flight.
4. Rate limits, permits and shedding are those of `/v1/inference`, for each request.
5. When a client leaves, all its requests are cancelled.
6. A client that does not read gets no new work done: nothing is read from it, and the connection's own rules cut it
   off. The work for one stream, and for all together, in a turn of the event loop is bounded; what else the client sent
   waits for a later turn, and nothing more is read from it until then.
7. Limits: bytes of a message (1009) and its fragments (1008), the time that it may take to come (3008), requests in
   flight (a 429 each), streams of this process (503) and of an owner (429). Compression is not offered.
8. Pings are answered. A client that is silent for PING_S gets a ping, and is cut off after SILENT_S; a stream that
   asks for nothing for `idle_timeout_s` ends (3008).
9. A page of another origin is refused (403) unless `gateway.cors_origins` has it. A client without `Origin` is
   no browser.
10. At a drain nothing new is begun; when its last answer has left, the stream ends (1012) and says when to come back.
"""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, SERVER
from websockets.protocol import Protocol as Frames

from carpool.core.errors import (
    CarpoolError,
    Draining,
    InternalError,
    Malformed,
    RateLimited,
    Unauthorized,
    without_frames,
)
from carpool.core.ports import NO_OPTIONS, Caller, LimitVerdict, RequestOptions
from carpool.core.problem import problem_json
from carpool.core.request import DONE, Request
from carpool.core.tensors import Data
from carpool.core.timers import TURN_S
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.gateway import too_large_for, with_trace
from carpool.face.http.wire import (
    CLIENT_ID_CHARS_MAX,
    Parameters,
    Pieces,
    body_fault,
    canonical_parameters,
    checked_input,
)
from carpool.face.intake import new_request_id

if TYPE_CHECKING:
    from carpool.face.http.streams import WebSocketStreams

logger = logging.getLogger("carpool.http")

# A client that is silent for so long gets a ping; and is cut off after so long.
PING_S = 20.0
SILENT_S = 60.0
# When to come back after a drain.
COME_BACK_S = 1
# Work for one stream in a turn of the event loop: requests and frames, and seconds, for one may take as long as many;
# bytes of frames that are looked at together.
STEPS_A_TURN = 64
SLICE_BYTES = 2 * 1024
# A message with answers is not made longer than this, unless it has one alone.
MESSAGE_BYTES = 256 * 1024
FRAGMENTS_MAX = 1024
# Why a stream ends: RFC 6455, and IANA's registry.
INVALID_TEXT, POLICY, DEFECT, RESTART, TRY_LATER, UNAUTHORIZED, TIMEOUT = 1007, 1008, 1011, 1012, 1013, 3000, 3008

OwnId = Annotated[str, Meta(min_length=1, max_length=128)] | Annotated[int, Meta(ge=-(2**53), le=2**53)]
# Of requests in one message.
REQUESTS_MAX = 1024
_FAULTS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_NO_HEADERS: dict[bytes, bytes] = {}
# Frames hold clients' data, and the library writes them to its log at debug level: this logger is off.
_silent = logging.getLogger("carpool.frames")
_silent.disabled = True


class StreamCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One request in a message."""

    id: OwnId
    input: Raw
    model: str | None = None
    parameters: Parameters | UnsetType = UNSET
    client_id: Annotated[str, Meta(max_length=CLIENT_ID_CHARS_MAX)] | None = None
    timeout_ms: Annotated[int, Meta(gt=0, lt=10**9)] | None = None


class BadCall(NamedTuple):
    """A request that could not be understood; `id` is None where it had no usable one."""

    id: str | int | None
    error: CarpoolError


class _Named(msgspec.Struct):
    id: OwnId | None = None


# A list of up to REQUESTS_MAX; decoding stops at the next element: a long list of zeros would take a tenth of a second.
_Parts = msgspec.defstruct(
    "_Parts", [(f"part_{n}", Raw, UNSET) for n in range(REQUESTS_MAX)], array_like=True, forbid_unknown_fields=True
)
_decode_calls = msgspec.json.Decoder(StreamCall | list[StreamCall]).decode
_decode_parts = msgspec.json.Decoder(_Parts).decode
_decode_call = msgspec.json.Decoder(StreamCall).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_encode = msgspec.json.Encoder().encode


class StreamLimits(msgspec.Struct, frozen=True):
    """What a stream may do."""

    # In flight on one stream; each beyond gets a 429.
    requests_max: int = 256
    # One message, with all requests in it; as long as a body may be.
    message_bytes_max: int = 1024 * 1024
    # A stream on which nothing is asked for this long is closed: it holds a place that others want.
    idle_timeout_s: float = 300.0


class WebSocketStream(ExchangeWorker):
    """One stream."""

    def __init__(self, streams: "WebSocketStreams", exchange: Exchange, owner: str, shown: dict[bytes, bytes]) -> None:
        self._streams = streams
        self._exchange = exchange
        self.owner = owner
        self._shown = shown
        self._protocol = Frames(SERVER, state=OPEN, max_size=streams.limits.message_bytes_max, logger=_silent)
        # Requests without an answer, by the client's id; None for one that waits for admission.
        self._asked: dict[str | int, Request | None] = {}
        # What came and waits for its turn: bytes, and requests of the message that is being worked on.
        self._unparsed: deque[bytes | memoryview] = deque()
        self._calls: deque[StreamCall | BadCall] = deque()
        # The fragments of a message so far, how many there were, and what came since the last whole one.
        self._message = bytearray()
        self._fragments = 0
        self._partial_bytes = 0
        self._partial_since = 0.0
        # Answers that leave with this turn, each with its bytes.
        self._out: list[tuple[int, Pieces]] = []
        # The stream waits for a turn to work.
        self._is_due = False
        self._is_behind = False
        self._is_over = False
        self._heard = self._used = self._pinged = streams.clock()
        exchange.context = self
        exchange.worker = self

    # What comes.

    def received(self, data: bytes) -> None:
        """Take bytes from the client."""
        self._heard = self._streams.clock()
        self._unparsed.append(data)
        if not self._is_due and not self._is_behind:
            self._is_due = True
            self._streams.turns.now(self._work)
        if self._is_due:
            self._exchange.sink.pause_reading()

    def _work_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._streams.turns.later(self._work)

    def _work(self) -> None:
        """Do some of what there is to do (rule 6), and the rest in a later turn."""
        self._is_due = False
        try:
            steps, clock = STEPS_A_TURN, self._streams.clock
            until = clock() + TURN_S
            while steps > 0 and clock() < until and not self._is_over and not self._is_behind:
                if self._calls:
                    steps -= 1
                    self._begin(self._calls.popleft())
                elif self._unparsed:
                    steps -= self._parse(self._unparsed.popleft())
                else:
                    self._exchange.sink.pump()
                    self.end_if_drained()  # what came before the drain may have asked for no answer
                    return
        except Exception:
            logger.exception("a stream failed on what its client sent")
            self.close(DEFECT, "the gateway failed")
        if not self._is_over:
            self._exchange.sink.pause_reading()
            if not self._is_behind:
                self._work_later()

    def _parse(self, data: bytes | memoryview) -> int:
        """Take frames out of some bytes; returns how many."""
        if len(data) > SLICE_BYTES:
            data = memoryview(data)
            self._unparsed.appendleft(data[SLICE_BYTES:])
            data = data[:SLICE_BYTES]
        protocol = self._protocol
        protocol.receive_data(bytes(data))
        frames = cast(list[Frame], protocol.events_received())  # there is no handshake in it
        for frame in frames:
            if frame.opcode < Opcode.CLOSE:
                self._take(bytes(frame.data), frame.fin)
        self._count_partial(any(frame.fin and frame.opcode < Opcode.CLOSE for frame in frames))
        self._send()
        return 1 + len(frames)

    def _take(self, data: bytes, is_last: bool) -> None:
        """One fragment of a message, which is mostly the whole."""
        if self._is_over:
            return
        if is_last and not self._message:
            message = data
        else:
            self._message += data
            self._fragments += 1
            if self._fragments > FRAGMENTS_MAX:
                self.close(POLICY, "too many fragments")
            if not is_last:
                return
            message = bytes(self._message)
        self._message = bytearray()
        self._fragments = 0
        if not message.isascii():
            try:
                message.decode()
            except UnicodeDecodeError:
                self.close(INVALID_TEXT, "not UTF-8")
                return
        self._calls.extend(decode_message(message))

    def _count_partial(self, is_one_whole: bool) -> None:
        """Count the bytes of an incomplete message among the partly received bodies."""
        state = self._streams.state
        held = 0 if self._is_over else len(self._protocol.reader.buffer) + len(self._message)
        state.receiving_bytes += held - self._partial_bytes
        self._partial_bytes = held
        if not held:
            self._partial_since = 0.0
        elif is_one_whole or not self._partial_since:
            self._partial_since = self._heard
        if held and state.receiving_bytes > state.limits.receiving_bytes_max:
            self.close(TRY_LATER, "too many large messages are being received")

    # What is asked.

    def _begin(self, call: StreamCall | BadCall) -> None:
        """One request: let it in, or say why not."""
        if isinstance(call, BadCall):
            # Its id may be that of another request in flight, which must not be forgotten for it.
            self.refuse(None if call.id in self._asked else call.id, call.error)
            return
        own_id, streams = call.id, self._streams
        self._used = self._heard
        if own_id in self._asked:
            # The request in flight will be answered by that id: this one cannot be.
            self.refuse(None, Malformed("the `id` of a request is that of another one in flight; choose a new one"))
            return
        most = streams.limits.requests_max
        if streams.is_draining:
            self.refuse(own_id, Draining("this gateway is shutting down; ask another", retry_after_s=COME_BACK_S))
        elif len(self._asked) >= most:
            too_many = f"at most {most} requests may be in flight on one stream; wait for an answer first"
            self.refuse(own_id, RateLimited(too_many, retry_after_s=1))
        else:
            self._enter(call)

    def _enter(self, call: StreamCall) -> None:
        """Identify the caller, and check its rate limit."""
        caller = self._identified()
        if isinstance(caller, CarpoolError):
            if not self._is_over:
                self.refuse(call.id, caller)
            return
        entry: LimitVerdict | None = b"" if caller.limit is None else self._streams.intake.enter(caller)
        if entry is None:
            self._asked[call.id] = None
            self._streams.intake.when_known(caller, partial(self._go_on, call, caller))
        else:
            self._go_on(call, caller, entry)

    def _identified(self) -> Caller | CarpoolError:
        """The caller; or why it is not known right now. A credential that is not valid any more ends the stream."""
        try:
            return self._streams.intake.identify(self._shown, self._exchange.sink.peer)
        except CarpoolError as error:
            without_frames(error)
            if isinstance(error, Unauthorized):
                self.close(UNAUTHORIZED, "the credential is not valid any more")
            return error

    def _go_on(self, call: StreamCall, caller: Caller, entry: LimitVerdict) -> None:
        """The rate limit has let the request in, or refused it."""
        if self._is_over:
            return
        own_id = call.id
        try:
            if isinstance(entry, CarpoolError):
                raise entry
            request = self._ask(call, caller)
        except CarpoolError as error:
            self.refuse(own_id, error)
        except Exception:
            logger.exception("a stream failed on a request")
            self.refuse(own_id, InternalError("the gateway failed on this request"))
        else:
            if request.phase != DONE:
                self._asked[own_id] = request

    def _ask(self, call: StreamCall, caller: Caller) -> Request:
        streams = self._streams
        intake = streams.intake
        model = intake.default_model if call.model is None else intake.model(call.model, caller)
        parameters = b"" if call.parameters is UNSET else canonical_parameters(call.parameters)
        value = checked_input(call.input, "input")
        if len(value) + len(parameters) > model.body_bytes_max:
            raise too_large_for(model)
        options = NO_OPTIONS if call.timeout_ms is None else RequestOptions(call.timeout_ms / 1000)
        if streams.traces is not None and (trace := streams.traces.begin(_NO_HEADERS)) is not None:
            options = with_trace(options, trace)
        own_id, client_id = new_request_id(), call.client_id or ""
        return intake.ask(caller, model, parameters, value, own_id, streams, (self, call.id), client_id, options)

    # What is answered.

    def answer(self, own_id: str | int | None, pieces: Pieces) -> None:
        """Let an answer leave with this turn."""
        if self._is_over:
            return
        # Measured here, where a defect harms one answer, and not where answers are joined.
        size = len(pieces[0]) + memoryview(pieces[1]).nbytes + len(pieces[2])
        self.forget(own_id)
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append((size, pieces))

    def refuse(self, own_id: str | int | None, error: CarpoolError, request_id: str = "") -> None:
        """Let an error leave with this turn."""
        self._exchange.sink.note_problem(self._exchange, error)
        if self._streams.traces is not None and (own_id is None or self._asked.get(own_id) is None):
            self._streams.traces.refused(b"POST", b"", _NO_HEADERS, error, "")  # it never came in
        self.answer(own_id, error_pieces(own_id, error, request_id or new_request_id()))

    def forget(self, own_id: str | int | None) -> None:
        """The request with this id is answered, or was cancelled."""
        if own_id is not None:
            self._asked.pop(own_id, None)

    def _flush(self) -> None:
        """Send the answers of a turn (rule 1)."""
        self._used = self._streams.clock()
        answers, self._out = self._out, []
        parts: list[Data] = []
        held = 0
        for size, pieces in answers:
            if parts and held + size > MESSAGE_BYTES:
                self._say(parts)
                parts, held = [], 0
            parts += (b"," if parts else b"[", *pieces)
            held += size
        if parts:
            self._say(parts)
        self.end_if_drained()

    def _say(self, parts: list[Data]) -> None:
        if not self._is_over:
            parts.append(b"]")
            self._protocol.send_text(b"".join(parts))
            self._send()

    def _send(self) -> None:
        """Write what the protocol has to say: answers, pongs, its last word."""
        if self._is_over:
            return
        data = b"".join(self._protocol.data_to_send())
        if data and not self._exchange.write(data):
            self._is_behind = True
        if self._protocol.state is not OPEN:
            self._end()
            self._exchange.end()

    def writable(self, exchange: Exchange) -> None:
        """The client has read on."""
        self._is_behind = False
        self._work_later()

    # The end.

    def look(self, now: float) -> None:
        """Check that the client is still there, and its credential still valid (rules 3, 7, 8)."""
        limits, streams = self._streams.limits, self._streams
        if not self._is_over:
            self._identified()
        if self._is_over or self._is_behind:
            return  # it is we who do not read
        silent_s = now - self._heard
        if self._partial_since and now - self._partial_since >= streams.state.limits.receive_timeout_s:
            self.close(TIMEOUT, "a message did not arrive in time")
        elif not self._asked and now - self._used >= limits.idle_timeout_s:
            self.close(TIMEOUT, "nothing was asked for")
        elif silent_s >= SILENT_S:
            self._exchange.break_off()
        elif silent_s >= PING_S and now - self._pinged >= PING_S:
            self._pinged = now
            self._protocol.send_ping(b"")
            self._send()

    def end_if_drained(self) -> None:
        """End the stream if this process drains and all answers have left (rule 10)."""
        if self._streams.is_draining and not (self._asked or self._out or self._calls or self._unparsed):
            self.close(RESTART, f"retry_after_s={COME_BACK_S}")

    def close(self, code: int, reason: str) -> None:
        """End the stream with a close frame."""
        if not self._is_over and self._protocol.state is OPEN:
            self._protocol.send_close(code, reason)
            self._send()

    def client_left(self, exchange: Exchange) -> None:
        """The connection is gone."""
        self._end()

    def _end(self) -> None:
        """The stream is over: drop what waits, and cancel its requests (rule 5)."""
        if self._is_over:
            return
        self._is_over = True
        self._count_partial(is_one_whole=True)
        asked, self._asked = self._asked, {}
        self._unparsed.clear()
        self._calls.clear()
        self._message.clear()
        self._out = []
        self._protocol.parser.close()  # it refers to the protocol, which holds what came of a message
        self._streams.closed(self)
        for request in asked.values():
            if request is not None:
                self._streams.intake.cancel(request)


def decode_message(message: bytes) -> list[StreamCall | BadCall]:
    """The requests in a message; one BadCall if nothing can be made of it at all."""
    try:
        calls = _decode_calls(message)
    except _FAULTS:
        return _one_by_one(message)
    if isinstance(calls, StreamCall):
        return [calls]
    if len(calls) > REQUESTS_MAX:
        return [BadCall(None, Malformed(f"a message may have {REQUESTS_MAX} requests at most; send several"))]
    return list(calls)


def _one_by_one(message: bytes) -> list[StreamCall | BadCall]:
    """The same for a message with a fault in it: its valid requests are still served."""
    if message.lstrip()[:1] != b"[":
        return [_decode_one(Raw(message))]
    try:
        parts = _decode_parts(message)
    except _FAULTS as failure:
        return [BadCall(None, Malformed(body_fault(failure)))]
    return [_decode_one(part) for part in msgspec.structs.astuple(parts) if part is not UNSET]


def _decode_one(part: Raw) -> StreamCall | BadCall:
    try:
        return _decode_call(part)
    except _FAULTS as failure:
        fault = Malformed(body_fault(failure, StreamCall))
    try:
        return BadCall(_decode_named(part).id, fault)
    except _FAULTS:
        return BadCall(None, fault)


def output_pieces(own_id: str | int, pieces: Pieces) -> Pieces:
    """An answer: what `POST /v1/inference` says, with the client's own id."""
    before, output, after = pieces
    return b'{"id":%b,%b' % (_encode(own_id), before[1:]), output, after


def error_pieces(own_id: str | int | None, error: CarpoolError, request_id: str) -> Pieces:
    """An error: a problem object, and when it is worth to ask again."""
    retry = b"" if error.retry_after_s is None else b',"retry_after_s":%d' % error.retry_after_s
    return b'{"id":%b,"error":' % _encode(own_id), problem_json(error, request_id), b"%b}" % retry
