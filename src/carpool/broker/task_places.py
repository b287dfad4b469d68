"""Where tasks stand in the queue of this process. Pure.

1. Polls come by the thousand, and tens of thousands of tasks may wait: no poll looks at them all. They are put in order
   so rarely that this costs little time, however many polls come; so the places that they get are up to a second old.
2. The order is that of their places. Owners that wait for each other's turn may change it a little.
"""

from bisect import bisect_left

from carpool.broker.lanes import STRICT_STEP_S
from carpool.core.request import Request

# A task's place in the order is this much later than a synchronous request's: no client waits on a connection for it.
TASK_DELAY_S = 5.0
# To put a task in order takes less than a hundredth of this.
SECONDS_A_TASK = 20e-6


class TaskPlaces:
    """The tasks that wait, by model."""

    def __init__(self, *, strict_order: bool) -> None:
        self._strict_order = strict_order
        # How many there are: where there are none, a batch need not be looked through.
        self.waiting = 0
        # By model and id: the place.
        self._places: dict[str, dict[str, float]] = {}
        # By model: their places in order, and until when that is good enough.
        self._ordered: dict[str, tuple[list[float], float]] = {}

    def add(self, request: Request) -> None:
        """A task waits."""
        places = self._places.setdefault(request.model, {})
        self.waiting += request.id not in places
        places[request.id] = request.tier * STRICT_STEP_S + request.place if self._strict_order else request.place

    def remove(self, request: Request) -> None:
        """It does not, or not any more."""
        places = self._places.get(request.model)
        if places and places.pop(request.id, None) is not None:
            self.waiting -= 1

    def waiting_of(self, model: str) -> int:
        """Tasks of one model that wait."""
        return len(self._places.get(model, ()))

    def before(self, request: Request, now: float) -> int | None:
        """Tasks that go before this one, a moment ago; None if it does not wait."""
        places = self._places.get(request.model, {})
        place = places.get(request.id)
        if place is None:
            return None
        ordered, until = self._ordered.get(request.model, ([], 0.0))
        if now >= until or len(ordered) > 2 * len(places):
            ordered = sorted(places.values())
            self._ordered[request.model] = ordered, now + len(ordered) * SECONDS_A_TASK
        return bisect_left(ordered, place)
