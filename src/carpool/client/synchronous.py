"""The client for programs without an event loop: an AsyncClient on a loop in a thread of its own.

So it keeps its deadlines too: a blocking read could not be ended in time while a byte comes now and then. Any number of
threads may use one client.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Iterator
from typing import Any, Literal, TypeVar, Unpack

from carpool.client.asynchronous import AsyncClient, ClientSettings
from carpool.client.wire import Answer, CallOptions, Prediction, SubmitOptions, TaskOutput

T = TypeVar("T")
_END = object()


class Client:
    """Asks one gateway. `with Client(url) as client`, or `close` it. Its methods are those of AsyncClient."""

    def __init__(self, url: str = "http://127.0.0.1:8000", **settings: Unpack[ClientSettings]) -> None:
        self._client = AsyncClient(url, **settings)
        self._is_running = threading.Event()
        # Calls begun before `close` end with it, and none begins later. Reentrant: the garbage collector may end a
        # stream in a thread that holds it.
        self._lock = threading.RLock()
        self._is_closed = False
        # Of the thread.
        self._loop: asyncio.AbstractEventLoop
        self._is_over: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="carpool-client", daemon=True)
        self._thread.start()
        self._is_running.wait()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way and close the connections."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def predict(self, value: Any, **options: Unpack[CallOptions]) -> Prediction:
        """The model's answer to one input, which is anything that JSON can say; raises a CarpoolError."""
        return self._run(self._client.predict(value, **options))

    def submit(self, value: Any, **options: Unpack[SubmitOptions]) -> str:
        """Make a task of one input; its id. It is sent again only where no task can have come of it."""
        return self._run(self._client.submit(value, **options))

    def result(self, task_id: str, *, timeout_s: float | None = None) -> TaskOutput:
        """Wait for a task's result; raises its error, or DeadlineExceeded when the time is over, while it goes on."""
        return self._run(self._client.result(task_id, timeout_s=timeout_s))

    def cancel(self, task_id: str, *, timeout_s: float | None = None) -> None:
        """Cancel a task that waits, or forget the result of a finished one; raises UnknownTask."""
        self._run(self._client.cancel(task_id, timeout_s=timeout_s))

    def stream(
        self, inputs: Iterable[Any], *, concurrency: int | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[Answer]:
        """Answers as they come, each with the index of its input. Inputs are read in other threads, one at a time."""
        answers = self._client.stream(_readable(inputs), concurrency=concurrency, **options)
        try:
            while (answer := self._run(_next(answers))) is not None:
                yield answer
        finally:
            # The client's own thread must not wait: there the collector ended this, and asyncio closes `answers`.
            if not self._is_closed and threading.current_thread() is not self._thread:
                self._run(_close(answers))

    def map(
        self,
        inputs: Iterable[Any],
        *,
        concurrency: int | None = None,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """The outputs of all inputs, in their order. The first error ends it, or stands in the place of its output."""
        mapping = self._client.map(
            _readable(inputs), concurrency=concurrency, progress=progress, on_error=on_error, **options
        )
        return self._run(mapping)

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        self._is_running.set()
        async with self._client:
            await self._is_over.wait()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._is_closed:
                call.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait ends the call; for a call that has failed it does nothing
            raise


async def _next(answers: AsyncGenerator[Answer, None]) -> Answer | None:
    return await anext(answers, None)


async def _close(answers: AsyncGenerator[Answer, None]) -> None:
    # A caller that was interrupted has cancelled its `anext`, which takes a moment; no event tells when it has ended.
    while getattr(answers, "ag_running", False):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await answers.aclose()


def _readable(inputs: Iterable[Any]) -> Iterable[Any] | AsyncIterable[Any]:
    """Inputs that may take their time, as any but a list or a tuple may, are read in threads, not on the loop."""
    return inputs if type(inputs) in (list, tuple) else _from_threads(inputs)


async def _from_threads(inputs: Iterable[Any]) -> AsyncGenerator[Any, None]:
    iterator = iter(inputs)
    while (value := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield value
