"""Requests that wait at a gateway (`broker/pending.py`)."""

from carpool.broker.pending import PendingRequests
from carpool.core.errors import CarpoolError, ClientLeft, QueueFull
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.testing import FakeClock, Witness, make_request


class Leaving(Witness):
    """Whoever is told first makes the others leave, as those of one call do."""

    def __init__(self, pending: PendingRequests) -> None:
        super().__init__()
        self._pending = pending
        self.others: list[Request] = []

    def settled(self, request: Request, outcome: Outcome) -> None:
        super().settled(request, outcome)
        others, self.others = self.others, []
        for other in others:
            self._pending.end(other, ClientLeft("the client left"))


def test_who_is_refused_together_may_make_others_leave() -> None:
    clock = FakeClock()
    pending = PendingRequests(waiting_max=9, bytes_max=1000, models=["m"], clock=clock)
    call, witness = Leaving(pending), Witness()
    first, second = (make_request(name, call, now=clock()) for name in "ab")
    last = make_request("c", witness, now=clock())
    for request in (first, second, last):
        assert pending.park(request) is None
    call.others = [second]
    error: CarpoolError = QueueFull("full")
    for request in (first, second, last):
        pending.end(request, error)
    assert call.outcome(first) is witness.outcome(last) is error
    assert isinstance(call.outcome(second), ClientLeft)
    assert pending.outcomes == {QueueFull.code: 2, ClientLeft.code: 1}
    assert (pending.held, pending.held_bytes) == (0, 0)
