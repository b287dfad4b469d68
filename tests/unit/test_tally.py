"""Counts by bucket."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.histograms import (
    SECONDS_BOUNDS,
    Histogram,
    RequestSeconds,
)
from carpool.core.outcome import CallFacts


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


def test_the_stages_of_a_request_add_up_to_its_time() -> None:
    """Two of one tier, one of another; taken 0.4 s ago; the call began 0.1 s after that and took 0.25 s."""
    seconds = RequestSeconds()
    seconds.answered({0: [0.7, 0.5], 2: [0.4]}, 0.4, CallFacts(3, 0.25, started_s=0.1))
    totals = {name: stage.total for name, stage in seconds.stages().items()}
    assert totals == pytest.approx(
        {"receive": 0, "admit": 0, "queue": 0.4, "dispatch": 0.3, "upstream": 0.75, "reply": 3 * 0.05}
    )
    assert {tier: sum(each.counts) for tier, each in seconds.by_tier.items()} == {0: 2, 2: 1}
    assert {tier: each.total for tier, each in seconds.by_tier.items()} == pytest.approx({0: 1.2, 2: 0.4})
    in_all = sum(each.total for each in seconds.by_tier.values())
    assert sum(totals.values()) == pytest.approx(in_all)


AGES = st.lists(st.floats(0.0, 60.0), min_size=1, max_size=8)
# What another process says of its part may be anything.
TOLD = st.floats(-5.0, 100.0)


@given(st.dictionaries(st.integers(0, 2), AGES, min_size=1), TOLD, TOLD, TOLD)
@example({0: [0.3]}, 0.35, -0.01, 0.4)
@example({0: [0.2], 1: [0.5, 0.01]}, 0.3, 0.25, 0.25)
def test_the_stages_sum_up_whatever_another_clock_says(
    ages: dict[int, list[float]], since_taken_s: float, started_s: float, call_s: float
) -> None:
    seconds = RequestSeconds()
    seconds.answered(ages, since_taken_s, CallFacts(1, call_s, started_s=started_s))
    stages = [seconds.queue, seconds.dispatch, seconds.upstream, seconds.reply]
    count, total = sum(map(len, ages.values())), sum(map(sum, ages.values()))
    assert all(stage.total >= 0.0 and sum(stage.counts) == count for stage in stages)
    assert sum(stage.total for stage in stages) == pytest.approx(total, abs=1e-9)
    assert sum(each.total for each in seconds.by_tier.values()) == pytest.approx(total)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 60.0), st.floats(0.0, 1.0)), min_size=1), TOLD, TOLD)
def test_those_who_came_at_any_time_count_as_one_by_one(
    ages: list[tuple[int, float, float]], started_s: float, call_s: float
) -> None:
    call = CallFacts(1, call_s, started_s=started_s)
    together, singly = RequestSeconds(), RequestSeconds()
    since_taken_s = [age_s * share for _, age_s, share in ages]
    waits = [age_s - since_s for (_, age_s, _), since_s in zip(ages, since_taken_s, strict=True)]
    together.answered_apart([(tier, age_s) for tier, age_s, _ in ages], waits, call)
    for (tier, age_s, _), wait_s in zip(ages, waits, strict=True):
        singly.answered({tier: [age_s]}, age_s - wait_s, call)
    pairs = [(together.by_tier[tier], singly.by_tier[tier]) for tier, _, _ in ages]
    for one, other in [*pairs, *zip(together.stages().values(), singly.stages().values(), strict=True)]:
        assert one.counts == other.counts
        assert one.total == pytest.approx(other.total, abs=1e-9)
