"""The waiting requests of one lane by size, so that those of similar size are found quickly. Pure.

1. Sizes are grouped in classes, CLASSES_AN_OCTAVE for each doubling: inside a class they differ by a tenth at most, and
   the one that came first goes first.
2. `nearest` goes outwards from a size, one class down, one class up, and so on: half of the company is smaller, half is
   larger, so that what a batch leaves behind fits together as well. (Taking only what makes the batch cheapest leaves
   the very small and the very large behind, and these then ride together.)
3. A request that was taken or settled stays here until it is met, or until more are gone than wait.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from math import log2

from carpool.core.request import QUEUED, Request

CLASSES_AN_OCTAVE = 8
# No input has more bytes than 2 to the power of this.
OCTAVES = 48
GONE_MIN = 64


def class_of(size: int) -> int:
    """The number of a size's class."""
    return min(int(CLASSES_AN_OCTAVE * log2(size + 1)), CLASSES_AN_OCTAVE * OCTAVES - 1)


class SizeIndex:
    """Requests by the classes of their sizes."""

    __slots__ = ("_classes", "_held", "_highest", "_lowest")

    def __init__(self, requests: Iterable[Request]) -> None:
        self._fill(requests)

    def __repr__(self) -> str:
        return f"<SizeIndex held={self._held}>"

    def _fill(self, requests: Iterable[Request]) -> None:
        self._classes: dict[int, deque[Request]] = {}
        # No class below or above these has any.
        self._lowest, self._highest = CLASSES_AN_OCTAVE * OCTAVES, -1
        self._held = 0
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """One more waits."""
        number = class_of(request.size)
        requests = self._classes.get(number)
        if requests is None:
            requests = self._classes[number] = deque()
            self._lowest, self._highest = min(self._lowest, number), max(self._highest, number)
        requests.append(request)
        self._held += 1

    def nearest(self, size: int) -> Iterator[Request]:
        """Remove and return requests that wait, those of the most similar size first."""
        below = class_of(size)
        above = below + 1
        while below >= self._lowest or above <= self._highest:
            yield from self._of_class(below)
            yield from self._of_class(above)
            below, above = below - 1, above + 1

    def _of_class(self, number: int) -> Iterator[Request]:
        requests = self._classes.get(number)
        while requests:
            request = requests.popleft()
            self._held -= 1
            if _waits(request):
                yield request

    def keep_small(self, waiting: int) -> None:
        """Drop what is gone, if that is more than what waits."""
        if self._held > 2 * waiting + GONE_MIN:
            self._fill([each for requests in self._classes.values() for each in requests if _waits(each)])


def _waits(request: Request) -> bool:
    """Whether it waits, and was never taken: what was put back goes first in any case, maybe in another lane."""
    return request.phase == QUEUED and not request.is_back
