"""The routes for clients: inference, predict, tasks. They only translate; `face/intake.py` does the rest.

The hot path is `inference` → `Intake.ask` … `ParkedReplies.settled`. For each request it makes one Request and one
Exchange, and no task, future, timer, lock or log line.
"""

import logging
import re
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from carpool.core.clock import rfc3339
from carpool.core.errors import (
    CallbackDenied,
    CarpoolError,
    ClientLeft,
    InternalError,
    Malformed,
    TooLarge,
    UnsupportedMedia,
)
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, Caller, LimitVerdict, RequestOptions, RequestTraces
from carpool.core.request import DONE, Request
from carpool.core.task import StoredTask
from carpool.core.tensors import Data
from carpool.core.trace import Trace
from carpool.face.http.exchange import JSON, Exchange, ExchangeWorker
from carpool.face.http.ids import echo_line, request_id
from carpool.face.http.known_heads import is_of_page
from carpool.face.http.problem import respond_problem
from carpool.face.http.router import Router, query_of
from carpool.face.http.wire import (
    InferenceAnswers,
    Pieces,
    base64_pieces,
    canonical_parameters,
    checked_input,
    decode_inference,
    decode_predict,
    latency_ms,
    predict_pieces,
)
from carpool.face.intake import WAIT_MS_MAX, Intake, ServedModel, new_request_id
from carpool.face.octets import OCTETS, Octets, base64_bytes, octets_in, wants_octets

logger = logging.getLogger("carpool.http")

_encode = msgspec.json.Encoder().encode
FORM = b"application/x-www-form-urlencoded"
# How a body must say that it is a task.
ASYNC = b'"async"'
TASK_ID = re.compile(r"[0-9a-f]{32}\Z").match


def no_callbacks(url: str) -> str:
    """Refuse every `callback_url`, where no webhooks are sent."""
    raise CallbackDenied("this gateway sends no webhooks; poll the task instead")


class ParkedReplies:
    """Waits for the outcomes of synchronous requests and answers their exchanges."""

    def __init__(self, form: Callable[[Request, Output], Pieces], route: str) -> None:
        self._form = form
        # For traces.
        self.route = route

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Turn an outcome into the response of the exchange that is parked for it."""
        exchange: Exchange = request.ticket
        try:
            if isinstance(outcome, Output):
                form = self._form
                lines = exchange.limit_lines
                if not exchange.is_plain:
                    lines += echo_line(exchange.headers)
                exchange.sink.answer(exchange, form(request, outcome), lines)
            elif not isinstance(outcome, ClientLeft):
                respond_problem(exchange, outcome, request.id)
        except Exception:
            self.failed(exchange, request)

    def failed(self, exchange: Exchange, request: Request) -> None:
        """Log a defect, and answer the client with an error."""
        logger.exception("an answer could not be written")
        if exchange.response is None:
            respond_problem(exchange, InternalError("the gateway failed on this request"), request.id)


class OctetReplies(ParkedReplies):
    """The same for clients that would rather have bytes than JSON."""

    def __init__(
        self,
        form: Callable[[Request, Output], Pieces],
        route: str,
        find: Callable[[Data], Octets | None] = octets_in,
    ) -> None:
        super().__init__(form, route)
        self._find = find

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Answer with the output's own bytes, if it has some."""
        try:
            octets = self._find(outcome.value) if isinstance(outcome, Output) else None
            if octets is None:
                super().settled(request, outcome)
                return
            exchange: Exchange = request.ticket
            lines = b"X-Request-Id: %b\r\nX-Latency-Ms: %d\r\n" % (request.id.encode(), latency_ms(request))
            if octets.datatype:
                shape = ",".join(map(str, octets.shape))
                lines += b"X-Tensor-Datatype: %b\r\nX-Tensor-Shape: %b\r\n" % (octets.datatype.encode(), shape.encode())
            exchange.respond(200, (octets.data,), OCTETS, lines + exchange.limit_lines)
        except Exception:
            self.failed(request.ticket, request)


