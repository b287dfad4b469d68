"""U1: a sick endpoint beside one that is well, at each of two batchers over Redis."""

from pathlib import Path

import pytest

from support.scenarios.sick_over_redis import one_of_two_is_sick


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("fault", ["status 500", "status 503", "reset"])
async def test_a_sick_endpoint_at_each_of_two_batchers_fails_nobody(tmp_path: Path, fault: str, share: float) -> None:
    seen = await one_of_two_is_sick(tmp_path, fault, share, seconds=10)
    passed = seen.verdict.is_clean and seen.statuses.keys() == {200} and not seen.problems and seen.failed > 0
    what = (
        f"over Redis, one of two: {fault} for {share:.0%} of its calls: {dict(seen.statuses)}, {dict(seen.problems)}, "
        f"{seen.failed} of {seen.calls} calls failed"
    )
    seen.verdict.report("U1", what, passed=passed)
    assert passed
