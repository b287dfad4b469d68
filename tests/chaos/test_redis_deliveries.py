"""F6, F7, C3 over Redis: doubled deliveries, calls longer than the lease, rolling restarts."""

from pathlib import Path

import pytest

from support.redis_fleet import LEASE_S
from support.scenarios.redis_deliveries import (
    calls_longer_than_the_lease,
    doubled_deliveries,
    rolling_restarts_over_redis,
)

REQUESTS = 64
ROUNDS = 10


async def test_doubled_deliveries_are_not_noticed(tmp_path: Path) -> None:
    seen = await doubled_deliveries(tmp_path, seconds=10)
    intruder = seen.intruder
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and intruder.copied > 0.05 * seen.requests
        and intruder.stolen > 0.02 * seen.requests
        and intruder.taken > 0
        and intruder.raced > 0
        and seen.errors == []
    )
    what = (
        f"{seen.requests} requests; by an intruder {intruder.copied} entries copied, {intruder.taken} taken, "
        f"{intruder.stolen} claimed from their batcher, {intruder.raced} claimed before other batchers; "
        f"{seen.late_outcomes:g} outcomes came when nobody waited any more, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F6", what, passed=passed)
    assert passed, seen.errors


async def test_a_call_longer_than_the_lease_is_made_once(tmp_path: Path) -> None:
    seen = await calls_longer_than_the_lease(tmp_path, REQUESTS)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.checker.tally == {"ok": REQUESTS}
        and seen.claimed == 0
        and seen.dead_letters == 0
        and seen.seconds > 3 * LEASE_S
    )
    what = (
        f"calls of {3 * LEASE_S:g} s, lease {LEASE_S:g} s: {seen.claimed:g} claimed, {seen.dead_letters} dead letters"
    )
    seen.verdict.report("F7", what, passed=passed)
    assert passed


@pytest.mark.timeout(240)
async def test_rolling_restarts_over_redis_are_not_noticed(tmp_path: Path) -> None:
    seen = await rolling_restarts_over_redis(tmp_path, ROUNDS, clients=30)
    passed = seen.verdict.is_clean and seen.checker.tally.keys() == {"ok"} and seen.errors == []
    what = (
        f"{ROUNDS} x SIGTERM of a gateway and of a batcher over Redis, {dict(seen.checker.tally)}, slowest exit after "
        f"{seen.slowest_exit_s:.2f} s"
    )
    seen.verdict.report("C3", what, passed=passed)
    assert passed, seen.errors
