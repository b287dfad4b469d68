"""Batching around any Python function, without a server: `Batcher` and `@batched`.

The same broker, policies and loop as the gateway; in place of an upstream, a function that takes a list.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import update_wrapper
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast, overload

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import PolicyName, make_policy
from carpool.broker.memory import MemoryBroker
from carpool.core.clock import Clock, monotonic
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

# What a future or a task takes as meant for itself: the caller would end without a sound, or the event loop would stop
# with the work of all callers.
CONTROL_FLOW = (StopIteration, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit)
# These have a length, and what comes out of them one by one are not the results in order.
NO_LISTS = (Mapping, Set, str, bytes, bytearray)
# In place of a result: the event loop is ending, and the call was cancelled.
_CANCELLED: Any = object()


class WrongResultCountError(Exception):
    """The function did not return one result for each item, so no result can be trusted to be the right one."""


def raisable(error: BaseException) -> BaseException:
    """What callers get raised: the exception itself, or for control flow a RuntimeError that it caused."""
    if not isinstance(error, CONTROL_FLOW):
        return error
    wrapped = RuntimeError(f"the function gave {type(error).__name__} in place of a result")
    wrapped.__cause__ = error
    return wrapped


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it must be awaited; also an object whose `__call__` must."""
    call = getattr(function, "__call__", None)  # noqa: B004 - the method is wanted, not the answer
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def as_list(results: Any, count: int) -> list[Any]:
    """What the function returned, one result for each of `count` items in their order; else WrongResultCountError."""
    kind = type(results)
    # A table (pandas, polars) has the length of its rows, and gives its columns.
    if isinstance(results, NO_LISTS) or hasattr(kind, "columns") or not hasattr(kind, "__len__"):
        raise WrongResultCountError(
            f"the function must return a list with one result for each item, not {kind.__name__}"
        )
    listed = list(results)
    if len(listed) != count:
        raise WrongResultCountError(f"the function returned {len(listed)} results for {count} items")
    return listed


class FunctionCalls:
    """Runs batches through the function: the upstream of the library. `concurrency` calls at once.

    Whatever the function raises ends its batch and no other: every caller of it gets that, and the slot is free again.
    """

    def __init__(
        self, predict: Predict[Any, Any], concurrency: int, threads: ThreadPoolExecutor | None, clock: Clock = monotonic
    ) -> None:
        self._clock = clock
        self._predict = predict
        self._total = self._free = concurrency
        # The threads of a plain function; None where the caller gave some, which are not ours to end.
        self._own_threads: ThreadPoolExecutor | None = None
        if threads is None and not is_async(predict):
            threads = self._own_threads = ThreadPoolExecutor(concurrency, "carpool-batch")
        self._threads = threads
        self._notify: Callable[[], None] | None = None
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()
        self.outcomes: MemoryBroker | None = None

    def total(self) -> int:
        """Calls that may run at once."""
        return self._total

    def free(self) -> int:
        """Calls that could start now."""
        return self._free

    def free_for_quarantined(self) -> int:
        """No owner is quarantined here."""
        return self._free

    def is_quarantined_due(self) -> bool:
        """No owner is quarantined here."""
        return False

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        """The function takes whatever the settings say."""
        return max_batch

    def when_slot_frees(self, notify: Callable[[], None]) -> None:
        """Have `notify` called when a call has ended."""
        self._notify = notify

    def dispatch(self, batch: list[Request], ended: Callable[[float], None]) -> None:
        """Call the function with a batch, in the background."""
        self._free -= 1
        task = asyncio.get_running_loop().create_task(self._call(batch, ended))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Let the threads go."""
        if self._own_threads is not None:
            self._own_threads.shutdown(wait=False)

    async def _call(self, batch: list[Request], ended: Callable[[float], None]) -> None:
        task, started = asyncio.current_task(), self._clock()
        assert task is not None
        try:
            results = await self._results([request.input for request in batch])
        except BaseException as failure:
            if not _is_running(task):
                raise  # thrown away with its event loop, and so were all callers that waited
            if isinstance(failure, asyncio.CancelledError) and task.cancelling():
                self._settle(batch, [_CANCELLED] * len(batch), started)
                raise
            seconds = self._settle(batch, [failure] * len(batch), started)
        else:
            seconds = self._settle(batch, results, started)
        ended(seconds)

    def _settle(self, batch: list[Request], results: Sequence[Any], started: float) -> float:
        """Free the slot and tell the callers; how long the call took."""
        assert self.outcomes is not None
        self._free += 1
        seconds = self._clock() - started
        facts = CallFacts(len(batch), seconds)
        self.outcomes.settle_batch(batch, [Output(result, facts) for result in results])
        if self._notify is not None:
            self._notify()
        return seconds

    def _call_plainly(self, items: list[Any]) -> Any:
        """The plain function, in a thread. A StopIteration cannot pass through a future: it would never come out."""
        try:
            return self._predict(items)
        except StopIteration as stopped:
            raise raisable(stopped) from stopped

    async def _results(self, items: list[Any]) -> Sequence[Any]:
        if self._threads is None:
            results = await cast(Awaitable[Sequence[Any]], self._predict(items))
        else:
            loop = asyncio.get_running_loop()
            results = cast(Sequence[Any], await loop.run_in_executor(self._threads, self._call_plainly, items))
        return as_list(results, len(items))


def _is_running(task: "asyncio.Task[Any]") -> bool:
    """Whether this is a step of the task. It is not where a coroutine is closed that no event loop will go on with."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop is running
        return False


