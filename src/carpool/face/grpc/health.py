"""`grpc.health.v1.Health`: whether this process serves, as its readiness says; NOT_SERVING from the start of a drain.

No credential is asked for, so the readiness, which tries the endpoints, is checked at most once a second for all
callers together, and only while a client checks or watches.

grpcio-health-checking is not used: its servicer holds a lock while it writes to a watcher, so that one client that does
not read would keep the status from changing for all of them, also at a drain.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from carpool.core.clock import Clock, monotonic
from carpool.core.errors import NotFound
from carpool.core.messages import health_v1
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method
from carpool.face.grpc.messages import parse
from carpool.face.http.places import Places
from carpool.face.intake import as_error

LOOK_S = 1.0

# Calls the given function with the reason why this process is not ready, or with None.
CheckReady = Callable[[Callable[[str | None], None]], None]


class Health:
    """The service. `services` are the names that clients may ask for; all of them are as the process is."""

    name = "grpc.health.v1.Health"

    def __init__(
        self, check_ready: CheckReady, services: Collection[str], places: Places, clock: Clock = monotonic
    ) -> None:
        self._check_ready = check_ready
        self._services = frozenset((*services, self.name, ""))
        self._places = places
        self._clock = clock
        self._status = "NOT_SERVING"
        self._known_until = 0.0
        # Set when the readiness that is being checked is known; None while it is not being checked.
        self._looking: asyncio.Future[None] | None = None
        # The process drains; and it has stopped listening.
        self._is_leaving = self._is_draining = False
        # Set, and replaced, when one of these two changes.
        self._change = asyncio.Event()
        self.methods: Mapping[str, Method] = {"Check": Method(self.check), "Watch": Method(self.watch, is_stream=True)}

    async def check(self, call: GrpcCall) -> GrpcResult:
        """The status now."""
        if parse(health_v1.HealthCheckRequest, await call.read()).service not in self._services:
            raise NotFound("there is no such service here")
        return health_v1.HealthCheckResponse(status=await self._now())

    async def watch(self, call: GrpcCall) -> None:
        """The status now, and each time that it changes; ends when the server stops listening."""
        with self._places.held_by(call.peer.address):
            await self._watch(call)

    async def _watch(self, call: GrpcCall) -> None:
        is_known = parse(health_v1.HealthCheckRequest, await call.read()).service in self._services
        last = ""
        while True:
            change = self._change
            status = await self._now() if is_known else "SERVICE_UNKNOWN"
            if status != last:
                await call.write(health_v1.HealthCheckResponse(status=status).SerializeToString())
                last = status
            if self._is_draining and (last == self._status or not is_known):
                return
            try:
                async with asyncio.timeout(LOOK_S):
                    await change.wait()
            except TimeoutError:
                pass

    def leave(self) -> None:
        """This process does not serve any more, whatever its endpoints do."""
        self._is_leaving = True
        self._told("draining")
        self._change.set()
        self._change = asyncio.Event()

    def drain(self) -> None:
        """End all watches."""
        self._is_draining = True
        self.leave()

    async def _now(self) -> str:
        while self._clock() >= self._known_until and not self._is_leaving:
            if self._looking is None:
                self._looking = asyncio.get_running_loop().create_future()
                self._look()
            if self._looking is not None:
                await asyncio.shield(self._looking)
        return self._status

    def _look(self) -> None:
        try:
            self._check_ready(self._told)
        except Exception as failure:  # no call may wait for ever
            self._told(as_error(failure).detail)

    def _told(self, why_not: str | None) -> None:
        self._status = "SERVING" if why_not is None and not self._is_leaving else "NOT_SERVING"
        self._known_until = self._clock() + LOOK_S
        looking, self._looking = self._looking, None
        if looking is not None and not looking.done():
            looking.set_result(None)
