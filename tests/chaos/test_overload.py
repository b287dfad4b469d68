"""O3 (short form): overload with large bodies."""

from pathlib import Path

from support.scenarios.overload import RESIDENT_MIB_MAX, overload


async def test_memory_is_flat_and_the_admitted_succeed(tmp_path: Path) -> None:
    seen = await overload(tmp_path, warm_up_s=10, seconds=30)
    passed = (
        seen.verdict.is_clean
        and seen.statuses.keys() == {"ok", "503"}
        and seen.resident_last < seen.resident_then * 1.1 + 8
        and seen.resident_last < RESIDENT_MIB_MAX
        and seen.refusal_ms_p99 < 100
    )
    what = (
        f"3 x overload with 64 KB for 40 s: {seen.statuses}, resident {seen.resident_then:.0f} then "
        f"{seen.resident_last:.0f} MiB, p99 of refusals {seen.refusal_ms_p99:.1f} ms"
    )
    seen.verdict.report("O3", what, passed=passed)
    assert passed
