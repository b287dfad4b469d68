"""The token bucket: never more than its rate and its burst; whoever keeps to them is never refused."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.token_bucket import TokenBucket

rates = st.sampled_from([0.05, 1.0, 3.7, 1000.0])
bursts = st.sampled_from([1.0, 2.5, 10.0, 400.0])
# Seconds since the call before, in parts of what a token takes; and how many tokens it takes.
calls = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.3, 1.0, 7.5, 1e6]) | st.floats(0, 3),
        st.sampled_from([0.5, 1.0, 3.0, 50.0]),
    ),
    max_size=80,
)


@given(rate=rates, burst=bursts, calls=calls, start=st.sampled_from([0.0, 1e7]))
def test_no_more_is_taken_than_rate_and_burst(
    rate: float, burst: float, calls: list[tuple[float, float]], start: float
) -> None:
    bucket, now = TokenBucket(rate, burst), start
    taken: list[tuple[float, float]] = []
    for pause, count in calls:
        now += pause / rate
        if bucket.borrow(now, count):
            taken.append((now, count))
    for first, (began, _) in enumerate(taken):
        total = 0.0
        for at, count in taken[first:]:
            total += count
            largest = max(burst, *(each for _, each in taken[first:]))
            assert total <= (at - began) * rate + largest + 1e-3


@given(rate=rates, burst=bursts, calls=calls)
def test_whoever_waits_as_long_as_it_says_is_never_refused_and_nobody_sooner(
    rate: float, burst: float, calls: list[tuple[float, float]]
) -> None:
    bucket, now = TokenBucket(rate, burst), 0.0
    for pause, count in calls:
        now += pause / rate
        wait_s = bucket.wait_s(now, min(count, burst))
        if wait_s > 0.0:
            before = bucket.tokens
            assert not bucket.borrow(now, count)
            assert bucket.tokens == before, "a refusal takes nothing"
            assert not bucket.borrow(now + 0.99 * wait_s, count)
            now += wait_s
        assert bucket.borrow(now, count)


@given(rate=rates, burst=bursts, debt=st.floats(0, 100))
def test_a_debt_is_paid_first(rate: float, burst: float, debt: float) -> None:
    bucket = TokenBucket(rate, burst)
    assert bucket.borrow(0.0, burst + debt)
    assert not bucket.take(0.99 * debt / rate)
    assert bucket.take((debt + 1) / rate + 1e-6)


@given(rate=rates, burst=bursts, back_s=st.floats(0, 1e6))
def test_a_clock_that_goes_back_adds_nothing(rate: float, burst: float, back_s: float) -> None:
    bucket = TokenBucket(rate, burst, 0.0, now=1e6)
    assert bucket.wait_s(1e6 - back_s) == 1 / rate
    assert bucket.wait_s(1e6) == 1 / rate
    assert not bucket.is_full(1e6)
    assert bucket.is_full(1e6 + burst / rate)


@given(steps=st.lists(st.floats(0, 3) | st.none(), max_size=100))
def test_without_a_rate_no_more_is_taken_than_was_put_in(steps: list[float | None]) -> None:
    bucket, put_in, taken = TokenBucket(0.0, 5.0, 2.0), 2.0, 0
    for number, count in enumerate(steps):
        if count is not None:
            bucket.add(count)
            put_in += count
            assert bucket.tokens <= 5.0
        elif bucket.take(float(number)):
            taken += 1
            assert taken <= put_in + 1e-3
        else:
            assert bucket.wait_s(float(number)) == inf
