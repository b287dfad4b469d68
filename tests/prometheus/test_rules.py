"""The alerts that are shipped: proven by Prometheus's own tool."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES, RULE_TESTS = FOLDER / "carpool-rules.yml", FOLDER / "carpool-rules-test.yml"
METRIC = "carpool_dead_letters_total"


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """What the tool says; without it these tests fail, so that nobody takes the alerts for proven."""
    tool = shutil.which("promtool")
    assert tool is not None, "there is no promtool here: run `make promtool`"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done


def test_they_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", RULE_TESTS)
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (") > 0\n            or", ") > 3\n            or"),  # one letter is not enough
        (") > 0\n            or", ") >= 0\n            or"),  # it always fires
        ("[10m]", "[60m]"),  # it does not resolve
        ("for: 0m", "for: 15m"),
        (f"({METRIC} unless", f"({METRIC} and"),  # it fires on old letters, and not on those of a new process
        (f"increase({METRIC}[10m])", METRIC),
    ],
)
def test_these_tests_can_fail(tmp_path: Path, right: str, wrong: str) -> None:
    rules = RULES.read_text()
    assert right in rules
    (tmp_path / RULES.name).write_text(rules.replace(right, wrong, 1))
    (tmp_path / RULE_TESTS.name).write_text(RULE_TESTS.read_text())
    assert promtool("check", "rules", tmp_path / RULES.name).returncode == 0
    assert promtool("test", "rules", tmp_path / RULE_TESTS.name).returncode == 1
