"""Requests, batches and calls as spans of OTLP, by OpenTelemetry's conventions. Pure: ids are drawn by an argument.

1. Spans hold nothing of an input or an output, a credential, or the text of an error, which may quote them, only its
   code. Attributes of Carpool's own begin with `carpool.`.
2. The protobuf is written by hand: several times as fast as encoding objects with a library. The numbers are those of
   `opentelemetry/proto/trace/v1/trace.proto`, which may get more fields but keeps these. What many spans have in common
   (a name, a set of attributes) is packed once and used as bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from urllib.parse import urlsplit

from carpool.core.batch import Batch
from carpool.core.errors import GRPC_STATUS, CarpoolError, all_errors
from carpool.core.outcome import CallFacts
from carpool.core.protobuf import BadMessageError, double_field, field, fields, number_field, read_varint, varint
from carpool.core.request import Request, facts_of_failure
from carpool.core.trace import SAMPLED, BatchTrace, Trace, trace_of_batch

# Sets of attributes that are remembered, of each kind.
COMMON_KEPT_MAX = 4096
# As many as most programs show.
LINKS_MAX = 128
INTERNAL, SERVER, CLIENT, CONSUMER = 1, 2, 3, 5

Value = str | bool | int | float

# What is read of a receiver's answer: it has one field, with two in it.
ANSWER_FIELDS_MAX = 16
_ERRORS = {kind.code: kind for kind in all_errors()}

# trace_id = 1, span_id = 2, start = 7, end = 8, flags = 16. Their order is free.
_ids_and_times = Struct("<2s16s2s8sBQBQ2sI").pack
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_START, _END, _FLAGS = 0x39, 0x41, b"\x85\x01"
# All spans that are packed are sampled. A parent, or the end of a link, is of this process, or of another one.
LOCAL, REMOTE = 0x100 | SAMPLED, 0x300 | SAMPLED
_LINK_FLAGS = b"\x35" + REMOTE.to_bytes(4, "little")
ERROR = b"\x7a\x02\x18\x02"  # status = 15 with code = 3 and the value 2


def attribute(name: str, value: Value) -> bytes:
    """One attribute of a span (`KeyValue`, field 9)."""
    return field(9, key_value(name, value))


def attributes(pairs: Iterable[tuple[str, Value | None]]) -> bytes:
    """Attributes of a span, but for those without a value."""
    return b"".join([attribute(name, value) for name, value in pairs if value is not None])


def key_value(name: str, value: Value) -> bytes:
    """A name with its value."""
    if isinstance(value, str):
        packed = field(1, value.encode())
    elif isinstance(value, bool):
        packed = number_field(2, value)
    elif isinstance(value, int):
        packed = number_field(3, value)
    else:
        packed = double_field(4, value)
    return field(1, name.encode()) + field(2, packed)


def named(name: str, kind: int) -> bytes:
    """Name and kind of a span."""
    return field(5, name.encode()) + number_field(6, kind)


def link(trace: Trace) -> bytes:
    """A link to a span of another trace."""
    packed = _TRACE_ID + trace.trace_id + _SPAN_ID + trace.span_id + _LINK_FLAGS
    return field(13, packed + trace_state(trace.state) if trace.state else packed)


def span(
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes,
    start_ns: int,
    end_ns: int,
    rest: bytes,
    flags: int = LOCAL,
) -> bytes:
    """A span, as a field of `ScopeSpans`. `rest` are name, kind, attributes, links, state and status, packed; `flags`
    say whose span its parent is, if it has one.
    """
    if parent_id:
        rest += _PARENT_ID + parent_id
    else:
        flags = LOCAL
    packed = _ids_and_times(_TRACE_ID, trace_id, _SPAN_ID, span_id, _START, start_ns, _END, end_ns, _FLAGS, flags)
    return b"\x12" + varint(len(packed) + len(rest)) + packed + rest


def trace_state(text: str) -> bytes:
    """The `tracestate` of a span, or of a link."""
    return field(3, text.encode())


class Envelope:
    """What goes around the spans of one process: its resource, and who wrote them."""

    def __init__(self, resource: Iterable[tuple[str, Value]], scope: str, version: str) -> None:
        pairs = b"".join(field(1, key_value(name, value)) for name, value in resource)
        self._resource = field(1, pairs)
        self._scope = field(1, field(1, scope.encode()) + field(2, version.encode()))

    def wrap(self, spans: Sequence[bytes]) -> bytes:
        """The body of one export (`ExportTraceServiceRequest`)."""
        return field(1, self._resource + field(2, self._scope + b"".join(spans)))


def rejected_spans(body: bytes) -> int:
    """How many spans a receiver says that it did not take (`ExportTraceServiceResponse`), though it answered 200.

    What cannot be read says nothing.
    """
    try:
        for number, partial_success, _ in fields(memoryview(body), ANSWER_FIELDS_MAX):
            if number != 1 or partial_success is None:
                continue
            start = 0
            for _, _, end in fields(partial_success, ANSWER_FIELDS_MAX):
                if partial_success[start] == 0x08:  # rejected_spans = 1, a varint
                    rejected, _ = read_varint(partial_success, start + 1)
                    return rejected if rejected < 1 << 63 else 0  # it may be negative, by mistake
                start = end
    except BadMessageError:
        pass
    return 0


_QUEUE = named("queue", INTERNAL)


class Spans:
    """Packs spans."""

    def __init__(self, tiers: Sequence[str], new_span_id: Callable[[], bytes]) -> None:
        self._tiers = tiers
        self._new_span_id = new_span_id
        # What to add to monotonic nanoseconds for those since 1970.
        self.offset_ns = 0

    def request(self, request: Request, trace: Trace, call: CallFacts | None, error: CarpoolError | None) -> bytes:
        """The span of a request that has its outcome, and that of its wait in the queue."""
        route = "" if request.is_task else getattr(request.waiter, "route", "")
        tier = self._tiers[min(request.tier, len(self._tiers) - 1)]
        of_client = "POST" if route else "", route, request.model, tier, request.owner
        rest = request_part(*of_client, trace.why, request.is_task, error.code if error else "")
        request_id = request.id.encode()
        rest += head_of_id(len(request_id)) + request_id
        if call is None:
            call = facts_of_failure(request)  # over Redis they come from another process
        if call is not None:
            # A request that shared a call under way is a reason to keep its batch that the call itself did not know.
            rest += call_facts_part(call, call.is_traced or (request.batch is not None and request.batch.is_traced))
        if trace.state:
            rest += trace_state(trace.state)
        trace_id, span_id, arrived = trace.trace_id, trace.span_id, self._ns(request.arrived)
        own = span(trace_id, span_id, trace.parent_id, arrived, self._ns(request.ended), rest, REMOTE)
        # A request that was never taken waited until its end.
        taken = self._ns(request.taken or request.ended)
        return own + span(trace_id, self._new_span_id(), span_id, arrived, taken, _QUEUE)

    def refusal(self, trace: Trace, method: str, route: str, error: CarpoolError, now: float) -> bytes:
        """The span of a request that did not come in."""
        rest = request_part(method, route, "", "", "", trace.why, False, error.code)
        if trace.state:
            rest += trace_state(trace.state)
        at = self._ns(now)
        return span(trace.trace_id, trace.span_id, trace.parent_id, at, at, rest, REMOTE)

    def batch(self, batch: Batch, traced: BatchTrace) -> bytes:
        """The span of a batch that is over."""
        rest = batch_part(batch.model, batch.size, batch.reason, batch.endpoint, batch.attempts, batch.result)
        rest += attribute("carpool.batch.id", batch.id) + b"".join(map(link, traced.links[:LINKS_MAX]))
        trace = traced.trace
        return span(trace.trace_id, trace.span_id, b"", self._ns(batch.taken), self._ns(batch.ended), rest)

    def calls(self, model: str, traced: BatchTrace) -> Iterator[bytes]:
        """The spans of the calls of a batch that were not written yet."""
        trace = traced.trace
        calls, traced.calls = traced.calls, []
        for call in calls:
            rest = call_part(model, call.endpoint, call.attempt, call.size, call.status, call.error, call.is_search)
            started, ended = self._ns(call.started), self._ns(call.ended)
            yield span(trace.trace_id, call.span_id, trace.span_id, started, ended, rest)

    def _ns(self, at: float) -> int:
        return int(at * 1e9) + self.offset_ns


@lru_cache(COMMON_KEPT_MAX)
def request_part(
    method: str, route: str, model: str, tier: str, owner: str, why: str, is_task: bool, code: str
) -> bytes:
    """What the spans of many requests have in common; one that did not come in has no model, tier and owner."""
    error = _ERRORS.get(code)
    part = named("task", CONSUMER) if is_task else face_part(method, route, error)
    part += attributes(
        [
            ("error.type", code or None),
            ("gen_ai.request.model", model or None),
            ("carpool.tier", tier or None),
            ("carpool.owner", owner or None),
            ("carpool.kept", why),
        ]
    )
    # By convention a fault of the client is no error of the server's span.
    return part + ERROR if error is not None and error.status >= 500 else part


def face_part(method: str, route: str, error: type[CarpoolError] | None) -> bytes:
    """What a span says of how its request came: over HTTP, by gRPC (`service/method`), or in a message of a stream."""
    if not method:
        return named("inference", SERVER)
    if route and route[0] != "/":
        service, _, call = route.rpartition("/")
        return named(route, SERVER) + attributes(
            [
                ("rpc.system", "grpc"),
                ("rpc.service", service),
                ("rpc.method", call),
                ("rpc.grpc.status_code", GRPC_STATUS[error.grpc_code] if error else 0),
            ]
        )
    return named(f"{method} {route}" if route else method, SERVER) + attributes(
        [
            ("http.request.method", method),
            ("http.route", route or None),
            ("http.response.status_code", error.status if error else 200),
        ]
    )


@lru_cache(COMMON_KEPT_MAX)
def head_of_id(size: int) -> bytes:
    """What stands before the id of a request in its attribute, by the length of the id."""
    whole = attribute("carpool.request.id", "x" * size)
    return whole[: len(whole) - size]


@lru_cache(64)
def call_facts_part(call: CallFacts, has_link: bool) -> bytes:
    """What a request's span says of its call: the same for all requests of a batch, which come one after the other."""
    part = attributes(
        [
            ("carpool.cached", True if call.cached else None),
            ("carpool.batch.id", call.batch_id or None),
            ("carpool.batch.size", None if call.cached else call.batch_size),
            ("carpool.endpoint", call.endpoint or None),
            ("carpool.attempts", None if call.cached else call.attempts),
            ("carpool.upstream.seconds", call.upstream_s or None),
            ("carpool.search.seconds", call.search_s + call.searched_s or None),
            ("carpool.model_version", call.model_version),
        ]
    )
    return part + link(trace_of_batch(call.batch_id)) if call.batch_id and has_link else part


