"""Which traces are kept (`telemetry/sampling.py`): its numbered rules."""

import random

from hypothesis import given
from hypothesis import strategies as st

from carpool.telemetry.sampling import ErrorRate, Ratio, Slowest


def ratio_of(share: float, seed: int = 1) -> Ratio:
    drawn = random.Random(seed)
    return Ratio(share, drawn.getrandbits, drawn.random)


@given(st.floats(0.000001, 1.0), st.integers(0, 2**32))
def test_an_id_that_is_drawn_is_one_that_is_kept(share: float, seed: int) -> None:
    ratio = ratio_of(share, seed)
    drawn = ratio.kept_id()
    assert len(drawn) == 16
    assert ratio.keeps(drawn)


@given(st.binary(min_size=16, max_size=16), st.floats(0, 1), st.floats(0, 1))
def test_whoever_keeps_more_keeps_what_others_keep(trace_id: bytes, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert not ratio_of(few).keeps(trace_id) or ratio_of(many).keeps(trace_id)
    assert ratio_of(1.0).keeps(trace_id)
    assert not ratio_of(0.0).keeps(trace_id)


@given(st.sampled_from([0.003, 0.01, 0.1, 0.5, 0.9]), st.integers(0, 1000))
def test_gaps_make_the_ratio(share: float, seed: int) -> None:
    ratio = ratio_of(share, seed)
    kept = 400
    requests = sum(ratio.gap() for _ in range(kept))
    # A sum of 400 gaps is within 30 % of what is expected, but for six standard deviations.
    assert 0.7 < kept / requests / share < 1.3 or share > 0.7


@given(st.integers(0, 100))
def test_all_and_none(seed: int) -> None:
    assert ratio_of(1.0, seed).gap() == 1
    assert ratio_of(0.0, seed).gap() > 1 << 60


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=300), st.integers(1, 20))
def test_errors_have_a_rate(pauses: list[float], per_second: int) -> None:
    rate = ErrorRate(per_second)
    now, kept = 1000.0, 0
    for pause in pauses:
        now += pause
        kept += rate.takes(now)
    assert kept <= per_second + (now - 1000.0) * per_second + 1
    assert kept >= min(len(pauses), per_second)


def test_no_errors_at_all() -> None:
    assert not ErrorRate(0).takes(5.0)


def window(slowest: Slowest, latencies: list[float]) -> list[float]:
    """A window with these, as the tracer measures."""
    for seconds in latencies:
        slowest.seen += 1
        if seconds >= slowest.threshold_s:
            slowest.add(seconds, seconds)
    return list(slowest.pick())


@given(st.integers(0, 20), st.sampled_from([0.01, 0.05, 0.2]))
def test_the_slowest_of_a_window_are_picked(seed: int, share: float) -> None:
    drawn = random.Random(seed)
    slowest = Slowest(share)
    for number in range(30):
        latencies = [drawn.lognormvariate(-2.0, 0.5) for _ in range(1000)]
        picked = window(slowest, latencies)
        assert len(picked) <= 1000 * share
        if number >= 10:  # it has learned where to look
            assert sorted(picked) == sorted(latencies)[-int(1000 * share) :]


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=200), max_size=20), st.floats(0, 1))
def test_never_more_than_the_share(windows: list[list[float]], share: float) -> None:
    slowest = Slowest(share)
    seen = picked = 0
    for latencies in windows:
        seen += len(latencies)
        picked += len(window(slowest, latencies))
    assert picked <= seen * share


def test_with_few_requests_a_window_goes_on_until_there_is_one_to_pick() -> None:
    slowest = Slowest(0.01)
    picked = [seconds for number in range(300) for seconds in window(slowest, [float(number % 100)])]
    assert picked == [99.0, 99.0, 99.0]


def test_when_everything_becomes_slow_no_more_are_picked_than_before() -> None:
    slowest = Slowest(0.01)
    for _ in range(10):
        window(slowest, [0.1] * 990 + [0.2] * 10)
    assert len(window(slowest, [5.0] * 1000)) == 10


def test_no_share_takes_nobody() -> None:
    slowest = Slowest(0.0)
    assert window(slowest, [1.0] * 1000) == []
    assert slowest.threshold_s == float("inf")
