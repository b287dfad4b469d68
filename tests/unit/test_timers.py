"""Work that comes again and again, and work that is done once a turn."""

import asyncio
import logging
import time
from collections import Counter
from functools import partial

import pytest

from carpool.core.timers import LONG_TURN_S, REST_S_MAX, TURN_S, Every, OncePerTurn, SharedTurns, repeat
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


def test_every_begins_after_an_interval_or_at_once(clock: FakeClock, work: Work) -> None:
    async def main() -> None:
        every = Every(0.5, work)
        every.start()
        await asyncio.sleep(1.2)
        every.start_now()  # in place of the time that would have come at 1.5
        await asyncio.sleep(0.6)
        every.stop()
        await asyncio.sleep(5.0)

    clock.run(main())
    assert work.done_at == [0.5, 1.0, 1.2, 1.7]


def test_to_start_again_changes_nothing(clock: FakeClock, work: Work) -> None:
    async def main() -> None:
        every = Every(0.5, work)
        every.start()
        await asyncio.sleep(0.3)
        every.start()
        await asyncio.sleep(0.3)
        every.stop()

    clock.run(main())
    assert work.done_at == [0.5]


def test_the_next_time_may_come_sooner(clock: FakeClock, work: Work) -> None:
    async def main() -> None:
        every = Every(0.5, work)
        every.start()
        every.next_in(0.1)
        await asyncio.sleep(0.7)
        every.stop()

    clock.run(main())
    assert work.done_at == [0.1, 0.6]


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


def test_the_work_may_stop_itself(clock: FakeClock) -> None:
    times = []

    def work() -> None:
        times.append(clock())
        every.stop()

    every = Every(0.5, work)

    async def main() -> None:
        every.start()
        await asyncio.sleep(5.0)
        every.start()
        await asyncio.sleep(5.0)

    clock.run(main())
    assert times == [1000.5, 1005.5]


def test_what_was_missed_is_not_made_up_for(clock: FakeClock, work: Work) -> None:
    async def main() -> None:
        every = Every(0.5, work)
        every.start()
        await asyncio.sleep(0.6)
        clock.advance(30.0)
        await asyncio.sleep(0.6)
        every.stop()

    clock.run(main())
    assert work.done_at == [0.5, 30.6, 31.1]


def test_once_per_turn_is_once_per_turn(clock: FakeClock) -> None:
    order: list[str] = []

    async def main() -> None:
        wakeup = OncePerTurn(lambda: order.append("work"))
        for _ in range(3):
            wakeup.notify()
        order.append(f"due: {wakeup.is_due}")
        await asyncio.sleep(0)
        order.append(f"due: {wakeup.is_due}")
        wakeup.notify()
        await asyncio.sleep(0.1)

    clock.run(main())
    assert order == ["due: True", "work", "due: False", "work"]


def test_what_the_work_itself_asks_for_comes_in_the_next_turn(clock: FakeClock) -> None:
    rounds: list[int] = []

    async def main() -> None:
        def work() -> None:
            rounds.append(len(rounds))
            if len(rounds) < 3:
                wakeup.notify()

        wakeup = OncePerTurn(work)
        wakeup.notify()
        await asyncio.sleep(0.1)

    clock.run(main())
    assert rounds == [0, 1, 2]


def test_repeat_waits_for_its_work_and_survives_it(
    clock: FakeClock, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def slow() -> None:
            await asyncio.sleep(1.0)
            work()

        work.is_broken = True
        task = asyncio.get_running_loop().create_task(repeat(lambda: 0.5, slow))
        await asyncio.sleep(3.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.ERROR):
        clock.run(main())
    assert work.done_at == [1.0, 2.5]
    assert len(caplog.records) == 2


async def test_of_those_who_share_turns_one_has_a_whole_one() -> None:
    turns, done, turn = SharedTurns(), Counter[tuple[int, int]](), 0

    def work(number: int, rounds: int) -> None:
        done[turn, number] += 1
        time.sleep(1.1 * TURN_S)
        if rounds > 1:
            turns.later(lambda: work(number, rounds - 1))

    for number in range(3):
        turns.now(lambda number=number: work(number, 3))  # type: ignore[misc]
    assert done == {(0, 0): 1}  # the others wait
    while len(done) < 9:
        turn += 1
        await asyncio.sleep(0)
    assert max(Counter(each for each, _ in done).values()) == 2  # what came, and some of what was left
    assert Counter(number for _, number in done) == {0: 3, 1: 3, 2: 3}


async def test_what_comes_goes_before_what_is_left_which_goes_on_all_the_same() -> None:
    turns, done = SharedTurns(), list[str]()

    def work(name: str, is_long: bool) -> None:
        done.append(name)
        time.sleep(1.1 * TURN_S)
        if is_long:
            turns.later(lambda: work(name, is_long=False))

    turns.now(lambda: work("long", is_long=True))
    for name in ("b", "c"):
        turns.now(lambda name=name: work(name, is_long=False))  # type: ignore[misc]
    for _ in range(1_000_000):
        await asyncio.sleep(0)
        if len(done) == 4:
            break
    assert done == ["long", "b", "long", "c"]


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


def test_after_work_that_took_long_the_loop_is_left_to_others_for_as_long() -> None:
    clock, done = FakeClock(), list[float]()

    def work() -> None:
        done.append(clock())
        clock.advance(10 * TURN_S)

    async def main() -> None:
        turns = SharedTurns()
        for _ in range(3):
            turns.now(work)
        assert len(turns) == 2
        await asyncio.sleep(1)
        assert not turns

    clock.run(main())
    pause_s = 20 * TURN_S - LONG_TURN_S
    assert done[1] - done[0] == pytest.approx(pause_s) and done[2] - done[1] == pytest.approx(pause_s)


def test_that_rest_is_short_where_the_process_stood_still() -> None:
    clock, done = FakeClock(), list[float]()

    async def main() -> None:
        turns = SharedTurns()
        turns.now(lambda: clock.advance(30.0))
        began = clock()
        turns.now(lambda: done.append(clock() - began))
        await asyncio.sleep(1)

    clock.run(main())
    assert done == [pytest.approx(REST_S_MAX)]


def test_work_that_calls_for_more_of_it_counts_once() -> None:
    clock, done = FakeClock(), list[int]()

    async def main() -> None:
        turns = SharedTurns()

        def work(inner: int) -> None:
            if inner:
                turns.now(lambda: work(inner - 1))
            else:
                clock.advance(0.6 * TURN_S)
            done.append(inner)

        turns.now(lambda: work(3))
        turns.now(lambda: work(0))
        assert done == [0, 1, 2, 3, 0]

    clock.run(main())


async def test_a_defect_of_one_who_shares_turns_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    turns, done = SharedTurns(), list[int]()
    turns.later(lambda: 1 / 0)  # type: ignore[arg-type]
    turns.later(lambda: done.append(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == [1] and "failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        turns.now(lambda: 1 / 0)  # type: ignore[arg-type]
