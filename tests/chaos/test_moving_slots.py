"""Slots of a Cluster that move under load."""

from pathlib import Path

import pytest

from support.scenarios.moving_slots import slots_move

TIMES = 6
REFUSED_SHARE_MAX = 0.01


@pytest.mark.timeout(240)
async def test_nothing_is_lost_when_slots_move(tmp_path: Path) -> None:
    seen = await slots_move(tmp_path, TIMES)
    refused = seen.task_statuses.total() - seen.task_statuses[202]
    passed = seen.verdict.is_clean and refused <= REFUSED_SHARE_MAX * seen.task_statuses.total() and seen.errors == []
    seen.verdict.report("R3", f"{2 * TIMES} slots moved, each held open 4 to 6 s: {seen}", passed=passed)
    assert passed, seen.errors[:10]
