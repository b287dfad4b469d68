"""The alerts that are shipped: proven by Prometheus's own tool, and about metrics that there are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from carpool.core.dead_letter import dead_letter_causes
from support.client import ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_servers import RedisServer
from support.upstreams import scripted_upstream

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


async def counts(process: GatewayProcess) -> dict[str, float]:
    """By cause: what Prometheus would read."""
    page = (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()
    assert f"# TYPE {METRIC} counter" in page.splitlines()
    return {cause: float(number) for cause, number in re.findall(rf'^{METRIC}{{cause="(.+)"}} (\S+)$', page, re.M)}


async def test_the_metric_is_there_from_the_start_and_counts(tmp_path: Path, redis_server: RedisServer) -> None:
    """An increase needs the zero before the first one, in every process that may keep a letter."""
    assert set(re.findall(r"\bcarpool_\w+", RULES.read_text())) == {METRIC}
    zeros = dict.fromkeys(dead_letter_causes(), 0.0)
    broker = {"broker.url": redis_server.url, "broker.namespace": tmp_path.name}
    async with scripted_upstream() as upstream:
        upstream.behaviour = "status 400"
        flags = ("--upstream", upstream.url, "--max-batch", "1")
        async with (
            running_gateway(tmp_path / "a", upstream.url, "--max-batch", "1") as alone,
            running_role(tmp_path / "b", "serve", *flags, settings=broker) as over_redis,
        ):
            for process in (alone, over_redis):
                assert await counts(process) == zeros

                async def is_counted(process: GatewayProcess = process) -> bool:
                    return await counts(process) == {**zeros, "input-refused": 1.0}

                answer = await ask_once(process.port, "POST", "/v1/inference", inference_body("x"))
                assert answer.status == 422
                await until(is_counted, within_s=10)
