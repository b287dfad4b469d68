"""One by one beside carpool, on the same arrivals: latencies, and how many GPUs each needs. Everything is computed.

One by one, each request has a GPU for itself for the time of a call; requests that come while all are busy wait in one
line. Carpool is production's own engine, on virtual time. A GPU takes as long for a whole batch
as for one input, as GPUs do, about, as long as a batch does not fill them.
"""

import asyncio
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from math import ceil, inf
from random import Random
from typing import Any, cast

import msgspec

from carpool.batching.policy import PolicyName
from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.core.outcome import Outcome
from carpool.core.request import Request
from carpool.settings import Model, Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, SheddingSettings, UpstreamSettings
from carpool.upstream.fleet import MakeEndpoint
from carpool.upstream.simulated import SimulatedEndpoint, SimulationSettings
from carpool.virtual_time import VirtualClock

MODEL = "m"
BATCHING = BatchingSettings()
# The p99 that a fleet must hold to be enough.
P99_MS_MAX = 500.0
# Arrivals of so many seconds, at most so many: the comparison should be there within a second or two.
SECONDS, ARRIVALS_MAX = 6.0, 4000
# The share of first arrivals that does not count: they find everything idle.
WARM_UP = 0.2
SPARE_GPUS = 32
# A fleet that is busier than this is not enough, even if it keeps up for a few seconds.
BUSY_MAX = 0.95


def compare(
    rate: float, gpus: int, latency_ms: float, policy: PolicyName = "adaptive", seed: int = 1
) -> dict[str, Any]:
    """Both at this rate: `p99_ms` with these GPUs, None if they cannot keep up; `gpus_needed` to hold P99_MS_MAX."""
    arrivals = draw_arrivals(rate)

    def side(latencies: Callable[[int], Sequence[float]], inputs_a_call: int) -> dict[str, Any]:
        # How many GPUs are busy all the time.
        load = len(arrivals) / arrivals[-1] * latency_ms / 1000 / inputs_a_call
        needed = fewest(lambda count: p99_ms(latencies(count)) <= P99_MS_MAX, load)
        # Without a steady state latencies only tell how long the simulation ran.
        return {"p99_ms": p99_ms(latencies(gpus)) if load < gpus else None, "gpus_needed": needed}

    one = side(lambda count: one_by_one(arrivals, count, latency_ms), 1)
    carpool = side(lambda count: Ride(arrivals, count, latency_ms, policy).run(), BATCHING.max_batch)
    return {"rate": rate, "gpus": gpus, "p99_ms_max": P99_MS_MAX, "one_by_one": one, "carpool": carpool}


def draw_arrivals(rate: float) -> list[float]:
    """Poisson arrivals, the same each time."""
    random = Random(1)
    seconds = min(SECONDS, ARRIVALS_MAX / rate)
    arrivals = [random.expovariate(rate)]
    while arrivals[-1] < seconds or len(arrivals) < 50:
        arrivals.append(arrivals[-1] + random.expovariate(rate))
    return arrivals


def one_by_one(arrivals: Sequence[float], gpus: int, latency_ms: float) -> list[float]:
    """Latencies in ms, in the order of arrival."""
    free_at = [0.0] * gpus
    heapify(free_at)
    seconds = latency_ms / 1000
    latencies = []
    for at in arrivals:
        done = max(at, free_at[0]) + seconds
        heapreplace(free_at, done)
        latencies.append((done - at) * 1000)
    return latencies


def fewest(is_enough: Callable[[int], bool], load: float) -> int:
    """The smallest number of GPUs that is enough. `load`: how many are busy all the time; twice as many do not wait."""
    low = max(1, ceil(load / BUSY_MAX))
    counts = range(low, 2 * low + SPARE_GPUS)
    return low + bisect_left(counts, True, key=is_enough)


def p99_ms(latencies: Sequence[float]) -> float:
    """The 99th percentile, without the latencies of the warm-up."""
    counted = sorted(latencies[int(len(latencies) * WARM_UP) :])
    return round(counted[min(len(counted) - 1, int(0.99 * len(counted)))], 1)


class Ride:
    """Production's own engine, to simulated GPUs, on virtual time."""

    def __init__(self, arrivals: Sequence[float], gpus: int, latency_ms: float, policy: PolicyName) -> None:
        self._clock = VirtualClock()
        self._arrivals = [self._clock() + at for at in arrivals]
        self._settings = Settings(
            model=MODEL,
            batching=BatchingSettings(policy=policy),
            broker=BrokerSettings(waiting_max=len(arrivals)),
            shedding=SheddingSettings(mode="off"),
            upstream=UpstreamSettings(endpoints=[f"http://gpu-{number}/" for number in range(gpus)]),
        )
        self._gpu = SimulationSettings(latency_ms=latency_ms, max_batch=BATCHING.max_batch)
        self._latencies = [0.0] * len(arrivals)
        self._left = len(arrivals)

    def run(self) -> list[float]:
        """Latencies in ms, in the order of arrival."""
        self._clock.run(self._run())
        return self._latencies

    def _endpoints(self, model: Model) -> MakeEndpoint:
        return lambda address: SimulatedEndpoint(address.url, self._gpu, clock=self._clock)

    async def _run(self) -> None:
        engine = Engine(Runtime(self._settings, self._clock, Random(1).random, self._endpoints))
        self._all_settled = asyncio.Event()
        await engine.run(self._send(engine))

    async def _send(self, engine: Engine) -> None:
        for number, at in enumerate(self._arrivals):
            await asyncio.sleep(at - self._clock())
            engine.admit(Request(str(number), MODEL, b"", b"1", 1, 0, at, at, inf, inf, self))
        await self._all_settled.wait()

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Note how long a request took."""
        self._latencies[int(request.id)] = (self._clock() - request.arrived) * 1000
        self._left -= 1
        if not self._left:
            self._all_settled.set()


if __name__ == "__main__":
    os.nice(10)  # the demo goes on meanwhile
    _rate, _gpus, _latency_ms, _policy = sys.argv[1:]
    _found = compare(float(_rate), int(_gpus), float(_latency_ms), cast(PolicyName, _policy))
    sys.stdout.buffer.write(msgspec.json.encode(_found))
