"""Several batchers that give back to one another what they cannot serve, in virtual time.

Each has the classes of a batcher. In place of Redis there is a queue that hands out what was given back.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from carpool.broker.redis.batcher.leases import NO_HEADER, BatchersElsewhere, EntryLease, History, LeasedEntries
from carpool.broker.redis.keys import Keys
from carpool.core.errors import CarpoolError, DeadlineExceeded, GivenBack
from carpool.core.outcome import Outcome, Output
from carpool.core.request import AGAIN, Request
from carpool.testing import FakeClock, FakeUpstream, make_request
from support.virtual_gateway import Stand

SHARD = Keys("fleet").shards[0]
CLAIM_S = 0.002


class Entry:
    """A request on its way through the fleet."""

    def __init__(self, number: int, value: bytes, owner: str, deadline: float) -> None:
        self.number = number
        self.value = value
        self.owner = owner
        self.deadline = deadline
        self.history = History()
        # The batchers that had it, and what became of it.
        self.had_by: list[int] = []
        self.outcomes: list[Outcome] = []

    @property
    def error(self) -> CarpoolError | None:
        """Why it failed; None if it was answered."""
        (outcome,) = self.outcomes
        return outcome if isinstance(outcome, CarpoolError) else None


class VirtualFleet:
    """Batchers, each with one endpoint. One that is free takes what waits, but not what it gave back itself."""

    def __init__(self, *upstreams: FakeUpstream, max_batch: int = 8) -> None:
        self.clock = FakeClock()
        self.entries: list[Entry] = []
        self._max_batch = max_batch
        self._waiting: list[Entry] = []
        self.stands = [
            Stand(
                upstream,
                max_batch=max_batch,
                attempts=4,
                others=BatchersElsewhere(self._well_beside(number)),
                clock=self.clock,
                random_share=lambda: 0.5,
            )
            for number, upstream in enumerate(upstreams)
        ]

    def _well_beside(self, number: int) -> Callable[[], bool]:
        return lambda: any(not stand.pool.is_none_closed for other, stand in enumerate(self.stands) if other != number)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the fleet until every entry has its outcome."""

        async def started() -> None:
            for stand in self.stands:
                stand.start()
            claims = asyncio.get_running_loop().create_task(self._claim())
            await main()
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if all(entry.outcomes for entry in self.entries):
                    break
            claims.cancel()
            for stand in self.stands:
                await stand.finish()

        self.clock.run(started())

    def send(self, value: bytes, owner: str, timeout_s: float = 8.0) -> Entry:
        """Queue a request."""
        number = len(self.entries)
        entry = Entry(number, b'"%b %d"' % (value, number), owner, self.clock() + timeout_s)
        self.entries.append(entry)
        self._waiting.append(entry)
        return entry

    def settled(self, request: Request, outcome: Outcome) -> None:
        """As the writer of replies: an outcome, or another batcher has it (core.request.Waiter)."""
        entry, lease = self.entries[int(request.id)], request.ticket
        if isinstance(outcome, GivenBack):
            failed = request.sends > lease.history.failures
            entry.history = lease.history.given_back(failed=failed, was_probe=lease.is_probe, is_alone=outcome.is_alone)
            self._waiting.append(entry)
        else:
            entry.outcomes.append(outcome)

    async def _claim(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_S)
            for entry in [entry for entry in self._waiting if entry.deadline <= self.clock()]:
                self._waiting.remove(entry)
                entry.outcomes.append(DeadlineExceeded("no batcher took it"))
            for number, stand in enumerate(self.stands):
                stand.broker.expire(self.clock())
                is_probing, is_in_doubt = stand.pool.is_none_closed, stand.pool.is_in_doubt()
                if not stand.pool.free() or stand.broker.depth:
                    continue
                mine = [
                    entry
                    for entry in self._waiting
                    if entry.had_by[-1:] != [number]
                    and not (is_in_doubt and (entry.history.was_probe or not entry.history.may_go_back))
                ]
                for entry in mine[: 1 if is_probing else self._max_batch]:
                    self._waiting.remove(entry)
                    entry.had_by.append(number)
                    self._stage(stand, entry, is_probing)

    def _stage(self, stand: Stand, entry: Entry, is_probing: bool) -> None:
        request = make_request(
            str(entry.number),
            self,
            now=self.clock(),
            value=entry.value,
            owner=entry.owner,
            total_timeout_s=entry.deadline - self.clock(),
        )
        request.ticket = EntryLease(LeasedEntries(SHARD, b"", 0.0, 0.0, {}), b"", NO_HEADER, entry.history, is_probing)
        request.sends = entry.history.failures
        request.lane = AGAIN + b"%d" % entry.number if entry.history.is_alone else b""
        refused = stand.broker.submit(request)
        assert refused is None


def answered(entries: list[Entry]) -> int:
    """How many have an output."""
    return sum(isinstance(entry.outcomes[0], Output) for entry in entries)
