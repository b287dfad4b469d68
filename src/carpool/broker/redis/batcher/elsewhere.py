"""Whether other batchers can serve what this one cannot."""

from collections.abc import Callable

from carpool.broker.redis.batcher.leases import EntryLease
from carpool.core.request import Request


class BatchersElsewhere:
    """The other batchers of one model (core.ports.OtherBatchers)."""

    def __init__(self, are_well: Callable[[], bool]) -> None:
        # Whether one of them has an endpoint that works, by its heartbeat.
        self.are_well = are_well

    def may_serve(self, request: Request, *, for_verdict: bool = False) -> bool:
        """Whether a request may go back to the queue. For a verdict: no other batcher has blamed its input yet."""
        lease = request.ticket
        if (
            not isinstance(lease, EntryLease)
            or not lease.history.may_go_back
            or (for_verdict and lease.history.was_blamed)
        ):
            return False
        return self.are_well()

    def had(self, request: Request) -> bool:
        """Whether another batcher has given a request back."""
        lease = request.ticket
        return isinstance(lease, EntryLease) and lease.history.returns > 0
