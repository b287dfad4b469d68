"""KServe V2 (Open Inference Protocol) for clients: health, metadata, `infer`. Triton's clients work unchanged.

A call of n rows is n requests, which share batches with other clients'; it is answered when all of them are, and
counts as n. Errors are `{"error": text}`, as Triton's.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from carpool.core.errors import (
    CarpoolError,
    MethodNotAllowed,
    NotFound,
    QueueFull,
    UnknownModel,
    UnsupportedMedia,
    without_frames,
)
from carpool.core.outcome import Output
from carpool.core.ports import Caller, LimitVerdict, RequestTraces
from carpool.core.timers import TURN_S
from carpool.face.http.exchange import JSON, Exchange, ExchangeWorker
from carpool.face.http.faces import INFER, model_with_face
from carpool.face.http.gateway import (
    check_encoding,
    headers_for_answer,
    media_type,
    options_in,
    preferences,
    too_large_for,
)
from carpool.face.http.ids import acceptable_id, echo_line, given_id
from carpool.face.http.known_heads import is_of_page
from carpool.face.http.lists import Answers
from carpool.face.http.problem import problem_headers
from carpool.face.http.router import Router, split_target
from carpool.face.http.v2_wire import V2Answer, V2Call, parse_call, write_answer
from carpool.face.intake import Intake, RequestGroup, ServedModel, as_error, new_request_id
from carpool.face.octets import OCTETS
from carpool.face.tensor_rows import Row, join_rows, read_row
from carpool.version import __version__


class KServeV2Routes:
    """Serves everything below `/v2`."""

    def __init__(
        self,
        intake: Intake,
        *,
        is_up: Callable[[str], bool],
        answers: Answers,
        traces: RequestTraces | None = None,
    ) -> None:
        self._intake = intake
        # Whether requests for a model would be taken now.
        self._is_up = is_up
        self._answers = answers
        self._begin_trace = None if traces is None else traces.begin

    def add_to(self, router: Router) -> None:
        """Serve these paths."""
        router.mount(b"/v2", self.serve)

    def serve(self, exchange: Exchange) -> None:
        """Serve one exchange. Every error is answered in the protocol's form."""
        try:
            self._serve(exchange)
        except MethodNotAllowed as error:
            if exchange.method == b"OPTIONS":
                exchange.respond(204, b"", b"", problem_headers(error))
            else:
                respond_error(exchange, error)
        except Exception as failure:
            respond_error(exchange, as_error(failure))

    def _serve(self, exchange: Exchange) -> None:
        match split_target(exchange.target)[0].split(b"/")[2:]:
            case []:
                check_method(exchange, b"GET")
                about = {"name": "carpool", "version": __version__, "extensions": ["binary_tensor_data"]}
                exchange.respond(200, msgspec.json.encode(about))
            case [b"health", b"live"]:
                check_method(exchange, b"GET")
                exchange.respond(200, b'{"live":true}')
            case [b"health", b"ready"]:
                check_method(exchange, b"GET")
                is_ready = any(self._is_up(model.name) for model in self._intake.models())
                self._tell_if(exchange, is_ready, b'{"ready":true}')
            case [b"models", name, b"versions", version, *rest] if len(rest) <= 1:
                self._of_model(exchange, name, version.decode("latin-1"), rest)
            case [b"models", name, *rest] if len(rest) <= 1:
                self._of_model(exchange, name, None, rest)
            case _:
                raise nothing_here()

    def _of_model(self, exchange: Exchange, name: bytes, version: str | None, rest: list[bytes]) -> None:
        match rest:
            case []:
                check_method(exchange, b"GET")
                model = self._model(exchange, name, version)[1]
                exchange.respond(200, msgspec.json.encode(metadata_of(model)))
            case [b"ready"]:
                check_method(exchange, b"GET")
                model = self._model(exchange, name, version)[1]
                about = msgspec.json.encode({"name": model.name, "ready": True})
                self._tell_if(exchange, self._is_up(model.name), about)
            case [b"infer"]:
                check_method(exchange, b"POST")
                self._infer(exchange, *self._model(exchange, name, version))
            case _:
                raise nothing_here()

    def _tell_if(self, exchange: Exchange, is_ready: bool, about: bytes) -> None:
        if is_ready:
            exchange.respond(200, about)
        else:
            exchange.respond(503, b'{"error":"not ready"}')

    def _model(self, exchange: Exchange, name: bytes, version: str | None) -> tuple[Caller, ServedModel]:
        """The caller and the model of an exchange; raises the refusal."""
        caller = self._intake.identify(exchange.headers, exchange.sink.peer)
        model = model_with_face(self._intake, decoded(name), INFER, caller)
        if version is not None:
            check_version(model, version)
        return caller, model

    def _infer(self, exchange: Exchange, caller: Caller, model: ServedModel) -> None:
        try:
            call: V2Call | CarpoolError = read_call(exchange, model)
        except CarpoolError as fault:
            without_frames(fault)
            call = fault
        # Of a body only its rows are needed from here on.
        exchange.body = b""
        ask = partial(self._ask, exchange, caller, model, call)
        if caller.limit is None:
            ask()
            return
        # A call that cannot be read counts as one row.
        cost = len(call.rows) if isinstance(call, V2Call) else 1
        entry = self._intake.enter_many(caller, cost)
        if entry is None:
            self._intake.when_known(caller, partial(go_on, exchange, ask), cost)
        else:
            go_on(exchange, ask, entry)

    def _ask(self, exchange: Exchange, caller: Caller, model: ServedModel, call: V2Call | CarpoolError) -> None:
        if isinstance(call, CarpoolError):
            respond_error(exchange, call)
            return
        headers = exchange.headers
        options = options_in(headers, preferences(headers.get(b"prefer", b"")))
        if call.timeout_s is not None and (options.timeout_s is None or call.timeout_s < options.timeout_s):
            options = replace(options, timeout_s=call.timeout_s)
        begin = None if self._begin_trace is None else partial(self._begin_trace, headers)
        reply = HttpReply(self._answers, exchange, model, replace(call, rows=[]), len(call.rows) > 1)
        group = self._intake.ask_all(
            caller=caller,
            model=model,
            parameters=call.parameters,
            values=call.rows,
            request_id=given_id(headers) or acceptable_id(call.id) or new_request_id(),
            answer=reply.answer,
            came=reply.rows.came,
            options=options,
            begin_trace=begin,
            route=INFER,
        )
        if not group.is_over:
            reply.group = exchange.context = group
            if group.came_in:  # else it may still be refused, and that is traced with its headers
                exchange.headers = headers_for_answer(headers)


