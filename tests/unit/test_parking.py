"""Requests that wait at a gateway (`broker/parking.py`)."""

from carpool.broker.parking import Parking
from carpool.core.errors import CarpoolError, ClientLeft, QueueFull
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.testing import FakeClock, Witness, make_request


class Leaving(Witness):
    """Whoever is told first makes the others leave, as those of one call do."""

    def __init__(self, parking: Parking) -> None:
        super().__init__()
        self._parking = parking
        self.others: list[Request] = []

    def settled(self, request: Request, outcome: Outcome) -> None:
        super().settled(request, outcome)
        others, self.others = self.others, []
        for other in others:
            self._parking.end(other, ClientLeft("the client left"))


def test_who_is_refused_together_may_make_others_leave() -> None:
    clock = FakeClock()
    parking = Parking(waiting_max=9, bytes_max=1000, models=["m"], clock=clock)
    call, witness = Leaving(parking), Witness()
    first, second = (make_request(name, call, now=clock()) for name in "ab")
    last = make_request("c", witness, now=clock())
    for request in (first, second, last):
        assert parking.park(request) is None
    call.others = [second]
    error: CarpoolError = QueueFull("full")
    for request in (first, second, last):
        parking.end(request, error)
    assert call.outcome(first) is witness.outcome(last) is error
    assert isinstance(call.outcome(second), ClientLeft)
    assert parking.outcomes == {QueueFull.code: 2, ClientLeft.code: 1}
    assert (parking.held, parking.held_bytes) == (0, 0)
