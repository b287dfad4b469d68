"""What a call costs is learned from any calls: it stays finite, and finds what the time really depends on."""

from math import isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.batching.cost import ENDPOINTS_MAX, OUTLIER, TERMS, CostModel

call = st.tuples(
    st.integers(1, 512),
    st.integers(0, 10**9),
    st.floats(0.0, 1e6),
    st.sampled_from(("a", "b", "c")),
    st.booleans(),
)


@given(st.lists(call, max_size=8), st.integers(1, 60))
def test_whatever_comes_what_is_expected_is_finite_and_above_zero(
    calls: list[tuple[int, int, float, str, bool]], times: int
) -> None:
    cost = CostModel()
    for _ in range(times):
        for count, largest, seconds, endpoint, in_order in calls:
            cost.seen(count, count * largest // 2, largest, seconds, endpoint, in_order=in_order)
    for count, largest, _, endpoint, _ in calls:
        expected = cost.seconds(count, count * largest, largest, endpoint)
        assert isfinite(expected)
        assert expected > 0 or not cost.is_known
    shares = cost.shares()
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares.values())
    assert (cost.explains() in TERMS) == cost.is_known == bool(shares)


def taught(
    call_s: float, input_s: float, kb_s: float, padded_kb_s: float, jitter: float, seed: int = 1, calls: int = 400
) -> CostModel:
    """A model that has seen calls of mixed sizes to an API that takes so long."""
    random, cost = Random(seed), CostModel()
    for _ in range(calls):
        sizes = drawn(random, random.randint(32, 64))
        seconds = true_seconds(sizes, call_s, input_s, kb_s, padded_kb_s) * random.uniform(1 - jitter, 1 + jitter)
        cost.seen(len(sizes), sum(sizes), max(sizes), seconds, "e", in_order=True)
    return cost


def drawn(random: Random, count: int) -> list[int]:
    return [min(2048, int(240 * random.lognormvariate(0.0, 0.875))) for _ in range(count)]


def true_seconds(sizes: list[int], call_s: float, input_s: float, kb_s: float, padded_kb_s: float) -> float:
    padded = len(sizes) * max(sizes)
    return call_s + input_s * len(sizes) + kb_s * sum(sizes) / 1000 + padded_kb_s * padded / 1000


@pytest.mark.parametrize(
    ("true", "explains", "is_padded"),
    [
        ((0.05, 0.0, 0.0, 0.0), "call", False),
        ((0.001, 0.001, 0.0, 0.0), "inputs", False),
        ((0.001, 0.0, 0.001, 0.0), "size", False),
        ((0.002, 0.0, 0.0, 0.00015), "padding", True),
        ((0.05, 0.0, 0.0, 0.00001), "call", False),  # padding costs, but so little that it is not worth it
    ],
)
@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.4])
def test_the_term_that_explains_the_time_is_found(
    true: tuple[float, float, float, float], explains: str, is_padded: bool, jitter: float
) -> None:
    cost = taught(*true, jitter)
    assert cost.explains() == explains
    assert cost.is_padded is is_padded
    random = Random(2)
    for _ in range(50):
        sizes = drawn(random, 48)
        assert cost.seconds(48, sum(sizes), max(sizes)) == pytest.approx(true_seconds(sizes, *true), rel=0.15)


def test_chance_alone_is_not_taken_for_padding() -> None:
    assert not [seed for seed in range(40) if taught(0.05, 0.0, 0.0, 0.0, 0.5, seed, calls=200).is_padded]


def test_each_endpoint_has_a_factor_and_outliers_say_little() -> None:
    random, cost = Random(1), CostModel()
    for number in range(1000):
        sizes = drawn(random, 64)
        seconds = true_seconds(sizes, 0.002, 0.0, 0.0, 0.00015) * (1 + number % 3)
        cost.seen(64, sum(sizes), max(sizes), 60.0 if number % 50 == 0 else seconds, str(number % 3), in_order=True)
    sizes = drawn(random, 64)
    expected = [cost.seconds(64, sum(sizes), max(sizes), name) for name in "012"]
    true_s = true_seconds(sizes, 0.002, 0.0, 0.0, 0.00015)
    assert expected == [pytest.approx(true_s * times, rel=0.3) for times in (1, 2, 3)]
    assert cost.is_padded


def test_an_endpoint_that_changes_is_learned_anew() -> None:
    random, cost = Random(1), taught(0.002, 0.0, 0.0, 0.00015, 0.1)
    was_padded = cost.is_padded
    for _ in range(3000):
        sizes = drawn(random, 64)
        cost.seen(64, sum(sizes), max(sizes), 0.5, "e", in_order=True)
    assert (was_padded, cost.is_padded) == (True, False)
    assert cost.seconds(64, 20_000, 2000) == pytest.approx(0.5, rel=0.1)


def test_endpoints_that_come_and_go_are_bounded() -> None:
    cost = taught(0.01, 0.0, 0.0, 0.0, 0.0)
    for number in range(2 * ENDPOINTS_MAX):
        cost.seen(64, 1000, 100, 0.01, f"http://{number}", in_order=True)
    assert len(cost.factors) <= ENDPOINTS_MAX
    assert all(1 / OUTLIER < factor < OUTLIER for factor in cost.factors.values())
