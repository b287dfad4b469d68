"""KServe V2 (Open Inference Protocol) for clients: health, metadata, `infer`. Triton's clients work unchanged.

A call of n rows is n requests, which share batches with other clients'; it is answered when all of them are, and
counts as n. Errors are `{"error": text}`, as Triton's.
"""

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from carpool.core.errors import CarpoolError, UnknownModel, UnsupportedMedia
from carpool.core.outcome import Output
from carpool.core.ports import Caller, RequestTraces
from carpool.core.timers import TURN_S
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import INFER, model_with_face
from carpool.face.http.gateway import check_encoding, check_size, media_type
from carpool.face.http.ids import echo_line, given_id
from carpool.face.http.known_heads import is_of_page
from carpool.face.http.lists import Answers, ListCall, ListFace, Work
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
        """Serve these paths. Every error is answered in the protocol's form."""
        own = Router(lambda exchange, error: self.refuse(exchange, error, ""))
        about = {"name": "carpool", "version": __version__, "extensions": ["binary_tensor_data"]}
        own.add(b"GET", b"/v2", lambda exchange, _: exchange.respond(200, msgspec.json.encode(about)))
        own.add(b"GET", b"/v2/health/live", lambda exchange, _: exchange.respond(200, b'{"live":true}'))
        own.add(b"GET", b"/v2/health/ready", self.ready)
        for path in (b"/v2/models/*", b"/v2/models/*/versions/*"):
            own.add(b"GET", path, self.metadata)
            own.add(b"GET", path + b"/ready", self.model_ready)
            own.add(b"POST", path + b"/infer", self.serve)
        router.mount(b"/v2", own.serve)

    def ready(self, exchange: Exchange, _: str) -> None:
        """`GET /v2/health/ready`."""
        is_ready = any(self._is_up(model.name) for model in self.intake.models())
        _tell_if(exchange, is_ready, b'{"ready":true}')

    def metadata(self, exchange: Exchange, rest: str) -> None:
        """`GET /v2/models/NAME`."""
        exchange.respond(200, msgspec.json.encode(metadata_of(self._model(exchange, rest)[1])))

    def model_ready(self, exchange: Exchange, rest: str) -> None:
        """`GET /v2/models/NAME/ready`."""
        model = self._model(exchange, rest)[1]
        _tell_if(exchange, self._is_up(model.name), msgspec.json.encode({"name": model.name, "ready": True}))

    def serve(self, exchange: Exchange, rest: str = "") -> None:
        """`POST /v2/models/NAME/infer`."""
        try:
            caller, model = self._model(exchange, rest)
            self.take(exchange, model, caller, given_id(exchange.headers) or "")
        except Exception as failure:
            self.refuse(exchange, as_error(failure), "")

    def _model(self, exchange: Exchange, rest: str) -> tuple[Caller, ServedModel]:
        """The caller and the model of an exchange, whose path has a name and perhaps a version; raises the refusal."""
        caller = self.intake.identify(exchange.headers, exchange.sink.peer)
        model = model_with_face(self.intake, rest, INFER, caller)
        segments = split_target(exchange.target)[0].split(b"/")
        if segments[4:5] == [b"versions"]:
            check_version(model, unquote_to_bytes(segments[5]).decode("latin-1"))
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


def _tell_if(exchange: Exchange, is_ready: bool, about: bytes) -> None:
    exchange.respond(200 if is_ready else 503, about if is_ready else b'{"error":"not ready"}')


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
