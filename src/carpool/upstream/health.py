"""What is known of the endpoints of one model beside their calls: probes, reported load, and the state that they show.

1. An endpoint that answered a call well within the interval needs no probe. Any other is asked for the health page of
   its protocol, or for a connection where the protocol has none: at the start, and after each interval.
2. Probes only inform: what became of calls decides which endpoint gets some. A server may have no health page, or one
   that is well while the model is not. But an endpoint that failed is asked for it before a client's input is risked.
3. Once a second: the load is read from the metrics page, if one is configured, and every limit makes its step.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import Protocol, runtime_checkable

from msgspec import UNSET

from carpool.core.clock import Clock, monotonic, rfc3339
from carpool.core.snapshot import EndpointHealth, EndpointStatus
from carpool.core.timeline import milliseconds
from carpool.core.timers import repeat
from carpool.upstream.breaker import Breaker
from carpool.upstream.endpoint import AttemptFailedError, Endpoint, UpstreamResponse
from carpool.upstream.load import LoadSource, metric_value
from carpool.upstream.pool import EndpointState, Pool

logger = logging.getLogger("carpool.upstream")

STATES: tuple[EndpointStatus, ...] = ("healthy", "degraded", "offline")
# As their numbers in metrics.
BREAKERS = ("closed", "half-open", "open")

# Probes in a row that must fail before an endpoint counts as offline.
FAILED_PROBES_MAX = 3
PROBE_TIMEOUT_S = 1.0
PROBES_AT_ONCE_MAX = 64
LOAD_INTERVAL_S = 1.0
# Answers that say: there is a server, but it shows no such page, or not to us.
_NO_PAGE = frozenset({401, 403, 404, 405, 501})


@runtime_checkable
class HasPages(Protocol):
    """An endpoint that can be asked for a page beside its calls."""

    async def get(self, where: str, timeout_s: float) -> UpstreamResponse:
        """Read a page; `where` is a path, `:PORT/PATH` on the same host, or a URL. Raises AttemptFailedError."""


class HealthWatch:
    """Looks after the endpoints of one model, in the background."""

    def __init__(
        self,
        pool: Pool,
        *,
        health_path: str | None,
        interval_s: float,
        load_source: LoadSource | None = None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._health_path = health_path
        self._interval_s = interval_s
        self._load_source = load_source
        self._clock = clock
        self._random_share = random_share
        self._at_once = asyncio.Semaphore(PROBES_AT_ONCE_MAX)
        self._running: list[asyncio.Task[None]] = []
        # Questions for the pool. The event loop holds its tasks only weakly.
        self._asking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to probe and to read loads."""
        loop = asyncio.get_running_loop()
        self._running = [
            loop.create_task(repeat(partial(self._pause_s, self._interval_s), self.probe_quiet_ones)),
            loop.create_task(repeat(partial(self._pause_s, LOAD_INTERVAL_S), self.adjust_limits)),
        ]

    async def close(self) -> None:
        """Stop."""
        tasks = [*self._running, *self._asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def probe_quiet_ones(self) -> None:
        """Probe every endpoint that has not answered a call well for an interval."""
        now = self._clock()
        quiet = [member for member in self._pool.members if now - member.well_at >= self._interval_s]
        await self._for_each(self._probe, quiet)

    async def adjust_limits(self) -> None:
        """Read the loads, and let every limit make its step."""
        if self._load_source is not None:
            await self._for_each(self._read_load, self._pool.members)
        now = self._clock()
        for member in self._pool.members:
            member.measure(now)
            member.controller.step(now)
            self._pool.follow(member)

    def _pause_s(self, interval_s: float) -> float:
        """With jitter, so that many gateways do not ask together."""
        return interval_s * (0.75 + self._random_share() / 2)

    async def _for_each(
        self, action: Callable[[EndpointState], Awaitable[None]], members: Sequence[EndpointState]
    ) -> None:
        async def one(member: EndpointState) -> None:
            async with self._at_once:
                await action(member)

        await asyncio.gather(*(one(member) for member in members))

    def ask(self, member: EndpointState, tell: Callable[[bool], None]) -> None:
        """For the pool: how an endpoint is, by its health page. A page that was never well says nothing."""

        async def ask() -> None:
            is_well = True  # whatever fails here must not keep the endpoint out
            try:
                is_well = await self._is_alive(member.endpoint) or member.alive_at == -inf
            except Exception:
                logger.exception("an endpoint could not be asked how it is")
            finally:
                tell(is_well)

        task = asyncio.get_running_loop().create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _is_alive(self, endpoint: Endpoint) -> bool:
        if self._health_path is None or not isinstance(endpoint, HasPages):
            return await endpoint.accepts_connections()
        try:
            status = (await endpoint.get(self._health_path, PROBE_TIMEOUT_S)).status
        except AttemptFailedError:
            return False
        return 200 <= status < 300 or status in _NO_PAGE

    async def _probe(self, member: EndpointState) -> None:
        if await self._is_alive(member.endpoint):
            member.failed_probes = 0
            member.alive_at = self._clock()
            return
        member.failed_probes += 1
        if member.failed_probes == FAILED_PROBES_MAX:
            logger.warning("an endpoint does not answer its probes", extra={"fields": {"endpoint": member.name}})

    async def _read_load(self, member: EndpointState) -> None:
        source, endpoint = self._load_source, member.endpoint
        if source is None or not isinstance(endpoint, HasPages):
            return
        try:
            answer = await endpoint.get(source.where, PROBE_TIMEOUT_S)
        except AttemptFailedError:
            return  # no report; that it is unwell is for the breaker to see
        value = metric_value(answer.body.decode(errors="replace"), source.metric) if answer.status == 200 else None
        if value is not None:
            member.controller.report(max(0.0, value / source.full))


def breaker_shown(breaker: Breaker, now: float) -> str:
    """The breaker's state; an open breaker that waits for a probe counts as half-open."""
    return "half-open" if breaker.state == "open" and breaker.allows(now) else breaker.state


def state_of(member: EndpointState, now: float) -> EndpointStatus:
    """How an endpoint is."""
    breaker = breaker_shown(member.breaker, now)
    is_open = breaker == "open" and not member.breaker.allows_others()  # else it is closed to one owner only
    if is_open or member.failed_probes >= FAILED_PROBES_MAX:
        return "offline"
    if (
        breaker != "closed"
        or member.failed_probes
        or member.limit < member.controller.slots
        or member.trouble is not None
    ):
        return "degraded"
    return "healthy"


def healthy_slots(members: Sequence[EndpointState], now: float) -> float:
    """Calls that the endpoints that work may have at once."""
    return sum(member.limit for member in members if works(member, now))


def works(member: EndpointState, now: float) -> bool:
    """Whether it gets calls."""
    return member.breaker.state == "closed" and state_of(member, now) != "offline"


def fails(member: EndpointState, now: float) -> bool:
    """Whether it is there, by its probes, and gets no calls: they fail. Another one of its kind would do the same."""
    return not works(member, now) and not member.failed_probes and member.alive_at > -inf


def endpoint_state(member: EndpointState, now: float, wall: float) -> EndpointHealth:
    """What the fleet's page shows of an endpoint; `now` and `wall` are the same moment on both clocks."""
    heard_at = max(member.well_at, member.alive_at)
    load = member.controller.reported_load
    took = member.latest_calls.quantiles(now)
    return EndpointHealth(
        endpoint=member.name,
        state=state_of(member, now),
        utilization=round(min(1.0, member.utilization if load is None else load), 4),
        in_flight=member.in_flight,
        limit=round(member.limit, 2),
        slots=member.controller.slots,
        breaker=breaker_shown(member.breaker, now),
        last_heartbeat=rfc3339(wall - (now - heard_at)) if heard_at > -inf else None,
        problem=UNSET if member.trouble is None else member.trouble.text,
        call_p50_ms=UNSET if took is None else milliseconds(took.p50),
        call_p99_ms=UNSET if took is None else milliseconds(took.p99),
    )
