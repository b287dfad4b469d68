"""F8: `kill -9` and SIGTERM of the embedded gateway with tasks accepted."""

from pathlib import Path

import pytest

from support.scenarios.embedded_kill import (
    deadline_counts_uptime_only,
    kill_at_random,
    terminate_while_the_upstream_hangs,
    terminate_with_a_queue,
)

ROUNDS = 20


@pytest.mark.timeout(240)
async def test_every_accepted_task_has_its_outcome_after_kill_9(tmp_path: Path) -> None:
    verdict, checker = await kill_at_random(tmp_path, ROUNDS)
    passed = verdict.is_clean and set(checker.tally) == {"ok"}
    verdict.report("F8", f"{ROUNDS} x kill -9 at random, {checker.tally['ok']} outcomes read", passed=passed)
    assert passed


async def test_queued_tasks_survive_sigterm(tmp_path: Path) -> None:
    verdict, checker, sent_before = await terminate_with_a_queue(tmp_path, count=200)
    passed = verdict.is_clean and verdict.duplicate_work == 0 and checker.tally == {"ok": 200} and sent_before < 200
    verdict.report("F8", f"SIGTERM with {200 - sent_before} of 200 tasks queued", passed=passed)
    assert passed


async def test_tasks_of_a_hanging_batch_survive_sigterm(tmp_path: Path) -> None:
    verdict, checker = await terminate_while_the_upstream_hangs(tmp_path)
    passed = verdict.is_clean and checker.tally == {"ok": 4}
    verdict.report("F8", "SIGTERM while a batch of 4 tasks hangs", passed=passed)
    assert passed


async def test_the_deadline_of_a_task_counts_uptime_only(tmp_path: Path) -> None:
    answered, stuck, seconds = await deadline_counts_uptime_only(tmp_path, timeout_s=5.0)
    assert (answered, stuck) == ("SUCCESS", "FAILED")
    assert 3.0 < seconds < 6.5  # a crash may lose up to a second of the uptime clock
