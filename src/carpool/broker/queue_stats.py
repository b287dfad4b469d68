"""How many requests wait, in all and by owner (core.ports.QueueStats). Pure."""

from carpool.core.request import Request

# So many bytes of an input cost as much as the request itself.
COST_BYTES = 4096
# What an owner may have parked: as many small requests, or fewer large ones.
SHARE_COST = 128
ALONE_S = 60.0


class WaitingCount:
    """Of one model, tier and kind (synchronous requests, or tasks)."""

    __slots__ = ("by_owner", "bytes", "late", "late_by_owner", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.bytes = 0
        # Only owners with requests that wait.
        self.by_owner: dict[str, int] = {}
        # Requests that came in late, with a burst.
        self.late = 0
        self.late_by_owner: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} waiting={self.waiting} owners={self.owners}>"

    @property
    def cost(self) -> float:
        """What they cost together."""
        return self.waiting + self.bytes / COST_BYTES

    @property
    def owners(self) -> int:
        """How many owners wait."""
        return len(self.by_owner)

    def of(self, owner: str) -> int:
        """How many requests of one owner wait."""
        return self.by_owner.get(owner, 0)

    @property
    def late_owners(self) -> int:
        """How many owners have requests that came in late."""
        return len(self.late_by_owner)

    def late_of(self, owner: str) -> int:
        """How many requests of one owner wait that came in late."""
        return self.late_by_owner.get(owner, 0)

    def add_late(self, owner: str) -> None:
        """A request that came in late waits."""
        self.late += 1
        self.late_by_owner[owner] = self.late_by_owner.get(owner, 0) + 1

    def remove_late(self, owner: str) -> None:
        """A request that came in late waits no more."""
        self.late -= 1
        count_out(self.late_by_owner, owner)

    def add(self, owner: str, size: int) -> None:
        """A request waits."""
        self.waiting += 1
        self.bytes += size
        self.by_owner[owner] = self.by_owner.get(owner, 0) + 1

    def remove(self, owner: str, count: int, size: int) -> None:
        """So many of one owner, with so many bytes together, wait no more."""
        self.waiting -= count
        self.bytes -= size
        count_out(self.by_owner, owner, count)


def count_out(counts: dict[str, int], owner: str, count: int = 1) -> None:
    """An owner has so many fewer; with none left it is forgotten."""
    left = counts[owner] - count
    if left:
        counts[owner] = left
    else:
        del counts[owner]


class ParkedShares(WaitingCount):
    """Of one model and tier: the synchronous requests that are parked at a gateway, whether they wait or run, and which
    of them exceed their owner's share.

    1. An owner may have `SHARE_COST` parked: a batch or so. What comes beyond that is over, and waits in a second line
       of the tier, behind what others send meanwhile.
    2. An owner's own requests keep their order: while some that are over are parked, so is what it sends.
    3. An owner that was the only one to send for a minute shares with no other: none of its requests is over.
    """

    __slots__ = ("_last", "_over", "_shared_until", "_weights")

    def __init__(self) -> None:
        super().__init__()
        # By owner: the cost in bytes, as whole numbers add up; and how many are over.
        self._weights: dict[str, int] = {}
        self._over: dict[str, int] = {}
        # The owner of the last request, and until when other owners count as present.
        self._last: str | None = None
        self._shared_until = 0.0

    def park(self, request: Request) -> None:
        """A request is parked: see whether it is over."""
        owner, over = request.owner, self._over
        if owner != self._last:
            if self._last is not None:
                self._shared_until = request.arrived + ALONE_S
            self._last = owner
        self.add(owner, request.size)
        if request.is_late:
            self.add_late(owner)
        weight = self._weights[owner] = self._weights.get(owner, 0) + COST_BYTES + request.size
        if owner in over or (weight > SHARE_COST * COST_BYTES and request.arrived < self._shared_until):
            over[owner] = over.get(owner, 0) + 1
            request.is_over = True

    def release(self, request: Request) -> None:
        """It is parked no more."""
        owner = request.owner
        self.remove(owner, 1, request.size)
        count_out(self._weights, owner, COST_BYTES + request.size)
        if request.is_late:
            self.remove_late(owner)
        if request.is_over:
            count_out(self._over, owner)
            request.is_over = False
