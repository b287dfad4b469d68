"""The engine on virtual time: the same seed gives the same outcomes, and it takes nothing of the machine's clock."""

import asyncio
from itertools import count
from random import Random
from typing import NamedTuple

import pytest

from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.errors import CarpoolError
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.settings import Model, Settings
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.testing import ANYBODY, FakeClock, Witness, make_request
from carpool.upstream.fleet import MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings

SETTINGS = Settings(
    model="m",
    batching=BatchingSettings(max_batch=16),
    upstream=UpstreamSettings(endpoints=["http://gpu-0/", "http://gpu-1/"]),
)
TARGETS_S = [tier.target_ms / 1000 for tier in SETTINGS.tiers]


class Ended(NamedTuple):
    number: int
    outcome: str
    seconds: float


class Drive:
    """Twice what two GPUs can do, of three tiers and some owners, one of which sends poison."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = FakeClock()
        self.ended: list[Ended] = []

    def run(self) -> list[Ended]:
        self.clock.run(self._run())
        return self.ended

    def settled(self, request: Request, outcome: Outcome) -> None:
        name = type(outcome).__name__ if isinstance(outcome, CarpoolError) else "ok"
        self.ended.append(Ended(int(request.id), name, self.clock() - request.arrived))

    def endpoints_of(self, model: Model) -> MakeEndpoint:
        gpu = SimulationSettings(latency_ms=50, max_batch=16, poison="POISON")
        return lambda address: SimulatedEndpoint(address.url, gpu, clock=self.clock)

    async def _run(self) -> None:
        engine = Engine(Runtime(SETTINGS, self.clock, self.random.random, self.endpoints_of))
        await engine.run(self._load(engine))
        assert engine.broker.held == 0

    async def _load(self, engine: Engine) -> None:
        for number in range(3000):
            tier = self.random.randrange(3)
            value = b'"POISON %d"' % number if self.random.random() < 0.002 else b'"%d"' % number
            owner = f"owner {self.random.randrange(5)}"
            request = make_request(
                str(number), self, now=self.clock(), value=value, tier=tier, target_s=TARGETS_S[tier], owner=owner
            )
            if (refusal := engine.admit(request)) is not None:
                self.ended.append(Ended(number, type(refusal).__name__, 0.0))
            await asyncio.sleep(self.random.expovariate(1280.0))
        await asyncio.sleep(5.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_gives_the_same_outcomes(seed: int) -> None:
    once = Drive(seed).run()
    assert once == Drive(seed).run()
    assert sorted(ended.number for ended in once) == list(range(3000))  # each has one
    assert {"ok", "Shed"} <= {ended.outcome for ended in once}
    assert once != Drive(seed + 10).run()


def test_a_slow_endpoint_is_shown_beside_its_siblings() -> None:
    clock = FakeClock()

    def endpoints_of(model: Model) -> MakeEndpoint:
        slow, quick = (SimulationSettings(latency_ms=latency_ms) for latency_ms in (300, 100))
        return lambda address: SimulatedEndpoint(address.url, slow if "gpu-1" in address.url else quick, clock=clock)

    async def main() -> None:
        engine = Engine(Runtime(SETTINGS, clock, Random(1).random, endpoints_of))
        (service,) = engine.serving.services
        assert not service.numbers().endpoint_latency_seconds

        async def load() -> None:
            for number in range(20):
                engine.admit(make_request(str(number), Witness(), now=clock(), value=b"1"))
                await asyncio.sleep(0.4)

        await engine.run(load())
        shown = service.numbers().endpoint_latency_seconds
        assert shown == pytest.approx(
            {
                (f"http://gpu-{number}/", share): took
                for number, took in ((0, 0.1), (1, 0.3))
                for share in ("0.5", "0.99")
            }
        )
        states = {each.endpoint: (each.call_p50_ms, each.call_p99_ms) for each in service.state().endpoints}
        assert states == {"http://gpu-0/": (100.0, 100.0), "http://gpu-1/": (300.0, 300.0)}

    clock.run(main())


def test_an_engine_without_a_journal_takes_no_tasks() -> None:
    told: list[object] = []

    async def main() -> None:
        drive = Drive(1)
        engine = Engine(Runtime(SETTINGS, drive.clock, drive.random.random, drive.endpoints_of))
        tasks = engine.admission.tasks
        tasks.submit(make_request("t", drive, now=drive.clock(), is_task=True), told.append)
        tasks.look(ANYBODY, "t", 0.0, False, lambda answer: told.append(answer))
        tasks.delete(ANYBODY, "t", told.append)
        await engine.runtime.close()

    FakeClock().run(main())
    assert len(told) == 3 and all(isinstance(each, CarpoolError) for each in told)


@pytest.mark.parametrize("max_batch", [64, 1024])
def test_a_bad_client_costs_others_little_where_endpoints_take_far_fewer_than_configured(max_batch: int) -> None:
    """What quarantined owners get is measured by the batches that endpoints really take, not by `max_batch`."""
    clock, random, limit = FakeClock(), Random(2), 8
    settings = Settings(
        model="m",
        batching=BatchingSettings(max_batch=max_batch),
        upstream=UpstreamSettings(endpoints=["http://gpu-0/"], slots=4),
    )
    gpu = SimulationSettings(latency_ms=50, slots=4, max_batch=limit, poison="POISON")
    waits: list[float] = []

    class Innocent:
        def settled(self, request: Request, outcome: Outcome) -> None:
            assert not isinstance(outcome, CarpoolError), outcome
            waits.append(clock() - request.arrived)

    async def load(engine: Engine) -> None:
        innocent, until = Innocent(), clock() + 6.0
        for number in count():
            is_bad = random.random() < 0.05
            waiter, owner = (Witness(), "bad") if is_bad else (innocent, f"good {number % 10}")
            value = b'"%b %d"' % (b"POISON" if is_bad else b"x", number)
            engine.admit(make_request(str(number), waiter, now=clock(), value=value, owner=owner))
            await asyncio.sleep(random.expovariate(0.85 * 4 * limit / 0.05))
            if clock() > until:
                break
        await asyncio.sleep(10.0)

    async def main() -> None:
        runtime = Runtime(
            settings,
            clock,
            random.random,
            lambda model: lambda address: SimulatedEndpoint(address.url, gpu, clock=clock),
        )
        engine = Engine(runtime)
        await engine.run(load(engine))

    clock.run(main())
    assert sorted(waits)[len(waits) // 2] < 0.12  # virtual time
