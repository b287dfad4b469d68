"""How many wait, in all and by owner (core.ports.Standing). Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from carpool.core.request import Request


class CountedStanding:
    """Counts when it is asked."""

    def __init__(self, requests: Callable[[], Iterable[Request]], tier: int) -> None:
        self._requests = requests
        self._tier = tier

    def _owners(self) -> Counter[str]:
        return Counter(each.owner for each in self._requests() if each.tier == self._tier and not each.is_task)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._owners().total()

    @property
    def cost(self) -> float:
        """What they cost together."""
        return self.waiting

    @property
    def owners(self) -> int:
        """Owners of whom some wait."""
        return len(self._owners())

    def of(self, owner: str) -> int:
        """Requests of one owner that wait."""
        return self._owners()[owner]