class GatewayRoutes(ExchangeWorker):
    """Serves clients."""

    def __init__(
        self,
        intake: Intake,
        openapi: bytes,
        traces: RequestTraces | None = None,
        # The `callback_url` of a task as it is kept; raises CallbackDenied.
        check_callback: Callable[[str], str] = no_callbacks,
        *,
        forget_after_read: bool = False,
    ) -> None:
        self._intake = intake
        self._check_callback = check_callback
        # None where nothing is traced.
        self._begin_trace = None if traces is None else traces.begin
        self._forget_after_read = forget_after_read
        self._early = intake.early
        # Tiers whose requests are tasks for some model where neither the client nor its key says.
        self._task_tiers = frozenset().union(*(model.task_tiers for model in intake.models()))
        self._inference_replies = ParkedReplies(InferenceAnswers().pieces, "/v1/inference")
        # For clients that accept JSON, and for those that prefer bytes; of some models all clients have bytes.
        route = "/v1/predict"
        self._predict_replies = {
            model.name: (ParkedReplies(pieces, route), OctetReplies(pieces, route, model.output_bytes or octets_in))
            for model in intake.models()
            for pieces in [partial(base64_pieces, model.output_bytes) if model.output_bytes else predict_pieces]
        }
        self.router = Router()
        self.router.add(b"POST", b"/v1/inference", self.inference)
        self.router.add(b"POST", b"/v1/predict", self.predict)
        self.router.add(b"GET", b"/v1/result/", self.result)
        self.router.add(b"DELETE", b"/v1/result/", self.delete)
        self.router.add(b"GET", b"/openapi.json", lambda exchange, _: exchange.respond(200, openapi))

    def inference(self, exchange: Exchange, _: str) -> None:
        """`POST /v1/inference`: a synchronous request, or a task."""
        headers, body, peer = exchange.headers, exchange.body, exchange.sink.peer
        caller = peer.caller or self._intake.identify(headers, peer)
        # With limit lines this is the second call for the exchange, after `_go_on`.
        if caller.limit is not None and not exchange.limit_lines:
            entry = self._intake.enter(caller)
            if isinstance(entry, bytes):  # the usual case
                exchange.limit_lines = entry
            else:
                self._does_not_come_in(exchange, caller, entry)
                return
        early = self._early
        if early is not None and early.headroom[caller.tier] <= 0 and not self.may_be_task(caller, headers, body):
            refusal = early.refusal(caller)
            if refusal is not None:
                exchange.sink.answer_error(exchange, refusal)
                return
        if not exchange.is_plain:
            check_media(exchange)
            check_encoding(headers)
        call = decode_inference(body)
        model = self._intake.default_model if call.model is None else self._intake.model(call.model, caller)
        if len(body) > model.body_bytes_max:
            raise too_large_for(model)
        mode, options = call.mode or caller.default_mode, NO_OPTIONS
        if not exchange.is_plain:
            prefer = preferences(headers.get(b"prefer", b""))
            options = options_in(headers, prefer)
            if b"respond-async" in prefer:
                mode = "async"
        parameters = b"" if call.parameters is UNSET else canonical_parameters(call.parameters)
        value = checked_input(call.input, "input")
        if self._begin_trace is not None and (trace := self._begin_trace(headers)) is not None:
            options = with_trace(options, trace)
        client_id = call.client_id or ""
        if mode == "async" or (self._task_tiers and not mode and caller.tier in model.task_tiers):
            callback_url = "" if call.callback_url is None else self._check_callback(call.callback_url)
            self._intake.submit(
                caller=caller,
                model=model,
                parameters=parameters,
                value=value,
                client_id=client_id,
                callback_url=callback_url,
                options=options,
                accepted=partial(_accepted, exchange),
            )
            return
        if call.callback_url is not None:
            raise Malformed('`callback_url` goes with a task: add `"mode": "async"`, or leave it out')
        own_id = new_request_id() if exchange.is_plain else request_id(headers)
        # Not by name: this is the hot path, and matching nine names takes as long as three calls.
        ask, replies = self._intake.ask, self._inference_replies
        self._park(exchange, ask(caller, model, parameters, value, own_id, replies, exchange, client_id, options))

    def predict(self, exchange: Exchange, _: str) -> None:
        """`POST /v1/predict`: JSON, or binary with the model in the query."""
        caller = self._intake.identify(exchange.headers, exchange.sink.peer)
        if caller.limit is not None and not exchange.limit_lines:
            entry = self._intake.enter(caller)
            if not isinstance(entry, bytes):
                self._does_not_come_in(exchange, caller, entry)
                return
            exchange.limit_lines = entry
        media = media_type(exchange.headers.get(b"content-type", JSON))
        check_encoding(exchange.headers)
        named = query_of(exchange).get("model_id")
        if media == OCTETS:
            model = self._intake.default_model if named is None else self._intake.model(named, caller)
            if not exchange.body:
                raise Malformed("the body is empty; send the input's bytes")
            check_size(exchange, model)
            value = model.binary_input(exchange.body)
        else:
            check_media(exchange, "application/json or application/octet-stream")
            call = decode_predict(exchange.body)
            if named is not None and named != call.model_id:
                raise Malformed("`model_id` in the query is another than in the body; name the model once")
            model = self._intake.model(call.model_id, caller)
            check_size(exchange, model)
            if model.output_bytes is None:
                value = checked_input(call.input_data, "input_data")
            else:
                value = model.binary_input(base64_bytes(call.input_data))
        headers = exchange.headers
        own_id, both = request_id(headers), self._predict_replies[model.name]
        replies = both[b"accept" in headers and wants_octets(headers[b"accept"])]
        options = options_in(headers, preferences(headers.get(b"prefer", b"")))
        if self._begin_trace is not None and (trace := self._begin_trace(headers)) is not None:
            options = with_trace(options, trace)
        self._park(exchange, self._intake.ask(caller, model, b"", value, own_id, replies, exchange, "", options))

    def result(self, exchange: Exchange, task_id: str) -> None:
        """`GET /v1/result/{task_id}`, with a long poll if the client asks for one."""
        caller = self._intake.identify(exchange.headers, exchange.sink.peer)
        wait_text = query_of(exchange).get("wait_ms", "0")
        if not (wait_text.isascii() and wait_text.isdigit() and len(wait_text) < 9 and int(wait_text) <= WAIT_MS_MAX):
            raise Malformed(f"`wait_ms` must be a whole number from 0 to {WAIT_MS_MAX}")

        def answer(task: StoredTask | CarpoolError) -> bool:
            if isinstance(task, CarpoolError):
                respond_problem(exchange, task)
            else:
                exchange.respond(200, task_json(task))
            return exchange.method == b"GET" and not exchange.sink.is_gone()

        ticket = self._intake.look(
            caller=caller,
            task_id=possible_task_id(task_id),
            wait_s=int(wait_text) / 1000,
            forget=self._forget_after_read,
            answer=answer,
        )
        if exchange.response is None:
            exchange.context, exchange.worker = ticket, self

    def delete(self, exchange: Exchange, task_id: str) -> None:
        """`DELETE /v1/result/{task_id}`."""
        caller = self._intake.identify(exchange.headers, exchange.sink.peer)

        def deleted(error: CarpoolError | None) -> None:
            if error is None:
                exchange.respond(204, b"", b"")
            else:
                respond_problem(exchange, error)

        self._intake.delete(caller=caller, task_id=possible_task_id(task_id), done=deleted)

    def may_be_task(self, caller: Caller, headers: dict[bytes, bytes], body: bytes) -> bool:
        """Whether the body must be read first: a task is not refused for how long it would wait."""
        if b"prefer" in headers or body.rfind(ASYNC) >= 0:  # from the end: `rfind` takes a third of the time of `in`
            return True
        return caller.default_mode == "async" or (not caller.default_mode and caller.tier in self._task_tiers)

    def _does_not_come_in(self, exchange: Exchange, caller: Caller, refusal: CarpoolError | None) -> None:
        """Refuse a caller over its rate limit; or, if the verdict is still to come, call the route again then."""
        if refusal is not None:
            exchange.sink.answer_error(exchange, refusal)
            return
        self._intake.when_known(caller, partial(_go_on, exchange))

    def _park(self, exchange: Exchange, request: Request) -> None:
        """Let the exchange of a synchronous request wait for its outcome, unless that is there already."""
        if request.phase != DONE:
            # What waits should be small: `value` is what is needed of the body, and few headers matter for the answer.
            exchange.body = b""
            if not exchange.is_plain:
                exchange.headers = headers_for_answer(exchange.headers)
            exchange.context = request
            exchange.worker = self

    def client_left(self, exchange: Exchange) -> None:
        """The client of a request left, or that of a long poll."""
        if isinstance(exchange.context, Request):
            self._intake.cancel(exchange.context)
        else:
            self._intake.leave(exchange.context)


