"""The alerts that are shipped: proven by Prometheus's own tool."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES, RULE_TESTS = FOLDER / "carpool-rules.yml", FOLDER / "carpool-rules-test.yml"
OBJECTIVE_TESTS = FOLDER / "carpool-objectives-test.yml"
METRIC = "carpool_dead_letters_total"


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """What the tool says; without it these tests fail, so that nobody takes the alerts for proven."""
    tool = shutil.which("promtool")
    assert tool is not None, "there is no promtool here: run `make promtool`"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=250, check=False)


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done


@pytest.mark.parametrize("tests", [RULE_TESTS, OBJECTIVE_TESTS], ids=lambda tests: str(tests.stem))
def test_they_fire_when_they_should_and_only_then(tests: Path) -> None:
    done = promtool("test", "rules", tests)
    assert done.returncode == 0, done


def fails_with(tmp_path: Path, right: str, wrong: str, tests: Path) -> None:
    rules = RULES.read_text()
    assert right in rules
    (tmp_path / RULES.name).write_text(rules.replace(right, wrong))
    (tmp_path / tests.name).write_text(tests.read_text())
    assert promtool("check", "rules", tmp_path / RULES.name).returncode == 0
    assert promtool("test", "rules", tmp_path / tests.name).returncode == 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (") > 0\n            or", ") > 3\n            or"),  # one letter is not enough
        (") > 0\n            or", ") >= 0\n            or"),  # it always fires
        (f"{METRIC}[10m]", f"{METRIC}[60m]"),  # it does not resolve
        ("offset 10m) > 0\n        for: 0m", "offset 10m) > 0\n        for: 15m"),
        (f"({METRIC} unless", f"({METRIC} and"),  # it fires on old letters, and not on those of a new process
        (f"increase({METRIC}[10m])", METRIC),
        ("avg_over_time(carpool_endpoint_breaker[5m])", "carpool_endpoint_breaker"),  # a moment is enough
        ("sum by (job, model) (carpool_healthy_slots)", "min by (job, model) (carpool_healthy_slots)"),
        ("carpool_live_batchers) == 0\n        for: 1m", "carpool_live_batchers) == 0\n        for: 0m"),
        ("carpool_broker_memory_share) > 0.8", "carpool_broker_memory_share) > 0.7"),
        ("carpool_journal_disk_free_share) < 0.1", "carpool_journal_disk_free_share) < 0.5"),
        ("increase(carpool_journal_commit_failures_total[5m])", "carpool_journal_commit_failures_total"),
        ("carpool_journal_fill) > 0.9", "carpool_journal_fill) > 0.99"),
        ("carpool_utilization[10m])) > 0.8", "carpool_utilization[10m])) > 0.1"),  # it fires while slots are idle
        ("carpool_batch_fill_count[10m])) < 0.5", "carpool_batch_fill_count[10m])) < 0.95"),
        ("avg_over_time(carpool_pressure[15m])", "carpool_pressure"),
        ("quantile by (job, model)", "quantile by (job)"),  # a small model is no measure for a large one
        ("0.01 + 2 * quantile", "2 * quantile"),  # milliseconds are enough
        ("0.01 + 2 * quantile", "0.01 + 4 * quantile"),
        ("2 * quantile by (job, model) (\n            0.25", "2 * quantile by (job, model) (\n            0.5"),
        ("sum by (job, model, direction) (rate(carpool_arrival", "sum by (job, model) (rate(carpool_arrival"),
        ("_count[15m])) > 0.4", "_count[15m])) > 0.1"),  # chance is enough
        ("_count[15m])) > 0.1", "_count[15m])) > 0"),
    ],
)
def test_these_tests_can_fail(tmp_path: Path, right: str, wrong: str) -> None:
    fails_with(tmp_path, right, wrong, RULE_TESTS)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('le="0.5"', 'le="0.3"'),
        ("14.4 * 0.01 ", "60 * 0.01 "),
        ("6 * 0.01", "0.1 * 0.01"),
        ("carpool:slow:ratio_rate5m > 14.4 * 0.01", "carpool:slow:ratio_rate1h > 14.4 * 0.01"),  # it resolves too late
        ("14.4 * 0.001 ", "600 * 0.001 "),
        ("|shed|", "|rate-limited|"),
        (" or\n              0", " and\n              0"),  # nothing is said where everything fails
    ],
)
def test_those_of_the_objectives_can_fail_too(tmp_path: Path, right: str, wrong: str) -> None:
    fails_with(tmp_path, right, wrong, OBJECTIVE_TESTS)
