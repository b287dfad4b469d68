"""Clients that each have one request under way, of mixed sizes, to the real engine and a simulated GPU, on virtual
time: what batches that fit are worth, without a GPU.
"""

import asyncio
from dataclasses import dataclass, field
from math import inf
from random import Random

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import Fit
from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.settings import Model, Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, SheddingSettings, UpstreamSettings
from carpool.upstream.fleet import MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings
from carpool.virtual_time import VirtualClock

MODEL = "m"
# Of a real encoder's calls, more or less: 64 inputs of 240 bytes at the median, cut at 2,048.
PADDED = SimulationSettings(latency_ms=2.0, padded_ms_per_kb=0.15, slots=2)
CONSTANT = SimulationSettings(latency_ms=20.0, jitter=0.2, slots=2, seed=1)
BY_SIZE = SimulationSettings(latency_ms=2.0, per_kb_ms=0.6, jitter=0.1, slots=2, seed=1)
MEDIAN, SIGMA, LARGEST = 240, 0.875, 2048


@dataclass
class Owner:
    """So many clients of one owner, each with one request under way at a time; `pause_s` between two of them."""

    clients: int
    sizes: tuple[int, ...] = ()
    pause_s: float = 0.0
    tier: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass
class Found:
    """What a run has shown, once it was warm."""

    rate: float
    mean_batch: float
    is_by_size: bool
    explains: str
    p99_s: dict[str, float]
    longest_s: float
    # Calls that the endpoint may have at once in the end.
    slots: float


class Load:
    """The waiter of every request of a run."""

    def __init__(
        self,
        owners: dict[str, Owner],
        gpu: SimulationSettings,
        batching: BatchingSettings,
        warm_s: float,
        measured_s: float,
    ) -> None:
        self.owners = owners
        self.batching = batching
        self.gpu = gpu
        self.warm_s, self.measured_s = warm_s, measured_s
        self.clock, self.random = VirtualClock(), Random(1)
        self.begin = self.clock() + warm_s
        self.count = self.batches_then = 0
        self.longest_s = 0.0

    def run(self) -> Found:
        """Run it, and say what was seen."""
        self.clock.run(self._run())
        return self.found

    async def _run(self) -> None:
        clients = sum(owner.clients for owner in self.owners.values())
        settings = Settings(
            model=MODEL,
            batching=self.batching,
            broker=BrokerSettings(waiting_max=2 * clients),
            shedding=SheddingSettings(mode="off"),
            upstream=UpstreamSettings(endpoints=["sim:"], slots=self.gpu.slots),
        )

        def endpoints(model: Model) -> MakeEndpoint:
            return lambda address: SimulatedEndpoint(address.url, self.gpu, asyncio.sleep, self.clock)

        self.engine = Engine(Runtime(settings, self.clock, self.random.random, endpoints))
        (service,) = self.engine.serving.services
        await self.engine.run(self._measure(service.loop))

    async def _measure(self, loop: BatchLoop) -> None:
        for name, owner in self.owners.items():
            for _ in range(owner.clients):
                self._send(name)
        await asyncio.sleep(self.warm_s)
        batches = sum(loop.batches.values())
        await asyncio.sleep(self.measured_s)
        batches = sum(loop.batches.values()) - batches
        self.found = Found(
            rate=self.count / self.measured_s,
            mean_batch=self.count / max(1, batches),
            is_by_size=loop.cost.is_padded,
            explains=loop.cost.explains(),
            p99_s={
                name: sorted(owner.seconds)[int(0.99 * len(owner.seconds))]
                for name, owner in self.owners.items()
                if owner.seconds
            },
            longest_s=self.longest_s,
            slots=self.engine.serving.services[0].pool.total(),
        )

    def _send(self, name: str) -> None:
        owner, now = self.owners[name], self.clock()
        if owner.sizes:
            size = self.random.choice(owner.sizes)
        else:
            size = min(LARGEST, max(3, int(MEDIAN * self.random.lognormvariate(0.0, SIGMA))))
        value = b'"' + bytes(size - 2).replace(b"\0", b"x") + b'"'
        place = now + self.engine.runtime.settings.tiers[owner.tier].target_ms / 1000
        request = Request("r", MODEL, b"", value, size, owner.tier, now, place, inf, inf, self, owner=name)
        refusal = self.engine.admit(request)
        assert refusal is None, refusal

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Count an answer, and send the next one."""
        assert isinstance(outcome, Output), outcome
        name, now = request.owner, self.clock()
        if self.begin <= now < self.begin + self.measured_s:
            self.count += 1
            self.owners[name].seconds.append(now - request.arrived)
            self.longest_s = max(self.longest_s, now - request.arrived)
        loop = asyncio.get_running_loop()
        pause_s = self.random.expovariate(1 / pause) if (pause := self.owners[name].pause_s) else 0.0
        if now < self.begin + self.measured_s:
            loop.call_later(pause_s, self._send, name) if pause_s else loop.call_soon(self._send, name)


def run(
    gpu: SimulationSettings,
    fit: Fit = "auto",
    owners: dict[str, Owner] | None = None,
    warm_s: float = 2.0,
    seconds: float = 3.0,
    batch_seconds_max: float = 0.0,
) -> Found:
    """By default 1,024 clients of one owner."""
    batching = BatchingSettings(fit=fit, batch_seconds_max=batch_seconds_max)
    return Load(owners or {"all": Owner(1024)}, gpu, batching, warm_s, seconds).run()
