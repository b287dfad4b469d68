"""The alerts that are shipped are about metrics that there are. `make prometheus` proves the alerts themselves."""

import re
from pathlib import Path

from carpool.core.dead_letter import dead_letter_causes
from support.client import ask_once, inference_body
from support.metric_names import named_in
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_servers import RedisServer
from support.upstreams import let_work_once, scripted_upstream

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "carpool-rules.yml"
METRIC = "carpool_dead_letters_total"


async def counts(process: GatewayProcess) -> dict[str, float]:
    """By cause: what Prometheus would read."""
    page = (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()
    assert f"# TYPE {METRIC} counter" in page.splitlines()
    return {cause: float(number) for cause, number in re.findall(rf'^{METRIC}{{cause="(.+)"}} (\S+)$', page, re.M)}


async def test_the_metric_is_there_from_the_start_and_counts(tmp_path: Path, redis_server: RedisServer) -> None:
    """An increase needs the zero before the first one, in every process that may keep a letter."""
    assert METRIC in named_in(RULES)
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
                await let_work_once(process.port)

                async def is_counted(process: GatewayProcess = process) -> bool:
                    return await counts(process) == {**zeros, "input-refused": 1.0}

                answer = await ask_once(process.port, "POST", "/v1/inference", inference_body("x"))
                assert answer.status == 422
                await until(is_counted)
