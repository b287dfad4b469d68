"""F11: entries in the streams that no batcher, or only a newer one, can read."""

from pathlib import Path

from support.scenarios.redis_strangers import strange_entries


async def test_strange_entries_stop_nobody(tmp_path: Path) -> None:
    seen = await strange_entries(tmp_path)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.dead_letters == seen.unreadable > 0
        and seen.newer_left == seen.newer > 0
        and seen.deliveries == 0
        and seen.not_ready == 0
        and min(seen.calls) > 0
    )
    what = (
        f"{seen.unreadable} entries that nobody can read: {seen.dead_letters} dead letters; {seen.newer} of a newer "
        f"format: {seen.newer_left} left alone, {seen.deliveries} deliveries counted; batchers not ready "
        f"{seen.not_ready} times, calls of each afterwards {seen.calls}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F11", what, passed=passed)
    assert passed
