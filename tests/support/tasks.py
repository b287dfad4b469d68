"""Tasks without Redis: a journal, a broker, and answers that come by a callback."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from carpool.broker.journal import Journal
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.outcome import Outcome
from carpool.core.ports import Caller
from carpool.core.request import Request
from carpool.testing import ANYBODY, FakeClock, Witness, make_request
from support.processes import PATIENCE_S, until

TARGETS_S = (0.05, 0.15, 0.5)


async def told(call: Callable[[Callable[[Any], None]], object]) -> Any:
    """What a callback is called with, and that it is called once."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call(answer.set_result)  # a second call raises
    return await asyncio.wait_for(answer, PATIENCE_S)


def open_journal(path: Path | None = None, **options: Any) -> Journal:
    """A journal in a file, or in memory; somebody closes it."""
    given = {"result_ttl_s": 600.0, "dead_letter_ttl_s": 6000.0, "stored_bytes_max": 10_000, **options}
    return Journal(path, asyncio.get_running_loop(), **given)


class Office:
    """Tasks, their journal and their broker; the upstream is whoever calls `finish`."""

    def __init__(
        self, path: Path | None = None, *, tiers: int = 3, clock: FakeClock | None = None, waiting_max: int = 100
    ) -> None:
        # Requests a second that the upstream serves; 0.0: nobody knows.
        self.capacity_rps = 0.0
        self.clock = clock or FakeClock()
        self.broker = MemoryBroker(waiting_max=100, bytes_max=1000, lanes_max=9, tiers=tiers, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.journal = open_journal(path, clock=self.clock)
        self.tasks = Tasks(
            self.broker,
            self.journal,
            waiting_max=waiting_max,
            capacity_rps=lambda model: self.capacity_rps,
            clock=self.clock,
        )

    def request(self, name: str = "t1", **options: Any) -> Request:
        given = {"is_task": True, "total_timeout_s": 600.0, "tier": 2, "owner": "owner", **options}
        return make_request(name, Witness(), now=self.clock(), **given)

    def restore(self, models: str = "m") -> int:
        restored = self.tasks.restore(frozenset(models), lambda tier, now: now + TARGETS_S[tier])
        self.tasks.send_restored()
        return restored

    async def submit(self, name: str = "t1", **options: Any) -> Request:
        request = self.request(name, **options)
        assert await told(partial(self.tasks.submit, request)) is None
        return request

    async def look(
        self, name: str = "t1", wait_s: float = 0.0, *, forget: bool = False, caller: Caller = ANYBODY
    ) -> Any:
        return await told(partial(self.tasks.look, caller, name, wait_s, forget))

    async def state(self, name: str = "t1") -> Any:
        return await told(partial(self.tasks.state, name))

    async def delete(self, name: str = "t1", caller: Caller = ANYBODY) -> Any:
        return await told(partial(self.tasks.delete, caller, name))

    def take(self, count: int = 64) -> list[Request]:
        (lane,) = self.broker.lanes("m")
        return self.broker.take(lane, count, self.clock())

    async def finish(self, request: Request, outcome: Outcome) -> None:
        """Settle, and wait until the result is on the disk."""
        results = self.journal.counts.results
        self.broker.settle(request, outcome)
        await until(lambda: self.journal.counts.results > results and "live=0" in repr(self.tasks))


@asynccontextmanager
async def open_office(path: Path | None = None, **options: Any) -> AsyncIterator[Office]:
    """An office until the block ends."""
    office = Office(path, **options)
    try:
        yield office
    finally:
        await office.journal.close()
