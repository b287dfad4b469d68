"""U1, U4, U5 of FAULTS.md in a short form; `make chaos` runs them long."""

from pathlib import Path

import pytest

from support.scenarios.resilience import ALL_BAD, ONE_BAD, all_are_bad, one_is_slow, one_of_three_is_bad, poison


@pytest.mark.parametrize("behaviour", ONE_BAD)
async def test_u1_one_bad_endpoint_of_three_is_not_noticed(tmp_path: Path, behaviour: str) -> None:
    seen = await one_of_three_is_bad(tmp_path, behaviour, per_s=100, seconds=4)
    assert seen.verdict.is_clean, seen
    assert seen.succeeded >= 0.999, seen


@pytest.mark.parametrize("behaviour", ALL_BAD)
async def test_u1_all_bad_fails_fast_and_spares_the_upstream(tmp_path: Path, behaviour: str) -> None:
    seen = await all_are_bad(tmp_path, behaviour, per_s=100, seconds=3)
    assert seen.verdict.is_clean, seen
    assert seen.statuses <= {502, 503, 504}, seen
    assert seen.sends_per_request <= 1.2, seen


async def test_u4_poison_harms_nobody_else(tmp_path: Path) -> None:
    seen = await poison(tmp_path, every=200, per_s=200, seconds=5)
    assert seen.verdict.is_clean, seen
    assert seen.innocents_ok >= 0.999, seen
    assert seen.poison_refused == 1.0, seen
    assert seen.poison_sends_max <= 7, seen
    assert seen.dead_letters == 5, seen
    assert seen.breakers == {"closed"}, seen


async def test_u5_a_slow_endpoint_gets_what_it_can_serve(tmp_path: Path) -> None:
    # The door is off: on a machine that stands still for a second it would refuse what comes all at once after that,
    # whoever is slow.
    seen = await one_is_slow(tmp_path, per_s=125, seconds=6, settings={"shedding.mode": "off"})
    assert seen.verdict.is_clean, seen
    assert seen.succeeded >= 0.999, seen
    assert seen.share < 0.1, seen  # 8 of 168 requests a second, and a third of the endpoints
