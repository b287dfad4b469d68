"""Deadlines while Redis stands still for moments."""

from pathlib import Path

import pytest

from support.scenarios.redis_stalls import redis_stalls

SECONDS = 40.0


@pytest.mark.timeout(120)
async def test_nothing_is_sent_late_when_redis_stalls(tmp_path: Path) -> None:
    seen = await redis_stalls(tmp_path, SECONDS)
    passed = seen.verdict.is_clean and seen.sent_late == 0 and seen.statuses[200] > 0
    seen.verdict.report("R5", str(seen), passed=passed)
    assert passed
