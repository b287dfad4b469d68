"""Bursts, from the door to the endpoint in virtual time: what came in late harms nobody who comes in time."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from carpool.admission.gate import Gate
from carpool.admission.shedding import Door, TierRule
from carpool.batching.loop import BatchLoop
from carpool.batching.policy import Fixed
from carpool.broker.memory import MemoryBroker
from carpool.composition.shedding import DOOR_TICK_S
from carpool.core.errors import CarpoolError
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.testing import Answer, Call, FakeClock, FakeUpstream, echo, make_request
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.offenders import Offenders
from carpool.upstream.pool import Pool

ENTERPRISE, PAID, FREE = range(3)
TIERS = [TierRule(0.05, 1.0, "enterprise"), TierRule(0.15, 0.5, "paid"), TierRule(0.5, 0.25, "free")]
# 320 requests a second. One that waits for the call that runs, and for its own, needs up to two.
CALL_S, BATCH, QUEUE_S = 0.2, 64, 2.0
USUAL_S = 2 * CALL_S + 0.02


class SlowEndpoint(FakeUpstream):
    """Every call takes as long."""

    async def post(self, call: Call, timeout_s: float) -> Answer:
        self.then(echo, delay_s=CALL_S)
        return await super().post(call, timeout_s)


class Scene:
    """One slot behind a door. Clients are known by a name; what became of their requests is written down by it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start it, warm it up, and wait for what is under way at the end."""

        async def started() -> None:
            self._start()
            ticks = asyncio.get_running_loop().create_task(self._ticks())
            for _ in range(10):
                self.send("warm")
                await asyncio.sleep(0.3)
            await asyncio.sleep(1.5)
            await main()
            await asyncio.sleep(5.0)
            ticks.cancel()
            await self._dispatcher.finish(60.0)
            self._pool.close()

        self.clock.run(started())

    def _start(self) -> None:
        clock, offenders = self.clock, Offenders()
        self._broker = MemoryBroker(
            waiting_max=10_000, bytes_max=10**9, lanes_max=9, tiers=3, offenders=offenders, clock=clock
        )
        self._pool = Pool([SlowEndpoint("gpu", 1)], clock, random_share=lambda: 0.5)
        self._pool.others_wait = lambda: self._broker.all_waiting("m") > 0
        self._dispatcher = UpstreamDispatcher(
            self._pool,
            JsonCodec(),
            self._broker,
            timeout_s=3.0,
            attempts=3,
            backoff_s=0.05,
            model="m",
            offenders=offenders,
            max_batch=lambda: BATCH,
            others_waiting=lambda: self._broker.most_waiting("m"),
            all_waiting=lambda: self._broker.all_waiting("m"),
            clock=clock,
            random_share=lambda: 0.5,
        )
        self._loop = BatchLoop(
            "m", self._broker, self._pool, self._dispatcher, Fixed(), max_batch=BATCH, max_wait_s=0.005, clock=clock
        )
        self._door = Door(TIERS, self._standings(), queue_s=QUEUE_S)
        nothing: Any = None
        self._gate = Gate(self._broker, nothing, {"m": self._pool}, lowest_tier=FREE, doors={"m": self._door})

    def _standings(self) -> list[Any]:
        return [self._broker.standing("m", tier) for tier in range(3)]

    async def _ticks(self) -> None:
        while True:
            for _ in range(10):
                await asyncio.sleep(DOOR_TICK_S / 10)
                self._broker.expire(self.clock())
            if self._loop.is_capacity_known():
                capacity, call_s = self._loop.capacity_rps(1), self._loop.service_s
                self._door.learn([capacity] * 3, [BATCH] * 3, self._standings(), call_s=call_s, burst_rps=capacity)
            self._door.tick(DOOR_TICK_S, self.clock())

    def send(self, name: str, tier: int = FREE, *, owner: str = "", timeout_s: float = 0.0) -> None:
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
            target_s=TIERS[tier].target_s,
            queue_timeout_s=QUEUE_S,
            total_timeout_s=timeout_s or 4.0,
            own_timeout_s=timeout_s,
            owner=owner or name,
        )
        if (refusal := self._gate.admit(request)) is not None:
            self.outcomes[name][type(refusal).__name__] += 1

    async def send_steadily(
        self, name: str, rate: float, seconds: float, tier: int = FREE, *, owners: int = 1, timeout_s: float = 0.0
    ) -> None:
        """So many a second, of so many owners in turn."""
        for number in range(int(rate * seconds)):
            self.send(name, tier, owner=f"{name}{number % owners}", timeout_s=timeout_s)
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


@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("owners", [1, 5, 20])
def test_nobody_who_was_let_in_times_out_where_too_much_begins_to_come(times: float, owners: int) -> None:
    scene = Scene()

    async def load(name: str, times: float, seconds: float) -> None:
        rates = {ENTERPRISE: 16 * times, PAID: 80 * times, FREE: 224 * times}
        await asyncio.gather(
            *(scene.send_steadily(f"{name}{tier}", rate, seconds, tier, owners=owners) for tier, rate in rates.items())
        )

    async def main() -> None:
        await load("calm", 0.5, 4)
        await load("much", times, 5)

    scene.run(main)
    assert {code for outcomes in scene.outcomes.values() for code in outcomes} == {"ok", "Shed"}
    assert set(scene.outcomes["much0"]) == {"ok"}


async def _both(*parts: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*parts)
