"""Records requests and batches at their end: a subscriber to events, and a task that writes rows to the store.

1. At an event the recorder only appends to a list. It never reads what inputs and outputs hold.
2. The list is bounded: a store that is slow or dead costs rows, which are counted, never a request.
3. Rows are made and written some at a time, so that the event loop is never kept for long; rows that the store did not
   take are tried again, after a pause.
4. If a write has bad rows, all its rows are cleaned and tried again, then in halves, and halves of these: a row that
   cannot be written at all is dropped alone, and counted.
5. At the end the rest is written within a bound. What is left then is counted as dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from carpool.core.batch import Batch
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError
from carpool.core.events import Subscriber
from carpool.core.outcome import NO_CALL, CallFacts, Outcome, Output
from carpool.core.request import Request, facts_of_failure
from carpool.tracking.records import OK, RecordFields, clean_batch, clean_entry
from carpool.tracking.stores import BadRowsError, Packed, Store, StoreAwayError, StoreUnusableError

logger = logging.getLogger("carpool.tracking")

# A row waits so long for others at most; a process that is killed loses no more than that.
WRITE_EVERY_S = 0.25
# Rows that are made at once, less than a millisecond of the event loop; and how many times that is one write.
CHUNK = 500
CHUNKS_A_WRITE = 8
TIDY_EVERY_S = 600.0
RETRY_S, RETRY_S_MAX = 0.5, 5.0
CLOSE_S_MAX = 5.0


class Recorder(Subscriber):
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
        self._requests: list[RecordFields] = []
        self._batches: list[Batch] = []
        # The rows that are written next, and how many: they wait in the lists until the store has them. Rows that it
        # did not take, or may not have taken, are given to it once more, the same.
        self._next: tuple[list[Packed], int, int] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()
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

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over."""
        if len(self._batches) >= self._buffer_max:
            self.dropped["batch"] += 1
        else:
            self._batches.append(batch)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request has its outcome."""
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

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests have their outputs: `settled` for many. Shared requests are no client's own."""
        entries = self._requests
        if len(entries) + len(requests) > self._buffer_max:
            for request, output in zip(requests, outputs, strict=True):
                if not request.is_shared:
                    self.settled(request, output)
            return
        entries += [
            (
                request.id,
                request.owner,
                request.tier,
                request.model,
                OK,
                request.arrived,
                request.taken,
                request.ended,
                request.is_task,
                output.call,
                output.tokens_used,
            )
            for request, output in zip(requests, outputs, strict=True)
            if not request.is_shared
        ]

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
            self._is_closing.set()
            # Not cut off in the middle of a write, unless that takes too long: the store may have the rows already.
            await asyncio.wait([self._writer], timeout=CLOSE_S_MAX)
            self._writer.cancel()
            await asyncio.wait([self._writer])
            self._writer = None
        if self.waiting:
            logger.error("rows that could not be written were dropped: %d", self.waiting)
            self._drop(len(self._requests), len(self._batches))
        await self.store.close()

    async def _run(self) -> None:
        """Write until there is nothing more to come, and the rest is written or was tried once."""
        pause_s, tidy_at = RETRY_S, self._clock()
        is_last = False
        while not is_last:
            is_last = self._is_closing.is_set()
            try:
                if self._clock() >= tidy_at and not is_last:
                    tidy_at = self._clock() + TIDY_EVERY_S
                    await self.store.tidy(self._wall())
                await self._write_all()
                pause_s = RETRY_S
                await self._rest(WRITE_EVERY_S)
            except (StoreAwayError, StoreUnusableError) as failure:
                self._note_failure(failure)
                await self._rest(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            except Exception:  # a defect must not end it: nothing would be written any more
                logger.exception("tracking failed; it goes on")
                self._next = None
                await self._rest(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _rest(self, seconds: float) -> None:
        """Pause, but not when it is time to leave."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_closing.wait()
        except TimeoutError:
            pass

    async def _write_all(self) -> None:
        """Write what waits now, in parts."""
        while self.waiting:
            requests, batches = min(len(self._requests), CHUNK * CHUNKS_A_WRITE), min(len(self._batches), CHUNK)
            try:
                self._next = self._next or (await self._make_next(requests, batches), requests, batches)
                packed, requests, batches = self._next
                await self.store.write(packed)
            except BadRowsError as fault:
                await self._write_apart(requests, batches, fault)
            else:
                self._forget(requests, batches)
                self.written["request"] += requests
                self.written["batch"] += batches
            if self._is_failing:
                self._is_failing = False
                logger.warning("tracking goes on; rows dropped so far: %d", sum(self.dropped.values()))
            if requests < CHUNK * CHUNKS_A_WRITE and batches < CHUNK:
                return

    async def _make_next(self, requests: int, batches: int) -> list[Packed]:
        """Rows of so many of the oldest; raises BadRowsError."""
        offset_s = self._wall() - self._clock()
        packed = [self._pack([], self._batches[:batches], offset_s)] if batches else []
        for first in range(0, requests, CHUNK):
            await asyncio.sleep(0)  # other work of the event loop first
            packed.append(self._pack(self._requests[first : min(first + CHUNK, requests)], [], offset_s))
        return packed

    def _pack(self, requests: Sequence[RecordFields], batches: Sequence[Batch], offset_s: float) -> Packed:
        try:
            return self.store.pack(requests, batches, offset_s, self._tiers)
        except Exception as fault:  # whatever is wrong with one of the rows
            raise BadRowsError(f"{type(fault).__name__} while rows were made") from None

    async def _write_apart(self, requests: int, batches: int, fault: BadRowsError) -> None:
        """Rule 4, for so many of the oldest."""
        self._next = None
        dropped = sum(self.dropped.values())
        self._requests[:requests] = map(clean_entry, self._requests[:requests])
        self._batches[:batches] = map(clean_batch, self._batches[:batches])
        for row, left in (("request", requests), ("batch", batches)):
            size = left
            while left:
                size = min(size, left)
                some = (size, 0) if row == "request" else (0, size)
                try:
                    await self.store.write(await self._make_next(*some))
                    self.written[row] += size
                    self._forget(*some)
                except BadRowsError as again:
                    if size > 1:
                        size //= 2
                        continue
                    fault = again
                    self._drop(*some)
                left -= size
                size *= 2
        dropped = sum(self.dropped.values()) - dropped
        logger.error("rows could not be written as they were (%s); so many were dropped: %d", fault, dropped)

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
