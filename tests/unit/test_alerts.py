"""The alerts that are shipped: about metrics that there are, and each with a section that says what to do.

`make prometheus` proves that they fire.
"""

import re
from pathlib import Path

from carpool.core.errors import GatewayError, OverloadError, RateLimited, UpstreamError, all_errors
from support.metric_names import SHOWN, named_in

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "carpool-rules.yml"
RULE_TESTS = [RULES.with_name(f"carpool-{name}-test.yml") for name in ("rules", "objectives")]
RUNBOOKS = ROOT / "docs" / "runbooks.md"


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def test_they_are_about_metrics_that_there_are() -> None:
    assert named_in(RULES) - SHOWN == set()
    assert set().union(*map(named_in, RULE_TESTS)) <= named_in(RULES)


def test_each_has_a_section_that_says_what_to_do() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sections == list(dict.fromkeys(alerts()))
    linked = re.findall(r"runbook: (\S+)", RULES.read_text())
    assert linked == [f"docs/runbooks.md#{alert.lower()}" for alert in alerts()]


def test_each_is_shown_to_fire_and_not_to_fire() -> None:
    """By what is expected of it in the tests: somebody, and nobody."""
    text = "".join(tests.read_text() for tests in RULE_TESTS)
    for alert in set(alerts()) - {"CarpoolDeadLetters"}:
        expected = re.findall(rf'alertname="{alert}".*\n\s+eval_time: .*\n\s+exp_samples:( \[\])?$', text, re.MULTILINE)
        assert set(expected) == {"", " []"}, alert


def test_answers_that_count_against_the_objective_are_those_that_are_not_the_clients_fault() -> None:
    ours = {error.code for root in (OverloadError, UpstreamError, GatewayError) for error in all_errors(root)}
    found = re.findall(r'code=~"(.*)"', RULES.read_text())
    assert len(found) == 4
    assert all(set(codes.split("|")) == ours - {RateLimited.code} for codes in found)


def test_the_runbooks_speak_of_metrics_that_there_are() -> None:
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    known = SHOWN | {name.removesuffix(suffix) for name in SHOWN for suffix in suffixes}
    assert named_in(RUNBOOKS) - known == set()
