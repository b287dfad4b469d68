"""Counts by bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.tally import BATCH_SIZE_BOUNDS, SECONDS_BOUNDS, Histogram


def test_bounds_are_inclusive_and_counts_cumulative() -> None:
    histogram = Histogram([1, 2, 4])
    for value in (0, 1, 1.5, 2, 4, 4.1, 100):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 7)]
    assert histogram.total == pytest.approx(112.6)


def test_an_empty_histogram_has_all_its_buckets() -> None:
    assert Histogram([0.5]).buckets() == [("0.5", 0), ("+Inf", 0)]


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, BATCH_SIZE_BOUNDS])
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