class HeldRows:
    """The outputs of a call's rows. What all calls hold of outputs is bounded (lists.py)."""

    def __init__(self, answers: Answers, model: ServedModel) -> None:
        self._answers = answers
        self._held = 0
        # Of the model, as the upstream tells it, or as it is configured.
        self.version = model.tensors.version if model.tensors else ""

    def came(self, number: int, output: Output) -> Row:
        """The output of one row."""
        if number == 0:
            self.version = output.call.model_version or self.version
        size = len(output.value)
        self._held += size
        self._answers.held += size
        if self._answers.held > self._answers.bytes_max:
            raise QueueFull("too many large answers are on their way; ask for fewer rows at a time", retry_after_s=1)
        return read_row(output.value)

    def let_go(self) -> None:
        """Nothing is held any more."""
        self._answers.held -= self._held
        self._held = 0


class HttpReply(ExchangeWorker):
    """Answers a call when its rows have their outcomes. An answer that is long is written over several turns."""

    def __init__(
        self, answers: Answers, exchange: Exchange, model: ServedModel, call: V2Call, is_several: bool
    ) -> None:
        self._answers = answers
        self.rows = HeldRows(answers, model)
        self._exchange = exchange
        self._model = model
        self._call = call
        self._is_several = is_several
        self._is_over = False
        self.group: RequestGroup | None = None
        exchange.worker = self

    def answer(self, outcomes: Sequence[Any], number: int | None) -> None:
        """Take the outputs of all rows, or the error of one, or of all."""
        first = outcomes[0]
        if self._is_over:
            return
        if isinstance(first, CarpoolError):
            self._fail(first, f"row {number}: " if number is not None and self._is_several else "")
            return
        try:
            steps = write_answer(
                self._model.name, self.rows.version, self._call.id, join_rows(outcomes), self._call.wanted
            )
        except Exception as failure:
            self._fail(as_error(failure))
        else:
            self._answers.turns.now(partial(self._go_on, steps))

    def _fail(self, error: CarpoolError, where: str = "") -> None:
        self._end()
        respond_error(self._exchange, error, where)

    def client_left(self, exchange: Exchange) -> None:
        """The client has left: cancel the requests of its rows."""
        self._end()
        if self.group is not None:
            self.group.leave()

    def _end(self) -> None:
        self._is_over = True
        self.rows.let_go()

    def _go_on(self, steps: Generator[None, None, V2Answer]) -> None:
        if self._is_over:
            return
        try:
            self._write(steps)
        except Exception as failure:  # whatever it is, the client must not be left waiting
            self._fail(as_error(failure))

    def _write(self, steps: Generator[None, None, V2Answer]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + TURN_S
        while loop.time() < until:
            try:
                next(steps)
            except StopIteration as end:
                self._send(end.value)
                return
        self._answers.turns.later(partial(self._go_on, steps))

    def _send(self, answer: V2Answer) -> None:
        exchange = self._exchange
        self._end()
        lines = echo_line(exchange.headers) + exchange.limit_lines
        if answer.header_length is None:
            exchange.respond(200, answer.body, JSON, lines)
        else:
            lines += b"Inference-Header-Content-Length: %d\r\n" % answer.header_length
            exchange.respond(200, answer.body, OCTETS, lines)


def go_on(exchange: Exchange, ask: Callable[[], None], entry: LimitVerdict) -> None:
    """The rate limit has let the call in, or refused it."""
    if exchange.has_left:
        return
    if isinstance(entry, CarpoolError):
        respond_error(exchange, entry)
        return
    exchange.limit_lines = entry
    try:
        ask()
    except Exception as failure:
        respond_error(exchange, as_error(failure))


def respond_error(exchange: Exchange, error: CarpoolError, where: str = "") -> None:
    """Answer with an error, in the protocol's form."""
    exchange.sink.note_problem(exchange, error)
    # One set of limit lines: the error's own, where it has some.
    limits = b"" if error.header_lines else exchange.limit_lines
    lines = echo_line(exchange.headers) + limits + problem_headers(error)
    exchange.respond(error.status, msgspec.json.encode({"error": where + error.detail}), JSON, lines)


def read_call(exchange: Exchange, model: ServedModel) -> V2Call:
    """The call in a body; raises an error of the tree."""
    check_encoding(exchange.headers)
    # Clients of this protocol send any Content-Type. Pages of other sites cannot send these two without a preflight.
    if is_of_page(exchange.headers) and media_type(exchange.headers.get(b"content-type", b"")) not in (JSON, OCTETS):
        raise UnsupportedMedia("send the header `Content-Type: application/json`")
    if len(exchange.body) > model.body_bytes_max:
        raise too_large_for(model)
    return parse_call(exchange.headers, exchange.body)


def check_method(exchange: Exchange, method: bytes) -> None:
    """Refuse any other."""
    taken = (b"GET", b"HEAD", b"OPTIONS") if method == b"GET" else (method, b"OPTIONS")
    if exchange.method not in taken[:-1]:
        allow = b", ".join(taken).decode()
        raise MethodNotAllowed(f"this path takes {allow}", allow=allow)


def nothing_here() -> NotFound:
    """The error for other paths."""
    return NotFound("there is nothing at this path; GET /openapi.json lists what there is")


def decoded(segment: bytes) -> str:
    """A segment of a path as text."""
    return unquote(segment.decode("latin-1"))


def check_version(model: ServedModel, version: str) -> None:
    """Raise UnknownModel unless this version is served."""
    served = model.tensors.version if model.tensors is not None else ""
    if version != served:
        raise UnknownModel(
            f"of this model version {served} is served; name it, or none"
            if served
            else "versions of this model are not told apart here; name none"
        )


def metadata_of(model: ServedModel) -> dict[str, Any]:
    """What is known of a model: its input where that is configured. Its outputs are the upstream's to tell."""
    tensors = model.tensors
    assert tensors is not None
    shape = [-1, *tensors.shape[1:]] if tensors.shape else [-1, -1]
    known = {"name": tensors.name, "datatype": tensors.datatype, "shape": shape}
    is_known = bool(tensors.name and tensors.datatype)
    return {
        "name": model.name,
        **({"versions": [tensors.version]} if tensors.version else {}),
        "platform": "carpool",
        "inputs": [known] if is_known else [],
        "outputs": [],
    }
