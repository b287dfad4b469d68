"""F9, F10: batchers die again and again, and those who were with them are innocent."""

from pathlib import Path

import pytest

from support.scenarios.redis_suspects import batchers_die_in_turn, many_in_flight_at_two_kills

KILL_EVERY_S, SECONDS = 2.0, 60.0
IN_FLIGHT, LAST_504_S_MAX = 256, 3.0


@pytest.mark.timeout(240)
async def test_nobody_is_given_up_though_batchers_die_all_the_time(tmp_path: Path) -> None:
    seen = await batchers_die_in_turn(tmp_path, SECONDS, KILL_EVERY_S)
    passed = (
        seen.verdict.lost == seen.verdict.wrong == 0
        and seen.given_up == seen.dead_letters == 0
        and seen.kills >= 0.8 * SECONDS / KILL_EVERY_S  # on a busy machine the next batcher may be late
        and seen.checker.tally["ok"] > 0.9 * sum(seen.checker.tally.values())
        and seen.errors == []
    )
    what = (
        f"{seen.kills} x kill -9 of one of two batchers in {SECONDS:g} s: given up {seen.given_up}, dead letters "
        f"{seen.dead_letters}, synchronous ones {dict(seen.statuses)}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F9", what, passed=passed)
    assert passed, seen.errors


async def test_those_in_flight_at_two_kills_hold_up_nobody(tmp_path: Path) -> None:
    seen = await many_in_flight_at_two_kills(tmp_path, IN_FLIGHT, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.others.verdict().is_clean
        and seen.tasks.tally == {"ok": IN_FLIGHT}
        and seen.held[0] == IN_FLIGHT
        and seen.held[1] > 0
        and seen.last_504_s <= LAST_504_S_MAX
        and seen.others.tally.keys() <= {"ok", "504"}
        and seen.dead_letters == 0
    )
    what = (
        f"two kills with {seen.held} tasks in flight: their last outcome {seen.last_task_s:.2f} s after the second, "
        f"the last 504 of 10/s others {seen.last_504_s:.2f} s; tasks {dict(seen.tasks.tally)}, others "
        f"{dict(seen.others.tally)}, dead letters {seen.dead_letters}"
    )
    seen.verdict.report("F10", what, passed=passed)
    assert passed
