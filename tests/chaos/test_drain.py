"""C3: SIGTERM under load."""

from pathlib import Path

import pytest

from support.scenarios.drain import (
    first_moments_of_a_drain,
    received_before_the_listener_closes,
    rolling_restarts,
    second_sigterm,
)

ROUNDS = 50


@pytest.mark.timeout(300)
async def test_rolling_restarts_are_not_noticed(tmp_path: Path) -> None:
    verdict, checker, seconds = await rolling_restarts(tmp_path, ROUNDS, clients=40)
    passed = verdict.is_clean and checker.tally.keys() == {"ok"}
    what = f"{ROUNDS} x SIGTERM under load, {dict(checker.tally)}, slowest exit after {max(seconds):.2f} s"
    verdict.report("C3", what, passed=passed)
    assert passed


async def test_the_first_moments_of_a_drain(tmp_path: Path) -> None:
    await first_moments_of_a_drain(tmp_path)


async def test_what_was_received_is_answered(tmp_path: Path) -> None:
    assert await received_before_the_listener_closes(tmp_path) == [200] * 4


async def test_a_second_sigterm_leaves_at_once(tmp_path: Path) -> None:
    assert await second_sigterm(tmp_path) < 1.0
