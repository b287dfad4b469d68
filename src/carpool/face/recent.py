"""The last requests, for people who look for one by its id: bounded by number, and by bytes. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from carpool.core.request import Request

# Ended requests keep parameters, lane and callback: so many bytes over all of them.
RECENT_BYTES_MAX = 8 * 1024 * 1024


class Recent:
    """A lookup scans all of them: only a person who looks for a request pays."""

    def __init__(self, number_max: int, bytes_max: int = RECENT_BYTES_MAX) -> None:
        # Of requests whose `size_of` is 0, and of the others: each may have so many.
        self._number_max = number_max
        self._bytes_max = bytes_max
        plain: deque[Request] = deque(maxlen=number_max)
        self._plain = plain
        # On the hot path, for a request whose `size_of` is 0.
        self.add_plain: Callable[[Request], None] = plain.append
        self._long: deque[Request] = deque()
        self._bytes = 0

    def __iter__(self) -> Iterator[Request]:
        return chain(self._plain, self._long)

    def add(self, request: Request) -> None:
        """One more; the oldest go where there is no room."""
        size = size_of(request)
        if not size:
            self.add_plain(request)
            return
        self._long.append(request)
        self._bytes += size
        while self._bytes > self._bytes_max or len(self._long) > self._number_max:
            self._bytes -= size_of(self._long.popleft())

    def extend(self, requests: Iterable[Request]) -> None:
        """Some more."""
        for request in requests:
            self.add(request)


def size_of(request: Request) -> int:
    """What a request keeps when it is over, beside what all of them have. It stays the same in a request's life."""
    return len(request.parameters) + len(request.lane) + len(request.callback_url)
