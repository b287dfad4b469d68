"""Arrival times hold their order, their bounds and their number, for any schedule."""

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.tools.bench.run import arrivals, even_gaps, poisson_gaps
from carpool.tools.bench.tally import Segment

rates = st.one_of(st.just(0.0), st.floats(0.1, 300))
segment_lists = st.lists(st.builds(Segment, rates, st.floats(0.01, 3)), min_size=1, max_size=5)
seeds = st.integers(0, 2**32)


def count_between(times: list[float], start: float, end: float) -> int:
    return sum(start <= time < end for time in times)


@given(segment_lists, seeds)
def test_arrivals_ascend_within_the_schedule(segments: list[Segment], seed: int) -> None:
    ends = sum(segment.duration_s for segment in segments)
    for gaps in (even_gaps(), poisson_gaps(Random(seed).random)):
        times = list(arrivals(segments, gaps))
        assert all(0 <= time <= ends * (1 + 1e-9) for time in times)
        assert all(earlier <= later + 1e-9 for earlier, later in pairwise(times))


@given(segment_lists)
def test_even_arrivals_are_as_many_as_expected_in_every_segment(segments: list[Segment]) -> None:
    times = list(arrivals(segments, even_gaps()))
    assert abs(len(times) - sum(segment.expected for segment in segments)) <= 0.5 + 1e-6
    start = 0.0
    for segment in segments:
        end = start + segment.duration_s
        # One at either border may fall to the neighbour.
        assert abs(count_between(times, start, end) - segment.expected) <= 2
        start = end


@given(segment_lists, seeds)
def test_the_same_seed_gives_the_same_arrivals(segments: list[Segment], seed: int) -> None:
    first, second = (list(arrivals(segments, poisson_gaps(Random(seed).random))) for _ in range(2))
    assert first == second


@settings(max_examples=20)
@given(seeds)
def test_poisson_arrivals_have_the_mean_and_the_spread_of_their_kind(seed: int) -> None:
    times = list(arrivals([Segment(100, 50)], poisson_gaps(Random(seed).random)))
    # Six standard deviations of the count, whose variance is its mean.
    assert abs(len(times) - 5000) < 6 * 5000**0.5
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # An exponential gap varies as much as its mean; even gaps would not vary at all.
    assert 0.8 < variance**0.5 / mean < 1.25