def _go_on(exchange: Exchange, entry: LimitVerdict) -> None:
    """The rate limit has let the exchange in, or refused it."""
    if exchange.has_left:
        return
    if isinstance(entry, CarpoolError):
        exchange.sink.answer_error(exchange, entry)
    else:
        exchange.limit_lines = entry
        exchange.sink.handle(exchange)


def _accepted(exchange: Exchange, request: Request, error: CarpoolError | None) -> None:
    """Answer the exchange of a task, which is safe now, or was refused."""
    if error is not None:
        respond_problem(exchange, error)
        return
    body = b'{"task_id":"%b","status":"PENDING"}' % request.id.encode()
    location = b"Location: /v1/result/%b\r\n" % request.id.encode()
    exchange.respond(202, body, JSON, location + echo_line(exchange.headers) + exchange.limit_lines)


def possible_task_id(text: str) -> str:
    """The id of a task that a client wrote; "-", which no task has, if it cannot be an id."""
    return text if TASK_ID(text) else "-"


def task_json(task: StoredTask) -> bytes:
    """The 200 of `GET /v1/result/{task_id}`."""
    middle = b""
    if task.output is not None:
        middle = b',"output":' + task.output
    elif task.error is not None:
        middle = b',"error":' + task.error
    elif task.queue is not None:
        middle = b',"queue":' + _encode(task.queue)
    return b'{"task_id":"%b","status":"%b"%b,"timestamp":"%b"}' % (
        task.id.encode(),
        task.status.encode(),
        middle,
        rfc3339(task.timestamp_wall).encode(),
    )


