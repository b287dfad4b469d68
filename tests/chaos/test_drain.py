"""C3: SIGTERM under load. Single drains, step by step, are in `tests/integration/test_faults.py`."""

from pathlib import Path

import pytest

from support.scenarios.drain import rolling_restarts

ROUNDS = 50


@pytest.mark.timeout(300)
async def test_rolling_restarts_are_not_noticed(tmp_path: Path) -> None:
    verdict, checker, seconds = await rolling_restarts(tmp_path, ROUNDS, clients=40)
    passed = verdict.is_clean and checker.tally.keys() == {"ok"}
    what = f"{ROUNDS} x SIGTERM under load, {dict(checker.tally)}, slowest exit after {max(seconds):.2f} s"
    verdict.report("C3", what, passed=passed)
    assert passed
