"""How long calls take, by how many inputs they have."""

import pytest

from carpool.batching.call_times import CallTimes

LARGEST = 64


def learnt(*calls: tuple[int, float, int]) -> CallTimes:
    """What is known after so many calls of a size, so many seconds each."""
    times = CallTimes(1.0)
    for size, seconds, number in calls:
        for _ in range(number):
            times.seen(size, LARGEST, seconds, 0.1)
    return times


def test_a_time_that_is_the_same_for_all_is_known_by_the_first_call() -> None:
    for size in (1, 10, LARGEST):
        times = learnt((size, 0.2, 1))
        assert [times.of(n, LARGEST) for n in (1, 20, LARGEST)] == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("few_first", [True, False])
def test_few_and_many_together_tell_the_line(few_first: bool) -> None:
    few, many = (1, 0.06, 5), (LARGEST, 0.69, 8)
    times = learnt(*((few, many) if few_first else (many, few)))
    assert times.of(LARGEST, LARGEST) == pytest.approx(0.69, rel=0.05)
    assert times.of(1, LARGEST) == pytest.approx(0.06, rel=0.05)
    assert times.of(32, LARGEST) == pytest.approx(0.37, rel=0.1)


def test_what_full_ones_told_is_forgotten_slowly() -> None:
    calls = (1, 0.06, 5), (LARGEST, 0.69, 8)
    assert learnt(*calls, (1, 0.06, 100)).of(LARGEST, LARGEST) > 0.6
    assert learnt(*calls, (1, 0.06, 5000)).of(LARGEST, LARGEST) < 0.1


def test_an_endpoint_that_becomes_slower_or_faster_is_known_by_small_calls() -> None:
    calls = (1, 0.05, 5), (LARGEST, 0.2, 8)
    assert learnt(*calls, (1, 0.5, 60)).of(LARGEST, LARGEST) == pytest.approx(2.0, rel=0.15)
    assert learnt(*calls, (1, 0.005, 60)).of(LARGEST, LARGEST) == pytest.approx(0.02, rel=0.15)


def test_many_alone_are_followed() -> None:
    calls = (1, 0.05, 5), (LARGEST, 0.2, 8)
    for seconds in (2.0, 0.06):
        assert learnt(*calls, (LARGEST, seconds, 12)).of(LARGEST, LARGEST) == pytest.approx(seconds, rel=0.05)


def test_full_ones_that_take_less_than_single_ones_did_are_believed_in_the_end() -> None:
    """The first call of an endpoint that loads its model takes seconds."""
    times = learnt((1, 5.0, 1), (LARGEST, 0.1, 40))
    assert times.of(LARGEST, LARGEST) < 1.0


def test_batches_of_one_and_calls_of_no_time() -> None:
    times = CallTimes(1.0)
    times.seen(1, 1, 0.0, 0.1)
    times.seen(1, 1, 0.2, 0.1)
    assert 0.0 < times.of(1, 1) <= 0.2
