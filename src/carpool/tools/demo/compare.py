"""One by one beside carpool, on the same arrivals: latencies, and how many GPUs each needs. Everything is computed.

One by one, each request has a GPU for itself for the time of a call; requests that come while all are busy wait in one
line. Carpool is production's own engine, on virtual time. A GPU takes as long for a whole batch
as for one input, as GPUs do, about, as long as a batch does not fill them.
"""

import os
import sys
from collections.abc import Callable
from heapq import heapify, heapreplace
from math import ceil
from typing import Any, cast

import msgspec

from carpool.batching.policy import PolicyName
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, SheddingSettings, UpstreamSettings
from carpool.tools.bench.tally import LogHistogram, Segment
from carpool.tools.simulate import Gpus, Load, Simulation
from carpool.tools.verify import fewest
from carpool.upstream.simulated import SimulationSettings

BATCHING = BatchingSettings()
# The p99 that a fleet must hold to be enough.
P99_MS_MAX = 500.0
# Arrivals of so many seconds, at most so many: the comparison should be there within a second or two. And at least
# about so many.
SECONDS, ARRIVALS_MAX, ARRIVALS_MIN = 6.0, 4000, 50
# The share of first arrivals that does not count: they find everything idle.
WARM_UP = 0.2
# Nobody waits so long.
PATIENCE_S = 24 * 3600.0
# A fleet that is busier than this is not enough, even if it keeps up for a few seconds.
BUSY_MAX = 0.95


def compare(rate: float, gpus: int, latency_ms: float, policy: PolicyName = "adaptive") -> dict[str, Any]:
    """Both at this rate: `p99_ms` with these GPUs, None if they cannot keep up; `gpus_needed` to hold P99_MS_MAX."""
    seconds = max(min(SECONDS, ARRIVALS_MAX / rate), ARRIVALS_MIN / rate)
    load = Load(segments=[Segment(rate, seconds * (1 - WARM_UP))], warm_s=seconds * WARM_UP)
    came = sum(1 for _ in load.times())

    def side(p99_ms: Callable[[int], float], inputs_a_call: int) -> dict[str, Any]:
        # How many GPUs are busy all the time.
        busy = came / seconds * latency_ms / 1000 / inputs_a_call
        needed = fewest(lambda count: p99_ms(count) <= P99_MS_MAX, max(1, ceil(busy / BUSY_MAX)))
        # Without a steady state latencies only tell how long the simulation ran.
        return {"p99_ms": round(p99_ms(gpus), 1) if busy < gpus else None, "gpus_needed": needed}

    one = side(lambda count: one_by_one_p99_ms(load, count, latency_ms), 1)
    carpool = side(lambda count: carpool_p99_ms(load, count, latency_ms, policy), BATCHING.max_batch)
    return {"rate": rate, "gpus": gpus, "p99_ms_max": P99_MS_MAX, "one_by_one": one, "carpool": carpool}


def one_by_one_p99_ms(load: Load, gpus: int, latency_ms: float) -> float:
    """The 99th percentile, without the warm-up."""
    free_at = [0.0] * gpus
    heapify(free_at)
    seconds, latencies = latency_ms / 1000, LogHistogram()
    for at in load.times():
        done = max(at, free_at[0]) + seconds
        heapreplace(free_at, done)
        if at >= load.warm_s:
            latencies.add((done - at) * 1000)
    return latencies.percentile(0.99) or 0.0


def carpool_p99_ms(load: Load, gpus: int, latency_ms: float, policy: PolicyName) -> float:
    """The same, where no request is refused, and each waits as long as it takes."""
    settings = Settings(
        batching=BatchingSettings(policy=policy),
        broker=BrokerSettings(queue_timeout_s=PATIENCE_S, total_timeout_s=PATIENCE_S),
        upstream=UpstreamSettings(timeout_s=PATIENCE_S),
        shedding=SheddingSettings(mode="off"),
    )
    gpu = SimulationSettings(latency_ms=latency_ms, max_batch=BATCHING.max_batch)
    found = Simulation(settings, load, Gpus(count=gpus, each=gpu)).run()
    return found.all.latency_ms.p99 or 0.0


if __name__ == "__main__":
    os.nice(10)  # the demo goes on meanwhile
    _rate, _gpus, _latency_ms, _policy = sys.argv[1:]
    _found = compare(float(_rate), int(_gpus), float(_latency_ms), cast(PolicyName, _policy))
    sys.stdout.buffer.write(msgspec.json.encode(_found))
