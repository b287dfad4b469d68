"""What is collected while somebody looks (`telemetry/live.py`), and who is shown it (`face/http/live.py`)."""

from typing import Any, cast

import pytest

from carpool.core.batch import Batch
from carpool.core.defaults import do_nothing
from carpool.core.errors import UpstreamFailed
from carpool.core.histograms import SECONDS_BOUNDS, Histogram
from carpool.core.live import BATCHES_MAX, SLOW_KEPT_S, LaneWaiting, LivePart
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import Peer
from carpool.core.request import Request
from carpool.core.snapshot import FleetState, Health, OutcomeNumbers, Scale, SheddingNumbers, Snapshot
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.live import MISSED_MAX, VIEWERS_MAX, Viewers
from carpool.telemetry.live import Collector, Merger
from carpool.testing import Witness, make_request

TIERS = ["paid", "free"]


def snapshot(shed: int = 0, ok: int = 0) -> Snapshot:
    return Snapshot(
        health=Health(status="healthy", gpu_utilization=0.5, queue_depth=3, requests_per_second=1.0),
        fleet=FleetState(models={}),
        scale=Scale(models={}),
        numbers=(
            OutcomeNumbers(
                requests={"ok": ok},
                queue_wait_seconds=Histogram(SECONDS_BOUNDS),
                request_seconds={},
                stage_seconds={},
                waiting={"paid": 0, "free": 1},
                dead_letters={},
                dead_letters_lost=0,
                dead_letters_kept=2,
                dead_letter_bytes=0,
            ),
            SheddingNumbers(
                problems={"shed": shed},
                connections=1,
                grpc_calls=2,
                held_requests=0,
                held_bytes=0,
                pressure={},
                wait_error_seconds={},
                utilization_target=0.75,
                shed={("m", "paid"): 0, ("m", "free"): shed},
            ),
        ),
        models={},
    )


def request_of(name: str, tier: int = 0) -> Request:
    return make_request(name, Witness(), now=0.0, tier=tier)


def cut(collector: Collector, now: float, name: str = "one", **numbers: int) -> LivePart:
    return collector.cut(name, "serve", snapshot(**numbers), [LaneWaiting("m", "", 1)], now)


def settle(request: Request, seconds: float, code: str = "ok") -> Request:
    request.ended, request.result_code = request.arrived + seconds, code
    request.taken = request.arrived + min(0.001, seconds)
    return request


def output(batch_id: str = "") -> Output:
    return Output(b"1", CallFacts(2, 0.2, endpoint="gpu", started_s=0.01, batch_id=batch_id))


def batch_of(number: int, requests: list[Request]) -> Batch:
    batch = Batch(f"{number:016x}", "m", len(requests), "full", 0.0)
    for request in requests:
        request.batch = batch
    return batch


def drive(collector: Collector, number: int, sent: float, ended: float, result: str = "ok") -> None:
    requests = [request_of(f"{number}-{n}", tier=n % 2) for n in range(3)]
    batch = batch_of(number, requests)
    collector.sent(requests, "gpu", 1, sent)
    batch.ended, batch.result = ended, result
    collector.ended(batch, requests)


def test_a_second_by_tier() -> None:
    collector = Collector(TIERS, 0.0)
    cut(collector, 0.0, shed=5)
    for tier in (0, 1, 1):
        collector.admitted(request_of("r", tier=tier))
    collector.settled(settle(request_of("a", tier=0), 0.1), output())
    collector.settled(settle(request_of("b", tier=1), 0.3, "upstream-failed"), UpstreamFailed("x"))
    event = Merger(TIERS, {"m": 64}).event(snapshot(), [cut(collector, 2.0, shed=9, ok=7)], 1.0, 1)
    paid, free = event.tiers
    assert (paid.offered, paid.admitted, paid.shed, paid.answered, paid.failed) == (0.5, 0.5, 0.0, 0.5, 0.0)
    assert (free.offered, free.admitted, free.shed, free.answered, free.failed) == (3.0, 1.0, 2.0, 0.0, 0.5)
    assert (paid.waiting, free.waiting) == (0, 1)
    assert paid.p99_ms is not None
    assert 100 <= paid.p99_ms <= 110
    assert free.p99_ms is None  # it was not answered
    assert event.requests == {"ok": 7}
    assert event.dead_letters == 2
    assert cut(collector, 3.0, shed=9).tiers[1].admitted == 0


