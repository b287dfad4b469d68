"""Tracing (`telemetry/tracer.py`): its numbered rules, on virtual time."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.errors import ClientLeft, Malformed, UpstreamFailed
from carpool.core.events import Events
from carpool.core.histograms import RequestSeconds
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import Request
from carpool.core.trace import Trace, traceparent_of
from carpool.telemetry.otlp import Envelope
from carpool.telemetry.spans import LINKS_MAX
from carpool.telemetry.tracer import LINE_MAX, PACKED_MIN, Rules, Tracer
from carpool.testing import FakeClock, Witness, make_output, make_request
from support.otlp import SeenSpan, spans_in

WALL = 1_800_000_000.0
ENVELOPE = Envelope([], "carpool", "1")
CALL = CallFacts(4, 0.1, endpoint="http://gpu/", batch_id="0011223344556677")


class Stand:
    """A tracer on virtual time, told by events as in production."""

    def __init__(
        self, ratio: float = 0.0, slow_share: float = 0.0, errors: float = 0.0, *, follows: bool = True
    ) -> None:
        self.clock = FakeClock()
        self.packed: list[bytes] = []
        self.seconds = RequestSeconds()
        drawn = random.Random(5)
        # Seconds that pass each time when somebody looks at the clock.
        self.tick_s = 0.0
        self._ticked_s = 0.0
        self.tracer = Tracer(
            Rules(ratio, slow_share, errors, follows),
            ["first", "last"],
            lambda packed, spans: self.packed.append(packed),
            seconds=self.seconds,
            clock=self._look_at_the_clock,
            wall=lambda: WALL + self.clock(),
            random_bits=drawn.getrandbits,
            random_share=drawn.random,
        )
        self.events = Events()
        self.events.subscribe(self.tracer)

    def _look_at_the_clock(self) -> float:
        self._ticked_s += self.tick_s
        return self.clock() + self._ticked_s

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
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (b"\0" * 15 + b"\1", b"12345678", True)
    assert (trace.state, trace.why) == ("a=1", "asked")
    assert trace.span_id not in (b"12345678", bytes(8))


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


def test_rule_2_errors_are_kept_at_a_rate_and_clients_who_left_are_none() -> None:
    def work(stand: Stand) -> None:
        for number in range(50):
            stand.settle(stand.request(f"left {number}"), ClientLeft("the client left"))
        for number in range(50):
            stand.settle(stand.request(f"failed {number}"), UpstreamFailed("canary"))

    spans = Stand(errors=10).run(work)
    assert requests_in(spans) == [f"failed {number}" for number in range(10)]
    assert {span.attributes["error.type"] for span in spans if span.attributes} == {"upstream-failed"}
    assert all(span.is_error for span in spans if span.attributes)
    assert len({span.trace_id for span in spans}) == 10


@pytest.mark.parametrize("told", ["one by one", "together"])
def test_rule_2_the_slowest_are_kept_and_tasks_are_not_among_them(told: str) -> None:
    def work(stand: Stand) -> None:
        pairs = []
        for number in range(200):
            request = stand.request(f"{number}")
            request.arrived -= 0.001 * number
            request.ended, request.taken = stand.clock(), request.arrived
            pairs.append((request, Output(b"", CALL)))
        task = stand.request("a task", is_task=True)
        task.arrived -= 60.0
        task.ended = stand.clock()
        pairs.append((task, Output(b"", CALL)))
        if told == "together":
            stand.events.all_settled([request for request, _ in pairs], [output for _, output in pairs])
        else:
            for request, output in pairs:
                stand.events.settled(request, output)

    spans = Stand(slow_share=0.01).run(work)
    assert sorted(requests_in(spans)) == ["198", "199"]
    kept = next(span for span in spans if span.attributes.get("carpool.request.id") == "199")
    assert kept.attributes["carpool.kept"] == "slow"
    assert kept.attributes["carpool.batch.id"] == CALL.batch_id
    assert kept.end_ns - kept.start_ns == pytest.approx(199_000_000, abs=1000)
    assert abs(kept.start_ns / 1e9 - WALL) < 86_400


def test_rule_2_a_batch_is_kept_with_one_that_is_kept_late() -> None:
    def work(stand: Stand) -> None:
        members = [stand.request(name) for name in ("fine", "failed")]
        batch = Batch("0011223344556677", "m", 2, "full", stand.clock())
        for member in members:
            member.batch = batch
        call = stand.tracer.call_begins(members, "http://gpu/", 1, stand.clock(), is_search=False)
        assert call is not None
        assert call.headers[0][1].endswith("-00")
        call.ended = batch.ended = stand.clock()
        stand.tracer.call_ended(members, call)
        stand.settle(members[0], Output(b"", CALL))
        stand.settle(members[1], UpstreamFailed("failed"))
        batch.result = "ok"
        stand.events.ended(batch, members)

    spans = Stand(errors=10).run(work)
    assert sorted(span.name for span in spans) == ["attempt", "batch", "inference", "queue"]
    by_name = {span.name: span for span in spans}
    [link] = by_name["batch"].links
    assert (link.trace_id, link.span_id) == (by_name["inference"].trace_id, by_name["inference"].span_id)
    [back] = by_name["inference"].links
    assert (back.trace_id, back.span_id) == (by_name["batch"].trace_id, by_name["batch"].span_id)


def test_a_batch_that_nobody_wants_is_not_kept() -> None:
    def work(stand: Stand) -> None:
        request = stand.request("fine")
        request.batch = Batch("0011223344556677", "m", 1, "full", stand.clock())
        assert stand.tracer.call_begins([request], "http://gpu/", 1, stand.clock(), is_search=False) is not None
        request.batch.result = "ok"
        stand.events.ended(request.batch, [request])

    assert Stand(errors=10).run(work) == []


def test_rule_3_a_flood_of_refusals_is_kept_by_ratio_and_by_the_rate_of_errors_where_callers_ask() -> None:
    def flood(given: dict[bytes, bytes]) -> Callable[[Stand], None]:
        def work(stand: Stand) -> None:
            for _ in range(2000):
                stand.tracer.refused(b"POST", b"/v1/inference", given, Malformed("canary"))

        return work

    assert Stand(errors=10).run(flood({})) == []
    assert 100 < len(Stand(ratio=0.1, errors=10).run(flood({}))) < 300
    asked = Stand(errors=10).run(flood(headers(b"\1" * 16, is_sampled=True)))
    assert len(asked) == 10
    assert {(span.trace_id, span.parent_id) for span in asked} == {((b"\1" * 16).hex(), b"12345678".hex())}


def test_rule_5_what_has_no_room_is_counted() -> None:
    stand = Stand(ratio=1.0)

    def work(stand: Stand) -> None:
        for number in range(LINE_MAX + 5):
            stand.settle(stand.request(f"{number}", stand.tracer.begin({})), Output(b"", CALL))
        assert stand.tracer.dropped == 10

    assert len(stand.run(work)) == 2 * LINE_MAX
    assert stand.tracer.kept["ratio"] == LINE_MAX


def test_rule_5_a_large_batch_is_packed_in_parts() -> None:
    stand = Stand(ratio=1.0)

    def work(stand: Stand) -> None:
        members = [stand.request(f"{number}", stand.tracer.begin({})) for number in range(1000)]
        stand.events.all_settled(members, [Output(b"", CALL)] * len(members))

    assert len(requests_in(stand.run(work))) == 1000
    assert max(len(requests_in(spans_in(ENVELOPE.wrap([each])))) for each in stand.packed) <= PACKED_MIN


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
