"""F1, F2: `kill -9` of batchers and gateways over Redis, and inputs that kill."""

from pathlib import Path

import pytest

from carpool.broker.redis.batcher.suspects import DELIVERIES_MAX
from support.redis_fleet import LEASE_S
from support.scenarios.redis_kills import PHASES, batchers_die, gateways_die, inputs_that_kill

BATCHER_KILLS, GATEWAY_KILLS, INNOCENTS = 100, 50, 60


@pytest.mark.timeout(300)
async def test_every_outcome_comes_though_batchers_die(tmp_path: Path) -> None:
    seen = await batchers_die(tmp_path, BATCHER_KILLS)
    latest = max(seen.reclaimed_s)
    passed = (
        seen.verdict.is_clean
        and all(seen.phases[phase] > 0 for phase in PHASES)
        and latest <= LEASE_S + 1.0
        and seen.errors == []
    )
    what = (
        f"{BATCHER_KILLS} x kill -9 of a batcher, entries found {dict(seen.phases)}, {len(seen.reclaimed_s)} orphans "
        f"sent by others within {latest:.2f} s of the kill (outcome within {max(seen.told_s):.2f} s), "
        f"{dict(seen.checker.tally)}"
    )
    seen.verdict.report("F1", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.timeout(240)
async def test_tasks_outlive_their_gateway(tmp_path: Path) -> None:
    seen = await gateways_die(tmp_path, GATEWAY_KILLS)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() <= {"ok", "left", "503"}
        and seen.statuses_at_the_other == {200}
        and seen.orphans > 0
        and seen.errors == []
    )
    what = (
        f"{GATEWAY_KILLS} x kill -9 of a gateway, {seen.tasks} tasks ({seen.orphans} open when a gateway died), "
        f"{dict(seen.checker.tally)}"
    )
    seen.verdict.report("F2", what, passed=passed)
    assert passed, seen.errors


async def test_inputs_that_kill_their_batcher_become_dead_letters(tmp_path: Path) -> None:
    seen = await inputs_that_kill(tmp_path, INNOCENTS)
    passed = (
        seen.verdict.is_clean
        and seen.tally == {"ok": INNOCENTS, "502": 2}
        and max(seen.sends) <= DELIVERIES_MAX
        and seen.last_batch == 1
        and seen.deliveries == [DELIVERIES_MAX, DELIVERIES_MAX]
    )
    what = (
        f"inputs that kill: sent {seen.sends} times, the last time in a batch of {seen.last_batch}, "
        f"{len(seen.deliveries)} dead letters after {seen.deliveries} deliveries, "
    )
    seen.verdict.report("F1", what + str(dict(seen.tally)), passed=passed)
    assert passed
