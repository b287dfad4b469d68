from io import StringIO
from math import ceil, inf, nan
from random import Random

import pytest
from rich.console import Console

from carpool.cli.bench import print_report
from carpool.tools.bench.run import progress_text
from carpool.tools.bench.tally import LogHistogram, Report, Tally


def report_of(tally: Tally, sending_s: float = 10.0) -> Report:
    return tally.report(sending_s=sending_s, intended_rate=100.0, generator_busy=0.25)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_percentiles_are_within_half_a_percent(share: float) -> None:
    random = Random(7)
    values = sorted(10 ** random.uniform(-2.9, 6) for _ in range(5000))
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    exact = values[max(1, ceil(share * len(values))) - 1]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.0051)


def test_values_out_of_range_are_counted_and_break_nothing() -> None:
    histogram = LogHistogram()
    for value in (0.0, 0.0005, -1.0, nan, 1e300, inf):
        histogram.add(value)
    assert histogram.count == sum(histogram.counts) == 6
    assert histogram.percentile(0.5) == 0.0


def test_a_report_counts_every_request_once() -> None:
    tally = Tally()
    tally.sent = 7
    for _ in range(3):
        tally.right(0.010, 100.0, 2.0, 4)
    tally.mismatched(0.020, 101.0)
    tally.failed("503", 0.002, 1.0)
    tally.failed("timeout", 10.0, 11.0)
    report = report_of(tally)
    assert (report.sent, report.ok, report.wrong, report.errors, report.unanswered) == (7, 3, 1, 2, 1)
    assert report.status == {"200": 4, "503": 1, "timeout": 1}
    assert report.latency_ms.max == pytest.approx(20)
    assert report.queue_ms.p50 == pytest.approx(2, rel=0.01)
    assert not report.clean


def test_answers_nobody_asked_for_are_errors_but_settle_no_request() -> None:
    tally = Tally()
    tally.sent = 1
    tally.unasked = 2
    assert tally.in_flight == 1
    assert report_of(tally).errors == 2
    assert report_of(tally).status == {"unasked": 2}


def test_the_batch_mean_is_over_batches_not_over_requests() -> None:
    tally = Tally()
    for size in (1, 3, 3, 3):  # one batch of one, one of three
        tally.right(0.01, 1.0, -1.0, size)
    assert report_of(tally).batch_mean == 2.0
    assert report_of(tally).queue_ms.p50 is None


def test_the_table_shows_failures_and_unknowns() -> None:
    tally = Tally()
    tally.sent = 1234
    tally.failed("503", 0.002, 1.0)
    out = StringIO()
    print_report(report_of(tally), Console(file=out, width=100))
    shown = out.getvalue()
    assert "1,234" in shown
    assert "503: 1" in shown
    assert "1,233" in shown  # unanswered
    assert "whole core" not in shown


def test_a_generator_at_its_limit_says_so() -> None:
    out = StringIO()
    print_report(Tally().report(sending_s=1, intended_rate=1, generator_busy=0.97), Console(file=out, width=100))
    assert "whole core" in out.getvalue()


def test_progress_tells_the_rate_of_late_and_the_counts_so_far() -> None:
    tally = Tally()
    tally.sent = 30
    for _ in range(20):
        tally.right(0.01, 1.0, -1.0, 0)
    tally.failed("503", 0.002, 1.0)
    line = progress_text(tally, 7.0)
    assert line.startswith("7/s  ok 20  errors 1  wrong 0  in flight 9  p50")
    assert "p99 10.0 ms" in line


def test_a_tier_counts_here_and_in_the_whole() -> None:
    whole = Tally()
    free, paid = Tally("free", whole), Tally("paid", whole, keep_record=True)
    for tier, times in ((free, 6), (paid, 3)):
        for _ in range(times):
            tier.came_due()
    free.right(0.1, 1.0, -1.0, 0)
    for kind in ("503", "429", "504", "closed"):
        free.failed(kind, 0.002, 1.0)
    free.retried(0.004)
    paid.right(0.2, 1.0, -1.0, 0)
    paid.mismatched(0.3, 1.0)
    paid.failed("timeout", 4.0, 5.0)
    report = whole.report(sending_s=2.0, intended_rate=4.5, generator_busy=0.1, tiers=(free, paid))
    assert (report.sent, report.ok, report.wrong, report.errors, report.unanswered) == (9, 2, 1, 5, 1)
    seen = report.tiers["free"]
    assert (seen.offered, seen.ok, seen.shed, seen.limited, seen.timed_out, seen.failed) == (6, 1, 1, 1, 1, 1)
    assert (seen.unanswered, seen.retries, seen.goodput) == (1, 1, 0.5)
    assert seen.latency_ms.p95 == pytest.approx(100)
    assert seen.refusal_ms.p99 == report.refusal_ms.p99 == pytest.approx(4.0)
    assert (report.tiers["paid"].wrong, report.tiers["paid"].timed_out) == (1, 1)
    assert report.retries == 1
    assert paid.record == [(0.8, 0.2, "200"), (0.7, 0.3, "200"), (1.0, 4.0, "timeout")]
    out = StringIO()
    print_report(report, Console(file=out, width=160))
    assert "timed out" in out.getvalue() and "paid" in out.getvalue()
