"""Batches that fit, in the real engine on virtual time: what they bring, and what they cost others."""

import pytest

from carpool.batching.policy import Fit
from carpool.upstream.simulated import SimulationSettings
from support.fitting import BY_SIZE, CONSTANT, PADDED, Found, Owner, run

HUGE, TINY = (2048,), (16,)


def test_where_padding_costs_it_is_avoided_and_everyone_gains() -> None:
    off, auto = run(PADDED, "off"), run(PADDED, "auto")
    assert auto.explains == "padding" and auto.is_by_size
    assert auto.mean_batch > 63
    assert auto.rate > 2.5 * off.rate
    assert auto.p99_s["all"] < off.p99_s["all"]


@pytest.mark.parametrize(("gpu", "explains"), [(CONSTANT, "call"), (BY_SIZE, "size")])
def test_where_padding_costs_nothing_nothing_changes(gpu: SimulationSettings, explains: str) -> None:
    off, auto = run(gpu, "off"), run(gpu, "auto")
    assert auto.explains == explains
    assert (auto.rate, auto.p99_s, auto.mean_batch) == (off.rate, off.p99_s, off.mean_batch)


def test_with_few_waiting_nothing_changes() -> None:
    quiet = {"all": Owner(100)}
    off, on = run(PADDED, "off", quiet), run(PADDED, "on", {"all": Owner(100)})
    assert (on.rate, on.p99_s) == (off.rate, off.p99_s)


# Most of the time of a call is padding; and a third of it.
WEAK = SimulationSettings(latency_ms=10.0, per_item_ms=0.5, padded_ms_per_kb=0.3)


def beside(gpu: SimulationSettings, fit: Fit, sizes: tuple[int, ...]) -> Found:
    """Fifty clients that pause, of five owners, beside an owner that always has 1,024 requests under way."""
    owners = {f"few{number}": Owner(10, pause_s=0.05) for number in range(5)}
    return run(gpu, fit, {"flood": Owner(1024, sizes), **owners}, warm_s=2.0 if gpu is PADDED else 8.0, seconds=2.0)


@pytest.mark.parametrize("gpu", [PADDED, WEAK], ids=["strong", "weak"])
@pytest.mark.parametrize("sizes", [(), HUGE, TINY], ids=["all sizes", "huge", "tiny"])
def test_an_owner_that_floods_harms_no_other(gpu: SimulationSettings, sizes: tuple[int, ...]) -> None:
    off, auto = beside(gpu, "off", sizes), beside(gpu, "auto", sizes)
    worst = {
        fit: max(p99_s for name, p99_s in found.p99_s.items() if name != "flood")
        for fit, found in (("off", off), ("auto", auto))
    }
    assert worst["auto"] <= 1.2 * worst["off"]


def test_a_flood_of_a_low_tier_harms_no_higher_one() -> None:
    def of_tiers(fit: Fit) -> Found:
        high = {name: Owner(10, pause_s=0.1, tier=tier) for tier, name in enumerate(("enterprise", "paid"))}
        return run(WEAK, fit, {"flood": Owner(512, tier=2), **high}, warm_s=8.0, seconds=8.0)

    off, auto = of_tiers("off"), of_tiers("auto")
    assert auto.is_by_size and auto.rate > off.rate
    for name in ("enterprise", "paid"):
        assert auto.p99_s[name] <= 1.2 * off.p99_s[name], name


def test_sizes_that_lie_starve_nobody() -> None:
    """A GPU whose time has nothing to do with sizes, and batches by size all the same: everyone is answered in time."""
    off, on = run(CONSTANT, "off"), run(CONSTANT, "on")
    assert on.rate > 0.98 * off.rate
    assert on.longest_s < 3 * off.longest_s


def test_a_batch_takes_no_longer_than_it_may() -> None:
    """2 ms and 0.5 ms an input: in 12 ms there is time for 20."""
    gpu = SimulationSettings(latency_ms=2.0, per_item_ms=0.5, slots=2)
    few = {"all": Owner(100, pause_s=0.01)}
    assert run(gpu, "off", few).mean_batch > 30
    found = run(gpu, "off", {"all": Owner(100, pause_s=0.01)}, batch_seconds_max=0.012)
    assert 14 < found.mean_batch <= 21


@pytest.mark.parametrize("fit", ["off", "auto"])
def test_batches_of_long_inputs_do_not_count_as_slow(fit: Fit) -> None:
    """A slow GPU that pads: a batch of long inputs takes many times as long as one of short ones, and loses no slot."""
    slow = SimulationSettings(latency_ms=40.0, padded_ms_per_kb=6.0, slots=4)
    assert run(slow, fit, {"all": Owner(1024)}, warm_s=60.0, seconds=30.0).slots == 4
