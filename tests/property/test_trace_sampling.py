"""Which traces are kept (`Ratio` in `telemetry/tracer.py`)."""

import random

from hypothesis import given
from hypothesis import strategies as st

from carpool.telemetry.tracer import Ratio


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
