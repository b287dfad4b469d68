"""U11: over Redis an endpoint for each batcher, and one of them falls sick: the other batchers carry its work."""

from pathlib import Path

import pytest

from support.scenarios.sick_batcher import BACK_S, Seen, one_batcher_is_sick

FAULTS = ["status 500", "status 429", "status 503", "reset", "refused", "hang"]
SICK_S = 12.0
FAILED_SHARE_MAX = 0.002


def judge(seen: Seen, what: str) -> bool:
    """Print the row's line; whether the row holds."""
    refused = [text for text in seen.problems if text.startswith("422")]
    is_back = seen.back_s is not None and seen.back_s <= BACK_S
    passed = (
        seen.verdict.is_clean and seen.share_failed <= FAILED_SHARE_MAX and not refused and not seen.letters and is_back
    )
    back = "never" if seen.back_s is None else f"{seen.back_s:.1f} s"
    seen.verdict.report(
        "U11",
        f"{what}: {seen.failed} failed ({seen.share_failed:.2%}), {dict(seen.statuses)}, {seen.tasks} tasks, "
        f"{dict(seen.problems)}, {seen.letters} dead letters, sent {seen.sends_max} times at most, back after {back}",
        passed=passed,
    )
    return passed


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_batcher_whose_endpoint_is_sick_leaves_its_work_to_another(
    tmp_path: Path, fault: str, owners: int
) -> None:
    seen = await one_batcher_is_sick(tmp_path, fault, owners=owners, sick_s=SICK_S)
    assert judge(seen, f"one of two batchers, {fault}, {owners} owners")


@pytest.mark.parametrize("owners", [1, 3])
async def test_one_that_is_slow_to_fail_leaves_its_work_to_another(tmp_path: Path, owners: int) -> None:
    seen = await one_batcher_is_sick(tmp_path, "status 500", owners=owners, sick_s=SICK_S, is_slow=True)
    assert judge(seen, f"one of two batchers, status 500 after a call's time at 60 % load, {owners} owners")


@pytest.mark.parametrize("fault", ["status 500", "status 429"])
async def test_a_sick_batcher_that_joins_fails_nobody(tmp_path: Path, fault: str) -> None:
    seen = await one_batcher_is_sick(tmp_path, fault, owners=1, sick_s=SICK_S, well=3, joins=True)
    assert judge(seen, f"a sick batcher joins three, {fault}")
