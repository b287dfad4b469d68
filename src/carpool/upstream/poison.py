"""Inputs that are known to make a batch fail: sent alone for a while, so that they cost their neighbours nothing."""

from collections.abc import Sequence

from carpool.core.request import Request

KEPT_S = 300.0
KEPT_MAX = 10_000


class KnownPoison:
    """Remembers poison by its hash; a hash shared by chance only means that a good input is sent alone. Pure."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        # By hash of model, parameters and input: until when it is remembered. Oldest first.
        self._until: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        """Remember an input that was refused."""
        self._until.pop(key := key_of(request), None)
        if len(self._until) >= KEPT_MAX:
            del self._until[next(iter(self._until))]
        self._until[key] = now + KEPT_S

    def forget(self, key: int) -> None:
        """An input with this hash was answered: it is good, whatever was thought of it."""
        self._until.pop(key, None)

    def among(self, batch: Sequence[Request], now: float) -> list[Request]:
        """The members of a batch that are known."""
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if not self._until:
            return []  # the usual case: hashing large inputs takes time
        return [request for request in batch if key_of(request) in self._until]


def key_of(request: Request) -> int:
    """What an input is known by."""
    return hash((request.model, request.parameters, request.input))
