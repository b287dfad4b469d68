"""With strict order: the share of what is served that the lowest tier gets all the same. Pure.

What is served counts while the lowest tier waits; every whole request of its share is due. What it gets before others
who wait is charged, also beyond what was due (a batch of a lane with nobody else in it), so that the share holds over
time. What it gets while nobody else waits is free.
"""

# Nobody saves up more than this.
DUE_MAX = 1024.0


class Trickle:
    """Kept for one model."""

    __slots__ = ("_credit", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0

    def due(self) -> int:
        """How many of the lowest tier go first now."""
        return int(self._credit) if self._credit >= 1.0 else 0

    def served(self, others: int, lowest: int, *, others_wait: bool, lowest_waits: bool) -> None:
        """So many were served; who still waits."""
        if others_wait:
            self._credit -= lowest
        if lowest_waits:
            self._credit = min(self._credit + self._share * (others + lowest), DUE_MAX)
        else:
            self._credit = min(self._credit, 0.0)
