"""What the faces that take several inputs share: how a call comes in, and how its answer is put together.

1. A call of k inputs counts as k for its owner's rate limit, or as one if it cannot be read; all of it comes in or
   nothing. It is read first for that: so no body may hold more than INPUTS_MAX.
2. Outputs are turned into pieces of the answer as they come, or, where a turn of the event loop has no more time for
   that, in the next ones. A piece is a copy, and what it was made from is dropped: an answer is held once.
3. What all calls hold of answers is bounded: beyond `bytes_max` a call ends with a 503.
4. A long answer leaves in parts, as its client reads it.
5. Any exception ends its own call alone, with an error in the face's own form.
6. Most calls have one input: these go the short way of `/v1/inference`.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from carpool.core.errors import CarpoolError, ClientLeft, QueueFull, without_frames
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, Caller, LimitVerdict, RequestTraces
from carpool.core.request import DONE, Request
from carpool.core.timers import SharedTurns
from carpool.face.http.exchange import JSON, Exchange, ExchangeWorker
from carpool.face.http.gateway import (
    check_encoding,
    check_media,
    headers_for_answer,
    options_in,
    preferences,
    with_trace,
)
from carpool.face.http.ids import acceptable_id, request_id
from carpool.face.http.problem import advice_lines
from carpool.face.intake import Intake, RequestGroup, ServedModel, as_error, new_request_id

logger = logging.getLogger("carpool.http")

# A longer answer leaves in parts of this size, so many in a turn.
PART_BYTES = 64 * 1024
PARTS_A_TURN = 16


class ListCall(msgspec.Struct, eq=False):
    """A call that was read."""

    model: ServedModel
    parameters: bytes
    values: Sequence[bytes]
    # What the face itself must remember of it.
    how: Any = None
    # Token ids in the call; and the tokens that its upstream reported.
    given_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # The id that the call itself has, for those without one in a header; and how long its client wants to wait.
    id: str = ""
    timeout_s: float | None = None


class Answers:
    """What all calls have together: the bytes that are held, and the turns in which answers are put together."""

    def __init__(self, bytes_max: int, turns: SharedTurns | None = None) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self.turns = SharedTurns() if turns is None else turns


class ListFace(ExchangeWorker):
    """Serves calls of one kind. What differs between faces is in the methods before `serve`."""

    # What an input is called in errors, and the path in traces.
    field = "inputs"
    route = ""
    # Rule 6. Not for answers that may take several turns to write, even for one input.
    has_short_way = True

    def __init__(self, intake: Intake, answers: Answers, traces: RequestTraces | None = None) -> None:
        self.intake = intake
        self.answers = answers
        self._begin_trace = None if traces is None else traces.begin
        self._singles = Singles(self)

    def check(self, exchange: Exchange) -> None:
        """Raise UnsupportedMedia for a body that has another form than those that `read` takes."""
        check_media(exchange)
        check_encoding(exchange.headers)

    def read(self, exchange: Exchange, rest: Any, caller: Caller) -> ListCall:
        """The call in a body; `rest` is what its path says. Raises an error of the tree."""
        raise NotImplementedError

    def work(self, exchange: Exchange, call: ListCall, own_id: str) -> "Work":
        """What waits for the outputs of a call, and answers it."""
        return Work(self, exchange, call, own_id)

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        """An input's part of the answer; raises UpstreamProtocolFault."""
        raise NotImplementedError

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        """The content type, and what comes before the pieces and after them; between them are commas."""
        raise NotImplementedError

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        """An error, in the face's own form. `detail` names the input, where it is that of one."""
        raise NotImplementedError

    def name_of(self, number: int) -> str:
        """What an input is called in an error."""
        return f"`{self.field}[{number}]`"

    def lines(self, exchange: Exchange, own_id: str, limits: bytes) -> bytes:
        """The header lines of any answer: its id, and `limits`, those of the rate limit that `/v1/inference` has."""
        return id_line(own_id) + limits

    def advice(self, error: CarpoolError) -> bytes:
        """The header lines that say what to do about an error."""
        return advice_lines(error)

    def serve(self, exchange: Exchange, rest: str = "") -> None:
        """One call, from its bytes to its answer."""
        own_id = new_request_id() if exchange.is_plain else request_id(exchange.headers)
        try:
            caller = exchange.sink.peer.caller or self.intake.identify(exchange.headers, exchange.sink.peer)
            self.take(exchange, rest, caller, own_id)
        except Exception as failure:
            self.refuse(exchange, as_error(failure), own_id)

    def take(self, exchange: Exchange, rest: Any, caller: Caller, own_id: str) -> None:
        """Read a call, and let it in (rule 1); raises what it is to be refused with."""
        try:
            if not exchange.is_plain:
                self.check(exchange)
            call: ListCall | CarpoolError = self.read(exchange, rest, caller)
        except CarpoolError as fault:
            without_frames(fault)
            call = fault
        exchange.body = b""  # of which only the inputs are needed from here on
        if caller.limit is None:
            self._ask(exchange, caller, call, own_id)
            return
        cost = len(call.values) if isinstance(call, ListCall) else 1
        entry = self.intake.enter(caller, cost)
        entered = partial(self._entered, exchange, caller, call, own_id)
        if entry is None:
            self.intake.when_known(caller, entered, cost)
        else:
            entered(entry)

    def _entered(
        self, exchange: Exchange, caller: Caller, call: ListCall | CarpoolError, own_id: str, entry: LimitVerdict
    ) -> None:
        """The rate limit, which all gateways may share, has let the call in, or refused it."""
        if exchange.has_left:
            return
        try:
            if isinstance(entry, CarpoolError):
                self.refuse(exchange, entry, own_id)
                return
            exchange.limit_lines = entry
            self._ask(exchange, caller, call, own_id)
        except Exception as failure:
            self.refuse(exchange, as_error(failure), own_id)

    def _ask(self, exchange: Exchange, caller: Caller, call: ListCall | CarpoolError, own_id: str) -> None:
        if isinstance(call, CarpoolError):
            self.refuse(exchange, call, own_id)
            return
        headers, options = exchange.headers, NO_OPTIONS
        if not exchange.is_plain:
            options = options_in(headers, preferences(headers.get(b"prefer", b"")))
        if call.timeout_s is not None and (options.timeout_s is None or call.timeout_s < options.timeout_s):
            options = replace(options, timeout_s=call.timeout_s)
        if len(call.values) == 1 and self.has_short_way:
            if self._begin_trace is not None and (trace := self._begin_trace(headers)) is not None:
                options = with_trace(options, trace)
            ticket, (value,), call.values = (exchange, call), call.values, ()
            ask, singles = self.intake.ask, self._singles
            request = ask(caller, call.model, call.parameters, value, own_id, singles, ticket, "", options)
            if request.phase != DONE:
                exchange.context, exchange.worker = request, self
                exchange.headers = headers_for_answer(headers)
            return
        own_id = own_id or acceptable_id(call.id) or new_request_id()
        begin = None if self._begin_trace is None else partial(self._begin_trace, headers)
        work = self.work(exchange, call, own_id)
        work.group = self.intake.ask_all(
            caller=caller,
            model=call.model,
            parameters=call.parameters,
            values=call.values,
            request_id=own_id,
            answer=work.answer,
            came=work.came,
            options=options,
            begin_trace=begin,
            route=self.route,
        )
        call.values = ()  # the requests have them
        if not work.group.is_over:
            exchange.context = work.group
            if work.group.came_in:  # else it may still be refused, and that is traced with its headers
                exchange.headers = headers_for_answer(headers)

    def client_left(self, exchange: Exchange) -> None:
        """The client of a single input left."""
        self.intake.cancel(exchange.context)

    def refuse(self, exchange: Exchange, error: CarpoolError, own_id: str, number: int | None = None) -> None:
        """Answer with an error; `number` is that of the input that failed, None for the whole call."""
        if exchange.is_unfinished:
            exchange.break_off()
            return
        exchange.sink.note_problem(exchange, error)
        detail = error.detail if number is None else f"{self.name_of(number)}: {error.detail}"
        # One set of limit lines: the error's own, where it has some.
        lines = self.lines(exchange, own_id, error.header_lines or exchange.limit_lines) + self.advice(error)
        exchange.respond(error.status, self.error_body(error, detail), JSON, lines)


