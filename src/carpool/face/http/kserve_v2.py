"""KServe V2 (Open Inference Protocol) for clients: health, metadata, `infer`. Triton's clients work unchanged.

A call of n rows is n requests, which share batches with other clients'; it is answered when all of them are, and
counts as n. Errors are `{"error": text}`, as Triton's.
"""

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec

from carpool.core.errors import CarpoolError, MethodNotAllowed, NotFound, UnknownModel, UnsupportedMedia
from carpool.core.outcome import Output
from carpool.core.ports import Caller, RequestTraces
from carpool.core.timers import TURN_S
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import INFER, model_with_face
from carpool.face.http.gateway import check_encoding, media_type
from carpool.face.http.ids import echo_line, given_id
from carpool.face.http.known_heads import is_of_page
from carpool.face.http.list_bodies import check_size
from carpool.face.http.lists import Answers, ListCall, ListFace, Work
from carpool.face.http.problem import problem_headers
from carpool.face.http.router import Router, split_target
from carpool.face.http.v2_wire import V2Answer, parse_call, write_answer
from carpool.face.intake import Intake, ServedModel, as_error
from carpool.face.octets import OCTETS
from carpool.face.tensor_rows import Row, join_rows, read_row
from carpool.version import __version__


class KServeV2Routes(ListFace):
    """Serves everything below `/v2`."""

    route = INFER
    has_short_way = False

    def __init__(
        self,
        intake: Intake,
        *,
        is_up: Callable[[str], bool],
        answers: Answers,
        traces: RequestTraces | None = None,
    ) -> None:
        super().__init__(intake, answers, traces)
        # Whether requests for a model would be taken now.
        self._is_up = is_up

    def add_to(self, router: Router) -> None:
        """Serve these paths."""
        router.mount(b"/v2", self.serve)

    def serve(self, exchange: Exchange, rest: str = "") -> None:
        """Serve one exchange. Every error is answered in the protocol's form."""
        try:
            self._serve(exchange)
        except MethodNotAllowed as error:
            if exchange.method == b"OPTIONS":
                exchange.respond(204, b"", b"", problem_headers(error))
            else:
                self.refuse(exchange, error, "")
        except Exception as failure:
            self.refuse(exchange, as_error(failure), "")

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
                is_ready = any(self._is_up(model.name) for model in self.intake.models())
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
                caller, model = self._model(exchange, name, version)
                self.take(exchange, model, caller, given_id(exchange.headers) or "")
            case _:
                raise nothing_here()

    def _tell_if(self, exchange: Exchange, is_ready: bool, about: bytes) -> None:
        if is_ready:
            exchange.respond(200, about)
        else:
            exchange.respond(503, b'{"error":"not ready"}')

    def _model(self, exchange: Exchange, name: bytes, version: str | None) -> tuple[Caller, ServedModel]:
        """The caller and the model of an exchange; raises the refusal."""
        caller = self.intake.identify(exchange.headers, exchange.sink.peer)
        model = model_with_face(self.intake, decoded(name), INFER, caller)
        if version is not None:
            check_version(model, version)
        return caller, model

    def check(self, exchange: Exchange) -> None:
        """Take any Content-Type, as clients of this protocol send any.

        But a page of another site has to send one of these two, which need a preflight.
        """
        headers = exchange.headers
        check_encoding(headers)
        if is_of_page(headers) and media_type(headers.get(b"content-type", b"")) not in (JSON, OCTETS):
            raise UnsupportedMedia("send the header `Content-Type: application/json`")

    def read(self, exchange: Exchange, rest: ServedModel, caller: Caller) -> ListCall:
        """The rows of a call; `how` is what it asks for."""
        check_size(exchange, rest)
        call = parse_call(exchange.headers, exchange.body)
        return ListCall(rest, call.parameters, call.rows, call.wanted, id=call.id, timeout_s=call.timeout_s)

    def work(self, exchange: Exchange, call: ListCall, own_id: str) -> Work:
        """Outputs are joined when all of them are there."""
        return InferWork(self, exchange, call, own_id)

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        """As Triton's."""
        return msgspec.json.encode({"error": detail})

    def name_of(self, number: int) -> str:
        """Inputs are rows."""
        return f"row {number}"

    def lines(self, exchange: Exchange, own_id: str, limits: bytes) -> bytes:
        """An id is echoed where the client sent one in a header."""
        return echo_line(exchange.headers) + limits


class InferWork(Work):
    """Answers a call when its rows have their outcomes. An answer that is long is written over several turns."""

    def __init__(self, face: ListFace, exchange: Exchange, call: ListCall, own_id: str) -> None:
        super().__init__(face, exchange, call, own_id)
        self._version = call.model.tensors.version if call.model.tensors else ""

    def piece(self, number: int, output: Output) -> Row:
        """The output of one row."""
        if number == 0:
            self._version = output.call.model_version or self._version
        return read_row(output.value)

    def _respond(self) -> None:
        call, outputs = self._call, join_rows(self._parts)
        steps = write_answer(call.model.name, self._version, call.id, outputs, call.how)
        self._face.answers.turns.now(partial(self._write, steps))

    def _write(self, steps: Generator[None, None, V2Answer]) -> None:
        if self._is_over:
            return
        time = asyncio.get_running_loop().time
        until = time() + TURN_S
        try:
            while time() < until:
                try:
                    next(steps)
                except StopIteration as end:
                    self._send(end.value)
                    return
            self._face.answers.turns.later(partial(self._write, steps))
        except Exception as failure:  # whatever it is, the client must not be left waiting
            self._fail(as_error(failure), None)

    def _send(self, answer: V2Answer) -> None:
        exchange = self._exchange
        self._end()
        lines = self._face.lines(exchange, self._own_id, exchange.limit_lines)
        if answer.header_length is None:
            exchange.respond(200, answer.body, JSON, lines)
        else:
            lines += b"Inference-Header-Content-Length: %d\r\n" % answer.header_length
            exchange.respond(200, answer.body, OCTETS, lines)


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
