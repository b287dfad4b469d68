"""How many streams may be open at once: in this process, and of each owner. Pure."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from carpool.core.errors import CarpoolError, QueueFull, RateLimited

# Streams of one kind in a process: each keeps a connection and a file that others may want.
STREAMS_MAX = 1024


class Places:
    """Counts open streams. An owner without one is not remembered."""

    def __init__(self, what: str, owner_most: int, most: int | None = None) -> None:
        # What there are places for, in a text for clients: "streams".
        self._what = what
        self._most = STREAMS_MAX if most is None else most
        self._owner_most = owner_most
        self.taken = 0
        self._by_owner: Counter[str] = Counter()

    def refusal(self, owner: str) -> CarpoolError | None:
        """Take a place for this owner, or say why there is none."""
        if self._by_owner[owner] >= self._owner_most:
            return RateLimited(f"at most {self._owner_most} {self._what} of yours may be open at once", retry_after_s=5)
        if self.taken >= self._most:
            return QueueFull(f"too many {self._what} are open; try again soon", retry_after_s=5)
        self.taken += 1
        self._by_owner[owner] += 1
        return None

    @contextmanager
    def held_by(self, owner: str) -> Iterator[None]:
        """Have a place for this owner until the block ends; raises why there is none."""
        if (refusal := self.refusal(owner)) is not None:
            raise refusal
        try:
            yield
        finally:
            self.give_back(owner)

    def give_back(self, owner: str) -> None:
        """A stream of this owner has ended."""
        self.taken -= 1
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