class Batcher(Generic[Item, Result]):
    """Groups single `predict(item)` calls into batches for a function that takes a list.

    `predict` is an `async def`, or a plain function, which then runs in a thread. It returns one result for each
    item, in order; an exception in place of a result is raised for that item's caller alone.

    What `predict` raises is raised for every caller of its batch, also what is no `Exception`, such as a panic of a
    Rust library; later batches are not harmed. Only what steers Python itself (KeyboardInterrupt, SystemExit,
    CancelledError, GeneratorExit, StopIteration) comes as a RuntimeError that has it as its cause: raised in a task,
    it would stop the event loop, or pass for a cancellation by the caller.
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
        clock: Clock = monotonic,
    ) -> None:
        if max_batch_size < 1 or concurrency < 1 or waiting_max < 1:
            raise ValueError("max_batch_size, concurrency and waiting_max must be at least 1")
        if max_wait_ms < 0:
            raise ValueError("max_wait_ms must not be negative")
        self._function = predict
        self._max_batch_size = max_batch_size
        self._max_wait_ms = max_wait_ms
        self.concurrency = concurrency
        self._policy = make_policy(policy)
        self._waiting_max = waiting_max
        self._clock = clock
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

    def start(self, threads: ThreadPoolExecutor | None = None) -> None:
        """Begin, on the running event loop; a plain function runs in these threads, or in some of its own."""
        self._broker = MemoryBroker(
            waiting_max=self._waiting_max, bytes_max=self._waiting_max, lanes_max=1, tiers=1, clock=self._clock
        )
        self._calls = FunctionCalls(self._function, self.concurrency, threads, self._clock)
        self._calls.outcomes = self._broker
        self._loop = BatchLoop(
            MODEL,
            self._broker,
            self._calls,
            self._calls,
            self._policy,
            max_batch=self._max_batch_size,
            max_wait_s=self._max_wait_ms / 1000,
            clock=self._clock,
        )

    async def close(self) -> None:
        """Finish what was asked for; take nothing new."""
        self._closed = True
        if self._broker is None or self._loop is None or self._calls is None:
            return
        self._loop.drain()
        try:
            while self._broker.held:
                self._settled_all.clear()
                await self._settled_all.wait()
        finally:
            self._calls.close()

    async def predict(self, item: Item) -> Result:
        """The function's result for one item. Cancelling this takes the item out of the queue."""
        if self._broker is None or self._closed:
            raise RuntimeError("the Batcher is not open; use it inside `async with Batcher(...) as b:`")
        now = self._clock()
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
            # A call that was thrown away with its event loop has no waiter left.
            if request.phase != DONE and not outcome.get_loop().is_closed():
                self._broker.cancel(request)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Hand an outcome to the caller that waits for it, if it still does."""
        future: asyncio.Future[Any] = request.ticket
        if not future.done():
            value = outcome.value if isinstance(outcome, Output) else outcome
            if value is _CANCELLED:
                future.cancel()
            elif issubclass(type(value), BaseException):  # not what only says so, such as a mock
                future.set_exception(raisable(value))
            else:
                future.set_result(value)
        self._settled_all.set()  # `close` looks again; it counts for itself


class BatchedFunction(Generic[Item, Result]):
    """What `@batched` makes of a function: call it with one item and await that item's result.

    It may be called from several event loops, also at the same time, in several threads. Calls share batches with those
    of their own event loop. `concurrency` holds for all of them together if the function is plain, and for each of
    them if it is an `async def`.
    """

    def __init__(self, function: Predict[Item, Result], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._options = options
        # A Batcher belongs to an event loop. Those of loops that ended go when the next loop comes.
        self._batchers: dict[asyncio.AbstractEventLoop, Batcher[Item, Result]] = {}
        # Of a plain function: the same for all loops, so that none is left behind when a loop ends.
        self._threads: ThreadPoolExecutor | None = None
        # Held while a Batcher is made, and by no call after that.
        self._making = threading.Lock()

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
            # Another thread may have been quicker.
            kept: BatchedFunction[Item, Result] = instance.__dict__.setdefault(self._name, bound)
        except AttributeError:
            kind = type(instance).__name__
            raise TypeError(f"@batched methods need instances with a __dict__; {kind} has __slots__ only") from None
        return kept

    async def __call__(self, item: Item) -> Result:
        """The function's result for one item."""
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop) or self._begin(loop)
        return await batcher.predict(item)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> Batcher[Item, Result]:
        with self._making:
            for ended in [each for each in self._batchers if each.is_closed()]:
                del self._batchers[ended]
            batcher = Batcher(self._function, **self._options)
            if self._threads is None and not is_async(self._function):
                self._threads = ThreadPoolExecutor(batcher.concurrency, "carpool-batch")
            batcher.start(self._threads)
            self._batchers[loop] = batcher
        return batcher


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
