"""Takes down what ends, and has it written: a subscriber to events, and what writes beside.

1. Told of an end, it appends to a list, and that is all. What is in a request is never touched.
2. The list is bounded: a store that is slow or dead costs rows, which are counted, never a request.
3. Rows are made and written some at a time, so that the event loop is never kept for long; what the store did not take
   is tried again, after a pause.
4. At the end the rest is written within a bound. What is left then is counted as dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

from carpool.core.batch import Batch
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError
from carpool.core.outcome import CallFacts, Outcome
from carpool.core.request import Request, facts_of_failure
from carpool.tracking.records import NO_CALL, OK, BatchRow, RequestEntry, RequestRow, batch_rows, request_rows
from carpool.tracking.stores import BadRowsError, Store, StoreAwayError, StoreUnusableError

logger = logging.getLogger("carpool.tracking")

# So long a row waits for others at most; a process that is killed loses no more than that.
WRITE_EVERY_S = 0.25
# Rows that are made at once: about a millisecond of the event loop.
CHUNK = 500
TIDY_EVERY_S = 600.0
RETRY_S, RETRY_S_MAX = 0.5, 5.0
CLOSE_S_MAX = 5.0


class Recorder:
    """Everything that ended and is not written yet (core.events.Subscriber)."""

    def __init__(
        self,
        store: Store,
        tiers: Sequence[str],
        *,
        buffer_max: int,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._tiers = tuple(tiers)
        self._buffer_max = buffer_max
        self._clock = clock
        self._wall = wall
        self._requests: list[tuple[object, ...]] = []
        self._batches: list[Batch] = []
        # The rows that are written next, which wait in the lists until the store has them: those that it did not take,
        # or of which nobody knows, are given to it once more, the same.
        self._next: tuple[list[RequestRow], list[BatchRow]] | None = None
        # What the store does with them. It is never broken off and begun anew: it may have succeeded.
        self._under_way: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_failing = False
        # For metrics, by kind of row.
        self.written = {"request": 0, "batch": 0}
        self.dropped = {"request": 0, "batch": 0}
        self.failures = 0

    @property
    def waiting(self) -> int:
        """Rows that are not written yet."""
        return len(self._requests) + len(self._batches)

    # What happens (core.events.Subscriber).

    def admitted(self, request: Request) -> None:
        """Its row comes at its end."""

    def taken(self, batch: Sequence[Request]) -> None:
        """Its row comes at its end."""

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        """Its row comes at its end."""

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over."""
        if len(self._batches) >= self._buffer_max:
            self.dropped["batch"] += 1
        else:
            self._batches.append(batch)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request has its outcome. As a RequestEntry is written, but without the cost of making one."""
        entries = self._requests
        if len(entries) >= self._buffer_max:
            self.dropped["request"] += 1
            return
        call: CallFacts
        if isinstance(outcome, CarpoolError):
            code, tokens, call = outcome.code, None, facts_of_failure(request) or NO_CALL
        else:
            code, tokens, call = OK, outcome.tokens_used, outcome.call
        entries.append(
            (
                request.id,
                request.owner,
                request.tier,
                request.model,
                code,
                request.arrived,
                request.taken,
                request.ended,
                request.is_task,
                call,
                tokens,
            )
        )

    # Writing.

    async def start(self) -> None:
        """Write from now on. Raises StoreUnusableError; a store that is away only costs rows until it is back."""
        try:
            await self.store.open()
        except StoreAwayError as failure:
            self._note_failure(failure)
        self._writer = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write the rest, if that can be done soon."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
            self._writer = None
            try:
                async with asyncio.timeout(CLOSE_S_MAX):
                    await self._write_all()
            except (StoreAwayError, TimeoutError) as failure:
                self._note_failure(failure)
            if self._under_way is not None:
                self._under_way.cancel()
                await asyncio.wait([self._under_way])
        if self.waiting:
            self._drop(len(self._requests), len(self._batches))
        await self.store.close()

    async def _run(self) -> None:
        pause_s, tidy_at = RETRY_S, self._clock()
        while True:
            try:
                if self._clock() >= tidy_at:
                    tidy_at = self._clock() + TIDY_EVERY_S
                    await self.store.tidy(self._wall())
                await self._write_all()
                pause_s = RETRY_S
                await asyncio.sleep(WRITE_EVERY_S)
            except (StoreAwayError, StoreUnusableError) as failure:
                self._note_failure(failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            except Exception:  # a defect must not end it: nothing would be written any more
                logger.exception("tracking failed; it goes on")
                self._drop(min(CHUNK, len(self._requests)), min(CHUNK, len(self._batches)))
                await asyncio.sleep(pause_s)

    async def _write_all(self) -> None:
        """Write what waits now, in parts."""
        while self.waiting:
            requests, batches = self._next = self._next or self._make_next()
            try:
                await self._write(requests, batches)
            except BadRowsError as fault:
                logger.error("rows that cannot be written were dropped: %s", fault)
                self._drop(len(requests), len(batches))
                continue
            self._forget(len(requests), len(batches))
            self.written["request"] += len(requests)
            self.written["batch"] += len(batches)
            if self._is_failing:
                self._is_failing = False
                logger.warning("tracking goes on; rows dropped so far: %d", sum(self.dropped.values()))
            if len(requests) < CHUNK and len(batches) < CHUNK:
                return

    async def _write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Have the store write these, or wait for what it does with them since somebody else waited."""
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self.store.write(requests, batches))
        try:
            await asyncio.shield(self._under_way)
        finally:
            if self._under_way.done():
                self._under_way = None

    def _make_next(self) -> tuple[list[RequestRow], list[BatchRow]]:
        offset_s = self._wall() - self._clock()
        entries = cast("list[RequestEntry]", self._requests[:CHUNK])  # see `settled`
        return request_rows(entries, offset_s, self._tiers), batch_rows(self._batches[:CHUNK], offset_s)

    def _forget(self, requests: int, batches: int) -> None:
        """So many of the oldest wait no more."""
        del self._requests[:requests], self._batches[:batches]
        self._next = None

    def _drop(self, requests: int, batches: int) -> None:
        """Give up the oldest."""
        self._forget(requests, batches)
        self.dropped["request"] += requests
        self.dropped["batch"] += batches

    def _note_failure(self, failure: Exception) -> None:
        self.failures += 1
        if not self._is_failing:
            self._is_failing = True
            logger.error("what becomes of requests cannot be kept for now: %s", failure or type(failure).__name__)
