"""A toy broker between a gateway and a batcher: a list that both can see."""

from collections import deque
from collections.abc import Sequence

from carpool.broker.memory import MemoryBroker
from carpool.broker.pending import PendingRequests
from carpool.core.clock import Clock
from carpool.core.errors import CarpoolError, ClientLeft
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.testing import make_request

Wire = deque[tuple[int, str, bytes, bytes, float]]


class ToyQueue:
    """The gateway's half (`RequestQueue`): parks requests and puts them on the wire."""

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self.pending = PendingRequests(waiting_max=100, bytes_max=10**6, models=["m"], clock=clock)
        self.wire = wire

    def submit(self, request: Request) -> CarpoolError | None:
        refusal = self.pending.park(request)
        if refusal is None:
            self.wire.append((request.number, request.model, request.parameters, request.input, request.deadline))
        return refusal

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        return self.pending.refusal_of_all(requests)

    def cancel(self, request: Request) -> None:
        if request in self.pending:
            self.pending.end(request, ClientLeft("the client left"))


class ToyFeed:
    """The batcher's half: takes from the wire into a local broker, and brings the outcomes back."""

    def __init__(self, wire: Wire, local: MemoryBroker, gateway: ToyQueue, clock: Clock) -> None:
        self.wire, self.local, self.gateway, self.clock = wire, local, gateway, clock

    def take(self) -> None:
        while self.wire:
            number, model, parameters, value, deadline = self.wire.popleft()
            now = self.clock()
            options = {"model": model, "parameters": parameters, "value": value, "total_timeout_s": deadline - now}
            request = make_request(str(number), self, now=now, **options)  # type: ignore[arg-type]
            assert self.local.submit(request) is None

    def settled(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Output):
            self.gateway.pending.settle_all([(int(request.id), 0, 0.0, outcome.value, None)], [outcome.call])
        else:
            self.gateway.pending.fail(int(request.id), outcome)
