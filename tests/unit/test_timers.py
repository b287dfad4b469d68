"""Work that comes again and again, and work that is done once a turn."""

import asyncio
import logging
import time
from functools import partial

import pytest

from carpool.core.timers import TURN_S, Every, SharedTurns
from carpool.testing import FakeClock


class Work:
    """Notes when it was done; fails when it is told to."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.start = clock()
        self.done_at: list[float] = []
        self.is_broken = False

    def __call__(self) -> None:
        self.done_at.append(round(self.clock() - self.start, 6))
        if self.is_broken:
            raise ValueError("broken")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def work(clock: FakeClock) -> Work:
    return Work(clock)


def test_a_defect_is_logged_and_does_not_end_it(clock: FakeClock, work: Work, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        every = Every(0.5, work)
        work.is_broken = True
        every.start_now()
        await asyncio.sleep(1.1)
        every.stop()

    with caplog.at_level(logging.ERROR):
        clock.run(main())
    assert work.done_at == [0.0, 0.5, 1.0]
    assert len(caplog.records) == 3


async def test_of_those_with_work_that_waits_each_has_a_turn_however_much_others_have() -> None:
    turns, done = SharedTurns(), list[str]()

    def work(name: str) -> None:
        time.sleep(1.1 * TURN_S)
        done.append(name)

    for number in range(5):
        turns.now(partial(work, f"many {number}"), "many")
    turns.now(partial(work, "one"), "one")
    while turns:  # noqa: ASYNC110 - it calls nobody back
        await asyncio.sleep(0.001)
    assert done == ["many 0", "many 1", "one", "many 2", "many 3", "many 4"]


async def test_a_defect_of_one_who_shares_turns_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    turns, done = SharedTurns(), list[int]()
    turns.later(lambda: 1 / 0)  # type: ignore[arg-type]
    turns.later(lambda: done.append(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == [1] and "failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        turns.now(lambda: 1 / 0)  # type: ignore[arg-type]
