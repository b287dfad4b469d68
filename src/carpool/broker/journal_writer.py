"""The journal's writer thread: group commit, and results that are not given up while the disk fails.

The loop puts operations into the queue; the thread takes what is there, makes one transaction of it, and
hands all answers of that group back in one call. Rules:

1. No caller hears of a success before its commit. Operations of one group are all unanswered, so they count as
   simultaneous: they run by kind (append, finish, bury, delete, other changes), reads after the commit.
2. A commit that fails fails its whole group, except results: an outcome must not be lost, so they are kept
   and tried again, apart from the groups, so that what frees space can get through meanwhile.
3. An operation that can never be written (a defect) is found by halving the group, and fails alone.
4. Nothing but the end of the process ends the thread before `close`.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from carpool.broker.journal_records import (
    Append,
    Bury,
    Change,
    Delete,
    Finish,
    JournalReply,
    Look,
    Operation,
    Read,
)
from carpool.broker.journal_store import Store
from carpool.broker.replays import no_such_letter
from carpool.core.clock import Clock
from carpool.core.errors import JournalFailed
from carpool.core.histograms import Histogram

logger = logging.getLogger("carpool")

# How long the first write of a group waits for company. A sync of the disk takes 0.2 to 5 ms: 2 ms more is
# hardly felt by a client that will poll for its result, and saves most of the syncs of a busy journal.
GATHER_S = 0.002
# Bounds the time the loop spends in the callbacks of one group, and how late the first of a burst is answered.
GROUP_MAX = 1024
# Expired rows removed in one transaction; more follow at once, with the groups in between.
PURGE_MAX = 1000
# How much uptime a crash can lose at most: with tasks or results stored, and with dead letters only, which
# live for days. With nothing stored no lifetime runs, and the disk is left alone.
TICK_S = 1.0
SLOW_TICK_S = 5.0
# How often the thread looks how full the disk is.
DISK_LOOK_S = 10.0
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 5.0
# How long `close` goes on trying to write results to a disk that fails.
CLOSE_PATIENCE_S = 5.0
FAILURE_LOG_S = 10.0
EVICTION_LOG_S = 60.0

# They change nothing, so they need no transaction.
READS = (Read, Look)
COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Writer:
    """The thread that owns the file. `put` and `close` are the loop's; the rest is the thread's own."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        now: Clock,
        answer: Callable[[list[JournalReply]], None],
        has_left: Callable[[], None],
        *,
        result_ttl_s: float,
        dead_letter_ttl_s: float,
    ) -> None:
        self._store = store
        self._loop = loop
        self._now = now
        # Called on the loop: with the answers of a group, and as the last thing the thread does.
        self._answer = answer
        self._has_left = has_left
        self._result_ttl_s = result_ttl_s
        self._dead_letter_ttl_s = dead_letter_ttl_s
        # Filled by the loop, emptied by the thread; a deque's ends need no lock.
        self._queue: deque[Operation] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        # For metrics: transactions that the disk did not take, and how long the others took. The thread writes these.
        self.commit_failures = 0
        self.commit_seconds = Histogram(COMMIT_SECONDS)
        # The share of the disk that is free; 1 where there is none.
        self.disk_free_share = 1.0
        self._disk_look_at = 0.0 if store.path else float("inf")
        # Results that the disk did not take, when to try again, and how many at once.
        self._unwritten: deque[Operation] = deque()
        self._retry_at = 0.0
        self._retry_pause_s = RETRY_FIRST_S
        self._retry_count = GROUP_MAX
        self._tick_at = 0.0
        self._is_failing = False
        self._failure_logged_at = float("-inf")
        self._evictions_logged = 0
        self._eviction_logged_at = float("-inf")
        # A daemon: an exit that skips `close` is a crash, which the journal is made to survive.
        self._thread = threading.Thread(target=self._run, name="carpool-journal", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Queue an operation."""
        self._queue.append(operation)
        # The thread clears the event before it empties the queue: a set event is one it has yet to act on.
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Have the thread write what is queued, close the file and leave; nothing may be put any more."""
        self._is_closing = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread's end; not for long once it has said that it left."""
        self._thread.join()

    def _run(self) -> None:
        give_up_at = float("inf")
        while True:
            if not self._queue and not self._is_closing:
                self._wake.wait(self._seconds_to_duty())
            self._wake.clear()
            try:
                self._execute(self._gather())
                self._retry()
                self._tick()
                self._look_at_disk()
            except Exception as error:  # a defect must not end the thread: everything after it would hang
                logger.error("the journal met an unexpected %s", type(error).__name__)
            if self._is_closing and not self._queue:
                give_up_at = min(give_up_at, time.monotonic() + CLOSE_PATIENCE_S)
                if not self._unwritten or time.monotonic() > give_up_at:
                    break
                time.sleep(RETRY_FIRST_S)
                self._retry_at = 0.0
        self._leave()

    def _leave(self) -> None:
        if self._unwritten:
            logger.error(
                "%d results could not be written; their tasks will run again at the next start",
                len(self._unwritten),
            )
            self._post([(operation, disk_failed()) for operation in self._unwritten])
        try:
            self._store.close(self._now())
        except Exception as error:  # whatever it is, `Journal.close` waits for the thread to leave
            logger.error("the journal could not be closed in order: %s", error)
        try:
            self._loop.call_soon_threadsafe(self._has_left)
        except RuntimeError:  # the loop is closed: no caller waits
            pass

    def _seconds_to_duty(self) -> float | None:
        """How long nothing needs to be done unless an operation comes; None for ever."""
        due = [self._disk_look_at] if self._store.path else []
        if self._is_anything_stored():
            due.append(self._tick_at)
        if self._unwritten:
            due.append(self._retry_at)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _gather(self) -> list[Operation]:
        group: list[Operation] = []
        self._take(group)
        is_write_waiting = not all(isinstance(op, READS) for op in group)
        if is_write_waiting and len(group) < GROUP_MAX and not self._is_closing:
            time.sleep(GATHER_S)
            self._take(group)
        return group

    def _take(self, group: list[Operation]) -> None:
        room = GROUP_MAX - len(group)
        group.extend(self._queue.popleft() for _ in range(min(len(self._queue), room)))

    def _execute(self, group: list[Operation]) -> None:
        reads = [op for op in group if isinstance(op, Read)]
        writes = [op for op in group if not isinstance(op, READS)]
        if self._unwritten:
            # The disk fails: results join those that wait, and leave the rest of the group a chance.
            self._unwritten.extend(op for op in writes if isinstance(op, Finish))
            writes = [op for op in writes if not isinstance(op, Finish)]
        replies = self._write(writes) if writes else []
        if reads:
            replies += self._look_up(reads)
        replies += [self._look(op) for op in group if isinstance(op, Look)]
        self._post(replies)

    def _write(self, operations: list[Operation]) -> list[JournalReply]:
        try:
            return self._commit(operations)
        except Exception as error:
            if _is_of_the_disk(error):
                self._note_failure(error)
                self._unwritten.extend(op for op in operations if isinstance(op, Finish))
                return [(op, disk_failed()) for op in operations if not isinstance(op, Finish)]
            if len(operations) == 1:
                # Only the type: the text of such an error may quote a value.
                logger.error("the journal cannot write an operation: %s", type(error).__name__)
                return [(operations[0], disk_failed())]
        half = len(operations) // 2
        return self._write(operations[:half]) + self._write(operations[half:])

    def _commit(self, operations: list[Operation]) -> list[JournalReply]:
        started = time.perf_counter()
        now = self._now()
        appends = [op for op in operations if isinstance(op, Append)]
        finishes = [op for op in operations if isinstance(op, Finish)]
        burials = [op for op in operations if isinstance(op, Bury)]
        deletes = [op for op in operations if isinstance(op, Delete)]
        replies: list[JournalReply] = []
        with self._store.transaction(now):
            if appends:
                replies += self._append(appends, now)
            if finishes:
                stored = self._store.finish(
                    [(op.task_id, op.result, op.dead_letter) for op in finishes],
                    now + self._result_ttl_s,
                    now + self._dead_letter_ttl_s,
                    now,
                )
                replies.extend(zip(finishes, stored, strict=True))
            if burials:
                kept = self._store.bury(burials, now + self._dead_letter_ttl_s)
                replies.extend(zip(burials, kept, strict=True))
            if deletes:
                removed = self._store.delete([op.task_id for op in deletes], now)
                for delete in deletes:
                    replies.append((delete, delete.task_id in removed))
                    removed.discard(delete.task_id)
            replies += [(op, op.work(self._store, now)) for op in operations if isinstance(op, Change)]
            self._store.make_room(PURGE_MAX)
        self._note_commit(started)
        self._note_evictions()
        return replies

    def _append(self, appends: list[Append], now: float) -> list[JournalReply]:
        """Add tasks; those that replay a dead letter only together with its removal, and once."""
        replays = [op.letter_id for op in appends if op.letter_id is not None]
        found = self._store.drop_letters(replays, now) if replays else set()
        accepted: list[Append] = []
        replies: list[JournalReply] = []
        for op in appends:
            if op.letter_id is not None:
                if op.letter_id not in found:
                    replies.append((op, no_such_letter()))
                    continue
                found.remove(op.letter_id)
            accepted.append(op)
            replies.append((op, None))
        self._store.append([op.task for op in accepted])
        return replies

    def _look_up(self, reads: Sequence[Operation]) -> list[JournalReply]:
        try:
            found = self._store.read([op.task_id for op in reads], self._now())
        except Exception as error:
            if not _is_of_the_disk(error) and len(reads) > 1:
                half = len(reads) // 2
                return self._look_up(reads[:half]) + self._look_up(reads[half:])
            logger.error("the journal cannot be read: %s", type(error).__name__)
            return [(op, disk_failed()) for op in reads]
        return [(op, found.get(op.task_id)) for op in reads]

    def _look(self, look: Look) -> JournalReply:
        try:
            return look, look.work(self._store, self._now())
        except Exception as error:
            logger.error("the journal cannot be read: %s", type(error).__name__)
            return look, disk_failed()

    def _retry(self) -> None:
        """Write results that the disk did not take: fewer at once while it fails, more when it works."""
        if not self._unwritten or time.monotonic() < self._retry_at:
            return
        count = min(self._retry_count, len(self._unwritten))
        replies = self._write([self._unwritten.popleft() for _ in range(count)])
        self._post(replies)
        if replies:
            self._retry_count = min(self._retry_count * 2, GROUP_MAX)
            self._retry_pause_s = RETRY_FIRST_S
        else:
            # `_write` has put them back behind the others: one that is too large must not block the rest.
            self._retry_count = max(count // 2, 1)
            self._retry_at = time.monotonic() + self._retry_pause_s
            self._retry_pause_s = min(self._retry_pause_s * 2, RETRY_LAST_S)

    def _is_anything_stored(self) -> bool:
        counts = self._store.counts
        return bool(counts.tasks_pending or counts.results or counts.dead_letters or counts.webhooks)

    def _tick(self) -> None:
        """Save the uptime clock and purge what has expired."""
        if time.monotonic() < self._tick_at or not self._is_anything_stored():
            return
        started = time.perf_counter()
        now = self._now()
        counts = self._store.counts
        pause_s = TICK_S if counts.tasks_pending or counts.results else SLOW_TICK_S
        try:
            with self._store.transaction(now):
                if self._store.purge(now, PURGE_MAX):
                    pause_s = 0.0
                self._store.make_room(PURGE_MAX)
            self._note_commit(started)
        except sqlite3.Error as error:
            self._note_failure(error)
            pause_s = SLOW_TICK_S
        self._tick_at = time.monotonic() + pause_s

    def _look_at_disk(self) -> None:
        path = self._store.path
        if path is None or time.monotonic() < self._disk_look_at:
            return
        self._disk_look_at = time.monotonic() + DISK_LOOK_S
        try:
            disk = os.statvfs(path.parent)
        except OSError:
            self.disk_free_share = 0.0  # a disk that cannot be looked at cannot be written
        else:
            self.disk_free_share = disk.f_bavail / max(1, disk.f_blocks)

    def _note_commit(self, started: float) -> None:
        self.commit_seconds.observe(time.perf_counter() - started)
        if self._is_failing and not self._unwritten:
            self._is_failing = False
            logger.warning("the journal can be written again")

    def _note_failure(self, error: Exception) -> None:
        self.commit_failures += 1
        # A disk that is nearly full takes one group and refuses the next: one line in a while is enough.
        if time.monotonic() - self._failure_logged_at > FAILURE_LOG_S:
            self._failure_logged_at = time.monotonic()
            self._is_failing = True
            logger.error("the journal cannot be written: %s", error)

    def _note_evictions(self) -> None:
        """Log, once in a while, that old dead letters had to make room."""
        evicted = self._store.counts.dead_letters_evicted
        if evicted > self._evictions_logged and time.monotonic() - self._eviction_logged_at > EVICTION_LOG_S:
            self._eviction_logged_at = time.monotonic()
            logger.warning("%d old dead letters were dropped to make room", evicted - self._evictions_logged)
            self._evictions_logged = evicted

    def _post(self, replies: list[JournalReply]) -> None:
        if not replies:
            return
        try:
            self._loop.call_soon_threadsafe(self._answer, replies)
        except RuntimeError:  # the loop is closed without `close`: keep what is queued, and leave
            self._is_closing = True


def disk_failed() -> JournalFailed:
    """The failure of an operation that could not be written or read."""
    return JournalFailed("The disk of the journal failed. Retry later.", retry_after_s=1)


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the machine is at fault (disk full, I/O error, file locked or corrupt), not an operation."""
    return isinstance(error, sqlite3.OperationalError | MemoryError) or type(error) is sqlite3.DatabaseError