def test_a_batch_under_way_is_shown_and_then_how_it_ended() -> None:
    collector = Collector(TIERS, 0.0)
    requests = [request_of(f"{n}", tier=n % 2) for n in range(3)]
    batch = batch_of(1, requests)
    collector.sent(requests, "gpu", 1, 0.5)
    [running] = cut(collector, 1.0).batches
    assert (running.size, running.sent, running.ended, running.result, running.tiers) == (3, 0.5, 0.0, "", (2, 1))
    batch.ended, batch.result = 1.5, "ok"
    collector.ended(batch, requests)
    part = cut(collector, 2.0)
    [over] = part.batches
    assert (over.id, over.ended, over.result, part.batches_ended) == (running.id, 1.5, "ok", 1)
    assert cut(collector, 3.0).batches == ()


def test_a_call_that_was_made_again_is_seen_as_failed() -> None:
    collector = Collector(TIERS, 0.0)
    requests = [request_of("r")]
    batch_of(1, requests)
    collector.sent(requests, "bad", 1, 0.1)
    collector.sent(requests, "good", 2, 0.3)
    again, failed = cut(collector, 1.0).batches
    assert (failed.endpoint, failed.ended, failed.result, failed.attempt) == ("bad", 0.3, "upstream-failed", 1)
    assert (again.endpoint, again.ended, again.attempt) == ("good", 0.0, 2)


def test_searches_leave_nothing_behind() -> None:
    collector = Collector(TIERS, 0.0)
    requests = [request_of("r")]
    batch = batch_of(1, requests)
    batch.ended = 0.1
    collector.sent(requests, "gpu", 1, 0.2)
    assert cut(collector, 1.0).batches == ()


@pytest.mark.parametrize("number", [BATCHES_MAX, BATCHES_MAX + 1, 4 * BATCHES_MAX])
def test_batches_are_sampled(number: int) -> None:
    collector = Collector(TIERS, 0.0)
    for each in range(number):
        drive(collector, each, each / number, each / number + 0.1)
    part = cut(collector, 2.0)
    assert part.batches_ended == number
    assert BATCHES_MAX / 2 <= len(part.batches) <= BATCHES_MAX
    # From the whole second, not from its beginning.
    assert part.batches[-1].sent > 0.9
    assert part.batches[0].sent < 0.1


def test_the_slowest_are_told_one_of_each_batch() -> None:
    collector = Collector(TIERS, 0.0)
    for number in range(20):
        for seat in range(3):
            collector.settled(settle(request_of(f"{number}-{seat}"), number / 10), output(f"batch {number}"))
    found = sorted(cut(collector, 1.0).slow, key=lambda slow: -slow.total_ms)
    assert [slow.batch for slow in found] == [f"batch {n}" for n in (19, 18, 17, 16, 15)]
    assert (found[0].total_ms, found[0].retry_ms, found[0].call_ms, found[0].batch_size) == (1900.0, 10.0, 200.0, 2)


def test_the_slowest_are_remembered_as_long_as_they_are_shown() -> None:
    collector = Collector(TIERS, 0.0)
    for second in range(2 * SLOW_KEPT_S):
        for number in range(20):
            collector.settled(settle(request_of(f"{second}-{number}"), number / 10), output(f"{second} {number}"))
        assert collector.find_slow(f"{second}-19") is not None
        cut(collector, second + 1.0)
    last = 2 * SLOW_KEPT_S - 1
    for second in (last, last - SLOW_KEPT_S + 1):
        found = collector.find_slow(f"{second}-19")
        assert found is not None and found.id == f"{second}-19"
    assert collector.find_slow(f"{last}-1") is None, "it was not slow"
    assert collector.find_slow(f"{last - SLOW_KEPT_S - 1}-19") is None


def test_an_error_over_redis_tells_of_the_batch_that_another_process_sent() -> None:
    collector = Collector(TIERS, 0.0)
    request = settle(request_of("r"), 0.5, "upstream-failed")
    request.call, request.taken = CallFacts(7, 0.0, endpoint="gpu", attempts=3, started_s=0.2, batch_id="b"), 0.1
    collector.settled(request, UpstreamFailed("x"))
    [slow] = cut(collector, 1.0).slow
    assert (slow.batch, slow.batch_size, slow.endpoint, slow.attempts) == ("b", 7, "gpu", 3)


def test_tasks_have_no_latency_here() -> None:
    collector = Collector(TIERS, 0.0)
    task = settle(request_of("t"), 100.0)
    task.is_task = True
    collector.settled(task, output())
    part = cut(collector, 1.0)
    assert part.slow == ()
    assert part.latencies == ({}, {})


