"""Batching around any Python function, without a server: `Batcher` and `@batched`.

The same broker, policies and loop as the gateway; in place of an upstream, a function that takes a list.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import update_wrapper
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast, overload

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import PolicyName, make_policy
from carpool.broker.memory import MemoryBroker
from carpool.core.clock import monotonic
from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.ports import LaneQueue
from carpool.core.request import DONE, Request

Item = TypeVar("Item")
Result = TypeVar("Result")
# A result may be an exception in place of a value: then that one caller gets it raised.
Predict = Callable[[list[Item]], Awaitable[Sequence[Result | Exception]] | Sequence[Result | Exception]]
PredictMethod = Callable[[Any, list[Item]], Awaitable[Sequence[Result | Exception]] | Sequence[Result | Exception]]

# The one model and lane that there is.
MODEL = "function"


class WrongResultCountError(Exception):
    """The function did not return one result for each item, so no result can be trusted to be the right one."""


class FunctionCalls:
    """Runs batches through the function: the upstream of the library. `concurrency` calls at once."""

    def __init__(self, predict: Predict[Any, Any], concurrency: int) -> None:
        self._predict = predict
        self._total = self._free = concurrency
        self._is_async = inspect.iscoroutinefunction(predict) or inspect.iscoroutinefunction(
            getattr(predict, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._threads = None if self._is_async else ThreadPoolExecutor(concurrency, "carpool-batch")
        self._ring: Callable[[], None] | None = None
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()
        self.outcomes: MemoryBroker | None = None

    def total(self) -> int:
        """Calls that may run at once."""
        return self._total

    def free(self) -> int:
        """Calls that could start now."""
        return self._free

    def free_apart(self) -> int:
        """Nobody rides apart here."""
        return self._free

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        """The function takes whatever the settings say."""
        return max_batch

    def when_slot_frees(self, ring: Callable[[], None]) -> None:
        """Have `ring` called when a call has ended."""
        self._ring = ring

    def dispatch(self, batch: list[Request], ended: Callable[[float], None]) -> None:
        """Call the function with a batch, in the background."""
        self._free -= 1
        task = asyncio.get_running_loop().create_task(self._call(batch, ended))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Let the threads go."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _call(self, batch: list[Request], ended: Callable[[float], None]) -> None:
        assert self.outcomes is not None
        started = monotonic()
        results: Sequence[Any]
        try:
            results = await self._results([request.input for request in batch])
        except asyncio.CancelledError:
            results = [asyncio.CancelledError() for _ in batch]
            raise
        except Exception as failure:
            results = [failure] * len(batch)
        finally:
            self._free += 1
            seconds = monotonic() - started
            facts = CallFacts(len(batch), seconds)
            self.outcomes.settle_batch(batch, [Output(result, facts) for result in results])
            if self._ring is not None:
                self._ring()
        ended(seconds)

    def _call_plainly(self, items: list[Any]) -> Any:
        """The plain function, in a thread. A StopIteration cannot pass through a future: it would never come out."""
        try:
            return self._predict(items)
        except StopIteration as stopped:
            raise RuntimeError("the function raised StopIteration") from stopped

    async def _results(self, items: list[Any]) -> Sequence[Any]:
        if self._threads is None:
            results = await cast(Awaitable[Sequence[Any]], self._predict(items))
        else:
            loop = asyncio.get_running_loop()
            results = cast(Sequence[Any], await loop.run_in_executor(self._threads, self._call_plainly, items))
        try:
            size = len(results)
        except TypeError:
            kind = type(results).__name__
            raise WrongResultCountError(f"the function must return a list, not {kind}") from None
        if size != len(items):
            raise WrongResultCountError(f"the function returned {size} results for {len(items)} items")
        return list(results)


class Batcher(Generic[Item, Result]):
    """Groups single `predict(item)` calls into batches for a function that takes a list.

    `predict` is an `async def`, or a plain function, which then runs in a thread. It returns one result for each
    item, in order; an exception in place of a result is raised for that item's caller alone.
    """

    def __init__(
        self,
        predict: Predict[Item, Result],
        *,
        max_batch_size: int = 64,
        max_wait_ms: float = 50.0,
        concurrency: int = 1,
        policy: PolicyName = "adaptive",
        waiting_max: int = 100_000,
    ) -> None:
        if max_batch_size < 1 or concurrency < 1 or waiting_max < 1:
            raise ValueError("max_batch_size, concurrency and waiting_max must be at least 1")
        if max_wait_ms < 0:
            raise ValueError("max_wait_ms must not be negative")
        self._function = predict
        self._max_batch_size = max_batch_size
        self._max_wait_ms = max_wait_ms
        self._concurrency = concurrency
        self._policy = make_policy(policy, busy_share=0.75, fill_target=0.8)
        self._waiting_max = waiting_max
        self._numbers = count(1)
        self._broker: MemoryBroker | None = None
        self._calls: FunctionCalls | None = None
        self._loop: BatchLoop | None = None
        # Set while nothing waits or runs.
        self._settled_all = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Batcher {self._broker!r}>"

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._broker = MemoryBroker(waiting_max=self._waiting_max, bytes_max=self._waiting_max, lanes_max=1, tiers=1)
        self._calls = FunctionCalls(self._function, self._concurrency)
        self._calls.outcomes = self._broker
        self._loop = BatchLoop(
            MODEL,
            self._broker,
            self._calls,
            self._calls,
            self._policy,
            max_batch=self._max_batch_size,
            max_wait_s=self._max_wait_ms / 1000,
        )

    async def close(self) -> None:
        """Finish what was asked for; take nothing new."""
        self._closed = True
        if self._broker is None or self._loop is None or self._calls is None:
            return
        self._loop.drain()
        while self._broker.held:
            self._settled_all.clear()
            await self._settled_all.wait()
        self._calls.close()

    def abandon(self) -> None:
        """The event loop is gone, and all who waited with it: let the threads go."""
        self._closed = True
        if self._calls is not None:
            self._calls.close()

    async def predict(self, item: Item) -> Result:
        """The function's result for one item. Cancelling this takes the item out of the queue."""
        if self._broker is None or self._closed:
            raise RuntimeError("the Batcher is not open; use it inside `async with Batcher(...) as b:`")
        now = monotonic()
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        request = Request(
            id=str(next(self._numbers)),
            model=MODEL,
            parameters=b"",
            input=item,
            size=1,
            tier=0,
            arrived=now,
            place=now,
            queue_timeout_s=inf,
            deadline=inf,
            waiter=self,
            ticket=outcome,
        )
        refusal = self._broker.submit(request)
        if refusal is not None:
            raise refusal
        try:
            return await outcome
        finally:
            if request.phase != DONE:
                self._broker.cancel(request)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Hand an outcome to the caller that waits for it, if it still does."""
        future: asyncio.Future[Any] = request.ticket
        if not future.done():
            value = outcome.value if isinstance(outcome, Output) else outcome
            if isinstance(value, asyncio.CancelledError):
                future.cancel()
            elif isinstance(value, StopIteration):  # which no future takes
                future.set_exception(RuntimeError("the function gave StopIteration for this item"))
            elif isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)
        self._settled_all.set()  # `close` looks again; it counts for itself


class BatchedFunction(Generic[Item, Result]):
    """What `@batched` makes of a function: call it with one item and await that item's result."""

    def __init__(self, function: Predict[Item, Result], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._options = options
        # A Batcher belongs to an event loop; the next `asyncio.run` gets a new one.
        self._batcher: Batcher[Item, Result] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> "BatchedFunction[Item, Result]":
        if instance is None:
            return self
        # One for each instance, so that instances do not share batches. Kept by the instance itself, where it hides
        # this descriptor, so that both are freed together.
        method = cast(Predict[Item, Result], self._function.__get__(instance, owner))
        bound = BatchedFunction(method, self._options)
        try:
            instance.__dict__[self._name] = bound
        except AttributeError:
            kind = type(instance).__name__
            raise TypeError(f"@batched methods need instances with a __dict__; {kind} has __slots__ only") from None
        return bound

    async def __call__(self, item: Item) -> Result:
        """The function's result for one item."""
        loop = asyncio.get_running_loop()
        if self._batcher is None or self._loop is not loop:
            if self._batcher is not None:
                self._batcher.abandon()
            self._loop, self._batcher = loop, Batcher(self._function, **self._options)
            self._batcher.start()
        return await self._batcher.predict(item)


class BatchedDecorator(Protocol):
    """What `@batched(...)` with options is: takes a function of a list, or a method of one."""

    @overload
    def __call__(self, function: Predict[Item, Result]) -> BatchedFunction[Item, Result]: ...

    @overload
    def __call__(self, function: PredictMethod[Item, Result]) -> BatchedFunction[Item, Result]: ...


@overload
def batched(function: Predict[Item, Result]) -> BatchedFunction[Item, Result]: ...


@overload
def batched(function: PredictMethod[Item, Result]) -> BatchedFunction[Item, Result]: ...


@overload
def batched(
    *,
    max_batch_size: int = 64,
    max_wait_ms: float = 50.0,
    concurrency: int = 1,
    policy: PolicyName = "adaptive",
    waiting_max: int = 100_000,
) -> BatchedDecorator: ...


def batched(function: Any = None, **options: Any) -> Any:
    """Make a function of a list into one of a single item, whose calls share batches."""
    if function is not None:
        return BatchedFunction(function, options)
    return lambda decorated: BatchedFunction(decorated, options)
