"""Requests, batches and calls as spans, by OpenTelemetry's semantic conventions. Pure: ids are drawn by an argument.

Spans hold nothing of an input or an output, a credential, or the text of an error, which may quote them, only its
code. Attributes of Carpool's own begin with `carpool.`.
"""

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from carpool.core.batch import Batch
from carpool.core.errors import GRPC_STATUS, CarpoolError
from carpool.core.outcome import CallFacts
from carpool.core.request import Request, facts_of_failure
from carpool.core.trace import SAMPLED, BatchTrace, CallTrace, Trace, trace_of_batch
from carpool.telemetry.otlp import (
    CLIENT,
    CONSUMER,
    ERROR,
    INTERNAL,
    LOCAL_PARENT,
    REMOTE_PARENT,
    SERVER,
    Inside,
    Linked,
    TextAttribute,
    attributes,
    flags_and_parent,
    named,
    span,
    trace_state,
)

# Sets of attributes that were packed before.
COMMON_KEPT_MAX = 8192
# As many as most programs show.
LINKS_MAX = 128

_request_id, _batch_id = TextAttribute("carpool.request.id"), TextAttribute("carpool.batch.id")
_QUEUE = named("queue", INTERNAL)
_BATCH = named("batch", INTERNAL)
_ATTEMPT, _SEARCH = named("attempt", CLIENT), named("search step", CLIENT)
_OF_HERE = LOCAL_PARENT | SAMPLED
_OF_ELSEWHERE = REMOTE_PARENT | SAMPLED
_link = Linked(_OF_ELSEWHERE)
_with_queue = Inside(_QUEUE, _OF_HERE)
_HERE = flags_and_parent(_OF_HERE, b"")


class Spans:
    """Packs spans. What was packed before, and is the same for many, is not packed again."""

    def __init__(self, tiers: Sequence[str], new_span_id: Callable[[], bytes]) -> None:
        self._tiers = tiers
        self._new_span_id = new_span_id
        # What to add to monotonic nanoseconds for those since 1970.
        self.offset_ns = 0
        self._common: dict[tuple[object, ...], bytes] = {}
        # The last call, and what its members have in common.
        self._call: CallFacts | None = None
        self._call_part = b""
        # The last times, and their bytes.
        self._ended = self._taken = -1.0
        self._ended_moment = self._taken_moment = b""

    def request(
        self, request: Request, trace: Trace, why: str, call: CallFacts | None, error: CarpoolError | None
    ) -> bytes:
        """The span of a request that has its outcome, and that of its wait in the queue."""
        is_task, parent_id = request.is_task, trace.parent_id
        route = "" if is_task else getattr(request.waiter, "route", "")
        key = (route, request.model, request.tier, request.owner, request.result_code, why, is_task)
        common = self._common.get(key) or self._remember(key, self._request_part(request, route, why, error))
        if call is None:
            call = facts_of_failure(request)  # over Redis they come from another process
        if call is None:
            of_call = b""
        else:
            of_call = self._call_part if call is self._call else self._remember_call(call, request.batch)
        place = _HERE
        if parent_id:
            place = flags_and_parent(_OF_ELSEWHERE, parent_id) + trace_state(trace.state)
        # The requests of one batch were taken, and have ended, at the same time.
        if request.ended != self._ended or request.taken != self._taken:
            self._ended, self._taken = request.ended, request.taken
            self._ended_moment = self._moment(request.ended)
            # A request that was never taken waited until its end.
            self._taken_moment = self._moment(request.taken or request.ended)
        return _with_queue(
            trace.trace_id,
            trace.span_id,
            (int(request.arrived * 1e9) + self.offset_ns).to_bytes(8, "little"),
            self._ended_moment,
            (common, _request_id(request.id), of_call, place),
            self._new_span_id(),
            self._taken_moment,
        )

    def _moment(self, at: float) -> bytes:
        return (int(at * 1e9) + self.offset_ns).to_bytes(8, "little")

    def refusal(self, trace: Trace, method: str, route: str, error: CarpoolError, now: float) -> bytes:
        """The span of a request that did not come in."""
        key = (method, route, trace.why, error.code)
        rest = self._common.get(key) or self._remember(
            key,
            face_part(method, route, error)
            + attributes([("error.type", error.code), ("carpool.kept", trace.why)])
            + (ERROR if error.status >= 500 else b""),
        )
        if trace.state:
            rest += trace_state(trace.state)
        now_ns = int(now * 1e9) + self.offset_ns
        flags = _OF_ELSEWHERE if trace.parent_id else _OF_HERE
        return span(trace.trace_id, trace.span_id, trace.parent_id, now_ns, now_ns, flags, rest)

    def batch(self, batch: Batch, traced: BatchTrace) -> bytes:
        """The span of a batch that is over."""
        key = (batch.model, batch.size, batch.reason, batch.endpoint, batch.attempts, batch.result)
        rest = self._common.get(key) or self._remember(key, batch_part(batch))
        rest += _batch_id(batch.id) + b"".join(
            [_link(each.trace_id, each.span_id, each.state) for each in traced.links[:LINKS_MAX]]
        )
        taken_ns, ended_ns = int(batch.taken * 1e9) + self.offset_ns, int(batch.ended * 1e9) + self.offset_ns
        return span(traced.trace.trace_id, traced.trace.span_id, b"", taken_ns, ended_ns, _OF_HERE, rest)

    def calls(self, model: str, traced: BatchTrace) -> Iterator[bytes]:
        """The spans of the calls of a batch that were not written yet."""
        trace, offset_ns = traced.trace, self.offset_ns
        calls, traced.calls = traced.calls, []
        for call in calls:
            key = (model, call.endpoint, call.attempt, call.size, call.status, call.error, call.is_search)
            rest = self._common.get(key) or self._remember(key, call_part(call, model))
            started_ns, ended_ns = int(call.started * 1e9) + offset_ns, int(call.ended * 1e9) + offset_ns
            yield span(trace.trace_id, call.span_id, trace.span_id, started_ns, ended_ns, _OF_HERE, rest)

    def _request_part(self, request: Request, route: str, why: str, error: CarpoolError | None) -> bytes:
        part = named("task", CONSUMER) if request.is_task else face_part("POST" if route else "", route, error)
        part += attributes(
            [
                ("error.type", None if error is None else error.code),
                ("gen_ai.request.model", request.model),
                ("carpool.tier", self._tiers[min(request.tier, len(self._tiers) - 1)]),
                ("carpool.owner", request.owner or None),
                ("carpool.kept", why),
            ]
        )
        # By convention a fault of the client is no error of the server's span.
        return part + ERROR if error is not None and error.status >= 500 else part

    def _remember_call(self, call: CallFacts, batch: Batch | None) -> bytes:
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
        # Of a batch of another process it is not known here how slow its requests were: its span may not be kept.
        if call.batch_id and (call.is_traced or batch is not None):
            part += link_to_batch(call.batch_id)
        self._call, self._call_part = call, part
        return part

    def _remember(self, key: tuple[object, ...], part: bytes) -> bytes:
        if len(self._common) >= COMMON_KEPT_MAX:
            self._common.clear()
        self._common[key] = part
        return part


