"""A minimum share of what is served, for requests that the order alone would starve. Pure.

With strict order the lowest tier has one. In any order synchronous requests have one: tasks that are old enough go
before them, and there may be very many tasks.

While such requests wait, each request served adds the share to their credit; each whole request of credit is due. What
they get while other requests wait is charged, also beyond what was due (a batch of a lane without others), so that the
share holds over time. What they get while no other request waits is free.
"""

# The most credit that is saved up.
DUE_MAX = 1024.0
# What the lowest tier gets of what is served, with strict order: enough to go on, too little for the others to miss.
LOWEST_TIER_SHARE = 0.05
# What synchronous requests get of what is served, however many tasks are old enough to go first.
SYNCHRONOUS_SHARE = 0.9


class MinShare:
    """Their credit. `debt_max`: at most so much of what they got beyond their share counts against them."""

    __slots__ = ("_credit", "_debt_max", "_share")

    def __init__(self, share: float, debt_max: float = DUE_MAX) -> None:
        self._share = share
        self._debt_max = debt_max
        self._credit = 0.0

    def due(self) -> int:
        """How many of these requests go first now."""
        return int(self._credit) if self._credit >= 1.0 else 0

    def served(self, others: int, lowest: int, *, others_wait: bool, lowest_waits: bool) -> None:
        """Count a batch: how many others and how many of these it had, and whether either still wait."""
        if others_wait:
            self._credit -= lowest
        if lowest_waits:
            self._credit = min(self._credit + self._share * (others + lowest), DUE_MAX)
        else:
            self._credit = min(self._credit, 0.0)
        self._credit = max(self._credit, -self._debt_max)
