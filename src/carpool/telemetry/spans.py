"""Requests, batches and calls as spans, by OpenTelemetry's semantic conventions. Pure: ids are drawn by an argument.

Never anything of an input or an output, a credential, or the text of an error, which may quote them: of an error there
is its code. What is Carpool's own begins with `carpool.`.
"""

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from carpool.core.batch import Batch
from carpool.core.errors import CarpoolError
from carpool.core.outcome import CallFacts
from carpool.core.request import Request
from carpool.core.trace import SAMPLED, CallTrace, Trace, trace_of_batch
from carpool.telemetry.otlp import (
    CLIENT,
    CONSUMER,
    ERROR,
    INTERNAL,
    LOCAL_PARENT,
    REMOTE_PARENT,
    SERVER,
    TextAttribute,
    attributes,
    link,
    named,
    span,
)

# Sets of attributes that were packed before.
COMMON_KEPT_MAX = 4096
# As many as most programs show.
LINKS_MAX = 128

_request_id, _owner = TextAttribute("carpool.request.id"), TextAttribute("carpool.owner")
_QUEUE = named("queue", INTERNAL)
_BATCH = named("batch", INTERNAL)
_ATTEMPT, _SEARCH = named("attempt", CLIENT), named("search step", CLIENT)
_TASK = named("task", CONSUMER)
_OF_HERE = LOCAL_PARENT | SAMPLED
_OF_ELSEWHERE = REMOTE_PARENT | SAMPLED


class BatchTrace(msgspec.Struct, eq=False):
    """What is remembered of a batch until it is written, if it is."""

    trace: Trace
    # Those of its requests that are kept.
    links: list[Trace]
    # Those that have ended and are not written.
    calls: list[CallTrace]
    is_written: bool = False


