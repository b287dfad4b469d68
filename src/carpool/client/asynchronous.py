"""The client for programs with an event loop.

1. A call ends by its `timeout_s`, whatever the network does: the client sends the gateway what is left of it, and waits
   no longer itself. Waiting for a place, retries and their pauses are in it.
2. At most `concurrency` calls are under way. A semaphore sees to that, not the pool of httpx: httpcore 1.0.9 loses a
   place of its pool when a call is cancelled at one moment.
3. When a call is cancelled, the connection is closed, so the gateway sees it leave.
"""

import asyncio
import os
import random
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, TypedDict, Unpack

from carpool.client.wire import (
    Accepted,
    Answer,
    CallOptions,
    ClientCall,
    ClientRetryBudget,
    LostAnswer,
    Prediction,
    SubmitOptions,
    TaskOutput,
    Unreachable,
    cancellation,
    error_in,
    pause_s,
    poll,
    prediction_call,
    read,
    submission,
    task_in,
    timeout_ms,
)
from carpool.core.errors import CarpoolError, DeadlineExceeded, TooLarge, own_deadline_passed
from carpool.version import __version__

try:
    import httpx
except ImportError as missing:
    raise ImportError("the client needs httpx: pip install 'carpool[client]'") from missing

CONNECT_S_MAX = 5.0
# A poll of a task waits so long; the next comes after a pause if the gateway did not wait (it is about to leave).
POLL_S = 10.0
POLL_PAUSE_S = 0.2


class ClientSettings(TypedDict, total=False):
    """The settings of both clients."""

    # Else CARPOOL_API_KEY of the environment, if there is one.
    api_key: str
    # Of calls that say nothing else; 30.
    timeout_s: float
    # Calls under way at once; 64.
    concurrency: int
    # Of one call; 3. And of all calls together, the share that may be repeated; 0.1.
    retries: int
    retry_share: float
    # No longer answer is read; 256 MiB.
    answer_bytes_max: int
    # How the gateway's certificate is checked.
    verify: ssl.SSLContext | bool


