"""Tracing. The hot path keeps next to nothing; what is kept is decided at the end of a request, and packed later.

1. Where its caller asks for it (the sampled flag), or the ratio falls on it, a request has a trace from the start: it
   travels with the request, the batch has a link to it, and the call tells the upstream that the batch is kept.
2. All other requests have no trace until their end. Errors and the slowest are kept then, with what is known of their
   call. The process that sent the batch keeps its span too.
3. Refusals are kept by ratio; with a trace of their caller, at most at the rate of errors: a flood must stay cheap.
4. The process that settles a request writes its span: over Redis the gateway, for a task the batcher. The process
   that sends a batch writes the span of the batch.
5. Spans wait in a bounded line, and are packed a little at a time. Those without room are dropped and counted.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from carpool.core.batch import Batch
from carpool.core.clock import Clock
from carpool.core.errors import CarpoolError, ClientLeft
from carpool.core.events import Subscriber
from carpool.core.histograms import RequestSeconds
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.request import Request
from carpool.core.timers import Every
from carpool.core.trace import (
    ASKED,
    BY_RATIO,
    BatchTrace,
    CallTrace,
    Given,
    Trace,
    read_traceparent,
    read_tracestate,
    trace_of_batch,
    traceparent_of,
)
from carpool.telemetry.sampling import ErrorRate, Ratio, Slowest
from carpool.telemetry.spans import LINKS_MAX, Spans

# Packing: how often, for how long at most, and how many at least; where more wait, this part of them.
PACK_S, PACK_S_MAX = 0.01, 0.005
PACKED_MIN, PACKED_PART = 64, 8
LINE_MAX = 20_000
# The window of the slowest; and how often the wall clock is looked at.
WINDOW_S = 1.0
# Spans that are lost with a request, or a batch, that is dropped.
SPANS_OF_ONE = 2
# Targets whose name is a route; others may hold anything.
PATHS = ("/v1/inference", "/v1/predict", "/v1/embeddings", "/v1/completions", "/embed")
ROUTES = {path.encode(): path for path in PATHS}
# Targets with the name of a model in them.
OF_MODELS = (
    (re.compile(rb"/v1/models/[^/]+:predict").fullmatch, "/v1/models/NAME:predict"),
    (re.compile(rb"/v2/models/[^/]+(/versions/[^/]+)?/infer").fullmatch, "/v2/models/NAME/infer"),
)
METHODS = {b"GET": "GET", b"HEAD": "HEAD", b"POST": "POST", b"PUT": "PUT", b"DELETE": "DELETE", b"OPTIONS": "OPTIONS"}


class Rules(NamedTuple):
    """What is kept."""

    ratio: float
    slow_share: float
    errors_per_second: float
    # Whether a caller's `traceparent` counts.
    follows_callers: bool


class Tracer(Subscriber):
    """Decides, and packs. `add` takes packed spans and how many these are.

    Ids are drawn by `random_bits(n)`, a number of n bits, and `random_share()`, one from 0 to 1.
    """

    def __init__(
        self,
        rules: Rules,
        tiers: Sequence[str],
        add: Callable[[bytes, int], None],
        *,
        # The histograms whose buckets get kept requests as examples.
        seconds: RequestSeconds,
        clock: Clock,
        wall: Clock,
        random_bits: Callable[[int], int],
        random_share: Callable[[], float],
    ) -> None:
        self._add = add
        self._seconds = seconds
        self._clock = clock
        self._wall = wall
        self._random_bits = random_bits
        self._follows = rules.follows_callers
        self._slow_share = rules.slow_share
        self._ratio = Ratio(rules.ratio, random_bits, random_share)
        # Requests until the next that is kept by ratio: of those that come in, of those that are refused.
        self._gap = self._ratio.gap()
        self._refused_gap = self._ratio.gap()
        self._errors = ErrorRate(rules.errors_per_second)
        self._batch_errors = ErrorRate(rules.errors_per_second)
        # By model.
        self._slowest: defaultdict[str, Slowest] = defaultdict(lambda: Slowest(rules.slow_share))
        self._spans = Spans(tiers, self._new_span_id)
        # The last headers of a caller, and what they say.
        self._last_read = b"", b""
        self._last_given: tuple[Given | None, str] = None, ""
        # What waits to be packed, and how many requests and batches that is.
        self._line: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._waiting = 0
        self._packs = Every(PACK_S, self._pack_some)
        self._windows = Every(WINDOW_S, self._window_ends)
        # For metrics: traces by why they are kept; spans that had no room here.
        self.kept: Counter[str] = Counter(asked=0, ratio=0, error=0, slow=0)
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<Tracer waiting={self._waiting} dropped={self.dropped}>"

    def start(self) -> None:
        """From now on."""
        self._windows.start_now()

    def finish(self) -> None:
        """Pack all there is; nothing comes any more."""
        self._windows.stop()
        self._packs.stop()
        self._pack(LINE_MAX)

    # What a face calls (core.ports.RequestTraces).

    def begin(self, headers: dict[bytes, bytes]) -> Trace | None:
        """The trace of a new request; None if it need not have one yet."""
        if b"traceparent" in headers and self._follows:
            return self._given(headers) or self.begin({})
        gap = self._gap = self._gap - 1
        return None if gap else self._next_kept()

    def _next_kept(self) -> Trace:
        """A trace that begins here, because the ratio falls on it."""
        ratio = self._ratio
        self._gap = ratio.gap()
        return Trace(ratio.kept_id(), self._new_span_id(), b"", True, "", BY_RATIO)

    def refused(
        self,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes],
        error: CarpoolError,
        route: str | None = None,
    ) -> None:
        """A request was answered with an error and never came in."""
        trace: Trace | None = None
        if b"traceparent" in headers and self._follows:
            trace = self._given(headers)
            if trace is not None and trace.is_sampled and not self._errors.takes(self._clock()):
                return
        if trace is None:
            self._refused_gap -= 1
            if self._refused_gap:
                return
            self._refused_gap = self._ratio.gap()
            trace = Trace(self._ratio.kept_id(), self._new_span_id(), b"", True, "", BY_RATIO)
        if trace.is_sampled:
            name = "" if route == "" else METHODS.get(method, "_OTHER")
            self._enter(
                1,
                self._pack_refusal,
                trace,
                name,
                route_of(target) if route is None else route,
                error,
                self._clock(),
            )

    def _given(self, headers: dict[bytes, bytes]) -> Trace | None:
        """The trace that a caller speaks of."""
        pair = headers[b"traceparent"], headers.get(b"tracestate", b"")
        if pair != self._last_read:  # the requests of one call have the same, and there may be thousands of them
            parent, state = (each.decode("latin-1") for each in pair)
            self._last_read, self._last_given = pair, (read_traceparent(parent), read_tracestate(state))
        given, state = self._last_given
        if given is None:
            return None
        why = ASKED if given.is_sampled else BY_RATIO if self._ratio.keeps(given.trace_id) else ""
        return Trace(given.trace_id, self._new_span_id(), given.span_id, bool(why), state, why)

    # What the upstream stage calls (core.ports.CallTraces).

    def call_begins(
        self, members: Sequence[Request], endpoint: str, attempt: int, now: float, *, is_search: bool
    ) -> CallTrace | None:
        """A call begins."""
        batch = members[0].batch
        if batch is None:
            return None
        traced = batch.trace
        if traced is None:
            links = [trace for each in members if (trace := each.trace) is not None and trace.is_sampled]
            traced = batch.trace = BatchTrace(trace_of_batch(batch.id, is_sampled=bool(links)), links, [])
        trace, span_id = traced.trace, self._new_span_id()
        header = traceparent_of(trace.trace_id, span_id, is_sampled=trace.is_sampled)
        headers = (("traceparent", header),)
        return CallTrace(headers, trace.trace_id, span_id, endpoint, attempt, len(members), now, is_search)

    def call_ended(self, members: Sequence[Request], call: CallTrace) -> None:
        """A call has ended; `call` says how."""
        batch = members[0].batch
        if batch is not None and batch.trace is not None:
            batch.trace.calls.append(call)
            if batch.trace.is_written:  # a step of a search
                self._enter(1, self._pack_calls, batch, batch.trace)

    # What happens to requests and batches (core.events).

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests of one model got their outputs at the same time: `settled` for many, on the hot path."""
        first = requests[0]
        slowest = self._slowest[first.model]
        slowest.seen += len(requests)
        # Requests that arrived by then took at least the threshold.
        slow_before = first.ended - slowest.threshold_s
        kept: list[tuple[Request, CallFacts]] = []
        for request, output in zip(requests, outputs, strict=True):
            trace = request.trace
            if trace is not None and trace.is_sampled:
                if not request.is_shared:
                    kept.append((request, output.call))
            elif request.arrived <= slow_before and not (request.is_task or request.is_shared):
                slowest.add(request.ended - request.arrived, (request, output.call))
        for start in range(0, len(kept), PACKED_MIN):  # so that no turn has to pack more of them at once
            some = kept[start : start + PACKED_MIN]
            self._enter(len(some), self._pack_outputs, some)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request got its outcome: keep it, or not."""
        trace = request.trace
        if trace is not None and trace.is_sampled:
            call, error = (outcome.call, None) if isinstance(outcome, Output) else (None, outcome)
            self._keep(request, trace.why, call, error)
        elif isinstance(outcome, Output):
            slowest = self._slowest[request.model]
            slowest.seen += 1
            seconds = request.ended - request.arrived
            if seconds >= slowest.threshold_s and not request.is_task:
                slowest.add(seconds, (request, outcome.call))
        elif not isinstance(outcome, ClientLeft) and self._errors.takes(request.ended):
            self._keep(request, "error", None, outcome)

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over: keep it, or not."""
        traced = batch.trace
        if traced is None or traced.is_written:
            return
        if traced.links or (batch.result not in ("ok", "not-sent") and self._batch_errors.takes(batch.ended)):
            self._write_batch(batch, traced)

    def _keep(self, request: Request, why: str, call: CallFacts | None, error: CarpoolError | None) -> None:
        """Keep a request, and its batch, which may have no link to it yet: it was kept late, or shared a request."""
        trace = request.trace
        if trace is None:
            trace = request.trace = Trace(self._new_trace_id(), self._new_span_id())
        self._enter(1, self._pack_request, request, trace, why, call, error)
        batch = request.batch
        if batch is not None and batch.trace is not None and not batch.trace.is_written:
            links = batch.trace.links
            if len(links) < LINKS_MAX and trace not in links:  # thousands may share a request: no reader looks at all
                links.append(trace)
            if batch.ended:
                self._write_batch(batch, batch.trace)

    def _write_batch(self, batch: Batch, traced: BatchTrace) -> None:
        traced.is_written = True
        self._enter(1, self._pack_batch, batch, traced)

    def _window_ends(self) -> None:
        self._spans.offset_ns = int(self._wall() * 1e9) - int(self._clock() * 1e9)
        for slowest in self._slowest.values():
            for request, call in slowest.pick():
                self._keep(request, "slow", call, None)

    # Packing.

    def _enter(self, weight: int, pack: Callable[..., None], *arguments: Any) -> None:
        """Let something wait until it is packed; `weight`: so many requests, or batches."""
        if self._waiting + weight > LINE_MAX:
            self.dropped += SPANS_OF_ONE * weight
            return
        self._waiting += weight
        if not self._line:
            self._packs.start()
        self._line.append((weight, pack, arguments))

    def _pack_some(self) -> None:
        self._pack(max(PACKED_MIN, self._waiting // PACKED_PART), self._clock() + PACK_S_MAX)
        if not self._line:
            self._packs.stop()

    def _pack(self, most: int, until: float = inf) -> None:
        line, clock = self._line, self._clock
        while line and most > 0 and clock() < until:
            weight, pack, arguments = line.popleft()
            self._waiting -= weight
            most -= weight
            pack(*arguments)

    def _pack_outputs(self, settled: Sequence[tuple[Request, CallFacts]]) -> None:
        pack, kept, packed = self._spans.request, self.kept, []
        for request, call in settled:
            trace = request.trace
            if trace is not None:
                kept[trace.why] += 1
                packed.append(pack(request, trace, trace.why, call, None))
                example = (request, trace, call)
        if packed:
            self._add(b"".join(packed), SPANS_OF_ONE * len(packed))
            self._show_as_example(*example)  # one of them is enough

    def _pack_request(
        self, request: Request, trace: Trace, why: str, call: CallFacts | None, error: CarpoolError | None
    ) -> None:
        self.kept[why] += 1
        self._add(self._spans.request(request, trace, why, call, error), SPANS_OF_ONE)
        if call is not None:
            self._show_as_example(request, trace, call)

    def _show_as_example(self, request: Request, trace: Trace, call: CallFacts) -> None:
        """Let the metrics name this trace, if its request is among those that they count."""
        if not call.cached and not request.is_task:
            took_s = request.ended - request.arrived
            self._seconds.by_tier[request.tier].exemplify(took_s, trace.trace_id.hex(), self._wall())

    def _pack_refusal(self, trace: Trace, method: str, route: str, error: CarpoolError, now: float) -> None:
        self.kept[trace.why] += 1
        self._add(self._spans.refusal(trace, method, route, error, now), 1)

    def _pack_batch(self, batch: Batch, traced: BatchTrace) -> None:
        self._add(self._spans.batch(batch, traced), 1)
        self._pack_calls(batch, traced)

    def _pack_calls(self, batch: Batch, traced: BatchTrace) -> None:
        for packed in self._spans.calls(batch.model, traced):
            self._add(packed, 1)

    def _new_span_id(self) -> bytes:
        return (self._random_bits(64) or 1).to_bytes(8)

    def _new_trace_id(self) -> bytes:
        return (self._random_bits(128) or 1).to_bytes(16)


def route_of(target: bytes) -> str:
    """The route of a target; "" if it is none, and so may hold anything."""
    path = target.partition(b"?")[0]
    return ROUTES.get(path) or next((route for matches, route in OF_MODELS if matches(path)), "")
