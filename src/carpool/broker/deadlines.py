"""Which requests are due? Without a timer, or a heap entry, for each synchronous request. Pure.

Requests that may wait equally long are due in the order in which they came, so a deque per allowance is enough; settled
ones are dropped when they come to its head. Tasks and requests with deadlines of their own have any order: a heap.
One long request at the head keeps settled ones behind it: `due` drops those whenever the entries have doubled.
"""

from collections import deque
from heapq import heapify, heappop, heappush

from carpool.core.request import DONE, Request

# With fewer entries, dropping settled ones is not worth the time.
REBUILD_MIN = 1024


class Deadlines:
    """Requests by the time at which the broker must look at them."""

    def __init__(self) -> None:
        # By queue timeout: requests to look at when it has passed.
        self._waiting: dict[float, deque[Request]] = {}
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0
        # Entries, settled ones included, at which the settled are cleared away.
        self._rebuild_at = REBUILD_MIN

    def add(self, request: Request) -> None:
        """Look at the request after `queue_timeout_s`. Requests with the same timeout must come in order of arrival."""
        if request.own_timeout_s:
            self.add_unordered(request, min(request.arrived + request.queue_timeout_s, request.deadline))
            return
        line = self._waiting.get(request.queue_timeout_s)
        if line is None:
            line = self._waiting[request.queue_timeout_s] = deque()
        line.append(request)

    def add_unordered(self, request: Request, due: float) -> None:
        """Look at the request at `due`, in no particular order with the others."""
        self._serial += 1
        heappush(self._heap, (due, self._serial, request))

    def due(self, now: float) -> list[Request]:
        """Remove and return the unsettled requests that are due."""
        found: list[Request] = []
        for allowance_s, line in self._waiting.items():
            while line:
                request = line[0]
                if request.phase != DONE:
                    if request.arrived + allowance_s > now:
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
        return len(self._heap) + sum(map(len, self._waiting.values()))

    def _drop_settled(self) -> None:
        """Keep unsettled requests only. The next time is when the entries have doubled, so it costs little per call."""
        for allowance_s, line in self._waiting.items():
            self._waiting[allowance_s] = deque(request for request in line if request.phase != DONE)
        self._heap = [entry for entry in self._heap if entry[2].phase != DONE]
        heapify(self._heap)
        self._rebuild_at = max(REBUILD_MIN, 2 * self._size())
