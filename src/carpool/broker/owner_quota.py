"""What each owner has parked at a gateway, and what of it exceeds its share (core.ports.QueueStats). Pure.

1. An owner may have `SHARE_COST` parked in a model and tier: a batch or so. What comes beyond that is over, and waits
   in a second line of the tier, behind what others send meanwhile.
2. An owner's own requests keep their order: while some that are over are parked, so is what it sends.
3. An owner that was the only one to send for a minute shares with no other: none of its requests is over.
4. Only owners with something parked are remembered.
"""

from carpool.broker.queue_stats import COST_BYTES
from carpool.core.request import Request

# What an owner may have parked: as many small requests, or fewer large ones.
SHARE_COST = 128
ALONE_S = 60.0


class OwnerShare:
    """What one owner has parked."""

    __slots__ = ("count", "late", "over", "weight")

    def __init__(self) -> None:
        self.count = 0
        # How many of them came in late, with a burst.
        self.late = 0
        # The cost, in bytes: whole numbers add up.
        self.weight = 0
        # How many of them are over.
        self.over = 0


class ParkedShares:
    """Of one model and tier: the synchronous requests that are parked, whether they wait or run."""

    __slots__ = ("_last", "_owners", "_shared_until", "_weight", "late", "late_owners", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        # Requests that came in late, with a burst, and how many owners have some.
        self.late = self.late_owners = 0
        self._weight = 0
        self._owners: dict[str, OwnerShare] = {}
        # The owner of the last request, and until when other owners count as present.
        self._last: str | None = None
        self._shared_until = 0.0

    def __repr__(self) -> str:
        return f"<ParkedShares waiting={self.waiting} owners={self.owners}>"

    @property
    def cost(self) -> float:
        """What they cost together."""
        return self._weight / COST_BYTES

    @property
    def owners(self) -> int:
        """How many owners have requests parked."""
        return len(self._owners)

    def of(self, owner: str) -> int:
        """Requests of one owner."""
        share = self._owners.get(owner)
        return 0 if share is None else share.count

    def late_of(self, owner: str) -> int:
        """Requests of one owner that came in late."""
        share = self._owners.get(owner)
        return 0 if share is None else share.late

    def add(self, request: Request) -> None:
        """A request is parked: see whether it is over."""
        owner = request.owner
        if owner != self._last:
            if self._last is not None:
                self._shared_until = request.arrived + ALONE_S
            self._last = owner
        share = self._owners.get(owner)
        if share is None:
            share = self._owners[owner] = OwnerShare()
        weight = COST_BYTES + request.size
        self.waiting += 1
        self._weight += weight
        share.count += 1
        if request.is_late:
            self.late_owners += not share.late
            share.late += 1
            self.late += 1
        share.weight += weight
        if share.over or (share.weight > SHARE_COST * COST_BYTES and request.arrived < self._shared_until):
            share.over += 1
            request.is_over = True

    def remove(self, request: Request) -> None:
        """It is parked no more."""
        weight = COST_BYTES + request.size
        share = self._owners[request.owner]
        self.waiting -= 1
        self._weight -= weight
        share.count -= 1
        if request.is_late:
            share.late -= 1
            self.late -= 1
            self.late_owners -= not share.late
        if not share.count:
            del self._owners[request.owner]
        share.weight -= weight
        if request.is_over:
            share.over -= 1
            request.is_over = False
