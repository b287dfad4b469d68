"""Tracing. Whether a trace is kept is decided when its request comes; its spans are packed at its end.

1. Where its caller asks for it (the sampled flag), or the ratio falls on it, a request has a trace: it travels with the
   request, the batch has a link to it, and the call tells the upstream that the batch is kept. All other requests have
   none, and cost a countdown. To keep the slowest, or those that failed, is the work of a collector behind: it can wait
   for the spans of all processes before it decides.
2. Refusals are kept by the same rule; with a trace of their caller, so many a second at most: a flood must stay cheap.
3. The process that settles a request writes its span: over Redis the gateway, for a task the batcher. The process
   that sends a batch writes the span of the batch.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf, log

from carpool.core.batch import Batch
from carpool.core.clock import Clock
from carpool.core.errors import CarpoolError
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
from carpool.telemetry.spans import LINKS_MAX, Spans

# How often the wall clock is looked at; and how many refusals are kept meanwhile because their callers ask.
WINDOW_S = 1.0
REFUSALS_MAX = 100
# Targets whose name is a route; others may hold anything.
PATHS = ("/v1/inference", "/v1/predict", "/v1/embeddings", "/v1/completions", "/embed")
ROUTES = {path.encode(): path for path in PATHS}
# Targets with the name of a model in them.
OF_MODELS = (
    (re.compile(rb"/v1/models/[^/]+:predict").fullmatch, "/v1/models/NAME:predict"),
    (re.compile(rb"/v2/models/[^/]+(/versions/[^/]+)?/infer").fullmatch, "/v2/models/NAME/infer"),
)
METHODS = {b"GET": "GET", b"HEAD": "HEAD", b"POST": "POST", b"PUT": "PUT", b"DELETE": "DELETE", b"OPTIONS": "OPTIONS"}


# A trace id is kept by its last seven bytes, as a number.
RANDOM_BITS = 56


class Ratio:
    """Which traces are kept. `random_bits(n)` draws a number of n bits, `random_share()` one from 0 to 1.

    It goes by trace id, as OpenTelemetry's samplers do: the last seven bytes, as a number, are among the highest. All
    services with this rule keep the same traces. Requests that begin a trace draw no id each: the tracer draws the gap
    to the next request that is kept, and gives that one an id which fits.
    """

    def __init__(self, ratio: float, random_bits: Callable[[int], int], random_share: Callable[[], float]) -> None:
        self._kept = round(ratio * (1 << RANDOM_BITS))
        self._log_rest = -inf if ratio >= 1.0 else log(1.0 - ratio) if ratio > 0.0 else 0.0
        self._random_bits = random_bits
        self._random_share = random_share

    def keeps(self, trace_id: bytes) -> bool:
        """Whether a trace with this id is kept."""
        return int.from_bytes(trace_id[-7:]) >= (1 << RANDOM_BITS) - self._kept

    def gap(self) -> int:
        """How many requests come until one is kept, that one included; for ever where none is."""
        if not self._log_rest:
            return 1 << 62
        if self._log_rest == -inf:
            return 1
        return min(1 << 62, 1 + int(log(1.0 - self._random_share()) / self._log_rest))

    def kept_id(self) -> bytes:
        """A new trace id that is kept."""
        if self._log_rest == -inf:
            return (self._random_bits(128) or 1).to_bytes(16)
        below_the_highest = 1 + min(int(self._random_share() * self._kept), self._kept - 1)
        return self._random_bits(72).to_bytes(9) + ((1 << RANDOM_BITS) - below_the_highest).to_bytes(7)


class Tracer(Subscriber):
    """Decides, and packs. `add` takes packed spans and how many these are; `random_bits(n)` draws n bits for ids."""

    def __init__(
        self,
        ratio: Ratio,
        tiers: Sequence[str],
        add: Callable[[bytes, int], None],
        *,
        # Whether a caller's `traceparent` counts.
        follows_callers: bool,
        # The histograms whose buckets get kept requests as examples.
        seconds: RequestSeconds,
        clock: Clock,
        wall: Clock,
        random_bits: Callable[[int], int],
    ) -> None:
        self._ratio = ratio
        self._add = add
        self._follows = follows_callers
        self._seconds = seconds
        self._clock = clock
        self._wall = wall
        self._random_bits = random_bits
        # Requests, and refusals, until the next that is kept by ratio.
        self._gap = ratio.gap()
        self._refusals_left = REFUSALS_MAX
        self._spans = Spans(tiers, self._new_span_id)
        # The last headers of a caller, and what they say.
        self._last_read = b"", b""
        self._last_given: tuple[Given | None, str] = None, ""
        self._windows = Every(WINDOW_S, self._window_ends)
        # For metrics: traces by why they are kept.
        self.kept: Counter[str] = Counter({ASKED: 0, BY_RATIO: 0})

    def start(self) -> None:
        """From now on."""
        self._windows.start_now()

    def finish(self) -> None:
        """Nothing comes any more."""
        self._windows.stop()

    # What a face calls (core.ports.RequestTraces).

    def begin(self, headers: dict[bytes, bytes]) -> Trace | None:
        """The trace of a new request; None: it is not kept."""
        if b"traceparent" in headers and self._follows:
            given, state = self._read(headers[b"traceparent"], headers.get(b"tracestate", b""))
            if given is not None:
                why = ASKED if given.is_sampled else BY_RATIO if self._ratio.keeps(given.trace_id) else ""
                return Trace(given.trace_id, self._new_span_id(), given.span_id, state, why) if why else None
        gap = self._gap = self._gap - 1
        if gap:
            return None
        self._gap = self._ratio.gap()
        return Trace(self._ratio.kept_id(), self._new_span_id(), b"", "", BY_RATIO)

    def refused(
        self,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes],
        error: CarpoolError,
        route: str | None = None,
    ) -> None:
        """A request was answered with an error and never came in."""
        trace = self.begin(headers)
        if trace is None:
            return
        if trace.parent_id:
            self._refusals_left -= 1
            if self._refusals_left < 0:
                return
        name = "" if route == "" else METHODS.get(method, "_OTHER")
        route = route_of(target) if route is None else route
        self.kept[trace.why] += 1
        self._add(self._spans.refusal(trace, name, route, error, self._clock()), 1)

    def _read(self, parent: bytes, state: bytes) -> tuple[Given | None, str]:
        """What a caller's headers say."""
        if (parent, state) != self._last_read:  # the requests of one call have the same: there may be thousands
            self._last_read = parent, state
            texts = parent.decode("latin-1"), state.decode("latin-1")
            self._last_given = read_traceparent(texts[0]), read_tracestate(texts[1])
        return self._last_given

    # What the upstream stage calls (core.ports.CallTraces).

    def call_begins(
        self, members: Sequence[Request], endpoint: str, attempt: int, now: float, *, is_search: bool
    ) -> CallTrace | None:
        """A call begins."""
        batch = members[0].batch
        if batch is None:
            return None
        if batch.trace is None:
            links = [each.trace for each in members if each.trace is not None]
            batch.trace = BatchTrace(trace_of_batch(batch.id), links, [])
        span_id = self._new_span_id()
        header = traceparent_of(batch.trace.trace.trace_id, span_id, is_sampled=batch.is_traced)
        return CallTrace((("traceparent", header),), span_id, endpoint, attempt, len(members), now, is_search)

    def call_ended(self, members: Sequence[Request], call: CallTrace) -> None:
        """A call has ended; `call` says how."""
        batch = members[0].batch
        if batch is not None and batch.trace is not None:
            batch.trace.calls.append(call)
            if batch.ended and batch.is_traced:  # a step of a search
                self._write_calls(batch, batch.trace)

    # What happens to requests and batches (core.events).

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests got their outputs at the same time: `settled` for many, on the hot path."""
        last: tuple[Request, Trace, CallFacts] | None = None
        for request, output in zip(requests, outputs, strict=True):
            if request.trace is not None and not request.is_shared:
                self._write_request(request, request.trace, output.call, None)
                last = request, request.trace, output.call
        if last is not None:
            self._show_as_example(*last)  # one of them is enough

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request got its outcome."""
        trace, batch = request.trace, request.batch
        if trace is None:
            return
        if batch is not None and batch.trace is not None:
            # A request that shared a call is not among those that were sent. Thousands may: no reader looks at all.
            links = batch.trace.links
            if len(links) < LINKS_MAX and trace not in links:
                links.append(trace)
                if batch.ended and len(links) == 1:
                    self._write_batch(batch, batch.trace)
        if isinstance(outcome, Output):
            self._write_request(request, trace, outcome.call, None)
            self._show_as_example(request, trace, outcome.call)
        else:
            self._write_request(request, trace, None, outcome)

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over."""
        if batch.trace is not None and batch.is_traced:
            self._write_batch(batch, batch.trace)

    def _write_request(
        self, request: Request, trace: Trace, call: CallFacts | None, error: CarpoolError | None
    ) -> None:
        self.kept[trace.why] += 1
        self._add(self._spans.request(request, trace, call, error), 2)

    def _show_as_example(self, request: Request, trace: Trace, call: CallFacts) -> None:
        """Let the metrics name this trace, if its request is among those that they count."""
        if not call.cached and not request.is_task:
            took_s = request.ended - request.arrived
            self._seconds.by_tier[request.tier].exemplify(took_s, trace.trace_id.hex(), self._wall())

    def _write_batch(self, batch: Batch, traced: BatchTrace) -> None:
        self._add(self._spans.batch(batch, traced), 1)
        self._write_calls(batch, traced)

    def _write_calls(self, batch: Batch, traced: BatchTrace) -> None:
        for packed in self._spans.calls(batch.model, traced):
            self._add(packed, 1)

    def _window_ends(self) -> None:
        self._spans.offset_ns = int(self._wall() * 1e9) - int(self._clock() * 1e9)
        self._refusals_left = REFUSALS_MAX

    def _new_span_id(self) -> bytes:
        return (self._random_bits(64) or 1).to_bytes(8)


def route_of(target: bytes) -> str:
    """The route of a target; "" if it is none, and so may hold anything."""
    path = target.partition(b"?")[0]
    return ROUTES.get(path) or next((route for matches, route in OF_MODELS if matches(path)), "")
