"""C1, C2: clients that hang up."""

from pathlib import Path
from statistics import median

import pytest

from support.scenarios.clients_leave import half_of_all_cancel, hang_up_in_waves, hang_up_over_redis

MIB = 1024 * 1024


@pytest.mark.timeout(240)
async def test_ten_thousand_hang_ups_free_their_places_and_leak_nothing(tmp_path: Path) -> None:
    seen = await hang_up_in_waves(tmp_path, waves=50, clients=200)
    freed_ms = [seconds * 1000 for seconds in seen.freed_s]
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.sent_after_leaving == 0
        and median(freed_ms) < 100
        and not any(seen.held.values())
        and seen.resident_growth_bytes < 8 * MIB
    )
    what = (
        f"{seen.hung_up} hang-ups, {seen.sent_after_leaving} sent after leaving, queue empty after "
        f"{median(freed_ms):.0f} ms (median), {max(freed_ms):.0f} ms (worst), "
        f"resident {seen.resident_growth_bytes / MIB:+.1f} MiB"
    )
    seen.verdict.report("C1", what, passed=passed)
    assert passed


async def test_thousands_hang_up_at_once(tmp_path: Path) -> None:
    seen = await hang_up_in_waves(tmp_path, waves=2, clients=5000)
    passed = seen.verdict.is_clean and seen.sent_after_leaving == 0 and not any(seen.held.values())
    freed = " and ".join(f"{seconds * 1000:.0f}" for seconds in seen.freed_s)
    seen.verdict.report("C1", f"2 x 5000 hang-ups at once, queue empty after {freed} ms", passed=passed)
    assert passed


async def test_hang_ups_over_redis(tmp_path: Path) -> None:
    seen = await hang_up_over_redis(tmp_path, waves=10, clients=300)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.sent_after_leaving == 0
        and not any(seen.held.values())
        and seen.resident_growth_bytes < 8 * MIB
    )
    what = (
        f"{seen.hung_up} hang-ups over Redis, {seen.sent_after_leaving} sent after leaving, queue empty after "
        f"{median(seen.freed_s) * 1000:.0f} ms (median), resident {seen.resident_growth_bytes / MIB:+.1f} MiB"
    )
    seen.verdict.report("C1", what, passed=passed)
    assert passed, seen


async def test_half_of_all_clients_cancel(tmp_path: Path) -> None:
    seen = await half_of_all_cancel(tmp_path, clients=100, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.verdict.duplicate_work == 0
        and seen.tally.keys() == {"ok", "left"}
        and seen.longest_pause_s < 1.0
        and not any(seen.held.values())
    )
    what = f"half of all cancel for 20 s: {seen.tally}, longest pause {seen.longest_pause_s * 1000:.0f} ms"
    seen.verdict.report("C2", what, passed=passed)
    assert passed