class Singles:
    """Waits for the outcomes of calls with one input (core.request.Waiter)."""

    def __init__(self, face: ListFace) -> None:
        self._face = face
        # For traces.
        self.route = face.route

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Turn an outcome into the answer to its call."""
        face = self._face
        exchange, call = request.ticket
        if isinstance(outcome, ClientLeft):
            return
        try:
            if isinstance(outcome, CarpoolError):
                face.refuse(exchange, outcome, request.id)
                return
            piece = face.piece(call, 0, outcome)
            content_type, before, after = face.ends(call, request.id)
            lines = face.lines(exchange, request.id, exchange.limit_lines)
            if content_type is JSON:
                exchange.sink.answer(exchange, (before, piece, after), lines)
            else:
                exchange.respond(200, b"".join((before, piece, after)), content_type, lines)
        except Exception as failure:
            face.refuse(exchange, as_error(failure), request.id)


class Work(ExchangeWorker):
    """One call that came in: its outputs become pieces, and these an answer."""

    def __init__(self, face: ListFace, exchange: Exchange, call: ListCall, own_id: str) -> None:
        self._face = face
        self._exchange = exchange
        self._call = call
        self._own_id = own_id
        # Of the answer; written from the front.
        self._parts: list[Any] = [b""] * len(call.values)
        self._written = 0
        # How many outputs came and are not pieces yet, and the bytes that are held.
        self._unmade = 0
        self._has_all = False
        self._held = 0
        self._is_over = False
        self.group: RequestGroup | None = None
        exchange.worker = self

    def came(self, number: int, output: Output) -> None:
        """Make an output a piece, in this turn or a later one."""
        self._hold(len(output.value))
        self._unmade += 1
        self._face.answers.turns.now(partial(self._make, number, output), self)
        if self._is_over:
            raise ClientLeft("the call has failed")  # its client has the error: the group cancels the other requests

    def answer(self, outcomes: Sequence[Any], number: int | None) -> None:
        """All outputs came, or an error."""
        if self._is_over:
            return
        if outcomes and isinstance(outcomes[0], CarpoolError):
            self._fail(outcomes[0], number)
            return
        self._has_all = True
        if not self._unmade:
            self._finish()

    def _make(self, number: int, output: Output) -> None:
        if self._is_over:
            return
        try:
            self._parts[number] = self.piece(number, output)
        except Exception as failure:
            self._fail(as_error(failure), number)
            return
        self._unmade -= 1
        if self._has_all and not self._unmade:
            self._finish()

    def piece(self, number: int, output: Output) -> Any:
        """An output's part of the answer."""
        piece = self._face.piece(self._call, number, output)
        self._hold(len(piece) - len(output.value))
        return piece

    def _finish(self) -> None:
        try:
            self._respond()
        except Exception as failure:
            self._fail(as_error(failure), None)

    def _fail(self, error: CarpoolError, number: int | None) -> None:
        is_list = len(self._parts) > 1
        self.client_left(self._exchange)
        self._face.refuse(self._exchange, error, self._own_id, number if is_list else None)

    def _respond(self) -> None:
        exchange = self._exchange
        content_type, before, after = self._face.ends(self._call, self._own_id)
        lines = self._face.lines(exchange, self._own_id, exchange.limit_lines)
        if self._held <= PART_BYTES:
            parts = self._parts
            self._end()
            exchange.respond(200, before + b",".join(parts) + after, content_type, lines)
            return
        self._parts[0] = before + self._parts[0]
        self._parts[-1] += after
        exchange.begin(200, content_type, lines)
        self.writable(exchange)

    def writable(self, exchange: Exchange) -> None:
        """Write as much as its client reads, or as a turn may have."""
        parts = self._parts
        try:
            for _ in range(PARTS_A_TURN):
                if self._is_over:
                    return
                some, size = [], 0
                while self._written < len(parts) and size < PART_BYTES:
                    some.append(parts[self._written])
                    size += len(some[-1])
                    parts[self._written] = b""
                    self._written += 1
                is_last = self._written == len(parts)
                self._hold(-min(size, self._held))
                has_room = exchange.write(b",".join(some) + (b"" if is_last else b","))
                if is_last:
                    self._end()
                    exchange.end()
                    return
                if not has_room:
                    return
            asyncio.get_running_loop().call_soon(self.writable, exchange)
        except Exception:
            logger.exception("an answer could not be written to its end")
            self._end()
            exchange.break_off()

    def _hold(self, size: int) -> None:
        answers = self._face.answers
        self._held += size
        answers.held += size
        if size > 0 and answers.held > answers.bytes_max:
            raise QueueFull("too many large answers are on their way; ask for fewer at a time", retry_after_s=1)

    def client_left(self, exchange: Exchange) -> None:
        """The client has left: cancel its requests."""
        self._end()
        if self.group is not None:
            self.group.leave()

    def _end(self) -> None:
        """Nothing is held any more."""
        self._is_over = True
        self._face.answers.held -= self._held
        self._held, self._parts = 0, []


def id_line(own_id: str) -> bytes:
    """The header line with the id of a call."""
    return b"X-Request-Id: %b\r\n" % own_id.encode()
