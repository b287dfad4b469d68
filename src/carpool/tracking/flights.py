"""Records requests that are in flight, too (`tracking.in_flight`): the recorder that is chosen where that is on.

1. What the store is to be told of a request is kept once, by its key: a row, or that it is over. So a request that ends
   before the next write costs the store nothing, and what is late is never out of order.
2. Outcomes are written first. Rows in flight come after them, and while the store is slow they are what is dropped:
   beyond the bound no new request gets one. What is over is told wherever the store has a row; of everybody's tasks it
   may have one, and while too many wait to be told of, such a row stays until its request has an outcome or no time.
3. Only requests that came in here get rows. Tasks that outlive their process (rule 6 of records.py) are everybody's:
   over Redis a gateway writes that one waits, a batcher that it runs, and who wrote its result that it is over. Where
   each process has a store of its own, none of them sees a task from its beginning to its end: tasks have no rows then.
4. A process says again and again that it lives, and looks for others that do not.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from secrets import token_hex

from carpool.core.batch import Batch
from carpool.core.clock import Clock, monotonic
from carpool.core.outcome import Outcome, Output
from carpool.core.request import DONE, Request
from carpool.tracking.recorder import WRITTEN_AT_ONCE, Recorder
from carpool.tracking.records import NOBODY, BadRowsError, FlightRow, Store, clean, flight_row, plain_id

logger = logging.getLogger("carpool.tracking")

ANNOUNCE_EVERY_S = 5.0
LOOK_EVERY_S = 10.0

# Writer and id.
Key = tuple[str, str]


class FlightRecorder(Recorder):
    """Also everything that has not ended."""

    def __init__(
        self,
        store: Store,
        tiers: Sequence[str],
        *,
        buffer_max: int,
        are_tasks_kept: bool,
        are_tasks_seen: bool = True,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(store, tiers, buffer_max=buffer_max, clock=clock, wall=wall)
        self.writer = token_hex(8)
        self._are_tasks_kept, self._are_tasks_seen = are_tasks_kept, are_tasks_seen
        # What the store is not told yet; None: it is over.
        self._changes: dict[Key, FlightRow | None] = {}
        # Requests that came in here and are not over, without tasks that are everybody's.
        self._own: set[Key] = set()
        # What the store has a row of, or may have, without such tasks: who ends one may be another process.
        self.stored: set[Key] = set()
        self._announce_at = self._look_at = self._clock()
        self.written["in_flight"] = self.dropped["in_flight"] = 0

    @property
    def waiting(self) -> int:
        """Rows that are not written yet."""
        return super().waiting + len(self._changes)

    # What happens (core.events.Subscriber).

    def admitted(self, request: Request) -> None:
        """A request came in."""
        key = self._key(request)
        if key is None:
            return
        if len(self._changes) >= self._buffer_max:
            self.dropped["in_flight"] += 1
            return
        if key[0]:
            self._own.add(key)
        self._change(key, request, None, 0, request.arrived)

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        """A call with these begins. Of requests that are coalesced one is here, for all of them."""
        for request in batch:
            if (key := self._key(request)) is not None and self._has_row(key):
                self._change(key, request, endpoint, attempt, now)

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over; some may wait again."""
        super().ended(batch, requests)
        for request in requests:
            if request.phase < DONE and (key := self._key(request)) is not None and self._has_row(key):
                self._change(key, request, None, 0, batch.ended)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request has its outcome."""
        super().settled(request, outcome)
        self._over(request)

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests have their outputs."""
        super().all_settled(requests, outputs)
        for request in requests:
            if not request.is_shared:
                self._over(request)

    def _key(self, request: Request) -> Key | None:
        """None: it has no row here."""
        if request.is_task and not self._are_tasks_seen:
            return None
        is_kept = request.is_task and self._are_tasks_kept
        return NOBODY if is_kept else self.writer, plain_id(request.id)

    def _has_row(self, key: Key) -> bool:
        """Whether a change is to be written: not where the first row was dropped, or another process has it."""
        if key[0]:
            return key in self._own
        return key in self._changes or len(self._changes) < self._buffer_max

    def _change(self, key: Key, request: Request, sent_to: str | None, attempts: int, now: float) -> None:
        row = flight_row(key[0], request, sent_to, attempts, now, self._tiers, self._offset_s())
        self._changes[key] = row

    def _over(self, request: Request) -> None:
        if (key := self._key(request)) is None:
            return
        self._own.discard(key)
        if key[0] and key not in self.stored:
            self._changes.pop(key, None)
        elif key[0] or key in self._changes or len(self._changes) < 2 * self._buffer_max:
            self._changes[key] = None
        else:
            self.dropped["in_flight"] += 1

    # Writing.

    async def _work(self, *, is_last: bool) -> None:
        await super()._work(is_last=is_last)
        now = self._clock()
        if now >= self._announce_at:
            await self.store.announce(self.writer, [request_id for writer, request_id in self.stored if writer])
            self._announce_at = now + ANNOUNCE_EVERY_S
        await self._write_flights()
        if now >= self._look_at and not is_last:
            await self.store.fail_gone(self._wall())
            self._look_at = now + LOOK_EVERY_S

    async def _leave(self) -> None:
        self.dropped["in_flight"] += len(self._changes)
        self._changes.clear()
        await self.store.leave(self.writer)

    async def _write_flights(self) -> None:
        """Write what is there now, in parts; what comes meanwhile is for the next time."""
        changes = iter(list(self._changes.items()))
        while some := dict(islice(changes, WRITTEN_AT_ONCE)):
            self.stored.update(key for key, row in some.items() if row is not None and key[0])
            await self._write_some(some)
            for key, row in some.items():
                if self._changes.get(key, self) is row:
                    del self._changes[key]
                if row is None:
                    self.stored.discard(key)

    async def _write_some(self, changes: Mapping[Key, FlightRow | None]) -> None:
        rows = [row for row in changes.values() if row is not None]
        over = [key for key, row in changes.items() if row is None]
        try:
            await self.store.write_flights(rows, over)
        except BadRowsError:
            try:
                await self.store.write_flights([clean(row) for row in rows], over)
            except BadRowsError as fault:  # not one by one, as outcomes are: none of these says what became of anybody
                logger.error("rows in flight could not be written (%s); dropped: %d", fault, len(rows))
                self.dropped["in_flight"] += len(rows)
                await self.store.write_flights([], over)
                return
        self.written["in_flight"] += len(rows)
