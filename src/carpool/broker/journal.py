"""The journal: tasks answered with 202, their results and dead letters, on the disk before a client hears of them.

Public methods run on the event loop, queue an operation and return; the answer comes by callback on the loop,
when the writer thread (journal_writer) has committed it to the file (journal_store) with its group. Rules:

1. The queue is bounded in operations and bytes. Results are always taken: there are no more of them than
   running tasks, and while they fill the queue no new task is accepted.
2. Dead letters have bounds of their own, in the queue and in the file: a flood of them blocks no task. What is beyond
   is lost, the oldest first, and counted all the same.
3. A refusal comes by callback too, never during the call.
4. Each counter has one writer: the loop or the thread.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from carpool.broker.journal_records import (
    Append,
    Bury,
    Change,
    Counts,
    DeadLetter,
    Delete,
    Finish,
    JournalReply,
    Look,
    Operation,
    Read,
    TaskRecord,
    TaskResult,
    result_size_of,
    size_of,
    store_full,
    webhooks_full,
)
from carpool.broker.journal_store import Store
from carpool.broker.journal_writer import Writer
from carpool.broker.replays import answer_of
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import dead_letter_causes
from carpool.core.errors import CarpoolError, JournalFailed, QueueFull
from carpool.core.task import StoredTask
from carpool.core.webhook import DueWebhook, WebhookState

logger = logging.getLogger("carpool")

QUEUED_OPERATIONS_MAX = 100_000
QUEUED_BYTES_MAX = 256 * 1024 * 1024
# A queue empties in a second or so.
QUEUE_RETRY_AFTER_S = 1
# Dead letters of synchronous requests on their way to the disk.
BURYING_MAX = 1000
BURYING_BYTES_MAX = 64 * 1024 * 1024
# Dead letters may have so much of `stored_bytes_max`, in addition to it.
DEAD_LETTER_SHARE = 0.25
# Results that were read go first where more than this share of `stored_bytes_max` is used.
NEARLY_FULL = 0.85
# The writer hears of so many results that were read at once.
READ_AT_ONCE = 1024

Found = TypeVar("Found")


class Journal:
    """Keeps tasks and results. Made on the loop that will use it; `close` ends it."""

    def __init__(
        self,
        path: Path | None,
        loop: asyncio.AbstractEventLoop,
        *,
        result_ttl_s: float,
        dead_letter_ttl_s: float,
        stored_bytes_max: int,
        webhook_bytes_max: int = sys.maxsize,
        clock: Clock = monotonic,
    ) -> None:
        """Open or create the journal at `path` (None: in memory); raises JournalUnusable."""
        self._store = Store(path, int(stored_bytes_max * DEAD_LETTER_SHARE), int(stored_bytes_max * NEARLY_FULL))
        self._loop = loop
        self._clock = clock
        self._opened = clock()
        self._stored_bytes_max = stored_bytes_max
        self._webhook_bytes_max = webhook_bytes_max
        # Operations without an answer yet, and their bytes.
        self._unanswered = 0
        self._unanswered_bytes = 0
        # Tasks whose results were read, and of which the writer has not heard yet.
        self._read: list[str] = []
        # Dead letters among the operations, and their bytes, which are not among those.
        self._burying = 0
        self._burying_bytes = 0
        # Requests given up on since the start; also those whose letter is no longer kept. All causes are in it: to see
        # an increase, an alert needs the zero before the first one.
        self.buried = Counter(dict.fromkeys(dead_letter_causes(), 0))
        # Synchronous requests that should have become dead letters, and did not.
        self.letters_lost = 0
        self._is_closing = False
        self._closed = asyncio.Event()
        self.writer = Writer(
            self._store,
            loop,
            self.now,
            self._answer,
            self._closed.set,
            result_ttl_s=result_ttl_s,
            dead_letter_ttl_s=dead_letter_ttl_s,
        )

    def now(self) -> float:
        """The uptime clock: counts the seconds in which some process had this journal open."""
        return self._store.uptime_at_open + self._clock() - self._opened

    def append(
        self, task: TaskRecord, done: Callable[[CarpoolError | None], None], letter_id: int | None = None
    ) -> None:
        """Keep a task; `done(None)` once it is on the disk, `done(error)` if it is not accepted.

        With `letter_id` it replays a dead letter, which goes in the same transaction: NotFound if it is gone already.
        """
        size = size_of(task)
        if self._read:  # which may have to make room for it
            self._tell_read()
        if self.stored_bytes + size > self._stored_bytes_max:
            self._loop.call_soon(done, store_full())
        elif task.callback_url and self.counts.webhook_bytes >= self._webhook_bytes_max:
            self._loop.call_soon(done, webhooks_full())
        else:
            self._offer(Append(task.id, done, size, task, letter_id))

    def finish(
        self,
        task_id: str,
        result: TaskResult,
        done: Callable[[bool | CarpoolError], None],
        dead_letter: DeadLetter | None = None,
    ) -> None:
        """Keep a task's result unless it has one; `done` says if it was kept (an error: `close` gave up)."""
        if self._is_closing:
            self._loop.call_soon(done, _closed())
        else:
            if dead_letter is not None:
                self.buried[dead_letter.cause] += 1
            self._put(Finish(task_id, done, result_size_of(result), result, dead_letter))

    def read(self, task_id: str, done: Callable[[StoredTask | CarpoolError | None], None]) -> None:
        """Look a task up."""
        self._offer(Read(task_id, done, 0))

    def was_read(self, task_id: str) -> None:
        """A client has the result of a task: it goes before others where there is no room for new ones."""
        self._read.append(task_id)
        if len(self._read) >= READ_AT_ONCE or self.stored_bytes > NEARLY_FULL * self._stored_bytes_max:
            self._tell_read()

    def _tell_read(self) -> None:
        told, self._read = self._read, []
        self._offer(Change("", lambda _: None, 0, lambda store, _: store.were_read(told)))

    def delete(self, task_id: str, done: Callable[[bool | CarpoolError], None]) -> None:
        """Remove a task in any state; `done` says whether there was one. Its dead letter stays."""
        self._offer(Delete(task_id, done, 0))

    def bury(self, record: TaskRecord, dead_letter: DeadLetter) -> None:
        """Keep a request that was no task as a dead letter, if there is room. The caller gets no answer."""
        self.buried[dead_letter.cause] += 1
        size = size_of(record)
        if self._is_closing or self._burying >= BURYING_MAX or self._burying_bytes + size > BURYING_BYTES_MAX:
            self.letters_lost += 1
            return
        self._burying += 1
        self._burying_bytes += size

        def done(was_kept: object) -> None:
            self._burying -= 1
            self._burying_bytes -= size
            self.letters_lost += was_kept is not True  # no room, or the disk did not take it

        self._put(Bury(record.id, done, 0, record, dead_letter, time.time()))

    async def look(self, work: Callable[[Store, float], Found]) -> Found:
        """Look something up in the file, at a reading of the uptime clock; raises JournalFailed or QueueFull."""
        found: Found = await answer_of(lambda done: self._offer(Look("", done, 0, work)))
        return found

    async def change(self, work: Callable[[Store, float], Found]) -> Found:
        """Change something in the file, in a transaction; raises the same."""
        found: Found = await answer_of(lambda done: self._offer(Change("", done, 0, work)))
        return found

    def pending(self) -> Iterator[TaskRecord]:
        """The tasks without a result, in order of submission: for the start, before the first `append`."""
        return self._store.pending()

    async def close(self) -> None:
        """Commit everything queued, bring the log into the file, end the thread and let go of the file."""
        self._is_closing = True
        self.writer.close()
        await self._closed.wait()
        self.writer.join()

    def _offer(self, operation: Operation) -> None:
        """Queue an operation that a client causes, within the bounds."""
        if self._is_closing:
            self._loop.call_soon(operation.done, _closed())
        elif self._unanswered >= QUEUED_OPERATIONS_MAX or self._unanswered_bytes + operation.size > QUEUED_BYTES_MAX:
            full = QueueFull("The disk cannot keep up with the tasks.", retry_after_s=QUEUE_RETRY_AFTER_S)
            self._loop.call_soon(operation.done, full)
        else:
            self._put(operation)

    def _put(self, operation: Operation) -> None:
        self._unanswered += 1
        self._unanswered_bytes += operation.size
        self.writer.put(operation)

    def _answer(self, replies: list[JournalReply]) -> None:
        self._unanswered -= len(replies)
        for operation, answer in replies:
            self._unanswered_bytes -= operation.size
            try:
                operation.done(answer)
            except Exception:  # one caller's defect must not take the answers of the others
                logger.exception("a callback of the journal failed")

    @property
    def counts(self) -> Counts:
        """What is on the disk."""
        return self._store.counts

    @property
    def last_letter(self) -> int:
        """The highest id that a dead letter has had; those of younger ones are above it."""
        return self._store.last_letter

    @property
    def stored_bytes(self) -> int:
        """Bytes of the inputs and results of tasks, on the disk and on their way to it."""
        return self._store.counts.stored_bytes + self._unanswered_bytes


