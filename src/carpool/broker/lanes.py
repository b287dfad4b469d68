"""One lane's waiting requests in the order in which they should be served. Pure.

1. Inside a tier: order of arrival, tasks apart. Between tiers: the smallest `place` (arrival + the tier's target) of
   the tiers' heads goes first. So those who pay go first, and nobody starves: a place never changes while later
   arrivals' places grow. With `strict`, a higher tier always goes first.
2. A request that was settled while it waited (client left, queue timeout) stays in its deque until it comes to the
   head, but counts no longer. When the dead outnumber the living the deques are rebuilt, so memory follows the living.
3. A batch is bounded in bytes too: it ends before the request with which it would have too many. Nobody overtakes that
   one. The first is taken however large it is, so that the lane gets shorter, unless there is no room for it at all.
"""

from collections import deque
from math import inf
from typing import Any

from carpool.core.request import APART, DONE, QUEUED, RUNNING, Request

REBUILD_DEAD_MIN = 64
# With `strict`, what a tier adds to the place by which lanes are compared: more seconds than any clock counts.
STRICT_STEP_S = 1e9


class Lane:
    """Requests of one model with the same lane key."""

    __slots__ = (
        "_dead",
        "_strict",
        "_task_lines",
        "_tiers",
        "arrivals",
        "batching_notes",
        "is_apart",
        "key",
        "model",
        "opener",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, model: str, key: bytes, tiers: int, strict: bool = False) -> None:
        self.model = model
        self.key = key
        self.is_apart = key.endswith(APART)
        # Whose request it was that found the lane empty.
        self.opener = ""
        self.waiting = 0
        self.waiting_bytes = 0
        self.arrivals = 0
        self.batching_notes: Any = None
        self._strict = strict
        self._dead = 0
        # Synchronous requests by tier, then tasks by tier: tasks have later places, so they need lines of their own.
        self._task_lines = tiers
        self._tiers: list[deque[Request]] = [deque() for _ in range(2 * tiers)]

    def __repr__(self) -> str:
        return f"<Lane {self.model} waiting={self.waiting} dead={self._dead}>"

    def append(self, request: Request) -> None:
        """Let a request wait."""
        request.phase = QUEUED
        self.waiting += 1
        self.waiting_bytes += request.size
        self.arrivals += 1
        tier = request.tier + self._task_lines if request.is_task else request.tier
        self._tiers[tier].append(request)

    def put_back(self, request: Request) -> None:
        """Let a request that was taken wait again, before those behind it: it has waited already."""
        request.phase = QUEUED
        self.waiting += 1
        self.waiting_bytes += request.size
        tier = self._tiers[request.tier + self._task_lines if request.is_task else request.tier]
        if tier and tier[-1].place <= request.place:  # one that moves to this lane from another
            tier.append(request)
            return
        later: list[Request] = []
        while tier and tier[0].place < request.place:  # a few at most: others that were put back
            later.append(tier.popleft())
        tier.appendleft(request)
        tier.extendleft(reversed(later))

    def forget(self, request: Request) -> None:
        """Count out a waiting request that is about to be settled."""
        self.waiting -= 1
        self.waiting_bytes -= request.size
        self._dead += 1
        if self._dead > REBUILD_DEAD_MIN and self._dead > self.waiting:
            self._tiers = [deque(r for r in tier if r.phase == QUEUED and r is not request) for tier in self._tiers]
            self._dead = 0

    def oldest(self) -> float:
        """When the longest-waiting request arrived."""
        return min(tier[0].arrived for tier in self._live_tiers())

    def place(self) -> float:
        """Where the lane stands among others: the smallest goes first."""
        tiers = self._live_tiers()
        if self._strict:
            head = tiers[0][0]
            return head.tier * STRICT_STEP_S + head.place
        return min(tier[0].place for tier in tiers)

    def requests(self) -> list[Request]:
        """All that wait, tier by tier."""
        return [request for tier in self._tiers for request in tier if request.phase == QUEUED]

    def take(
        self, count: int, now: float, bytes_max: float = inf, room_bytes: float = inf
    ) -> tuple[list[Request], list[Request]]:
        """Remove up to `count` in order, and with them those whose deadline has passed, which do not count.

        At most `bytes_max` bytes together; a larger one comes alone, if it has not more than `room_bytes`.
        """
        batch: list[Request] = []
        expired: list[Request] = []
        bytes_left = min(bytes_max, room_bytes)
        while len(batch) < count and self.waiting and bytes_left >= 0:
            tiers = self._live_tiers()
            if len(tiers) == 1:
                tier, bound = tiers[0], None
            else:
                if not self._strict:
                    tiers.sort(key=lambda tier: tier[0].place)
                tier = tiers[0]
                bound = None if self._strict else tiers[1][0].place
            bytes_left = self._take_from(tier, bound, count, now, bytes_left, room_bytes, batch, expired)
        return batch, expired

    def _take_from(
        self,
        tier: deque[Request],
        bound: float | None,
        count: int,
        now: float,
        bytes_left: float,
        room_bytes: float,
        batch: list[Request],
        expired: list[Request],
    ) -> float:
        """Move requests from one tier while its head is still the best (its place not after `bound`) and there is room.

        Returns the bytes left; below 0 if there is no room for the next one.
        """
        popleft, add = tier.popleft, batch.append
        room = count - len(batch)
        before = len(batch) + len(expired)
        taken_bytes = 0
        while tier and room and bytes_left >= 0:
            request = popleft()
            if request.phase == DONE:
                self._dead -= 1
                continue
            if bound is not None and request.place > bound:
                tier.appendleft(request)
                break
            size = request.size
            if request.deadline <= now:
                expired.append(request)
            elif size > bytes_left and (batch or size > room_bytes):
                tier.appendleft(request)
                bytes_left = -1.0
                break
            else:
                bytes_left -= size
                room -= 1
                add(request)
            request.phase = RUNNING
            request.taken = now
            taken_bytes += size
        self.waiting -= len(batch) + len(expired) - before
        self.waiting_bytes -= taken_bytes
        return bytes_left

    def _live_tiers(self) -> list[deque[Request]]:
        """The tiers with somebody waiting, highest first, the dead removed from their heads."""
        live = []
        for tier in self._tiers:
            while tier and tier[0].phase == DONE:
                tier.popleft()
                self._dead -= 1
            if tier:
                live.append(tier)
        return live
