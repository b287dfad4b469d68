"""Bursts, from the door to the endpoint in virtual time: what came in late harms nobody who comes in time."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.errors import CarpoolError
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.settings import Model, Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, UpstreamSettings
from carpool.testing import FakeClock, FakeUpstream, UpstreamCall, UpstreamResponse, echo, inputs_of, make_request
from carpool.upstream.fleet import MakeEndpoint

ENTERPRISE, PAID, FREE = range(3)
# 320 requests a second. One that waits for the call that runs, and for its own, needs up to two.
CALL_S, BATCH, QUEUE_S = 0.2, 64, 2.0
USUAL_S = 2 * CALL_S + 0.02
SETTINGS = Settings(
    model="m",
    batching=BatchingSettings(policy="fixed", max_batch=BATCH, max_wait_ms=5.0),
    broker=BrokerSettings(queue_timeout_s=QUEUE_S),
    upstream=UpstreamSettings(endpoints=["http://gpu/"], slots=1),
)


class SlowEndpoint(FakeUpstream):
    """Every call takes as long, or longer with each input."""

    input_s = 0.0

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        self.then(echo, delay_s=0.05 + self.input_s * len(inputs_of(call)) if self.input_s else CALL_S)
        return await super().post(call, timeout_s)


class Scene:
    """One slot behind a door. Clients are known by a name; what became of their requests is written down by it."""

    def __init__(self, *, input_s: float = 0.0) -> None:
        self._input_s = input_s
        self.clock = FakeClock()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start it, warm it up, and wait for what is under way at the end."""

        async def load() -> None:
            for _ in range(10):
                self.send("warm")
                await asyncio.sleep(0.3)
            await asyncio.sleep(1.5)
            await main()
            await asyncio.sleep(5.0)

        async def started() -> None:
            self._engine = Engine(Runtime(SETTINGS, self.clock, lambda: 0.5, self._endpoints))
            await self._engine.run(load())

        self.clock.run(started())

    def _endpoints(self, model: Model) -> MakeEndpoint:
        endpoint = SlowEndpoint("gpu", 1)
        endpoint.input_s = self._input_s
        return lambda address: endpoint

    def send(
        self, name: str, tier: int = FREE, *, owner: str = "", timeout_s: float = 0.0, parameters: bytes = b""
    ) -> None:
        """One request."""
        scene = self

        class Client:
            def settled(self, request: Request, outcome: Outcome) -> None:
                failed = isinstance(outcome, CarpoolError)
                scene.outcomes[name][type(outcome).__name__ if failed else "ok"] += 1
                if not failed:
                    scene.seconds[name].append(scene.clock() - request.arrived)

        request = make_request(
            name,
            Client(),
            now=self.clock(),
            tier=tier,
            target_s=SETTINGS.tiers[tier].target_ms / 1000,
            queue_timeout_s=QUEUE_S,
            total_timeout_s=timeout_s or 4.0,
            own_timeout_s=timeout_s,
            owner=owner or name,
            parameters=parameters,
        )
        if (refusal := self._engine.admit(request)) is not None:
            self.outcomes[name][type(refusal).__name__] += 1

    async def send_steadily(
        self,
        name: str,
        rate: float,
        seconds: float,
        tier: int = FREE,
        *,
        owners: int = 1,
        timeout_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        """So many a second, of so many owners, and lanes, in turn."""
        for number in range(int(rate * seconds)):
            parameters = b'{"n":%d}' % (number % lanes) if lanes > 1 else b""
            owner = f"{name}{number % owners}"
            self.send(name, tier, owner=owner, timeout_s=timeout_s, parameters=parameters)
            await asyncio.sleep(1 / rate)

    def p99(self, name: str) -> float:
        """Of those answered."""
        return sorted(self.seconds[name])[int(0.99 * len(self.seconds[name]))]


def test_higher_tiers_that_begin_after_a_burst_do_not_wait_for_it() -> None:
    scene = Scene()

    async def main() -> None:
        for _ in range(700):
            scene.send("burst")
        await asyncio.sleep(0.05)
        await asyncio.gather(
            scene.send_steadily("enterprise", 100, 4, ENTERPRISE), scene.send_steadily("paid", 150, 4, PAID)
        )

    scene.run(main)
    assert set(scene.outcomes["enterprise"]) == set(scene.outcomes["paid"]) == {"ok"}
    assert scene.p99("enterprise") <= USUAL_S * 1.2


@pytest.mark.parametrize("rate", [50, 150])
def test_other_owners_do_not_wait_for_the_bursts_of_one(rate: float) -> None:
    scene = Scene()

    async def bursts() -> None:
        for _ in range(5):
            for _ in range(600):
                scene.send("burst")
            await asyncio.sleep(2.0)

    scene.run(lambda: _both(scene.send_steadily("other", rate, 10), bursts()))
    assert set(scene.outcomes["other"]) == {"ok"}
    assert scene.p99("other") <= USUAL_S
    assert scene.outcomes["burst"]["ok"] > 1000


@pytest.mark.parametrize("timeout_s", [0.7, 1.0])
def test_clients_with_deadlines_are_served_in_time_and_afterwards(timeout_s: float) -> None:
    scene = Scene()

    async def main() -> None:
        await scene.send_steadily("crowd", 600, 4, timeout_s=timeout_s)
        await asyncio.sleep(3.0)
        await scene.send_steadily("later", 10, 5, timeout_s=timeout_s)

    scene.run(main)
    assert set(scene.outcomes["later"]) == {"ok"}
    assert set(scene.outcomes["crowd"]) == {"ok", "Shed"}


@pytest.mark.parametrize("owners", [12, 20])
def test_many_owners_with_a_lane_each_do_not_time_out(owners: int) -> None:
    """All of them come for the first lane of their owner: there are more than can have a call in time."""
    scene = Scene()
    scene.run(lambda: scene.send_steadily("much", 640, 15, owners=owners, lanes=owners))
    assert set(scene.outcomes["much"]) == {"ok", "Shed"}
    assert scene.outcomes["much"]["ok"] >= 0.8 * 320 * 15


def test_one_owner_of_many_lanes_takes_none_from_others_and_none_from_higher_tiers() -> None:
    scene = Scene()

    async def main() -> None:
        await asyncio.gather(
            scene.send_steadily("lanes", 160, 15, lanes=20),
            scene.send_steadily("others", 96, 15, owners=10),
            scene.send_steadily("paid", 16, 15, PAID),
        )

    scene.run(main)
    assert scene.outcomes["others"]["ok"] >= 0.9 * scene.outcomes["others"].total()
    assert set(scene.outcomes["paid"]) == {"ok"}


def test_calls_that_take_longer_with_each_input_are_known_by_the_second_burst() -> None:
    """Small calls between bursts do not make it forget how long full ones take."""
    scene = Scene(input_s=0.01)

    async def main() -> None:
        for number in range(4):
            await scene.send_steadily("calm", 5, 8)
            for _ in range(500):
                scene.send(f"burst{number}")
            await asyncio.sleep(4.0)

    scene.run(main)
    for number in (2, 3):
        assert set(scene.outcomes[f"burst{number}"]) == {"ok", "Shed"}
        assert scene.outcomes[f"burst{number}"]["ok"] >= 100


async def _both(*parts: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*parts)