def _closed() -> JournalFailed:
    return JournalFailed("The journal is closed: this gateway is shutting down.")


class JournalOutbox:
    """The webhooks that wait in a journal (core.webhook.Outbox); their only deliverer is in the same process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def waiting(self) -> tuple[int, int]:
        """How many wait, and what they count in bytes."""
        return self._journal.counts.webhooks, self._journal.counts.webhook_bytes

    async def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int]) -> list[DueWebhook]:
        """Some that are due, the oldest of each host first: no other claim gets them before the lease is over."""
        busy = dict(busy)  # another thread reads it
        return await self._journal.change(lambda store, now: store.webhooks.claim(limit, lease_s, host_max, busy, now))

    async def read(self, webhook: DueWebhook) -> StoredTask | None:
        """The outcome; None if it is gone."""
        return await self._journal.look(lambda store, _: store.webhooks.read(webhook.id))

    async def remove(self, webhook: DueWebhook) -> None:
        """It was delivered, or given up."""
        await self._journal.change(lambda store, _: store.webhooks.remove(webhook.id))

    async def put_back(self, webhook: DueWebhook, in_s: float, failure: str | None) -> None:
        """Let it be due again; without a failure it was not sent, and that is no attempt."""
        await self._journal.change(lambda store, now: store.webhooks.put_back(webhook.id, now + in_s, failure))

    async def page(self, limit: int) -> list[WebhookState]:
        """Some of the webhooks that wait, the next first."""
        return await self._journal.look(lambda store, now: store.webhooks.page(limit, now))

    async def retry(self, task_id: str | None) -> int:
        """Let one webhook, or all, be due now, but for those being sent; how many there were."""
        return await self._journal.change(lambda store, _: store.webhooks.retry(task_id))
