"""F12: more dead letters, and more tasks, than there is room for."""

from pathlib import Path

import pytest

from support.scenarios.redis_floods import LARGE_BYTES, letters_without_end, tasks_beyond_the_bound

LETTERS, MEMORY_MAX = 300, 200_000_000
TASKS, BYTES_MAX = 60, 10_000_000
# What Redis needs for itself and its clients' buffers.
OWN_BYTES = 20_000_000


@pytest.mark.timeout(240)
async def test_a_flood_of_dead_letters_keeps_nobody_out(tmp_path: Path) -> None:
    seen = await letters_without_end(tmp_path, LETTERS, MEMORY_MAX)
    passed = (
        seen.verdict.is_clean
        and seen.others.statuses.keys() == {200}
        and seen.accepted == {202: LETTERS}
        # 502 for poisons that were in one batch with each other alone: the endpoint may have been at fault.
        and seen.outcomes.keys() <= {"422", "502"}
        and seen.outcomes.total() == LETTERS
        and seen.letter_bytes <= 0.5 * MEMORY_MAX
        and seen.dropped > 0
    )
    what = (
        f"{LETTERS} poison tasks of {LARGE_BYTES / 1e6:g} MB, maxmemory {MEMORY_MAX / 1e6:g} MB: others {seen.others}; "
        f"letters at most {seen.letter_bytes / 1e6:.0f} MB ({seen.used_bytes / 1e6:.0f} MB in use), {seen.kept} kept, "
        f"{seen.dropped:g} dropped; tasks {dict(seen.accepted)}, {dict(seen.outcomes)}"
    )
    seen.verdict.report("F12", what, passed=passed)
    assert passed


async def test_tasks_beyond_the_bound_are_refused_until_there_is_room(tmp_path: Path) -> None:
    seen = await tasks_beyond_the_bound(tmp_path, TASKS, BYTES_MAX)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() == {"ok"}
        and seen.statuses.keys() == {202, 503}
        and seen.statuses[202] > 0.5 * BYTES_MAX / LARGE_BYTES
        and seen.input_bytes <= BYTES_MAX
        and seen.used_bytes <= 2 * BYTES_MAX + OWN_BYTES
        and seen.statuses_later.keys() == {202}
    )
    what = (
        f"{TASKS} tasks of {LARGE_BYTES / 1e6:g} MB, bytes_max {BYTES_MAX / 1e6:g} MB: {dict(seen.statuses)}, inputs "
        f"at most {seen.input_bytes / 1e6:.1f} MB ({seen.used_bytes / 1e6:.0f} MB in use), when drained "
        f"{dict(seen.statuses_later)}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F12", what, passed=passed)
    assert passed
