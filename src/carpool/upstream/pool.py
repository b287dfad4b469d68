"""The endpoints of one model and their slots. A free slot is taken, never waited for, except by a retry.

Every slot is in exactly one place: in `_free`, or with whoever took it. `give_back` hands it to a waiting retry if
that may use it, since its requests are the oldest there are; else it becomes free, and batching is told.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from carpool.core.clock import Clock, monotonic
from carpool.upstream.endpoint import Endpoint


class Pool:
    """Slots of several endpoints; the one that has been free longest goes first."""

    def __init__(self, endpoints: Sequence[Endpoint], clock: Clock = monotonic) -> None:
        self.endpoints = list(endpoints)
        self._clock = clock
        # One entry for each free slot, dealt round so that consecutive batches go to different endpoints.
        self._free: deque[Endpoint] = deque()
        for turn in range(max(endpoint.slots for endpoint in self.endpoints)):
            self._free.extend(endpoint for endpoint in self.endpoints if turn < endpoint.slots)
        self._total = len(self._free)
        self._retries: deque[tuple[Endpoint, asyncio.Future[Endpoint]]] = deque()
        self._ring: Callable[[], None] | None = None
        # Slot-seconds spent busy until `_counted_until`, for utilisation.
        self._busy_s = 0.0
        self._counted_until = clock()

    def __repr__(self) -> str:
        return f"<Pool slots={self._total} free={len(self._free)} retries={len(self._retries)}>"

    def total(self) -> int:
        """All slots."""
        return self._total

    def free(self) -> int:
        """Slots that could take a batch now."""
        return len(self._free)

    def busy_seconds(self) -> float:
        """Slot-seconds spent busy so far; two readings give the utilisation between them."""
        now = self._clock()
        self._busy_s += (self._total - len(self._free)) * (now - self._counted_until)
        self._counted_until = now
        return self._busy_s

    def when_slot_frees(self, ring: Callable[[], None]) -> None:
        """Have `ring` called when a slot becomes free."""
        self._ring = ring

    def take(self) -> Endpoint:
        """Take a free slot; there must be one."""
        self.busy_seconds()
        return self._free.popleft()

    def give_back(self, endpoint: Endpoint) -> None:
        """End the use of a slot."""
        for index, (failed, future) in enumerate(self._retries):
            if not future.done() and self._may_retry_on(endpoint, failed):
                del self._retries[index]
                future.set_result(endpoint)
                return
        self.busy_seconds()
        self._free.append(endpoint)
        if self._ring is not None:
            self._ring()

    async def take_for_retry(self, failed: Endpoint, timeout_s: float) -> Endpoint | None:
        """A slot of another endpoint than the one that failed, if there is another; None if none frees in time."""
        for endpoint in self._free:
            if self._may_retry_on(endpoint, failed):
                self.busy_seconds()
                self._free.remove(endpoint)
                return endpoint
        future: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._retries.append((failed, future))
        try:
            await asyncio.wait([future], timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done():
                self.give_back(future.result())
            raise
        finally:
            if not future.done():
                future.cancel()
                self._retries = deque(entry for entry in self._retries if entry[1] is not future)
        return None if future.cancelled() else future.result()

    def _may_retry_on(self, endpoint: Endpoint, failed: Endpoint) -> bool:
        return endpoint is not failed or len(self.endpoints) == 1
