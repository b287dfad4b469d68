"""F3, F4, F5 and direct mode: Redis terminated, killed, stopped, forgetful, failing over."""

from pathlib import Path

import pytest

from support.scenarios.redis_outages import (
    Failovers,
    gateways_go_direct,
    keys_are_deleted,
    primaries_of_a_cluster_die,
    primary_under_sentinels_dies,
    redis_forgets,
    redis_is_away,
)

AWAY_S, BACK_S_MAX = 10.0, 5.0
GROWTH_MIB_MAX = 32.0
CLUSTER_RUNS = 20
REFUSAL_MS_MAX = 50.0


@pytest.mark.parametrize("how", ["terminated", "killed", "stopped"])
async def test_nothing_is_lost_while_redis_is_away(tmp_path: Path, how: str) -> None:
    seen = await redis_is_away(tmp_path, how, AWAY_S)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() <= {"ok", "503", "504"}
        and seen.growth_mib < GROWTH_MIB_MAX
        and seen.back_s < BACK_S_MAX
        and seen.served_after > 0
        and seen.refusal_ms < REFUSAL_MS_MAX
        and seen.errors == []
    )
    what = (
        f"Redis {how} for {AWAY_S:g} s (appendfsync always): back to normal {seen.back_s:.2f} s after its return, "
        f"refusals within {seen.refusal_ms:.1f} ms (p99), {seen.growth_mib:.0f} MiB more, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F3", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.parametrize(
    ("fsync", "how", "cut_s"),
    [("everysec", "terminated", 0.0), ("everysec", "killed", 0.0), ("everysec", "killed", 1.0), ("", "killed", 0.0)],
)
async def test_what_a_crash_of_redis_costs(tmp_path: Path, fsync: str, how: str, cut_s: float) -> None:
    seen = await redis_forgets(tmp_path, fsync, how, cut_s)
    is_bounded = {
        # What was accepted in the last second is forgotten; a shutdown, or a crash of the process alone, costs nothing.
        "everysec": seen.back_to_s < cut_s + 0.2 and (seen.verdict.lost > 0) == (cut_s > 0),
        # Everything is forgotten.
        "": seen.verdict.lost > 0 and seen.results_gone > 0,
    }[fsync]
    passed = seen.verdict.wrong == 0 and seen.verdict.late == 0 and is_bounded and seen.back_s < BACK_S_MAX
    kept = f"appendfsync {fsync}" if fsync else "nothing on disk"
    cut = f", its last {cut_s:g} s of writes cut off" if cut_s else ""
    what = (
        f"Redis {how} ({kept}{cut}): of {seen.accepted} accepted tasks {seen.verdict.lost} are lost, and results of "
        f"{seen.results_gone} that had been told; accepted up to {seen.back_to_s:.2f} s before"
    )
    seen.verdict.report("F4", what, passed=passed)
    assert passed


def is_nothing_lost(seen: Failovers) -> bool:
    """A result that a replica did not have yet may be told twice. But nobody is given up: no batcher died."""
    verdict = seen.verdict
    has_no_fault = verdict.lost == verdict.wrong == verdict.late == 0 and seen.errors == []
    return has_no_fault and seen.checker.tally.keys() <= {"ok", "503", "504"}


@pytest.mark.timeout(300)
async def test_nothing_is_lost_when_primaries_of_a_cluster_die(tmp_path: Path) -> None:
    seen = await primaries_of_a_cluster_die(tmp_path, CLUSTER_RUNS)
    passed = is_nothing_lost(seen)
    what = f"{CLUSTER_RUNS} x primary of a 3+3 Cluster killed (WAIT 1): {seen.figures()}, {dict(seen.checker.tally)}"
    seen.verdict.report("F5", what, passed=passed)
    assert passed, seen.errors


async def test_nothing_is_lost_when_a_primary_under_sentinels_dies(tmp_path: Path) -> None:
    seen = await primary_under_sentinels_dies(tmp_path)
    passed = is_nothing_lost(seen)
    what = f"primary under Sentinels killed (WAIT 1): {seen.figures()}, {dict(seen.checker.tally)}"
    seen.verdict.report("F5", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_gateways_with_upstreams_serve_on_without_redis(tmp_path: Path, how: str) -> None:
    seen = await gateways_go_direct(tmp_path, how, seconds=6.0)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.longest_gap_s < 1.0
        and seen.mean_batch > 1.0
        and seen.task_statuses == {503}
        and seen.without_upstreams == {503}
        and seen.refusal_ms < REFUSAL_MS_MAX
        and seen.back_s < BACK_S_MAX
        and seen.served_direct > 0
    )
    what = (
        f"direct mode, Redis {how}: longest gap of a client {seen.longest_gap_s:.2f} s, mean batch "
        f"{seen.mean_batch:.1f}, tasks {seen.task_statuses}, without upstreams {seen.without_upstreams} within "
        f"{seen.refusal_ms:.1f} ms, normal {seen.back_s:.2f} s after the return, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F3", what, passed=passed)
    assert passed


async def test_who_waits_is_served_when_keys_are_deleted(tmp_path: Path) -> None:
    seen = await keys_are_deleted(tmp_path, times=6)
    passed = seen.verdict.is_clean and seen.statuses.keys() == {200} and seen.slowest_s < 1.5
    what = f"3 x reply stream deleted, 3 x FLUSHALL: {dict(seen.statuses)}, the slowest {seen.slowest_s:.2f} s"
    seen.verdict.report("R6", what, passed=passed)
    assert passed
