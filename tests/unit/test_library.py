"""Batching around Python functions, without a server."""

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import dataclass

import pytest

from carpool import Batcher, batched
from carpool.core.errors import QueueFull
from carpool.library import WrongResultCountError


class Recorder:
    """An async function of a list that doubles numbers and remembers its batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self.seconds = seconds
        self.running = 0
        self.most_running = 0

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return [item * 2 for item in items]


async def test_each_caller_gets_its_own_result_and_calls_share_batches() -> None:
    double = Recorder()
    async with Batcher(double, max_batch_size=8, max_wait_ms=20) as b:
        results = await asyncio.gather(*(b.predict(number) for number in range(50)))
    assert results == [number * 2 for number in range(50)]
    assert max(map(len, double.batches)) == 8
    assert len(double.batches) < 20


@pytest.mark.parametrize("policy", ["fixed", "adaptive", "pid"])
async def test_every_policy_serves_a_lone_call(policy: str) -> None:
    double = Recorder()
    async with Batcher(double, max_wait_ms=5, policy=policy) as b:  # type: ignore[arg-type]
        assert await asyncio.wait_for(b.predict(21), 2) == 42


async def test_concurrency_is_the_number_of_calls_at_once() -> None:
    double = Recorder(seconds=0.01)
    async with Batcher(double, max_batch_size=2, max_wait_ms=1, concurrency=3) as b:
        await asyncio.gather(*(b.predict(number) for number in range(30)))
    assert double.most_running == 3


async def test_a_plain_function_runs_in_a_thread() -> None:
    threads: set[str] = set()

    def double(items: list[int]) -> list[int]:
        threads.add(threading.current_thread().name)
        return [item * 2 for item in items]

    async with Batcher(double, max_batch_size=4, max_wait_ms=5) as b:
        assert await asyncio.gather(*(b.predict(number) for number in range(9))) == [n * 2 for n in range(9)]
    assert threads
    assert threading.main_thread().name not in threads


async def test_an_exception_in_place_of_a_result_reaches_that_caller_alone() -> None:
    async def picky(items: list[int]) -> list[int | Exception]:
        return [ValueError(f"not {item}") if item == 3 else item for item in items]

    async with Batcher(picky, max_batch_size=8, max_wait_ms=10) as b:
        results = await asyncio.gather(*(b.predict(number) for number in range(6)), return_exceptions=True)
    assert results[:3] == [0, 1, 2]
    assert isinstance(results[3], ValueError)
    assert results[4:] == [4, 5]


async def test_a_failing_function_fails_its_batch_and_the_next_one_works() -> None:
    calls = 0

    async def flaky(items: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("out of memory")
        return items

    async with Batcher(flaky, max_batch_size=8, max_wait_ms=5, concurrency=1) as b:
        first = await asyncio.gather(*(b.predict(number) for number in range(3)), return_exceptions=True)
        assert [str(failure) for failure in first] == ["out of memory"] * 3
        assert await b.predict(7) == 7


@pytest.mark.parametrize("answer", [[1], [1, 2, 3], None, 5])
async def test_results_that_do_not_match_the_items_are_nobodys(answer: object) -> None:
    async def wrong(items: list[int]) -> list[int]:
        return answer  # type: ignore[return-value]

    async with Batcher(wrong, max_batch_size=2, max_wait_ms=50, policy="fixed") as b:
        results = await asyncio.gather(b.predict(1), b.predict(2), return_exceptions=True)
    assert all(isinstance(result, WrongResultCountError) for result in results)


async def test_a_cancelled_call_leaves_the_queue_and_harms_nobody() -> None:
    double = Recorder(seconds=0.02)
    async with Batcher(double, max_batch_size=4, max_wait_ms=1, concurrency=1) as b:
        running = asyncio.create_task(b.predict(1))
        await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(b.predict(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        running.cancel()
        assert await waiting[1] == 6
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        with pytest.raises(asyncio.CancelledError):
            await running
    assert all(2 not in batch for batch in double.batches)


async def test_closing_finishes_what_was_asked_for() -> None:
    double = Recorder(seconds=0.01)
    b = Batcher(double, max_batch_size=2, max_wait_ms=100, concurrency=1, policy="fixed")
    async with b:
        calls = [asyncio.create_task(b.predict(number)) for number in range(5)]
        await asyncio.sleep(0)
    assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="async with"):
        await b.predict(1)


async def test_the_queue_is_bounded() -> None:
    double = Recorder(seconds=0.05)
    async with Batcher(double, max_batch_size=1, max_wait_ms=0, waiting_max=2) as b:
        calls = [asyncio.create_task(b.predict(number)) for number in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[:2] == [0, 2]
    assert isinstance(results[2], QueueFull)


async def test_the_decorator_with_and_without_options() -> None:
    sizes: list[int] = []

    @batched(max_batch_size=4, max_wait_ms=10)
    async def double(items: list[int]) -> list[int]:
        """Double."""
        sizes.append(len(items))
        return [item * 2 for item in items]

    @batched
    async def negate(items: list[int]) -> list[int]:
        return [-item for item in items]

    assert await asyncio.gather(*(double(number) for number in range(10))) == [n * 2 for n in range(10)]
    assert max(sizes) == 4
    assert double.__doc__ == "Double."
    assert await negate(5) == -5


async def test_the_decorator_on_a_method_keeps_instances_apart() -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @batched(max_batch_size=8, max_wait_ms=5)
        async def predict(self, items: list[int]) -> list[int]:
            return [item * self.factor for item in items]

    two, three = Model(2), Model(3)
    assert [*await asyncio.gather(two.predict(5), three.predict(5))] == [10, 15]


def test_a_decorated_function_outlives_its_event_loop() -> None:
    @batched(max_wait_ms=1)
    async def double(items: list[int]) -> list[int]:
        return [item * 2 for item in items]

    async def once() -> int:
        return await double(4)

    assert asyncio.run(once()) == 8
    assert asyncio.run(once()) == 8


@pytest.mark.parametrize(
    "options", [{"max_batch_size": 0}, {"concurrency": 0}, {"waiting_max": 0}, {"max_wait_ms": -1.0}]
)
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Batcher(Recorder(), **options)  # type: ignore[arg-type]


async def test_stop_iteration_reaches_its_caller_as_an_error() -> None:
    def first_of_none(items: list[int]) -> list[int]:
        return [next(iter(())) for _ in items] if items == [1] else items

    async with Batcher(first_of_none, max_wait_ms=1) as b:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(b.predict(1), 2)
        assert await asyncio.wait_for(b.predict(2), 2) == 2

    async def one_stops(items: list[int]) -> list[int | Exception]:
        return [StopIteration() if item == 1 else item for item in items]

    async with Batcher(one_stops, max_wait_ms=1) as b:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(b.predict(1), 2)


def test_a_decorated_plain_function_keeps_no_threads_of_loops_that_are_gone() -> None:
    @batched(max_wait_ms=1)
    def double(items: list[int]) -> list[int]:
        return [item * 2 for item in items]

    async def once() -> int:
        return await double(4)

    before = threading.active_count()
    for _ in range(5):
        assert asyncio.run(once()) == 8
    deadline = time.monotonic() + 2
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1


async def test_a_decorated_method_dies_with_its_instance() -> None:
    @dataclass
    class Model:
        factor: int

        @batched(max_wait_ms=1)
        async def predict(self, items: list[int]) -> list[int]:
            return [item * self.factor for item in items]

    model = Model(3)
    assert await model.predict(2) == 6
    await asyncio.sleep(0.01)  # the call's own task ends
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


async def test_a_decorated_method_of_a_class_with_slots_says_why_it_cannot_be() -> None:
    class Model:
        __slots__ = ()

        @batched
        async def predict(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="__slots__"):
        await Model().predict(1)
