"""Serving: the queue's way out, batching and the upstreams. The engine's second half."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from msgspec import UNSET
from msgspec.structs import replace

from carpool.broker.lanes import LOWEST_TIER_SHARE
from carpool.broker.memory import MemoryBroker
from carpool.broker.task_places import TASK_DELAY_S
from carpool.composition.runtime import Runtime
from carpool.core.ports import DeadLetters, FetchedQueue, OtherBatchers
from carpool.core.request import Request
from carpool.core.snapshot import ModelNumbers, ModelState
from carpool.core.timeline import Queue, RequestState, state_of
from carpool.service import ModelService
from carpool.settings import Model

RATE_TICK_S = 1.0
# Endpoints that one question for readiness tries at the same time.
TRIED_AT_ONCE = 16


def make_broker(runtime: Runtime) -> MemoryBroker:
    """The broker of this process, as it is configured."""
    settings = runtime.settings
    return MemoryBroker(
        waiting_max=settings.broker.waiting_max,
        bytes_max=settings.broker.bytes_max,
        lanes_max=runtime.lanes_max,
        tiers=len(settings.tiers),
        strict_order=settings.broker.order == "strict",
        min_share=LOWEST_TIER_SHARE,
        task_patience_s=TASK_DELAY_S,
        quarantined=runtime.quarantined.riders,
        seconds=runtime.seconds,
        events=runtime.events,
        clock=runtime.clock,
    )


class Serving:
    """Sends what waits in a broker of this process. One without models has nothing to do."""

    def __init__(
        self,
        runtime: Runtime,
        broker: MemoryBroker,
        dead_letters: DeadLetters | None,
        models: Iterable[Model],
        # How many processes share the endpoints, if this one does not have its slots to itself.
        sharers: Callable[[], int] | None = None,
        # By model: the batchers of other processes.
        others: Mapping[str, OtherBatchers] = MappingProxyType({}),
        # By model: where its requests are fetched from, if they wait elsewhere.
        fetched: Mapping[str, FetchedQueue] = MappingProxyType({}),
        # Sees one request of each batch that leaves.
        sampled: Callable[[Request], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self.broker = broker
        self.services = [
            ModelService(
                model,
                runtime.endpoints,
                broker,
                dead_letters,
                runtime.quarantined,
                sharers,
                others.get(model.name),
                fetched.get(model.name),
                sampled,
                traces=runtime.tracer,
                clock=runtime.clock,
                random_share=runtime.random_share,
            )
            for model in models
        ]

    def start(self) -> None:
        """Watch the endpoints of every model, ask them for their limits, and work out rates from now on."""
        for service in self.services:
            self._runtime.opened.push_async_callback(service.fleet.close)
            service.fleet.start()
            self._runtime.in_background(service.ask_limits())
            if service.probe_input:
                self._runtime.in_background(service.prove())
        self._runtime.do_every(RATE_TICK_S, self._measure)

    def hurry(self) -> None:
        """Let batches wait for company no more: it will not come."""
        for service in self.services:
            service.loop.drain()

    async def drain(self) -> None:
        """Let the batches under way come to their end."""
        self.hurry()
        for service in self.services:
            await service.dispatcher.finish(service.timeout_s)

    def expire(self, now: float) -> None:
        """Look at the deadlines."""
        self.broker.expire(now)

    def prepare(self, request: Request) -> None:
        """Let its model look at a request that this process did not just receive; raises Malformed."""
        for service in self.services:
            if service.name == request.model:
                service.prepare(request)

    def find_waiting(self, request_id: str) -> Request | None:
        """A request that waits here."""
        return next((request for request in self.broker.waiting_requests() if request.id == request_id), None)

    def tell_of(self, request: Request) -> RequestState:
        """The state of a request that waits here, or did."""
        state = state_of(request, self._runtime.clock(), self._runtime.company_s_max(request.model))
        if state.status != "queued" or not self.has(request.model):
            return state
        place, capacity = self.broker.place_of(request), self.capacity_rps(request.model)
        waiting = self.broker.depth_of(request.model)
        wait_ms = round(place / capacity * 1000) if capacity else UNSET
        return replace(state, queue=Queue(place=place, waiting=waiting, estimated_wait_ms=wait_ms))

    def has(self, model: str) -> bool:
        """Whether requests of a model may wait here."""
        return any(service.name == model for service in self.services)

    def capacity_rps(self, model: str) -> float:
        """Requests of a model that its endpoints serve in a second; 0.0 while that is not known."""
        known = (each for each in self.services if each.name == model and each.loop.is_capacity_known())
        return sum(service.capacity_rps() for service in known)

    # What operators see.

    def slots_total(self) -> float:
        """Slots of all models."""
        return sum(service.pool.total() for service in self.services)

    def utilization(self) -> float:
        """The share of all slots that was used lately."""
        busy = sum(service.utilization * service.pool.total() for service in self.services)
        return busy / (self.slots_total() or 1)

    def describe(self) -> dict[str, ModelNumbers]:
        """What `/metrics` shows of every model."""
        return {service.name: service.numbers() for service in self.services}

    def states(self) -> dict[str, ModelState]:
        """What `/internal/fleet` shows of every model."""
        return {service.name: service.state() for service in self.services}

    def is_down(self) -> bool:
        """Whether no endpoint may be called for now."""
        return all(service.pool.is_down for service in self.services)

    def try_endpoints(self, answer: Callable[[str | None], None]) -> None:
        """Answer None once an endpoint accepts a connection, else the reason why nothing can be done.

        Where there is a `probe_input`, once a call was answered.
        """
        if (waiting := next((each for each in self.services if each.is_unproven()), None)) is not None:
            answer(f"no endpoint of {waiting.name} has answered a call yet, and upstream.probe_input is set")
            return
        self._runtime.in_background(self._try_endpoints(answer))

    async def _try_endpoints(self, answer: Callable[[str | None], None]) -> None:
        endpoints = [endpoint for service in self.services for endpoint in service.pool.endpoints]
        reason: str | None = "no endpoint accepts a connection"
        try:
            for first in range(0, len(endpoints), TRIED_AT_ONCE):
                tried = endpoints[first : first + TRIED_AT_ONCE]
                if any(await asyncio.gather(*(endpoint.accepts_connections() for endpoint in tried))):
                    reason = None
                    return
        finally:
            answer(reason)

    def _measure(self) -> None:
        runtime = self._runtime
        for service in self.services:
            service.measure(RATE_TICK_S)
        waiting = self.broker.quarantined_owners() if runtime.quarantined else frozenset()
        runtime.quarantined.look(runtime.clock(), waiting)
