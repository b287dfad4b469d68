"""Requests, batches and calls as spans, by OpenTelemetry's semantic conventions. Pure: ids are drawn by an argument.

Spans hold nothing of an input or an output, a credential, or the text of an error, which may quote them, only its
code. Attributes of Carpool's own begin with `carpool.`. What is the same for many spans is packed once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from carpool.core.batch import Batch
from carpool.core.errors import GRPC_STATUS, CarpoolError
from carpool.core.outcome import CallFacts
from carpool.core.request import Request, facts_of_failure
from carpool.core.trace import BatchTrace, Trace, trace_of_batch
from carpool.telemetry.otlp import (
    CLIENT,
    CONSUMER,
    ERROR,
    INTERNAL,
    REMOTE,
    SERVER,
    attribute,
    attributes,
    link,
    named,
    span,
    trace_state,
)

# Sets of attributes that are remembered, of each kind.
COMMON_KEPT_MAX = 4096
# As many as most programs show.
LINKS_MAX = 128

_QUEUE = named("queue", INTERNAL)


class Result(NamedTuple):
    """How a request ended: the code of its error, or "", and its status by HTTP and by gRPC."""

    code: str = ""
    status: int = 200
    grpc_status: int = 0


OK = Result()


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
        rest = request_part(route, request.model, tier, request.owner, trace.why, request.is_task, result_of(error))
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
        rest = refusal_part(method, route, trace.why, result_of(error))
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


def result_of(error: CarpoolError | None) -> Result:
    """The result of a request with this error, or with none."""
    return OK if error is None else Result(error.code, error.status, GRPC_STATUS[error.grpc_code])


@lru_cache(COMMON_KEPT_MAX)
def request_part(route: str, model: str, tier: str, owner: str, why: str, is_task: bool, result: Result) -> bytes:
    """What the spans of many requests have in common."""
    part = named("task", CONSUMER) if is_task else face_part("POST" if route else "", route, result)
    part += attributes(
        [
            ("error.type", result.code or None),
            ("gen_ai.request.model", model),
            ("carpool.tier", tier),
            ("carpool.owner", owner or None),
            ("carpool.kept", why),
        ]
    )
    # By convention a fault of the client is no error of the server's span.
    return part + ERROR if result.status >= 500 else part


@lru_cache(COMMON_KEPT_MAX)
def refusal_part(method: str, route: str, why: str, result: Result) -> bytes:
    """The same for requests that did not come in."""
    part = face_part(method, route, result) + attributes([("error.type", result.code), ("carpool.kept", why)])
    return part + ERROR if result.status >= 500 else part


def face_part(method: str, route: str, result: Result) -> bytes:
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
                ("rpc.grpc.status_code", result.grpc_status),
            ]
        )
    return named(f"{method} {route}" if route else method, SERVER) + attributes(
        [
            ("http.request.method", method),
            ("http.route", route or None),
            ("http.response.status_code", result.status),
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
