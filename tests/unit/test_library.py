"""Batching around Python functions, without a server."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from carpool import Batcher, batched
from carpool.core.errors import QueueFull
from carpool.library import CONTROL_FLOW, WrongResultCountError
from support.processes import PATIENCE_S, until


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


async def test_concurrency_is_the_number_of_calls_at_once() -> None:
    double = Recorder(seconds=0.01)
    async with Batcher(double, max_batch_size=2, max_wait_ms=1, concurrency=3) as b:
        await asyncio.gather(*(b.predict(number) for number in range(30)))
    assert double.most_running == 3


@pytest.mark.parametrize("answer", [[1], [1, 2, 3], None, 5])
async def test_results_that_do_not_match_the_items_are_nobodys(answer: object) -> None:
    async def wrong(items: list[int]) -> list[int]:
        return answer  # type: ignore[return-value]

    async with Batcher(wrong, max_batch_size=2, max_wait_ms=50, policy="fixed") as b:
        results = await asyncio.gather(b.predict(1), b.predict(2), return_exceptions=True)
    assert all(isinstance(result, WrongResultCountError) for result in results)


class Table:
    """As a DataFrame: its length is that of its rows, and it gives its columns."""

    columns = ("a", "b")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Broken:
    """Has a length, and cannot be gone through."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("lost the device")


@pytest.mark.parametrize("how", ["in a thread", "on the loop"])
@pytest.mark.parametrize(
    "answer",
    [
        Table(),
        {1: "one", 2: "two"},
        {1, 2},
        frozenset({1, 2}),
        {1: 1, 2: 2}.keys(),
        "ab",
        b"ab",
        bytearray(b"ab"),
    ],
    ids=lambda answer: type(answer).__name__,
)
async def test_what_is_no_list_of_results_is_refused_and_nobody_waits_for_ever(answer: Any, how: str) -> None:
    def plain(items: list[int]) -> Any:
        return answer if items == [1, 2] else items

    async def on_the_loop(items: list[int]) -> Any:
        return plain(items)

    function = plain if how == "in a thread" else on_the_loop
    async with asyncio.timeout(PATIENCE_S), Batcher(function, max_batch_size=2, policy="fixed") as b:
        results = await asyncio.gather(b.predict(1), b.predict(2), return_exceptions=True)
        assert [type(result) for result in results] == [WrongResultCountError] * 2
        assert "must return a list" in str(results[0])
        assert type(answer).__name__ in str(results[0])
        assert [*await asyncio.gather(b.predict(3), b.predict(4))] == [3, 4]


async def test_results_that_break_off_while_they_are_read_reach_every_caller() -> None:
    async def broken(items: list[int]) -> Any:
        return Broken() if items == [1, 2] else items

    async with asyncio.timeout(PATIENCE_S), Batcher(broken, max_batch_size=2, policy="fixed") as b:
        results = await asyncio.gather(b.predict(1), b.predict(2), return_exceptions=True)
        assert [str(result) for result in results] == ["lost the device"] * 2
        assert [*await asyncio.gather(b.predict(3), b.predict(4))] == [3, 4]


