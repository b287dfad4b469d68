"""Which requests are due? Without a timer, or a heap entry, for each synchronous request. Pure.

Requests with the same allowance are due in the order in which they were added, so a deque per allowance is enough;
settled ones are dropped when they come to its head. Tasks restored after a restart have odd allowances: a heap.
One that lasts would keep all the settled behind it, so the lines are cleared of those whenever they have doubled.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from carpool.core.request import DONE, Request

# So many entries are never worth a clearance.
REBUILD_MIN = 1024


class Deadlines:
    """Requests by the time at which somebody must look at them."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[tuple[float, Request]]] = {}
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0
        # Entries, settled ones included, at which the settled are cleared away.
        self._rebuild_at = REBUILD_MIN

    def add(self, request: Request, due: float, line_name: Hashable) -> None:
        """Look at the request at `due`, which must not fall from one call to the next with the same line name."""
        line = self._lines.get(line_name)
        if line is None:
            line = self._lines[line_name] = deque()
        line.append((due, request))

    def add_unordered(self, request: Request, due: float) -> None:
        """Look at the request at `due`, in no particular order with the others."""
        self._serial += 1
        heappush(self._heap, (due, self._serial, request))

    def due(self, now: float) -> list[Request]:
        """Remove and return the unsettled requests that are due."""
        found: list[Request] = []
        for line in self._lines.values():
            while line:
                due, request = line[0]
                if request.phase != DONE:
                    if due > now:
                        break
                    found.append(request)
                line.popleft()
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][2].phase == DONE):
            request = heappop(heap)[2]
            if request.phase != DONE:
                found.append(request)
        if self._size() > self._rebuild_at:
            self._drop_settled()
        return found

    def _size(self) -> int:
        return len(self._heap) + sum(map(len, self._lines.values()))

    def _drop_settled(self) -> None:
        """Keep the living alone. The next time is when they have doubled, so the cost is spread over many calls."""
        for name, line in self._lines.items():
            self._lines[name] = deque(entry for entry in line if entry[1].phase != DONE)
        self._heap = [entry for entry in self._heap if entry[2].phase != DONE]
        heapify(self._heap)
        self._rebuild_at = max(REBUILD_MIN, 2 * self._size())
