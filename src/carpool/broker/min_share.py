"""The share of what is served that some get all the same, whatever the order. Pure.

With strict order that is the lowest tier. In any order it is those who wait on the line: tasks go before them once they
are old enough, and there may be very many of them.

What is served counts while they wait; every whole request of their share is due. What they get before others who wait
is charged, also beyond what was due (a batch of a lane with nobody else in it), so that the share holds over time. What
they get while nobody else waits is free.
"""

# Nobody saves up more than this.
DUE_MAX = 1024.0
# What synchronous requests get of what is served, however many tasks are old enough to go first.
SYNCHRONOUS_SHARE = 0.9


class MinShare:
    """Kept for one model. `debt_max`: of what they got beyond their share, so much is held against them."""

    __slots__ = ("_credit", "_debt_max", "_share")

    def __init__(self, share: float, debt_max: float = DUE_MAX) -> None:
        self._share = share
        self._debt_max = debt_max
        self._credit = 0.0

    def due(self) -> int:
        """How many of them go first now."""
        return int(self._credit) if self._credit >= 1.0 else 0

    def served(self, others: int, lowest: int, *, others_wait: bool, lowest_waits: bool) -> None:
        """So many were served; who still waits."""
        if others_wait:
            self._credit -= lowest
        if lowest_waits:
            self._credit = min(self._credit + self._share * (others + lowest), DUE_MAX)
        else:
            self._credit = min(self._credit, 0.0)
        self._credit = max(self._credit, -self._debt_max)
