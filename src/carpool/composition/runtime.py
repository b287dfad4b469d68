"""What all parts of a process stand on, and how it gives up what was opened."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from carpool.composition.tracing import start_tracing
from carpool.core.clock import Clock, monotonic
from carpool.core.events import Events
from carpool.core.histograms import RequestSeconds
from carpool.core.ports import Caller
from carpool.core.snapshot import Numbers, Status
from carpool.core.timeline import COMPANY_S_MAX
from carpool.core.timers import Every
from carpool.service import EndpointsOf, endpoint_maker
from carpool.settings import Settings, models_of
from carpool.telemetry.tracer import Tracer
from carpool.upstream.quarantine import Quarantine

Value = TypeVar("Value")

# Distinct model and parameter sets that may wait at once, shared among owners: each is looked at when a slot is free.
LANES_MAX = 1024


class Runtime:
    """Settings, clock and events of a process; timers and background work that end with it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
        # None: the endpoints that the addresses name.
        endpoints: EndpointsOf | None = None,
        # Callers that are known by this `Authorization` header, whatever the settings say of credentials: the demo's.
        known_callers: Mapping[bytes, Caller] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.models = models_of(settings)
        # What each tier adds to the time of a request for its place in the order.
        self.tier_target_s = tuple(tier.target_ms / 1000 for tier in settings.tiers)
        self.lanes_max = LANES_MAX
        self.clock = clock
        self.random_share = random_share
        self.known_callers = known_callers
        self.endpoints = endpoints or partial(endpoint_maker, clock=clock)
        # What happens to requests, for subscribers.
        self.events = Events()
        # Where their time went.
        self.seconds = RequestSeconds()
        self.tracing = start_tracing(settings, self.events, self.seconds, clock)
        # Owners whose inputs keep being refused.
        self.quarantined = Quarantine()
        self.draining = False
        # Parts that make use of new settings: each gets them ready, which may fail, and returns what makes the change.
        self.reloads: list[Callable[[Settings], Callable[[], None]]] = []
        # How to give up what has been opened so far, the last first.
        self.opened = AsyncExitStack()
        if self.tracing is not None:
            self.opened.push_async_callback(self.tracing.close)
        self._background: set[asyncio.Task[None]] = set()

    def by_tier_name(self, value: Callable[[int], Value]) -> dict[str, Value]:
        """What is known of each tier by its number, by its name."""
        return {tier.name: value(number) for number, tier in enumerate(self.settings.tiers)}

    @property
    def tracer(self) -> Tracer | None:
        """None where nothing is traced."""
        return None if self.tracing is None else self.tracing.tracer

    def describe(self) -> tuple[Numbers, ...]:
        """What `/metrics` shows of it."""
        return () if self.tracing is None else (self.tracing.describe(),)

    def status_with(self, problem: str) -> Status:
        """The status that operators see."""
        if problem:
            return "degraded"
        return "draining" if self.draining else "healthy"

    def company_s_max(self, model: str) -> float:
        """How long a request of a model waits for company at most."""
        known = self.models.get(model)
        return COMPANY_S_MAX if known is None else known.batching.max_wait_ms / 1000

    def do_every(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something now and from now on, until this process gives up what it opened."""
        every = Every(seconds, work)
        self.opened.callback(every.stop)
        every.start_now()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something run beside."""
        # The event loop holds its tasks only weakly.
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Give up everything that was opened, in the reverse order."""
        await self.opened.aclose()