def face_part(method: str, route: str, error: CarpoolError | None) -> bytes:
    """What a span says of how its request came: over HTTP, by gRPC (`service/method`), or in a message of a stream."""
    if not method:
        return named("inference", SERVER)
    if route and route[0] != "/":
        service, _, call = route.rpartition("/")
        status = 0 if error is None else GRPC_STATUS[error.grpc_code]
        return named(route, SERVER) + attributes(
            [
                ("rpc.system", "grpc"),
                ("rpc.service", service),
                ("rpc.method", call),
                ("rpc.grpc.status_code", status),
            ]
        )
    return named(f"{method} {route}" if route else method, SERVER) + attributes(
        [
            ("http.request.method", method),
            ("http.route", route or None),
            ("http.response.status_code", 200 if error is None else error.status),
        ]
    )


def link_to_batch(batch_id: str) -> bytes:
    """A request's link to its batch."""
    trace = trace_of_batch(batch_id, is_sampled=True)
    return _link(trace.trace_id, trace.span_id)


def batch_part(batch: Batch) -> bytes:
    """What the spans of many batches have in common."""
    is_error = batch.result != "ok"
    part = _BATCH + attributes(
        [
            ("gen_ai.request.model", batch.model),
            ("carpool.batch.size", batch.size),
            ("carpool.batch.reason", batch.reason),
            ("carpool.endpoint", batch.endpoint or None),
            ("carpool.attempts", batch.attempts),
            ("error.type", batch.result if is_error else None),
        ]
    )
    return part + ERROR if is_error else part


def call_part(call: CallTrace, model: str) -> bytes:
    """What the spans of many calls have in common. The name of an endpoint has no credentials in it."""
    try:
        parsed = urlsplit(call.endpoint)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host, port = None, None
    is_grpc = call.endpoint.startswith("grpc")
    is_http = call.endpoint.startswith(("http:", "https:"))
    # By convention the status, where it is one of an error.
    error = str(call.status) if call.error and call.status >= 400 else call.error
    part = (_SEARCH if call.is_search else _ATTEMPT) + attributes(
        [
            ("gen_ai.request.model", model),
            ("server.address", host or call.endpoint.partition("?")[0]),
            ("server.port", port),
            ("http.request.method", "POST" if is_http else None),
            ("url.full", call.endpoint if is_http else None),
            ("http.response.status_code", call.status if is_http and call.status else None),
            ("rpc.system", "grpc" if is_grpc else None),
            ("rpc.service", "inference.GRPCInferenceService" if is_grpc else None),
            ("rpc.method", "ModelInfer" if is_grpc else None),
            ("error.type", error or None),
            ("carpool.attempt", call.attempt),
            ("carpool.batch.size", call.size),
        ]
    )
    return part + ERROR if error else part
