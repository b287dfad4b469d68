"""Records requests and batches at their end: a subscriber to events, and a task that writes rows to the store.

1. At an event the recorder only appends rows to a list. It never reads what inputs and outputs hold.
2. The list is bounded: a store that is slow or dead costs rows, which are counted, never a request.
3. Rows are written some at a time; rows that the store did not take are tried again, after a pause.
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
from carpool.core.outcome import NO_CALL, Outcome, Output
from carpool.core.request import Request, facts_of_failure
from carpool.core.timers import wait_for
from carpool.tracking.records import (
    BadRowsError,
    BatchRow,
    RequestRow,
    Store,
    StoreAwayError,
    StoreUnusableError,
    batch_row,
    clean,
    request_row,
)

logger = logging.getLogger("carpool.tracking")

# A row waits so long for others at most; a process that is killed loses no more than that.
WRITE_EVERY_S = 0.25
# Rows of each kind in one write.
WRITTEN_AT_ONCE = 4000
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
        self._requests: list[RequestRow] = []
        self._batches: list[BatchRow] = []
        # How many of the oldest, which wait in the lists until the store has them, it was given and did not take, or
        # may not have taken: it gets the same once more.
        self._given: tuple[int, int] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()
        self._is_failing = False
        self._tidy_at = clock()
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
        self._batches.append(batch_row(batch, self._offset_s()))
        self._keep_the_bound("batch", self._batches)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request has its outcome."""
        if isinstance(outcome, CarpoolError):
            error, tokens, call = outcome.code, None, facts_of_failure(request) or NO_CALL
        else:
            error, tokens, call = None, outcome.tokens_used, outcome.call
        self._requests.append(request_row(request, error, call, tokens, self._tiers, self._offset_s()))
        self._keep_the_bound("request", self._requests)

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests have their outputs: `settled` for many. Shared requests are no client's own."""
        tiers, offset_s = self._tiers, self._offset_s()
        self._requests += [
            request_row(request, None, output.call, output.tokens_used, tiers, offset_s)
            for request, output in zip(requests, outputs, strict=True)
            if not request.is_shared
        ]
        self._keep_the_bound("request", self._requests)

    def _offset_s(self) -> float:
        return self._wall() - self._clock()

    def _keep_the_bound(self, kind: str, rows: list[RequestRow] | list[BatchRow]) -> None:
        if len(rows) > self._buffer_max:
            self.dropped[kind] += len(rows) - self._buffer_max
            del rows[self._buffer_max :]

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
        try:
            await self._leave()
        except (StoreAwayError, StoreUnusableError) as failure:
            self._note_failure(failure)
        await self.store.close()

    async def _leave(self) -> None:
        """Nothing more is written."""

    async def _run(self) -> None:
        """Write until there is nothing more to come, and the rest is written or was tried once."""
        pause_s = RETRY_S
        is_last = False
        while not is_last:
            is_last = self._is_closing.is_set()
            try:
                await self._work(is_last=is_last)
                pause_s = RETRY_S
                await wait_for(self._is_closing, WRITE_EVERY_S)
            except Exception as failure:  # a defect must not end it either: nothing would be written any more
                if isinstance(failure, StoreAwayError | StoreUnusableError):
                    self._note_failure(failure)
                else:
                    logger.exception("tracking failed; it goes on")
                    self._given = None
                await wait_for(self._is_closing, pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _work(self, *, is_last: bool) -> None:
        """Do what is due now."""
        if self._clock() >= self._tidy_at and not is_last:
            self._tidy_at = self._clock() + TIDY_EVERY_S
            await self.store.tidy(self._wall())
        await self._write_all()

    async def _write_all(self) -> None:
        """Write what waits now, in parts."""
        while self._requests or self._batches:
            waiting = min(len(self._requests), WRITTEN_AT_ONCE), min(len(self._batches), WRITTEN_AT_ONCE)
            given = self._given or waiting
            await self._write_oldest(*given)
            if self._is_failing:
                self._is_failing = False
                logger.warning("tracking goes on; rows dropped so far: %d", sum(self.dropped.values()))
            if given == waiting and max(waiting) < WRITTEN_AT_ONCE:
                return

    async def _write_oldest(self, requests: int, batches: int, *, is_clean: bool = False) -> None:
        """Write so many of the oldest (rule 4)."""
        self._given = requests, batches
        try:
            await self.store.write(self._requests[:requests], self._batches[:batches])
        except BadRowsError as fault:
            if not is_clean:
                dropped = sum(self.dropped.values())
                self._requests[:requests] = map(clean, self._requests[:requests])
                self._batches[:batches] = map(clean, self._batches[:batches])
                await self._write_oldest(requests, batches, is_clean=True)
                dropped = sum(self.dropped.values()) - dropped
                logger.error("rows could not be written as they were (%s); so many were dropped: %d", fault, dropped)
            elif requests + batches > 1:
                await self._write_oldest(requests // 2, batches - batches // 2, is_clean=True)
                await self._write_oldest(requests - requests // 2, batches // 2, is_clean=True)
            else:
                self._drop(requests, batches)
        else:
            self._forget(requests, batches)
            self.written["request"] += requests
            self.written["batch"] += batches

    def _forget(self, requests: int, batches: int) -> None:
        """So many of the oldest wait no more."""
        del self._requests[:requests], self._batches[:batches]
        self._given = None

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