def test_parts_of_a_fleet_add_up_and_count_once() -> None:
    one, two = Collector(TIERS, 0.0), Collector(TIERS, 50.0)
    for collector in (one, two):
        collector.admitted(request_of("r", tier=0))
        collector.settled(settle(request_of("r", tier=0), 0.1), output())
        drive(collector, 1, 0.1, 0.2)
    parts = [cut(one, 1.0, "one", ok=1), cut(two, 51.0, "two", ok=2)]
    merger = Merger(TIERS, {})
    event = merger.event(snapshot(), parts, 1.0, 1)
    assert (event.tiers[0].admitted, event.requests, len(event.batches)) == (2.0, {"ok": 3}, 2)
    assert [process.name for process in event.processes] == ["one", "two"]
    # The second of the other comes late: its rate stays, what happened in it does not happen again.
    event = merger.event(snapshot(), [cut(one, 2.0, "one", ok=1), parts[1]], 2.0, 1)
    assert (event.tiers[0].admitted, event.requests, len(event.batches)) == (1.0, {"ok": 3}, 0)
    assert [process.name for process in event.processes] == ["one"]


def test_a_fleet_shows_no_more_batches_than_one_process() -> None:
    parts = []
    for name in "abc":
        collector = Collector(TIERS, 0.0)
        for each in range(BATCHES_MAX):
            drive(collector, each, 0.1, 0.2)
        parts.append(cut(collector, 1.0, name))
    event = Merger(TIERS, {}).event(snapshot(), parts, 1.0, 1)
    assert (len(event.batches), event.batches_ended) == (BATCHES_MAX, 3 * BATCHES_MAX)
    assert {place for place, _ in event.batches} == {0, 1, 2}


class Wire:
    """The other end of an exchange, which reads as it is told."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.written: list[bytes] = []
        self.reads = True
        self.is_broken = False
        self.status = 0

    def respond(self, exchange: Exchange, status: int, body: Any, content_type: bytes, headers: bytes) -> None:
        self.status = status

    def note_problem(self, *arguments: Any) -> None:
        pass

    def begin(self, exchange: Exchange, status: int, content_type: bytes, headers: bytes) -> None:
        self.status = status

    def write(self, exchange: Exchange, part: bytes) -> bool:
        self.written.append(part)
        exchange.is_told_to_wait = not self.reads
        return self.reads

    def end(self, exchange: Exchange) -> None:
        self.is_broken = True

    def break_off(self) -> None:
        self.is_broken = True


def look(viewers: Viewers, method: bytes = b"GET") -> tuple[Wire, Exchange]:
    wire = Wire()
    exchange = Exchange(cast(Connection, wire), method, b"/internal/live", {}, b"", True)
    viewers.join(exchange, "")
    return wire, exchange


def leave(exchange: Exchange) -> None:
    assert exchange.worker is not None
    exchange.worker.client_left(exchange)


def test_viewers_are_bounded() -> None:
    viewers = Viewers(do_nothing, bytes)
    exchanges = [look(viewers)[1] for _ in range(VIEWERS_MAX)]
    assert look(viewers)[0].status == 503
    leave(exchanges[0])
    assert look(viewers)[0].status == 200


def test_one_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    viewers = Viewers(do_nothing, bytes)
    (slow, exchange), (quick, _) = look(viewers), look(viewers)
    slow.reads = False
    for _ in range(MISSED_MAX + 1):
        viewers.show(b"{}")
    assert len(slow.written) == 2  # the greeting, and the first that it did not read
    broken = [slow.is_broken]
    viewers.show(b"{}")
    broken += [slow.is_broken, quick.is_broken]
    assert broken == [False, True, False]
    assert len(quick.written) == MISSED_MAX + 3
    leave(exchange)
    assert len(viewers) == 1


def test_one_that_reads_on_is_kept() -> None:
    viewers = Viewers(do_nothing, bytes)
    wire, exchange = look(viewers)
    for _ in range(3 * MISSED_MAX):
        wire.reads = False
        viewers.show(b"{}")
        viewers.show(b"{}")
        wire.reads, exchange.is_told_to_wait = True, False
        viewers.show(b"{}")
    assert not wire.is_broken


def test_head_looks_at_nothing() -> None:
    viewers = Viewers(do_nothing, bytes)
    look(viewers, b"HEAD")
    assert len(viewers) == 0
