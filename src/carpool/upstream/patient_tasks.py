"""Tasks that failed before any endpoint of their model had answered: each is tried again until its own time is over."""

from math import inf

from carpool.core.clock import Clock
from carpool.core.errors import CarpoolError, Draining
from carpool.core.ports import Returns
from carpool.core.request import DONE, Request
from carpool.core.timers import Every

LOOK_S = 0.5
RETRY_S = 2.0


class PatientTasks:
    """They rest here between two attempts."""

    def __init__(self, broker: Returns, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        # The last error, and when it is to wait for a slot again; infinity: it does, or is under way.
        self._kept: dict[Request, tuple[CarpoolError, float]] = {}
        self._looks = Every(LOOK_S, self._look)

    def __repr__(self) -> str:
        return f"<PatientTasks {len(self._kept)}>"

    def __contains__(self, request: object) -> bool:
        return request in self._kept

    def keep(self, request: Request, error: CarpoolError) -> None:
        """Try a task again in a while."""
        self._broker.rest(request)  # what it has of `in_flight_bytes_max` is for others
        self._kept[request] = (error, self._clock() + RETRY_S)
        self._looks.start()

    def leave(self) -> None:
        """This process leaves: the tasks are for the next one, or for others."""
        self._looks.stop()
        kept, self._kept = self._kept, {}
        for request, (_, again_at) in kept.items():
            if again_at < inf:
                self._broker.settle(request, Draining("this gateway shut down before the result came"))

    def _look(self) -> None:
        now = self._clock()
        for request, (error, again_at) in list(self._kept.items()):
            if request.phase == DONE:
                del self._kept[request]
            elif request.deadline - now <= 2 * LOOK_S:  # before the broker ends it, which only knows that it is late
                del self._kept[request]
                self._broker.settle(request, error)
            elif again_at <= now:
                self._kept[request] = (error, inf)
                searched_s = request.searched_s
                self._broker.put_back([request])
                request.searched_s = searched_s  # there was no search
        if not self._kept:
            self._looks.stop()
