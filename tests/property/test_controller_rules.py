"""For any history, a limit stays in its bounds, falls only for a reason, moves by one step, and comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.controller import (
    DECREASE,
    FOUND_MAX,
    LOAD_MAX,
    PAUSE_S_MAX,
    REPORTED_MIN,
    Controller,
)

SLOTS = st.integers(1, 256)
Second = tuple[list[float], int, list[tuple[int, float, bool]], int]
# One second: loads reported, a refusal or 0, calls as (size, seconds, whether a batch waits), and how often they come.
SECONDS = st.lists(
    st.tuples(
        st.lists(st.floats(0, 5), max_size=4),
        st.sampled_from([0, 0, 0, 429, 503]),
        st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 10), st.booleans()), max_size=20),
        st.integers(1, 30),
    ),
    max_size=60,
)


@given(SLOTS | st.none(), SECONDS)
def test_the_limit_is_in_its_bounds_never_jumps_and_comes_back(slots: int | None, seconds: list[Second]) -> None:
    controller = Controller(slots)
    now, has_answered = 0.0, False
    for loads, refusal, calls, times in seconds:
        slots_before, limit_before = controller.slots, controller.limit
        for load in loads:
            controller.report(load)
        for size, took, is_crowded in times * calls:
            controller.answered(size, took, now, is_crowded=is_crowded)
        has_answered = has_answered or bool(calls)
        if refusal:
            controller.failed(refusal, now)
        assert controller.slots >= slots_before - 1
        now += 1.0
        limit = controller.step(now)
        assert limit == controller.limit
        assert REPORTED_MIN <= limit <= controller.slots <= max(slots or 1, FOUND_MAX if slots is None else 1)
        assert limit < 1 or limit == int(limit)
        assert limit >= min(int(limit_before * DECREASE) or REPORTED_MIN, slots_before - 1 or 1)
        if slots is None:
            assert abs(controller.slots - slots_before) <= 1
        else:
            assert controller.slots == slots
            assert limit - limit_before <= slots / 20 + 1
        if refusal == 429:
            assert limit <= max(limit_before, 1)
        assert (controller.interval_s > 0.0) == (limit < 1 and has_answered)
    for _ in range(21):
        now += 1.0
        controller.report(0.1)
        controller.step(now)
    assert controller.limit == controller.slots


@given(st.floats(0.001, 30), st.integers(1, 20))
def test_the_endpoint_is_busy_for_its_share_of_the_time_or_waits_a_second(call_s: float, steps: int) -> None:
    controller = Controller(1)
    controller.answered(64, call_s, 0.0)
    for _ in range(steps):
        controller.report(1.0)
        controller.step(0.0)
    pause_s = controller.interval_s - call_s
    assert pause_s <= PAUSE_S_MAX + 1e-9
    assert call_s / controller.interval_s == pytest.approx(controller.limit) or pause_s == pytest.approx(PAUSE_S_MAX)


@given(SLOTS, st.lists(st.floats(0, LOAD_MAX), max_size=40))
def test_without_overload_nothing_is_taken(slots: int, loads: list[float]) -> None:
    controller = Controller(slots)
    for load in loads:
        controller.report(load)
        assert controller.step(0.0) == slots


@given(SLOTS, st.lists(st.floats(0.001, 10), max_size=400))
def test_time_alone_leaves_half(slots: int, durations: list[float]) -> None:
    controller = Controller(slots)
    for number, took in enumerate(durations):
        controller.answered(64, took, float(number))
        if number % 10 == 9:
            assert controller.step(float(number)) >= max(1, slots // 2)


@given(SLOTS, st.floats(0.2, 1.0))
def test_the_limit_settles_where_the_load_is_right(slots: int, share: float) -> None:
    """An endpoint that is full with a share of its slots is soon kept near there, and keeps its throughput."""
    full = slots * share
    controller = Controller(slots)
    seen = []
    for _ in range(100):
        controller.report(controller.limit / full)
        seen.append(controller.step(0.0))
    settled = seen[50:]
    assert max(settled) <= full * LOAD_MAX + slots / 20 + 1
    assert sum(settled) / len(settled) >= 0.6 * LOAD_MAX * full - 1
