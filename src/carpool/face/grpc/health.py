"""`grpc.health.v1.Health`: whether this process serves, as its readiness says; NOT_SERVING from the start of a drain.

No credential is asked for, so the readiness, which tries the endpoints, is checked at most once a second for all
callers together, and only while a client checks or watches.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, NotFound
from carpool.core.protobuf import BadMessageError, as_text, fields, number_field
from carpool.core.timers import Every
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method
from carpool.face.grpc.messages import FIELDS_MAX, malformed
from carpool.face.http.places import Places
from carpool.face.intake import as_error

SERVING, NOT_SERVING, SERVICE_UNKNOWN = (number_field(1, status) for status in (1, 2, 3))
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
        self._status = NOT_SERVING
        self._known_until = 0.0
        self._is_asking = False
        # The process drains; and it has stopped listening.
        self._is_leaving = self._is_draining = False
        # Calls that wait for the status, and watches that wait for a change.
        self._askers: list[asyncio.Future[bytes]] = []
        self._watchers: set[asyncio.Future[bytes]] = set()
        self._looks = Every(LOOK_S, self._look)
        self.methods: Mapping[str, Method] = {"Check": Method(self.check), "Watch": Method(self.watch, is_stream=True)}

    async def check(self, call: GrpcCall) -> GrpcResult:
        """The status now."""
        if service_in(await call.read()) not in self._services:
            raise NotFound("there is no such service here")
        return await self._now()

    async def watch(self, call: GrpcCall) -> CarpoolError | None:
        """The status now, and each time that it changes; ends when the server stops listening."""
        if (refusal := self._places.refusal(call.peer.address)) is not None:
            return refusal
        try:
            await self._watch(call)
        finally:
            self._places.give_back(call.peer.address)
        return None

    async def _watch(self, call: GrpcCall) -> None:
        is_known = service_in(await call.read()) in self._services
        last = b""
        while not self._is_draining:
            status = await self._now() if is_known else SERVICE_UNKNOWN
            if status != last:
                await call.write(status)
                last = status
            else:
                await self._change()
        if last != NOT_SERVING and is_known:
            await call.write(NOT_SERVING)

    def leave(self) -> None:
        """This process does not serve any more, whatever its endpoints do."""
        self._is_leaving = True
        self._told("draining")

    def drain(self) -> None:
        """End all watches."""
        self._is_draining = True
        self.leave()
        self._looks.stop()

    async def _now(self) -> bytes:
        if self._clock() >= self._known_until and not self._is_leaving:
            waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._askers.append(waiting)
            if not self._is_asking:
                self._look()
            return await waiting
        return self._status

    async def _change(self) -> None:
        """Wait until the status may have changed."""
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._watchers.add(waiting)
        self._looks.start()
        try:
            await waiting
        finally:
            self._watchers.discard(waiting)
            if not self._watchers:
                self._looks.stop()

    def _look(self) -> None:
        if not self._is_asking:
            self._is_asking = True
            try:
                self._check_ready(self._told)
            except Exception as failure:  # no call may wait for ever
                self._told(as_error(failure).detail)

    def _told(self, why_not: str | None) -> None:
        self._is_asking = False
        status = SERVING if why_not is None and not self._is_leaving else NOT_SERVING
        is_new, self._status = status != self._status, status
        self._known_until = self._clock() + LOOK_S
        askers, self._askers = self._askers, []
        for waiting in (*askers, *(self._watchers if is_new or self._is_draining else ())):
            if not waiting.done():
                waiting.set_result(status)


def service_in(message: bytes) -> str:
    """The service of a HealthCheckRequest; raises Malformed."""
    service = ""
    try:
        for number, value in fields(message, FIELDS_MAX):
            if number == 1:
                service = as_text(value)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return service
