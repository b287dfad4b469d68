"""Tracing (`telemetry/tracer.py`): its numbered rules, on virtual time."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.errors import Malformed, UpstreamFailed
from carpool.core.events import Events
from carpool.core.histograms import RequestSeconds
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import Request
from carpool.core.trace import Trace, traceparent_of
from carpool.telemetry.spans import LINKS_MAX, Envelope
from carpool.telemetry.tracer import REFUSALS_MAX, Ratio, Tracer
from carpool.testing import FakeClock, Witness, make_output, make_request
from support.otlp import SeenSpan, spans_in

WALL = 1_800_000_000.0
ENVELOPE = Envelope([], "carpool", "1")
CALL = CallFacts(4, 0.1, endpoint="http://gpu/", batch_id="0011223344556677")


class Stand:
    """A tracer on virtual time, told by events as in production."""

    def __init__(self, ratio: float = 0.0, *, follows: bool = True) -> None:
        self.clock = FakeClock()
        self.packed: list[bytes] = []
        self.seconds = RequestSeconds()
        drawn = random.Random(5)
        self.tracer = Tracer(
            Ratio(ratio, drawn.getrandbits, drawn.random),
            ["first", "last"],
            lambda packed, spans: self.packed.append(packed),
            follows_callers=follows,
            seconds=self.seconds,
            clock=self.clock,
            wall=lambda: WALL + self.clock(),
            random_bits=drawn.getrandbits,
        )
        self.events = Events()
        self.events.subscribe(self.tracer)

    def run(self, work: Callable[["Stand"], None], seconds: float = 3.0) -> list[SeenSpan]:
        """What is kept of this."""

        async def main() -> None:
            self.tracer.start()
            work(self)
            await asyncio.sleep(seconds)
            self.tracer.finish()

        self.clock.run(main())
        return spans_in(ENVELOPE.wrap(self.packed))

    def request(self, request_id: str, trace: Trace | None = None, **facts: Any) -> Request:
        request = make_request(request_id, Witness(), now=self.clock(), **facts)
        request.trace = trace
        return request

    def settle(self, request: Request, outcome: Any, seconds: float = 0.0) -> None:
        request.taken, request.ended = request.arrived, request.arrived + seconds
        request.result_code = "ok" if isinstance(outcome, Output) else outcome.code
        self.events.settled(request, outcome)


def headers(trace_id: bytes, *, is_sampled: bool, state: bytes = b"") -> dict[bytes, bytes]:
    text = traceparent_of(trace_id, b"12345678", is_sampled=is_sampled).encode()
    return {b"traceparent": text} | ({b"tracestate": state} if state else {})


def requests_in(spans: list[SeenSpan]) -> list[str]:
    return [span.attributes["carpool.request.id"] for span in spans if "carpool.request.id" in span.attributes]


def test_rule_1_whoever_asks_is_kept_and_goes_on_with_its_trace() -> None:
    tracer = Stand().tracer
    trace = tracer.begin(headers(b"\0" * 15 + b"\1", is_sampled=True, state=b"a=1"))
    assert trace is not None
    assert (trace.trace_id, trace.parent_id) == (b"\0" * 15 + b"\1", b"12345678")
    assert (trace.state, trace.why) == ("a=1", "asked")
    assert trace.span_id not in (b"12345678", bytes(8))


def test_rule_1_whoever_does_not_ask_is_kept_by_the_ratio_of_its_trace() -> None:
    high, low = headers(b"\xff" * 16, is_sampled=False), headers(b"\1" * 16, is_sampled=False)
    assert Stand().tracer.begin(high) is None
    tracer = Stand(ratio=0.1).tracer
    kept = tracer.begin(high)
    assert kept is not None and (kept.parent_id, kept.why) == (b"12345678", "ratio")
    assert [tracer.begin(low) for _ in range(100)] == [None] * 100
    assert Stand(follows=False).tracer.begin(headers(b"\xff" * 16, is_sampled=True)) is None


def test_rule_1_what_is_not_sampled_is_not_kept_however_it_ends() -> None:
    def work(stand: Stand) -> None:
        request = stand.request("failed", stand.tracer.begin({}))
        request.batch = Batch("0011223344556677", "m", 1, "full", stand.clock())
        call = stand.tracer.call_begins([request], "http://gpu/", 1, stand.clock(), is_search=False)
        assert call is not None and call.headers[0][1].endswith("-00")
        call.ended = request.batch.ended = stand.clock()
        call.error = "upstream-failed"
        stand.tracer.call_ended([request], call)
        stand.settle(request, UpstreamFailed("failed"), seconds=60.0)
        request.batch.result = "upstream-failed"
        stand.events.ended(request.batch, [request])

    assert Stand().run(work) == []


@pytest.mark.parametrize("text", [b"", b"00-x", b"\xff" * 55, b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
def test_a_traceparent_that_cannot_be_read_begins_a_trace(text: bytes) -> None:
    assert Stand().tracer.begin({b"traceparent": text}) is None
    trace = Stand(ratio=1.0).tracer.begin({b"traceparent": text})
    assert trace is not None and trace.parent_id == b""


@pytest.mark.parametrize("how", ["one", "batch"])
def test_metrics_name_a_trace_that_is_kept(how: str) -> None:
    def answer(stand: Stand) -> None:
        requests = [stand.request(str(number), stand.tracer.begin({})) for number in range(2)]
        if how == "one":
            stand.settle(requests[0], make_output(b"1"), seconds=0.3)
            return
        for request in requests:
            request.taken, request.ended = request.arrived, request.arrived + 0.3
        stand.events.all_settled(requests, [make_output(b"1")] * 2)

    stand = Stand(ratio=1.0)
    spans = stand.run(answer)
    [example] = stand.seconds.by_tier[0].examples.values()
    assert example.value == pytest.approx(0.3)
    assert example.trace_id in {span.trace_id for span in spans}


def test_rule_2_a_flood_of_refusals_is_kept_by_ratio_and_some_a_second_where_callers_ask() -> None:
    def flood(given: dict[bytes, bytes]) -> Callable[[Stand], None]:
        def work(stand: Stand) -> None:
            for _ in range(2000):
                stand.tracer.refused(b"POST", b"/v1/inference", given, Malformed("canary"))

        return work

    assert Stand().run(flood({})) == []
    assert 100 < len(Stand(ratio=0.1).run(flood({}))) < 300
    asked = Stand().run(flood(headers(b"\1" * 16, is_sampled=True)))
    assert len(asked) == REFUSALS_MAX
    assert {(span.trace_id, span.parent_id) for span in asked} == {((b"\1" * 16).hex(), b"12345678".hex())}


def test_no_more_links_are_remembered_of_a_batch_than_are_told() -> None:
    """Thousands who ask may share one seat. To look through as many links for each of them would take seconds."""
    batch = Batch("0011223344556677", "m", 1, "full", 0.0)

    def work(stand: Stand) -> None:
        members = [stand.request(f"{number}", stand.tracer.begin({})) for number in range(LINKS_MAX + 100)]
        for member in members:
            member.batch = batch
        stand.tracer.call_begins(members[:1], "http://gpu/", 1, stand.clock(), is_search=False)
        for member in members:
            stand.settle(member, Output(b"", CALL))
        stand.events.ended(batch, members[:1])

    spans = Stand(ratio=1.0).run(work)
    assert batch.trace is not None and len(batch.trace.links) == LINKS_MAX
    assert [len(span.links) for span in spans if span.name == "batch"] == [LINKS_MAX]
