"""An event loop that never sleeps."""

import asyncio
import time
from random import Random

import pytest

from carpool.virtual_time import VirtualClock, VirtualLoop


def test_a_day_passes_at_once() -> None:
    clock = VirtualClock()
    began = time.monotonic()

    async def main() -> str:
        await asyncio.sleep(3 * 86_400)
        return "done"

    assert clock.run(main()) == "done"
    assert clock() == pytest.approx(1000.0 + 3 * 86_400)
    assert time.monotonic() - began < 86_400


def test_timers_run_in_the_order_of_their_times() -> None:
    clock = VirtualClock(0.0)
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((round(clock(), 6), name))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert loop.time() == clock()
        for seconds, name in ((0.3, "c"), (0.1, "a"), (0.2, "b")):
            loop.call_later(seconds, note, name)
        cancelled = loop.call_later(0.15, note, "never")
        cancelled.cancel()
        await asyncio.sleep(1.0)

    clock.run(main())
    assert seen == [(0.1, "a"), (0.2, "b"), (0.3, "c")]


def test_many_timers_that_were_cancelled_leave_the_others_in_order() -> None:
    clock = VirtualClock(0.0)
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = [loop.call_at(float(number % 7), seen.append, number) for number in range(20_000)]
        for number, timer in enumerate(timers):
            if number % 100:
                timer.cancel()
        await asyncio.sleep(10.0)

    clock.run(main())
    assert seen == sorted(range(0, 20_000, 100), key=lambda number: (number % 7, number))


def test_time_stands_still_while_something_runs() -> None:
    clock = VirtualClock()

    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    clock.run(main())
    assert clock() == 1000.0


def test_a_clock_that_was_moved_by_hand_makes_timers_due() -> None:
    clock = VirtualClock()
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: times.append(clock()))
        loop.call_later(5.0, lambda: times.append(clock()))
        clock.advance(30.0)
        await asyncio.sleep(0.1)

    clock.run(main())
    assert times == [1030.0, 1030.0]


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> list[tuple[float, int]]:
        clock, random = VirtualClock(), Random(seed)
        seen: list[tuple[float, int]] = []

        async def one(number: int) -> None:
            for _ in range(20):
                await asyncio.sleep(round(random.random(), 1))  # many at the same time
                seen.append((clock(), number))

        async def main() -> None:
            await asyncio.gather(*(one(number) for number in range(20)))

        clock.run(main())
        return seen

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_hang_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="would hang for ever"):
        VirtualClock().run(main())


def test_there_are_no_threads() -> None:
    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        VirtualClock().run(main())


def test_a_monotonic_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(-1.0)
