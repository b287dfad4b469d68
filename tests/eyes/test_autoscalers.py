"""What the manifests of autoscalers ask is what Carpool wants: each shipped query, asked of a real Prometheus.

The queries are read from deploy/kubernetes. KEDA and Kubernetes themselves are not here.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from support.client import ask_once, inference_body
from support.processes import GatewayProcess, until
from support.prometheus import running_prometheus
from support.quick_scaling import QUICK, SLOW
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer

SHIPPED = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents(name: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((SHIPPED / name).read_text())


def triggers(name: str) -> list[dict[str, str]]:
    return [trigger["metadata"] for each in documents(name) for trigger in each["spec"]["triggers"]]


def queries_of_hpa() -> list[str]:
    """What prometheus-adapter asks for each metric of the HPA, by the rule that is shipped with it."""
    hpa, adapter = documents("hpa.yaml")
    (rule,) = yaml.safe_load(adapter["data"]["config.yaml"])["externalRules"]
    queries = []
    for each in hpa["spec"]["metrics"]:
        metric = each["external"]["metric"]
        assert rule["seriesQuery"] == metric["name"]
        labels = ",".join(f'{name}="{value}"' for name, value in metric["selector"]["matchLabels"].items())
        query = rule["metricsQuery"].replace("<<.Series>>", metric["name"]).replace("<<.LabelMatchers>>", labels)
        queries.append(query)
    return queries


def at(path: str, page: Any) -> Any:
    """What is there, as KEDA's `valueLocation` says it."""
    for name in path.split("."):
        page = page[name]
    return page


def behaviours() -> Iterator[Any]:
    for name in ("keda-metrics-api.yaml", "keda-prometheus.yaml"):
        for each in documents(name):
            yield each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    yield next(documents("hpa.yaml"))["spec"]["behavior"]


def test_who_acts_damps_nothing() -> None:
    for behaviour in behaviours():
        down, up = behaviour["scaleDown"], behaviour["scaleUp"]
        assert down["stabilizationWindowSeconds"] == up["stabilizationWindowSeconds"] == 0
        assert down["policies"] == [{"type": "Percent", "value": 100, "periodSeconds": 15}]
        assert up["policies"][0]["value"] >= 1000
    for name in ("keda-metrics-api.yaml", "keda-prometheus.yaml"):
        for each in documents(name):
            spec = each["spec"]
            assert spec["minReplicaCount"] or spec["cooldownPeriod"] == 0


async def test_each_shipped_query_returns_what_is_wanted(tmp_path: Path, redis_server: RedisServer) -> None:
    async with fleet_over(tmp_path, redis_server.url, {**QUICK, "broker.namespace": tmp_path.name}) as fleet:
        await fleet.add("batcher", "--upstream", SLOW)
        gateways = [(await fleet.add("gateway")).process for _ in range(2)]
        first, second = gateways

        async def scale(process: GatewayProcess) -> Any:
            return json.loads((await ask_once(process.admin_port, "GET", "/internal/scale")).body)

        async def flood() -> None:
            while True:
                await ask_once(first.port, "POST", "/v1/inference", inference_body("flood"))

        async def some_are_wanted() -> bool:
            return bool((await scale(second))["models"].get("default", {}).get("wanted", 0) >= 4)

        flooding = [asyncio.create_task(flood()) for _ in range(30)]
        await until(some_are_wanted)
        for each in flooding:
            each.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)

        ports = [process.admin_port for process in gateways]
        async with running_prometheus(tmp_path / "prometheus", ports) as prometheus:
            asked = [each["query"] for each in triggers("keda-prometheus.yaml")]
            locations = [each["valueLocation"] for each in triggers("keda-metrics-api.yaml")]
            (of_hpa,) = queries_of_hpa()
            # The load is over, and the number falls after five minutes at the earliest.
            await asyncio.sleep(2)
            for query, location in [*zip(asked, locations, strict=True), (of_hpa, locations[0])]:
                await prometheus.until_found(query)
                numbers = [at(location, await scale(process)) for process in gateways]
                (found,) = await prometheus.ask(query)
                assert [float(found["value"][1])] * 2 == numbers, query
            assert at(locations[0], await scale(first)) >= 4
            # Of what is not known there is no number, and none is made up: who acts changes nothing.
            assert await prometheus.ask(asked[0].replace("default", "unknown")) == []
            for trigger in triggers("keda-prometheus.yaml"):
                assert trigger["ignoreNullValues"] == "false"
                assert trigger["threshold"] == "1"
            for trigger in triggers("keda-metrics-api.yaml"):
                assert trigger["url"].endswith(":8001/internal/scale")
                assert trigger["targetValue"] == "1"