async def test_a_cancelled_call_leaves_the_queue_and_harms_nobody() -> None:
    batches: list[list[int]] = []
    let_go = asyncio.Event()

    async def double(items: list[int]) -> list[int]:
        batches.append(items)
        await let_go.wait()
        return [item * 2 for item in items]

    async with Batcher(double, max_batch_size=4, max_wait_ms=1, concurrency=1) as b:
        running = asyncio.create_task(b.predict(1))
        await until(lambda: batches == [[1]])
        waiting = [asyncio.create_task(b.predict(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        running.cancel()
        await asyncio.sleep(0)
        let_go.set()
        assert await waiting[1] == 6
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        with pytest.raises(asyncio.CancelledError):
            await running
    assert batches == [[1], [3]]


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
            await asyncio.wait_for(b.predict(1), PATIENCE_S)
        assert await asyncio.wait_for(b.predict(2), PATIENCE_S) == 2

    async def one_stops(items: list[int]) -> list[int | Exception]:
        return [StopIteration() if item == 1 else item for item in items]

    async with Batcher(one_stops, max_wait_ms=1) as b:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(b.predict(1), PATIENCE_S)


async def test_a_decorated_method_of_a_class_with_slots_says_why_it_cannot_be() -> None:
    class Model:
        __slots__ = ()

        @batched
        async def predict(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="__slots__"):
        await Model().predict(1)


# What a function may raise.


class Panic(BaseException):
    """As pyo3 raises one where Rust code panics: no Exception."""


def raising(error: BaseException, how: str) -> Callable[[list[int]], Any]:
    """A function that raises for the first batch, and doubles after that."""
    calls: list[list[int]] = []

    def plain(items: list[int]) -> list[int]:
        calls.append(items)
        if len(calls) == 1:
            raise error
        return [item * 2 for item in items]

    async def on_the_loop(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return plain(items)

    return plain if how == "in a thread" else on_the_loop


WAYS = ["in a thread", "on the loop"]


@pytest.mark.parametrize("how", WAYS)
async def test_closing_returns_though_the_last_batch_raised(how: str) -> None:
    b = Batcher(raising(Panic(), how), max_wait_ms=600_000, policy="fixed")
    async with asyncio.timeout(PATIENCE_S):
        async with b:
            calls = [asyncio.create_task(b.predict(number)) for number in range(3)]
            await asyncio.sleep(0)
        for call in calls:
            with pytest.raises(Panic):
                await call


@pytest.mark.parametrize("kind", [Panic, *CONTROL_FLOW])
async def test_any_exception_in_place_of_a_result_reaches_that_caller_alone(kind: type[BaseException]) -> None:
    async def picky(items: list[int]) -> list[Any]:
        return [kind() if item == 1 else item for item in items]

    async with Batcher(picky, max_batch_size=3, policy="fixed") as b:
        got = await asyncio.gather(*(b.predict(number) for number in range(3)), return_exceptions=True)
    assert [got[0], got[2]] == [0, 2]
    raised = got[1].__cause__ if kind in CONTROL_FLOW and isinstance(got[1], RuntimeError) else got[1]
    assert type(raised) is kind


@pytest.mark.parametrize("how", WAYS)
def test_an_event_loop_that_ends_cancels_the_callers(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the function raises after that, in its thread."""
    let_go, threads_before = threading.Event(), threading.active_count()
    callers: list[asyncio.Task[int]] = []

    def block(items: list[int]) -> list[int]:
        assert let_go.wait(PATIENCE_S)
        raise Panic

    async def hang(items: list[int]) -> list[int]:
        await asyncio.sleep(PATIENCE_S)
        return items

    async def main() -> None:
        b: Batcher[int, int] = Batcher(hang if how == "on the loop" else block, max_wait_ms=0)
        b.start()
        callers.append(asyncio.create_task(b.predict(1)))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert callers[0].cancelled()
    callers.clear()
    let_go.set()
    until_threads(threads_before)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_an_event_loop_that_is_thrown_away_takes_its_calls_with_it() -> None:
    """Its coroutines are closed by the garbage collector: there is nobody to tell, and nothing to raise."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: None)  # of tasks that were destroyed while they waited

    async def hang(items: list[int]) -> list[int]:
        await asyncio.sleep(PATIENCE_S)
        return items

    async def main() -> "asyncio.Task[int]":
        b: Batcher[int, int] = Batcher(hang, max_wait_ms=0)
        b.start()
        caller = asyncio.ensure_future(b.predict(1))
        await asyncio.sleep(0.01)
        return caller

    caller = loop.run_until_complete(main())
    loop.close()
    assert not caller.done()
    del caller, loop
    gc.collect()  # what is raised there is a warning, and warnings are errors


# A decorated function in several event loops.


def until_threads(number: int) -> None:
    """Until no more threads than these are alive: those of a Batcher that nobody has end with it."""

    def are_gone() -> bool:
        gc.collect()
        return threading.active_count() <= number

    asyncio.run(until(are_gone))


class Guarded:
    """A function, or a method, that is called from many threads, and says how many calls were in it at once."""

    def __init__(self) -> None:
        self.most_running = 0
        self._running = 0
        self._counting = threading.Lock()

    def _enter(self, change: int) -> None:
        with self._counting:
            self._running += change
            self.most_running = max(self.most_running, self._running)

    @batched(max_batch_size=4, max_wait_ms=1)
    def plain(self, items: list[int]) -> list[int]:
        self._enter(1)
        self._enter(-1)
        return [item * 2 for item in items]

    @batched(max_batch_size=4, max_wait_ms=1)
    async def on_the_loop(self, items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [item * 2 for item in items]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("method", ["plain", "on_the_loop"])
def test_event_loops_of_several_threads_share_a_decorated_method(run: Callable[[Any], Any], method: str) -> None:
    threads_before, guarded = threading.active_count(), Guarded()
    together = threading.Barrier(4)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def ask(guarded: Guarded, first: int) -> list[int]:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        predict: Callable[[int], Awaitable[int]] = getattr(guarded, method)
        return await asyncio.gather(*(predict(first + number) for number in range(20)))

    def one_loop_after_the_other(guarded: Guarded, thread: int) -> None:
        together.wait(PATIENCE_S)
        for turn in range(8):
            first = 1000 * thread + 100 * turn
            assert run(ask(guarded, first)) == [2 * (first + number) for number in range(20)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one_loop_after_the_other, [guarded] * 4, range(4)))
    assert guarded.most_running <= 1  # of the plain one: `concurrency` holds for all loops together
    assert run(ask(guarded, 0)) == [2 * number for number in range(20)]
    gc.collect()
    assert [loop() is None for loop in loops] == [True] * 32 + [False], "those of loops that ended are kept"
    until_threads(threads_before + 1)
    del guarded
    until_threads(threads_before)


def test_a_loop_that_ends_does_not_disturb_another() -> None:
    """It shut down the threads of the loops that came after it."""

    @batched(max_wait_ms=1)
    def double(items: list[int]) -> list[int]:
        return [item * 2 for item in items]

    async def once() -> int:
        return await double(4)

    async def main() -> None:
        assert await double(1) == 2
        for _ in range(5):
            assert await asyncio.to_thread(asyncio.run, once()) == 8
            assert await double(3) == 6

    asyncio.run(main())
    assert asyncio.run(once()) == 8


def test_wrong_options_of_a_decorated_function_are_said_at_every_call() -> None:
    @batched(concurrency=0)
    def double(items: list[int]) -> list[int]:
        return items

    async def once() -> None:
        with pytest.raises(ValueError, match="must be at least 1"):
            await double(1)

    asyncio.run(once())
    asyncio.run(once())