class Spans:
    """Packs spans."""

    def __init__(self, tiers: Sequence[str], new_span_id: Callable[[], bytes]) -> None:
        self._tiers = tiers
        self._new_span_id = new_span_id
        # What to add to monotonic nanoseconds for those since 1970.
        self.offset_ns = 0
        self._common: dict[tuple[object, ...], bytes] = {}
        self._names: dict[str, bytes] = {}
        # The last call, and what its members have in common.
        self._call: CallFacts | None = None
        self._call_part = b""

    def request(
        self, request: Request, trace: Trace, why: str, call: CallFacts | None, error: CarpoolError | None
    ) -> tuple[bytes, bytes]:
        """The span of a request that has its outcome, and that of its wait in the queue."""
        offset_ns, span_id = self.offset_ns, trace.span_id
        arrived_ns, ended_ns = (int(at * 1e9) + offset_ns for at in (request.arrived, request.ended))
        route = "" if request.is_task else getattr(request.waiter, "route", "")
        code = "" if error is None else error.code
        key = (route, request.model, request.tier, code, why, request.is_task)
        common = self._common.get(key) or self._remember(key, self._request_part(request, route, why, error))
        parts = [common, _request_id(request.id)]
        if request.owner:
            parts.append(_owner(request.owner))
        if call is not None:
            parts.append(self._call_part if call is self._call else self._remember_call(call))
        elif request.batch is not None:
            parts.append(self._batch_part(request.batch))
        name = _TASK if request.is_task else self._name(route)
        parent_id = trace.parent_id
        flags = _OF_ELSEWHERE if parent_id else _OF_HERE
        whole = span(
            trace.trace_id, span_id, parent_id, name, arrived_ns, ended_ns, flags, b"".join(parts), trace.state
        )
        # One that was never taken waited until its end.
        taken_ns = int(request.taken * 1e9) + offset_ns if request.taken else ended_ns
        wait = span(trace.trace_id, self._new_span_id(), span_id, _QUEUE, arrived_ns, taken_ns, _OF_HERE, b"")
        return whole, wait

    def refusal(self, trace: Trace, method: str, route: str, why: str, error: CarpoolError, now: float) -> bytes:
        """The span of a request that did not come in."""
        key = (method, route, why, error.code)
        common = self._common.get(key) or self._remember(
            key,
            attributes(
                [
                    ("http.request.method", method),
                    ("http.route", route or None),
                    ("http.response.status_code", error.status),
                    ("error.type", error.code),
                    ("carpool.kept", why),
                ]
            )
            + (ERROR if error.status >= 500 else b""),
        )
        now_ns = int(now * 1e9) + self.offset_ns
        flags = _OF_ELSEWHERE if trace.parent_id else _OF_HERE
        name = named(f"{method} {route}" if route else method, SERVER)
        return span(trace.trace_id, trace.span_id, trace.parent_id, name, now_ns, now_ns, flags, common, trace.state)

    def batch(self, batch: Batch, traced: BatchTrace) -> bytes:
        """The span of a batch that is over."""
        is_error = batch.result != "ok"
        rest = attributes(
            [
                ("gen_ai.request.model", batch.model),
                ("carpool.batch.id", batch.id),
                ("carpool.batch.size", batch.size),
                ("carpool.batch.reason", batch.reason),
                ("carpool.endpoint", batch.endpoint or None),
                ("carpool.attempts", batch.attempts),
                ("error.type", batch.result if is_error else None),
            ]
        )
        rest += b"".join(
            [link(each.trace_id, each.span_id, _OF_ELSEWHERE, each.state) for each in traced.links[:LINKS_MAX]]
        )
        if is_error:
            rest += ERROR
        taken_ns, ended_ns = (int(at * 1e9) + self.offset_ns for at in (batch.taken, batch.ended))
        trace = traced.trace
        return span(trace.trace_id, trace.span_id, b"", _BATCH, taken_ns, ended_ns, _OF_HERE, rest)

    def calls(self, model: str, traced: BatchTrace) -> Iterator[bytes]:
        """The spans of the calls of a batch that were not written yet."""
        trace = traced.trace
        for call in traced.calls:
            key = (call.endpoint, model)
            rest = self._common.get(key) or self._remember(key, endpoint_part(call.endpoint, model))
            is_error = bool(call.error)
            rest += attributes(
                [
                    ("http.response.status_code", call.status or None),
                    ("carpool.attempt", call.attempt),
                    ("carpool.batch.size", call.size),
                    # By convention the status, where it is one of an error.
                    ("error.type", (str(call.status) if call.status >= 400 else call.error) if is_error else None),
                ]
            )
            if is_error:
                rest += ERROR
            started_ns, ended_ns = (int(at * 1e9) + self.offset_ns for at in (call.started, call.ended))
            name = _SEARCH if call.is_search else _ATTEMPT
            yield span(trace.trace_id, call.span_id, trace.span_id, name, started_ns, ended_ns, _OF_HERE, rest)
        traced.calls.clear()

    def _request_part(self, request: Request, route: str, why: str, error: CarpoolError | None) -> bytes:
        is_http = bool(route)
        status = 200 if error is None else error.status
        part = attributes(
            [
                ("http.request.method", "POST" if is_http else None),
                ("http.route", route or None),
                ("http.response.status_code", status if is_http else None),
                ("error.type", None if error is None else error.code),
                ("gen_ai.request.model", request.model),
                ("carpool.tier", self._tiers[min(request.tier, len(self._tiers) - 1)]),
                ("carpool.kept", why),
            ]
        )
        # A client's own fault is none of the server's, by convention.
        return part + ERROR if status >= 500 else part

    def _remember_call(self, call: CallFacts) -> bytes:
        part = attributes(
            [
                ("carpool.cached", True if call.cached else None),
                ("carpool.batch.id", call.batch_id or None),
                ("carpool.batch.size", None if call.cached else call.batch_size),
                ("carpool.endpoint", call.endpoint or None),
                ("carpool.attempts", None if call.cached else call.attempts),
                ("carpool.upstream.seconds", None if call.cached else call.upstream_s),
                ("carpool.model_version", call.model_version),
            ]
        )
        if call.batch_id:
            part += _link_to(call.batch_id)
        self._call, self._call_part = call, part
        return part

    def _batch_part(self, batch: Batch) -> bytes:
        """Of a request that failed: the last batch that it was in."""
        part = attributes(
            [
                ("carpool.batch.id", batch.id),
                ("carpool.batch.size", batch.size),
                ("carpool.endpoint", batch.endpoint or None),
                ("carpool.attempts", batch.attempts),
            ]
        )
        return part + _link_to(batch.id)

    def _remember(self, key: tuple[object, ...], part: bytes) -> bytes:
        if len(self._common) >= COMMON_KEPT_MAX:
            self._common.clear()
        self._common[key] = part
        return part

    def _name(self, route: str) -> bytes:
        name = self._names.get(route)
        if name is None:
            name = self._names[route] = named(f"POST {route}" if route else "inference", SERVER)  # bounded: few routes
        return name


def _link_to(batch_id: str) -> bytes:
    trace = trace_of_batch(batch_id, is_sampled=True)
    return link(trace.trace_id, trace.span_id, _OF_ELSEWHERE)


def endpoint_part(endpoint: str, model: str) -> bytes:
    """What calls of a model to one endpoint have in common. `endpoint` has no credentials in it."""
    try:
        parsed = urlsplit(endpoint)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host, port = None, None
    is_grpc = endpoint.startswith("grpc")
    is_http = endpoint.startswith(("http:", "https:"))
    return attributes(
        [
            ("gen_ai.request.model", model),
            ("server.address", host or endpoint.partition("?")[0]),
            ("server.port", port),
            ("http.request.method", "POST" if is_http else None),
            ("url.full", endpoint if is_http else None),
            ("rpc.system", "grpc" if is_grpc else None),
            ("rpc.service", "inference.GRPCInferenceService" if is_grpc else None),
            ("rpc.method", "ModelInfer" if is_grpc else None),
        ]
    )
