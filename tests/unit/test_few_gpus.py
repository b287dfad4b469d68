"""Too much for one to four GPUs, on virtual time: all of them stay busy with full batches, and nobody times out.

FAULTS.md asks for this as O1 and O2; `tests/chaos/test_overload.py` shows it with 32 slots, over real sockets.
"""

import pytest

from carpool.settings import Settings
from carpool.tools.bench.run import TierLoad
from carpool.tools.bench.tally import Segment
from carpool.tools.simulate import Gpus, Load, Simulated, Simulation
from carpool.upstream.simulated import SimulationSettings

TIERS = [TierLoad("enterprise", 10, ""), TierLoad("paid", 30, ""), TierLoad("free", 60, "")]
CALL_S, BATCH = 0.2, 64
# Of two calls, the one that runs and its own: what nobody is promised to be quicker than.
USUAL_MS = 2000 * CALL_S
WAIT_MAX_MS = {tier.name: tier.wait_max_ms for tier in Settings().tiers}


def overload(
    gpus: int, times: float, *, call_s: float = CALL_S, tiers: list[TierLoad] | None = None, owners: int = 100
) -> tuple[Simulated, float]:
    """What becomes of so many times the capacity once the start is over, and the share of the capacity that is used."""
    capacity = gpus * BATCH / call_s
    # Whole calls: a slot ends as many of them wherever the counted time begins.
    load = Load(segments=[Segment(times * capacity, 20 * call_s)], warm_s=15 * call_s, tiers=tiers or [], owners=owners)
    found = Simulation(Settings(), load, Gpus(count=gpus, each=SimulationSettings(latency_ms=call_s * 1000))).run()
    return found, found.all.goodput / capacity


@pytest.mark.parametrize("owners", [1, 100])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_twice_the_capacity_in_three_tiers(gpus: int, owners: int) -> None:
    found, used = overload(gpus, 2, tiers=TIERS, owners=owners)
    assert used >= 0.95
    assert found.all.ok + found.all.shed == found.all.offered
    enterprise, free = found.tiers["enterprise"], found.tiers["free"]
    assert enterprise.shed == 0 < free.ok
    assert enterprise.latency_ms.p99 is not None and enterprise.latency_ms.p99 <= 2 * USUAL_MS


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_ten_times_the_capacity_in_three_tiers(gpus: int) -> None:
    """Enterprise alone brings all that can be served."""
    found, used = overload(gpus, 10, tiers=TIERS)
    assert used >= 0.9
    assert found.all.ok + found.all.shed == found.all.offered
    p99_ms = found.tiers["enterprise"].latency_ms.p99
    assert p99_ms is not None and p99_ms <= 1.25 * (USUAL_MS + WAIT_MAX_MS["enterprise"])


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_little_too_much(gpus: int) -> None:
    """A slot that becomes free seldom finds more than it can take."""
    _, used = overload(gpus, 1.2, tiers=TIERS)
    assert used >= 0.94


@pytest.mark.parametrize("gpus", [2, 4])
def test_calls_that_take_longer_than_the_tier_may_wait(gpus: int) -> None:
    """Slots that took their batches together become free together: one batch that waits is too little for them."""
    found, used = overload(gpus, 2, call_s=1.0, owners=1)
    assert used >= 0.95
    assert found.all.ok + found.all.shed == found.all.offered


@pytest.mark.parametrize("gpus", [2, 4])
def test_many_owners_of_one_tier_wait_little_longer_than_one(gpus: int) -> None:
    """An owner's fourth request would wait for the first three of each other owner, those that are yet to come too."""
    found, used = overload(gpus, 2)
    assert used >= 0.95
    assert found.all.latency_ms.p99 is not None
    assert found.all.latency_ms.p99 <= 1.25 * (USUAL_MS + WAIT_MAX_MS["free"])
