"""A plan simulated: whether p99 holds, and the smallest fleet for which it does.

1. It holds if at most one request in a hundred had no answer, and p99 of the answers is at most what is wanted. Without
   headroom at all it does not, whatever a short run says: the queue never shrinks.
2. A run is as short as tells that: MANY requests, and BATCH_TIMES times as long as a call.
"""

from collections.abc import Callable
from math import floor

import msgspec

from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.tools.bench.tally import Segment
from carpool.tools.plan import P99_BOUNDS, PlanError, Sizing, Workload, check_bounds, shown
from carpool.tools.simulate import GPUS_MAX, RATE_MAX, Gpus, Load, Simulation
from carpool.upstream.simulated import SimulationSettings

MANY, BATCH_TIMES, REQUESTS_MAX, SECONDS_MAX = 5_000, 20, 2_000_000, 10_000
ANSWERED_MIN = 0.99
BATCH_MAX, PAYLOAD_BYTES = 65_536, 100


class Checked(msgspec.Struct, frozen=True):
    """What was simulated with so many GPUs."""

    gpus: int
    p99_ms: float | None
    answered_share: float
    busy_share: float
    holds: bool


class Verified(msgspec.Struct, frozen=True):
    """One rate. `smallest`: None where no fleet of a sensible size holds."""

    rate: float
    p99_ms_max: float
    planned: Checked
    smallest: Checked | None


def verify(work: Workload, sizing: Sizing, p99_ms_max: float, told: Callable[[float, Checked], None]) -> Verified:
    """Simulate a plan at one of its rates; each run is told. Raises PlanError."""
    check_bounds("--p99-ms", p99_ms_max, P99_BOUNDS)
    batch_s, rate = work.batch_ms / 1000, sizing.rate
    seconds = max(MANY / rate, BATCH_TIMES * batch_s)
    if not p99_ms_max > work.batch_ms:
        raise PlanError(f"--p99-ms is {shown(p99_ms_max)}, and a call alone takes {shown(work.batch_ms)}: give more")
    if rate > RATE_MAX or sizing.servers.gpus > GPUS_MAX or rate * seconds > REQUESTS_MAX or work.batch > BATCH_MAX:
        raise PlanError(
            f"--verify takes {RATE_MAX:,}/s, {GPUS_MAX:,} GPUs, {BATCH_MAX:,} inputs a call and {REQUESTS_MAX:,} "
            f"requests within {BATCH_TIMES} calls at most: give a part of the rate, or --peak 1"
        )
    if seconds > SECONDS_MAX:
        raise PlanError(
            f"--verify takes {SECONDS_MAX:,} s, and {MANY:,} requests and {BATCH_TIMES} calls are {shown(seconds)} s: "
            "give a higher rate, or a shorter call"
        )
    settings = Settings(
        batching=BatchingSettings(max_batch=work.batch),
        upstream=UpstreamSettings(timeout_s=max(UpstreamSettings().timeout_s, 2 * batch_s)),
    )
    load = Load(segments=[Segment(rate, seconds)], warm_s=seconds / 4, payload_bytes=PAYLOAD_BYTES)
    each = SimulationSettings(latency_ms=work.batch_ms, max_batch=work.batch)
    checked: dict[int, Checked] = {}

    def check(gpus: int) -> Checked:
        if gpus not in checked:
            run = Simulation(settings, load, Gpus(count=gpus, each=each)).run()
            p99_ms, answered = run.all.latency_ms.p99, run.all.ok / max(run.all.offered, 1)
            holds = p99_ms is not None and p99_ms <= p99_ms_max and answered >= ANSWERED_MIN and gpus >= least
            checked[gpus] = Checked(gpus, p99_ms, round(answered, 4), run.busy_share, holds)
            told(rate, checked[gpus])
        return checked[gpus]

    # The first that is not busy all the time.
    least = floor(rate / (work.batch / batch_s)) + 1
    planned = check(sizing.servers.gpus)
    found = fewest(lambda count: check(count).holds, least)
    return Verified(rate, p99_ms_max, planned, None if found is None else check(found))


def fewest(is_enough: Callable[[int], bool], least: int) -> int | None:
    """The smallest number from `least` on that is enough; None if that is over twice as many and GPUS_MAX.

    It is near `least`, mostly: so the steps double, and the last one is halved.
    """
    low, high = least - 1, least
    while not is_enough(high):
        if high - least > least + 32 or high >= GPUS_MAX:
            return None
        low, high = high, min(2 * high - least + 1, GPUS_MAX)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