def with_trace(options: RequestOptions, trace: Trace) -> RequestOptions:
    """What a client wishes, for a request whose trace is kept."""
    return RequestOptions(None, False, False, trace) if options is NO_OPTIONS else replace(options, trace=trace)


def headers_for_answer(headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Those that an answer depends on."""
    return {name: headers[name] for name in (b"x-request-id", b"connection") if name in headers}


def too_large_for(model: ServedModel) -> TooLarge:
    """The error for a body that is too long for its model."""
    return TooLarge(f"a body for this model may have {model.body_bytes_max} bytes at most; send a shorter one")


def check_size(exchange: Exchange, model: ServedModel) -> None:
    """Raise TooLarge for a body that is longer than the model's may be."""
    if len(exchange.body) > model.body_bytes_max:
        raise too_large_for(model)


def media_type(content_type: bytes) -> bytes:
    """A content type without its parameters."""
    return content_type.partition(b";")[0].strip().lower()


def check_media(exchange: Exchange, wanted: str = "application/json") -> None:
    """Refuse a body of another type than JSON.

    `curl -d` calls everything a form. A form that begins like a JSON object is taken as JSON, and so is a body without
    a type, unless a browser's page may have sent it: other sites' pages can send these, not JSON, without a preflight.
    """
    given = exchange.headers.get(b"content-type")
    media = JSON if given is None else media_type(given)
    if media == JSON and given is not None:
        return
    is_json = media == JSON or (media == FORM and exchange.body.lstrip().startswith(b"{"))
    if not is_json or is_of_page(exchange.headers):
        raise UnsupportedMedia(f"send the header `Content-Type: {wanted}`")


def check_encoding(headers: dict[bytes, bytes]) -> None:
    """Refuse a compressed body: unpacking what unknown clients send could exhaust memory."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise UnsupportedMedia("send the body without Content-Encoding")


def preferences(prefer: bytes) -> dict[bytes, bytes]:
    """The names in a Prefer header, each with its value or b"" (RFC 7240); the first of a repeated one counts."""
    found: dict[bytes, bytes] = {}
    for part in prefer.split(b","):
        name, _, value = part.partition(b";")[0].partition(b"=")
        found.setdefault(name.strip().lower(), value.strip().strip(b'"'))
    return found


def options_in(headers: dict[bytes, bytes], prefer: dict[bytes, bytes]) -> RequestOptions:
    """What the headers say about how a request is to be treated; raises Malformed.

    A `Prefer` that cannot be understood is passed over, as its RFC says; `X-Request-Timeout-Ms` is our own. Beside
    `respond-async`, `wait` says when a 202 is to come, not when the task is over.
    """
    timeout_s: float | None = None
    if (text := headers.get(b"x-request-timeout-ms")) is not None:
        if not (text.isdigit() and len(text) < 10 and int(text) > 0):
            raise Malformed("`X-Request-Timeout-Ms` must be a whole number of milliseconds above 0")
        timeout_s = int(text) / 1000
    elif b"respond-async" not in prefer:
        text = prefer.get(b"wait", b"")
        if text.isdigit() and len(text) < 7 and int(text) > 0:
            timeout_s = float(int(text))
    said = headers.get(b"cache-control")
    if timeout_s is None and said is None:
        return NO_OPTIONS
    directives = {part.strip().lower() for part in (said or b"").split(b",")}
    return RequestOptions(timeout_s, b"no-store" in directives, b"no-cache" in directives)