@lru_cache(COMMON_KEPT_MAX)
def batch_part(model: str, size: int, reason: str, endpoint: str, attempts: int, result: str) -> bytes:
    """What the spans of many batches have in common."""
    is_error = result != "ok"
    part = named("batch", INTERNAL) + attributes(
        [
            ("gen_ai.request.model", model),
            ("carpool.batch.size", size),
            ("carpool.batch.reason", reason),
            ("carpool.endpoint", endpoint or None),
            ("carpool.attempts", attempts),
            ("error.type", result if is_error else None),
        ]
    )
    return part + ERROR if is_error else part


@lru_cache(COMMON_KEPT_MAX)
def call_part(model: str, endpoint: str, attempt: int, size: int, status: int, error: str, is_search: bool) -> bytes:
    """What the spans of many calls have in common. The name of an endpoint has no credentials in it."""
    try:
        parsed = urlsplit(endpoint)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host, port = None, None
    is_grpc = endpoint.startswith("grpc")
    is_http = endpoint.startswith(("http:", "https:"))
    # By convention the status, where it is one of an error.
    error = str(status) if error and status >= 400 else error
    part = named("search step" if is_search else "attempt", CLIENT) + attributes(
        [
            ("gen_ai.request.model", model),
            ("server.address", host or endpoint.partition("?")[0]),
            ("server.port", port),
            ("http.request.method", "POST" if is_http else None),
            ("url.full", endpoint if is_http else None),
            ("http.response.status_code", status if is_http and status else None),
            ("rpc.system", "grpc" if is_grpc else None),
            ("rpc.service", "inference.GRPCInferenceService" if is_grpc else None),
            ("rpc.method", "ModelInfer" if is_grpc else None),
            ("error.type", error or None),
            ("carpool.attempt", attempt),
            ("carpool.batch.size", size),
        ]
    )
    return part + ERROR if error else part
