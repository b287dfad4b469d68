"""A gateway without resilience, to measure what resilience costs: no breaker, no retry, no isolation of bad inputs.

    .venv/bin/python bench/bare_gateway.py UPSTREAM PORT DATA_DIR

The same gateway but for its pool and dispatcher, which do what is needed when nothing fails, and no more.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import carpool.app
import carpool.service
from carpool.core.clock import monotonic
from carpool.core.histograms import SECONDS_BOUNDS, Histogram
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import LaneQueue
from carpool.core.request import Request
from carpool.settings import load_settings
from carpool.upstream.endpoint import Endpoint
from carpool.upstream.pool import Pool


class BarePool(Pool):
    """Free slots in a deque, and nothing else."""

    def __init__(self, endpoints: Sequence[Endpoint], *_: Any, **__: Any) -> None:
        super().__init__(endpoints, monotonic)
        self.bare = deque(endpoint for endpoint in endpoints for _ in range(endpoint.slots or 1))
        self.slots = len(self.bare)

    def total(self) -> int:
        return self.slots

    def free(self) -> int:
        return len(self.bare)

    def is_free_again(self, endpoint: Endpoint) -> None:
        self.bare.append(endpoint)
        for notify in self._notifies:
            notify()


class BareDispatcher:
    """One call for each batch; a failure is a failure."""

    def __init__(self, pool: BarePool, codec: Any, outcomes: Any, **_: Any) -> None:
        self.pool, self.codec, self.outcomes = pool, codec, outcomes
        self.tasks: set[asyncio.Task[None]] = set()
        self.call_seconds = Histogram(SECONDS_BOUNDS)
        self.calls = {"ok": 0}
        # What batching and metrics ask for.
        self.scheduler: Any = pool
        for name in ("steps", "poisoned", "unresolved", "searching"):
            setattr(pool, name, 0)

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        return max_batch

    def dispatch(self, batch: list[Request], ended: Callable[[float], None]) -> None:
        task = asyncio.get_running_loop().create_task(self.deliver(batch, self.pool.bare.popleft(), ended))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def deliver(self, batch: list[Request], endpoint: Endpoint, ended: Callable[[float], None]) -> None:
        started = monotonic()
        answer = await endpoint.post(self.codec.encode(batch), 3.0)
        self.pool.is_free_again(endpoint)
        seconds = monotonic() - started
        ended(seconds)
        facts = CallFacts(len(batch), seconds)
        parts = self.codec.decode(answer, batch)
        self.outcomes.settle_batch(batch, [Output(part.value, facts) for part in parts])

    async def finish(self, timeout_s: float) -> None:
        await asyncio.sleep(0.2)


setattr(carpool.service, "Pool", BarePool)  # noqa: B010 - put in place of the real ones
setattr(carpool.service, "UpstreamDispatcher", BareDispatcher)  # noqa: B010
upstream, port, data_dir = sys.argv[1:]
flags = {"upstream.endpoints": [upstream], "gateway.port": port, "tasks.data_dir": data_dir}
sys.exit(carpool.app.run(load_settings(flags, environ=os.environ, file=None)))
