"""Counts by bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.outcome import CallFacts
from carpool.core.tally import BATCH_SIZE_BOUNDS, SECONDS_BOUNDS, SHARE_BOUNDS, Histogram, RequestSeconds


def test_bounds_are_inclusive_and_counts_cumulative() -> None:
    histogram = Histogram([1, 2, 4])
    for value in (0, 1, 1.5, 2, 4, 4.1, 100):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 7)]
    assert histogram.total == pytest.approx(112.6)


def test_an_empty_histogram_has_all_its_buckets() -> None:
    assert Histogram([0.5]).buckets() == [("0.5", 0), ("+Inf", 0)]


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BATCH_SIZE_BOUNDS, SHARE_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=64))
def test_many_at_once_count_as_one_by_one(values: list[float]) -> None:
    together, singly = Histogram(SECONDS_BOUNDS), Histogram(SECONDS_BOUNDS)
    together.observe_all(values)
    for value in values:
        singly.observe(value)
    assert together.counts == singly.counts
    assert together.total == pytest.approx(singly.total)


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=64), st.integers(0, 60_000))
def test_values_less_something_count_as_their_differences(values: list[int], less: int) -> None:
    """In whole seconds, where differences are exact: a value on a bound is below it."""
    bounds = (0, 10, 100, 1000, 10_000)
    together, singly = Histogram(bounds), Histogram(bounds)
    together.observe_ordered(sorted(less + value for value in values), less)
    for value in values:
        singly.observe(value)
    assert together.counts == singly.counts
    assert together.total == pytest.approx(singly.total)


@given(st.floats(0.0, 60.0), st.integers(1, 64))
def test_the_same_value_many_times_counts_as_one_by_one(value: float, count: int) -> None:
    together, singly = Histogram(SECONDS_BOUNDS), Histogram(SECONDS_BOUNDS)
    together.observe_alike(value, count)
    for _ in range(count):
        singly.observe(value)
    assert together.counts == singly.counts
    assert together.total == pytest.approx(singly.total)


def test_the_stages_of_a_request_add_up_to_its_time() -> None:
    """Two of one tier, one of another; taken 0.4 s ago; the call began 0.1 s after that and took 0.25 s."""
    seconds = RequestSeconds()
    seconds.answered({0: [0.7, 0.5], 2: [0.4]}, 0.4, CallFacts(3, 0.25, started_s=0.1), writing_s=0.01)
    totals = {name: stage.total for name, stage in seconds.stages().items()}
    assert totals == pytest.approx(
        {"receive": 0, "admit": 0, "queue": 0.4, "dispatch": 0.3, "upstream": 0.75, "reply": 3 * 0.06}
    )
    assert {tier: sum(each.counts) for tier, each in seconds.by_tier.items()} == {0: 2, 2: 1}
    assert {tier: each.total for tier, each in seconds.by_tier.items()} == pytest.approx({0: 1.2, 2: 0.4})
    in_all = sum(each.total for each in seconds.by_tier.values())
    assert sum(totals.values()) == pytest.approx(in_all + 3 * 0.01), "the last was told a little later"


def test_clocks_that_do_not_agree_make_no_stage_negative() -> None:
    """Over Redis the time in the queue is another process's word: it may be more than there was."""
    seconds = RequestSeconds()
    seconds.answered({0: [0.3]}, 0.35, CallFacts(1, 0.4, started_s=-0.01), writing_s=0.0)
    assert all(stage.total >= 0 for stage in seconds.stages().values())
    assert sum(seconds.queue.counts) == 1
