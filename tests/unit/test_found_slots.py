"""How many calls endpoints get from production's own engine, on virtual time: those that say they are loaded, and those
whose slots are found.
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from random import Random

import pytest

from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.service import ModelService
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, SheddingSettings, UpstreamSettings
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings
from carpool.virtual_time import VirtualClock

MAX_BATCH, LATENCY_MS = 8, 50.0


class Gpu(SimulatedEndpoint):
    """A GPU that takes so many calls at once, has one slot or is to be found out about, and may tell its load."""

    def __init__(self, clock: VirtualClock, takes: int, *, is_found: bool, refuses_more: int) -> None:
        super().__init__("gpu", SimulationSettings(latency_ms=LATENCY_MS, slots=takes), clock=clock)
        self.slots = None if is_found else 1  # type: ignore[assignment]
        self.load: float | None = None
        self.refused = 0
        self._refuses_more = refuses_more

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        if self._refuses_more and self.gpu.stats().in_flight >= self.gpu.settings.slots:
            self.refused += 1
            return UpstreamResponse(self._refuses_more, b"CUDA out of memory")
        answer = await super().post(call, timeout_s)
        return UpstreamResponse(answer.status, answer.body, self.load)


class Site:
    """An engine before one GPU, and clients that each send their next request when they have an answer."""

    def __init__(self, takes: int, *, is_found: bool, clients: int = 6 * MAX_BATCH, refuses_more: int = 0) -> None:
        self.clock = VirtualClock()
        self.gpu = Gpu(self.clock, takes, is_found=is_found, refuses_more=refuses_more)
        upstream = UpstreamSettings(endpoints=["http://gpu/infer"], slots="auto" if is_found else 1)
        self.settings = Settings(
            model="m",
            batching=BatchingSettings(max_batch=MAX_BATCH),
            shedding=SheddingSettings(mode="off"),
            upstream=upstream,
        )
        self.clients = clients
        self.served = 0
        self.failed: list[Outcome] = []
        self.sent = 0
        self.is_over = False

    def run(self, scene: Callable[[], Awaitable[None]]) -> None:
        """Play a scene, which waits by `asyncio.sleep`."""
        self.clock.run(self._run(scene))

    async def _run(self, scene: Callable[[], Awaitable[None]]) -> None:
        runtime = Runtime(self.settings, self.clock, Random(1).random, lambda model: lambda address: self.gpu)
        self.engine = Engine(runtime)
        [self.service] = self.engine.serving.services
        for _ in range(self.clients):
            self.send()

        async def play() -> None:
            await scene()
            self.is_over = True
            while self.served + len(self.failed) < self.sent:  # noqa: ASYNC110 - it is virtual time
                await asyncio.sleep(0.1)

        await self.engine.run(play())

    def send(self) -> None:
        now = self.clock()
        self.sent += 1
        refusal = self.engine.admit(Request(str(self.sent), "m", b"", b"1", 1, 0, now, now, inf, inf, self))
        assert refusal is None, refusal

    def settled(self, request: Request, outcome: Outcome) -> None:
        self.served += isinstance(outcome, Output)
        if not isinstance(outcome, Output):
            self.failed.append(outcome)
        elif not self.is_over:
            self.send()

    async def served_in(self, seconds: float) -> float:
        """Requests served a second from now on."""
        before = self.served
        await asyncio.sleep(seconds)
        return (self.served - before) / seconds

    async def busy_in(self, seconds: float) -> float:
        """The busy share of the GPU from now on."""
        before = self.gpu.gpu.stats().busy_seconds
        await asyncio.sleep(seconds)
        return (self.gpu.gpu.stats().busy_seconds - before) / seconds


FULL_RPS = MAX_BATCH * 1000 / LATENCY_MS


def allowed(service: ModelService) -> float:
    return service.pool.members[0].limit


def test_an_endpoint_of_one_slot_that_says_it_is_loaded_gets_less_until_it_is_not() -> None:
    site = Site(1, is_found=False)

    async def scene() -> None:
        assert await site.served_in(10.0) == pytest.approx(FULL_RPS, rel=0.02)
        assert site.service.capacity_rps() == pytest.approx(FULL_RPS, rel=0.05)
        site.gpu.load = 0.95
        await asyncio.sleep(2.5)
        for _ in range(3):
            limit = allowed(site.service)
            assert limit < 0.75
            assert site.service.pool.total() == site.service.fleet.healthy_slots() == limit
            assert site.service.capacity_rps() == pytest.approx(limit * FULL_RPS, rel=0.05)
            assert await site.busy_in(0.5) < 0.8
            await asyncio.sleep(0.5)
        await asyncio.sleep(8.0)
        assert allowed(site.service) == pytest.approx(0.1)
        assert await site.busy_in(10.0) == pytest.approx(0.1, rel=0.1)
        site.gpu.load = 0.89
        await asyncio.sleep(30.0)
        assert allowed(site.service) == 1
        assert await site.served_in(10.0) == pytest.approx(FULL_RPS, rel=0.02)

    site.run(scene)
    assert site.failed == []


@pytest.mark.parametrize("load_when_full", [0.95, 1.2, 2.0])
def test_an_endpoint_whose_load_is_its_busy_share_settles_below_the_limit(load_when_full: float) -> None:
    site = Site(1, is_found=False)

    async def scene() -> None:
        for _ in range(60):
            site.gpu.load = load_when_full * await site.busy_in(1.0)
        loads = []
        for _ in range(60):
            site.gpu.load = load_when_full * await site.busy_in(1.0)
            loads.append(site.gpu.load)
        assert 0.6 <= sum(loads) / len(loads) <= 0.9

    site.run(scene)
    assert site.failed == []


def test_two_slots_are_found_where_two_bring_twice_as_much() -> None:
    site = Site(2, is_found=True)

    async def scene() -> None:
        assert allowed(site.service) == 1
        await asyncio.sleep(30.0)
        rates = [await site.served_in(60.0) for _ in range(3)]
        assert min(rates) > 1.9 * FULL_RPS
        assert site.service.fleet.slots() in (2, 3)
        assert site.service.capacity_rps() == pytest.approx(2 * FULL_RPS, rel=0.1)

    site.run(scene)
    assert site.failed == []


def test_where_a_second_one_brings_nothing_as_much_is_served_as_with_one_slot() -> None:
    rates: dict[bool, float] = {}
    slots: list[float] = []
    for is_found in (False, True):
        site = Site(1, is_found=is_found)

        async def scene(site: Site = site, is_found: bool = is_found) -> None:
            rates[is_found] = await site.served_in(300.0)
            slots.append(allowed(site.service))

        site.run(scene)
        assert site.failed == []
    assert slots == [1, 1]
    assert rates[True] == pytest.approx(rates[False], rel=0.02)


@pytest.mark.parametrize("status", [429, 500])
def test_an_endpoint_that_refuses_a_second_call_fails_nobody(status: int) -> None:
    site = Site(1, is_found=True, refuses_more=status)

    async def scene() -> None:
        assert await site.served_in(300.0) == pytest.approx(FULL_RPS, rel=0.02)

    site.run(scene)
    assert site.failed == []
    assert 0 < site.gpu.refused < 10