class AsyncClient:
    """Asks one gateway. `async with AsyncClient(url) as client`, or `aclose` it."""

    def __init__(self, url: str = "http://127.0.0.1:8000", **settings: Unpack[ClientSettings]) -> None:
        self._timeout_s = settings.get("timeout_s", 30.0)
        self._concurrency = settings.get("concurrency", 64)
        self._retries = settings.get("retries", 3)
        self._budget = ClientRetryBudget(settings.get("retry_share", 0.1))
        self._answer_bytes_max = settings.get("answer_bytes_max", 256 * 1024 * 1024)
        self._places = asyncio.Semaphore(self._concurrency)
        # Nothing is unpacked: a short answer could become a long one.
        headers = {"User-Agent": f"carpool-client/{__version__}", "Accept-Encoding": "identity"}
        if api_key := settings.get("api_key") or os.environ.get("CARPOOL_API_KEY"):
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            # Reading the system's certificates takes longer than the rest of this.
            verify=settings.get("verify", True) if url.lower().startswith("https:") else False,
            timeout=httpx.Timeout(None, connect=CONNECT_S_MAX),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency),
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def predict(self, value: Any, **options: Unpack[CallOptions]) -> Prediction:
        """The model's answer to one input, which is anything that JSON can say; raises a CarpoolError."""
        return read(await self._ask(prediction_call(value, options, new_id()), options.get("timeout_s")), Prediction)

    async def submit(self, value: Any, **options: Unpack[SubmitOptions]) -> str:
        """Make a task of one input; its id. It is sent again only where no task can have come of it."""
        return read(await self._ask(submission(value, options, new_id()), options.get("timeout_s")), Accepted).task_id

    async def result(self, task_id: str, *, timeout_s: float | None = None) -> TaskOutput:
        """Wait for a task's result; raises its error, or DeadlineExceeded when the time is over, while it goes on."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        with _told_as_deadline(timeout_s):
            async with asyncio.timeout_at(deadline):
                while True:
                    asked = clock()
                    wait_s = max(0.0, min(POLL_S, deadline - asked))
                    try:
                        found = task_in(await self._ask(poll(task_id, int(wait_s * 1000)), wait_s + CONNECT_S_MAX))
                    except DeadlineExceeded:  # of this poll, which had no place or no answer: there is time for more
                        found = None
                    if isinstance(found, TaskOutput):
                        return found
                    if found is not None:
                        raise found
                    if clock() - asked < wait_s / 2:
                        await asyncio.sleep(POLL_PAUSE_S)

    async def cancel(self, task_id: str, *, timeout_s: float | None = None) -> None:
        """Cancel a task that waits, or forget the result of a finished one; raises UnknownTask."""
        await self._ask(cancellation(task_id), timeout_s)

    async def stream(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Answer, None]:
        """Answers as they come, each with the index of its input.

        At most `concurrency` inputs are under way, and as many answers wait to be read: inputs are read no faster.
        A caller that stops reading must `aclose` it (`contextlib.aclosing`): calls under way are cancelled then.
        """
        number = min(concurrency or self._concurrency, self._concurrency)
        source, is_read = _numbered(inputs), asyncio.Lock()
        answers: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue(number)

        async def work() -> None:
            while True:
                async with is_read:
                    try:
                        index, value = await anext(source)
                    except StopAsyncIteration:
                        return
                try:
                    answer = Answer(index, value, await self.predict(value, **options), None)
                except CarpoolError as error:
                    answer = Answer(index, value, None, error)
                await answers.put(answer)

        async def work_all() -> None:
            failure: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(number):
                        group.create_task(work())
            except BaseExceptionGroup as failures:  # of the inputs themselves: they end the stream
                failure = failures.exceptions[0]
            await answers.put(failure)

        working = asyncio.create_task(work_all())
        try:
            while isinstance(found := await answers.get(), Answer):
                yield found
            if found is not None:
                raise found
        finally:
            working.cancel()
            await asyncio.wait([working])
            await source.aclose()

    async def map(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int | None = None,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """The outputs of all inputs, in their order. The first error ends it, or stands in the place of its output."""
        outputs: dict[int, Any] = {}
        answers = self.stream(inputs, concurrency=concurrency, **options)
        try:
            with _progress(progress, len(inputs) if isinstance(inputs, Sized) else None) as advance:
                async for answer in answers:
                    if answer.error is not None and on_error == "raise":
                        raise answer.error
                    outputs[answer.index] = answer.output if answer.error is None else answer.error
                    advance()
        finally:
            await answers.aclose()
        return [outputs[index] for index in range(len(outputs))]

    async def _ask(self, call: ClientCall, timeout_s: float | None) -> bytes:
        """The body of the gateway's answer; raises its error."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        self._budget.called()
        with _told_as_deadline(timeout_s):
            async with asyncio.timeout_at(deadline):
                for attempt in count():
                    try:
                        return await self._attempt(call, deadline)
                    except CarpoolError as error:
                        wait_s = pause_s(attempt, error.retry_after_s, random.random())
                        is_in_time = attempt < self._retries and clock() + wait_s < deadline
                        if not (is_in_time and call.may_repeat(error) and self._budget.take(clock())):
                            raise
                    await asyncio.sleep(wait_s)
        raise AssertionError("the loop ends by a return or an error")

    async def _attempt(self, call: ClientCall, deadline: float) -> bytes:
        async with self._places:
            headers = call.headers
            if call.has_deadline:
                left_s = deadline - asyncio.get_running_loop().time()
                headers = headers | {"X-Request-Timeout-Ms": str(timeout_ms(left_s))}
            try:
                async with self._http.stream(call.method, call.path, headers=headers, content=call.body) as response:
                    body = await self._read(response)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
                raise Unreachable(f"the gateway cannot be reached: {type(failure).__name__}") from failure
            except httpx.TransportError as failure:
                raise LostAnswer(f"the connection failed: {type(failure).__name__}") from failure
        if response.is_success:
            return body
        raise error_in(response.status_code, body, response.headers.get("retry-after"))

    async def _read(self, response: httpx.Response) -> bytes:
        parts: list[bytes] = []
        left = self._answer_bytes_max
        async for part in response.aiter_raw():
            left -= len(part)
            if left < 0:
                raise TooLarge(f"the answer has more than {self._answer_bytes_max} bytes (`answer_bytes_max`)")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def new_id() -> str:
    """The id of a call, the same in each attempt."""
    return f"cli_{secrets.token_hex(12)}"


async def _numbered(inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[tuple[int, Any], None]:
    if isinstance(inputs, AsyncIterable):
        index = 0
        async for value in inputs:
            yield index, value
            index += 1
    else:
        for pair in enumerate(inputs):
            yield pair


@contextmanager
def _told_as_deadline(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise own_deadline_passed(timeout_s) from None


@contextmanager
def _progress(is_wanted: bool, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where rich is there to draw it."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        is_wanted = False
    if not is_wanted:
        yield lambda: None
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        line = bar.add_task("", total=total)
        yield lambda: bar.advance(line)
