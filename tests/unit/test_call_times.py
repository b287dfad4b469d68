"""How long calls take, by how many inputs they have."""

import pytest

from carpool.batching.loop import CallTimes

LARGEST = 64


def learnt(*calls: tuple[int, float, int]) -> CallTimes:
    """What is known after so many calls of a size, so many seconds each."""
    times = CallTimes(1.0)
    for size, seconds, number in calls:
        for _ in range(number):
            times.seen(size, LARGEST, seconds, 0.1)
    return times


def test_what_full_ones_told_is_forgotten_slowly() -> None:
    calls = (1, 0.06, 5), (LARGEST, 0.69, 8)
    assert learnt(*calls, (1, 0.06, 100)).of(LARGEST, LARGEST) > 0.6
    assert learnt(*calls, (1, 0.06, 5000)).of(LARGEST, LARGEST) < 0.1


def test_many_alone_are_followed() -> None:
    calls = (1, 0.05, 5), (LARGEST, 0.2, 8)
    for seconds in (2.0, 0.06):
        assert learnt(*calls, (LARGEST, seconds, 12)).of(LARGEST, LARGEST) == pytest.approx(seconds, rel=0.05)


def test_full_ones_that_take_less_than_single_ones_did_are_believed_in_the_end() -> None:
    """The first call of an endpoint that loads its model takes seconds."""
    times = learnt((1, 5.0, 1), (LARGEST, 0.1, 40))
    assert times.of(LARGEST, LARGEST) < 1.0
