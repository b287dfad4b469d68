"""How many requests wait, in all and by owner (core.ports.QueueStats). Pure."""

# So many bytes of an input cost as much as the request itself.
COST_BYTES = 4096


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
        return f"<WaitingCount waiting={self.waiting} owners={self.owners}>"

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
        left = self.late_by_owner[owner] - 1
        if left:
            self.late_by_owner[owner] = left
        else:
            del self.late_by_owner[owner]

    def add(self, owner: str, size: int) -> None:
        """A request waits."""
        self.waiting += 1
        self.bytes += size
        self.by_owner[owner] = self.by_owner.get(owner, 0) + 1

    def remove(self, owner: str, count: int, size: int) -> None:
        """So many of one owner, with so many bytes together, wait no more."""
        self.waiting -= count
        self.bytes -= size
        left = self.by_owner[owner] - count
        if left:
            self.by_owner[owner] = left
        else:
            del self.by_owner[owner]
