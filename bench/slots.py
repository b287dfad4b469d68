"""`upstream.slots = "auto"` beside one slot and two, on virtual time: production's own engine, one simulated GPU.

    .venv/bin/python bench/slots.py [--seconds N] [--seed N]

Each setting meets the same arrivals, with load shedding on. Nothing is measured but waits: virtual time passes while
somebody waits, not while something is computed. The same seed gives the same table.
"""

import argparse
import asyncio
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from rich.console import Console
from rich.table import Table

from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.tools.bench.tally import Segment
from carpool.tools.simulate import Load
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings
from carpool.virtual_time import VirtualClock

MODEL = "m"
MAX_BATCH = 8
# Of one call at a time, transfer included.
CALL_S = 0.05
FULL_RPS = MAX_BATCH / CALL_S
LOADS = (0.7, 1.2, 2.0)
SETTINGS: tuple[int | Literal["auto"], ...] = (1, 2, "auto")


@dataclass(frozen=True)
class Model:
    """How a GPU behaves with several calls at once."""

    name: str
    # How many it runs at once.
    takes: int = 1
    # The part of a call in which the GPU is not needed: transfer, tokenisation.
    apart: float = 0.0
    # How much longer it needs for a call that came while another ran.
    slower: float = 1.0
    # It answers 429 to a call that would have to wait.
    refuses: bool = False


MODELS = (
    Model("one at a time"),
    Model("a third of a call is transfer", apart=1 / 3),
    Model("two at once", takes=2),
    Model("eight at once", takes=8),
    Model("30 % slower with two", slower=1.3),
    Model("429 for a second call", refuses=True),
)


class Gpu(SimulatedEndpoint):
    def __init__(self, model: Model, slots: int | Literal["auto"], rng: random.Random, clock: VirtualClock) -> None:
        gpu = SimulationSettings(latency_ms=CALL_S * (1.0 - model.apart) * 1000, slots=model.takes)
        super().__init__("gpu", gpu, self._run, clock)
        self.slots = None if slots == "auto" else slots  # type: ignore[assignment]
        self._model = model
        self._rng = rng
        # By how much longer the calls take that came and have not begun, in their order.
        self._slower: deque[float] = deque()

    async def _run(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._rng.uniform(0.8, 1.2) * self._slower.popleft())

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        if self._model.refuses and self.gpu.stats().in_flight >= self._model.takes:
            return UpstreamResponse(429, b"")
        if self._model.apart:
            await asyncio.sleep(CALL_S * self._model.apart)
        self._slower.append(self._model.slower if self.gpu.stats().in_flight else 1.0)
        return await super().post(call, timeout_s)


@dataclass
class Run:
    """One setting before one GPU at one rate."""

    model: Model
    slots: int | Literal["auto"]
    arrivals: list[float]
    seed: int
    took_ms: list[float] = field(default_factory=list)
    errors: int = 0
    shed: int = 0
    found: float = 0.0

    def play(self) -> "Run":
        self.clock = VirtualClock()
        self.clock.run(self._play())
        self.took_ms.sort()
        return self

    async def _play(self) -> None:
        rng = random.Random(self.seed)
        settings = Settings(
            model=MODEL,
            batching=BatchingSettings(max_batch=MAX_BATCH),
            upstream=UpstreamSettings(endpoints=["http://gpu/infer"], slots=self.slots),
        )
        gpu = Gpu(self.model, self.slots, rng, self.clock)
        self.engine = Engine(Runtime(settings, self.clock, rng.random, lambda model: lambda address: gpu))
        await self.engine.run(self._arrive())

    async def _arrive(self) -> None:
        start = self.clock()
        for number, at in enumerate(self.arrivals):
            if start + at > self.clock():
                await asyncio.sleep(start + at - self.clock())
            now = self.clock()
            request = Request(str(number), MODEL, b"", b"1", 1, 0, now, now, inf, inf, self)
            self.shed += self.engine.admit(request) is not None
        self.found = self.engine.serving.services[0].pool.members[0].limit
        await asyncio.sleep(5.0)

    def settled(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Output):
            self.took_ms.append((self.clock() - request.arrived) * 1000)
        else:
            self.errors += 1

    def cell(self) -> str:
        p50, p99 = (self.took_ms[int(share * (len(self.took_ms) - 1))] for share in (0.5, 0.99))
        errors = f", [bold red]{self.errors} failed[/]" if self.errors else ""
        found = f", has {self.found:g}" if self.slots == "auto" else ""
        return f"{len(self.took_ms) / self.arrivals[-1]:.1f}/s, {p50:.0f} / {p99:.0f}{found}{errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Slots found and slots set, on virtual time.")
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual time of each run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    title = f"Served a second, p50 / p99 in ms; one call at a time: {FULL_RPS:g}/s; {options.seconds:g} s"
    table = Table("", "load", *(f"slots = {each}" for each in SETTINGS), title=title, title_justify="left")
    for model in MODELS:
        for load in LOADS:
            rate = load * FULL_RPS
            arrivals = list(Load(segments=[Segment(rate, options.seconds)], seed=options.seed).times())
            runs = [Run(model, slots, arrivals, options.seed).play() for slots in SETTINGS]
            table.add_row(model.name, f"{load:.0%}", *(run.cell() for run in runs))
    console.print(table)


if __name__ == "__main__":
    main()
