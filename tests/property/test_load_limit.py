"""For any history, a limit stays in its bounds, falls only for a reason, and comes back."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.load import DECREASE, LOAD_MAX, LoadLimit

SLOTS = st.integers(1, 256)
# One second: loads reported, whether a 429 came, and calls as (size, seconds).
SECONDS = st.lists(
    st.tuples(
        st.lists(st.floats(0, 5), max_size=4),
        st.booleans(),
        st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 10)), max_size=20),
    ),
    max_size=40,
)


@given(SLOTS, SECONDS)
def test_the_limit_is_from_one_to_the_slots_and_never_jumps(
    slots: int, seconds: list[tuple[list[float], bool, list[tuple[int, float]]]]
) -> None:
    limit = LoadLimit(slots)
    for now, (loads, is_refusing, calls) in enumerate(seconds):
        before = limit.limit
        for load in loads:
            limit.report(load)
        if is_refusing:
            limit.refused()
        for size, took in calls:
            limit.answered(size, took, float(now))
        after = limit.step()
        assert after == limit.limit
        assert max(1, int(before * DECREASE)) <= after <= slots
        assert after - before <= slots / 20 + 1
        if is_refusing:
            assert after <= before
    for _ in range(21):
        limit.report(0.1)
        limit.step()
    assert limit.limit == slots


@given(SLOTS, st.lists(st.floats(0, LOAD_MAX), max_size=40))
def test_without_overload_nothing_is_taken(slots: int, loads: list[float]) -> None:
    limit = LoadLimit(slots)
    for load in loads:
        limit.report(load)
        assert limit.step() == slots


@given(SLOTS, st.lists(st.floats(0.001, 10), max_size=400))
def test_time_alone_leaves_half(slots: int, durations: list[float]) -> None:
    limit = LoadLimit(slots)
    for number, took in enumerate(durations):
        limit.answered(64, took, float(number))
        if number % 10 == 9:
            assert limit.step() >= max(1, slots // 2)


@given(SLOTS, st.floats(0.2, 1.0))
def test_the_limit_settles_where_the_load_is_right(slots: int, share: float) -> None:
    """An endpoint that is full with a share of its slots is soon kept near there, and keeps its throughput."""
    full = max(1.0, slots * share)
    limit = LoadLimit(slots)
    seen = []
    for _ in range(100):
        limit.report(limit.limit / full)
        seen.append(limit.step())
    settled = seen[50:]
    assert max(settled) <= max(1.0, full * LOAD_MAX + slots / 20 + 1)
    assert sum(settled) / len(settled) >= 0.6 * LOAD_MAX * full - 1
