"""Who comes in: credential → rate limit → shed → permit. Nothing past the gate is refused for load.

For now there are no credentials: everybody is anonymous, of the lowest tier. The permit is the broker's bound.
"""

from collections.abc import Callable, Mapping

from carpool.core.errors import CarpoolError, Draining, UpstreamDown
from carpool.core.ports import Availability, Caller, Intake, TaskBoard
from carpool.core.request import Request


class Gate:
    """Admits requests to the broker, or says why not."""

    def __init__(
        self, broker: Intake, tasks: TaskBoard, upstreams: Mapping[str, Availability], lowest_tier: int
    ) -> None:
        self._broker = broker
        self._tasks = tasks
        # By model.
        self._upstreams = upstreams
        self._anonymous = Caller(owner="", tier=lowest_tier)
        # Closed at the end of a drain, when nothing could be finished any more.
        self.closed = False

    def identify(self, headers: dict[bytes, bytes]) -> Caller:
        """The caller behind a request's headers."""
        return self._anonymous

    def admit(self, request: Request) -> CarpoolError | None:
        """Let a synchronous request in, or say why not."""
        if self.closed:
            return leaving()
        upstream = self._upstreams[request.model]
        if upstream.is_down or (upstream.is_shut_to_some and upstream.is_shut_to(request.owner)):
            down = "the inference API is down; try again soon, or submit a task"
            return UpstreamDown(down, retry_after_s=upstream.retry_after_s())
        return self._broker.submit(request)

    def admit_task(self, request: Request, caller: Caller, accepted: Callable[[CarpoolError | None], None]) -> None:
        """Let a task in: `accepted(None)` once it is safe, or `accepted(error)`."""
        if self.closed:
            accepted(leaving())
        else:
            self._tasks.submit(request, caller.owner, accepted)


def leaving() -> Draining:
    """What is told to those who come too late."""
    return Draining("this gateway is shutting down; connect again to reach another one", retry_after_s=1)
