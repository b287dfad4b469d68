"""What operators are told: outcomes in direct mode, and every metric by those who should show it."""

import asyncio
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from carpool.telemetry.metrics import METRICS
from support.client import ask_once
from support.processes import GatewayProcess, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer, running_redis
from support.tracking import outcomes
from support.webhooks import SECRET

SIM = "sim:?latency_ms=5&slots=4"


async def test_direct_mode_counts(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "redis") as server, fleet_over(tmp_path, server.url) as fleet:
        gateway = (await fleet.add("gateway", "--upstream", SIM)).process
        server.kill()

        async def is_direct() -> bool:
            return await gateway.metric("carpool_broker_mode") == 2

        await until(is_direct)
        before, waited = await outcomes(gateway), await gateway.metric("carpool_queue_wait_seconds_count")
        answers = await asyncio.gather(*(gateway.ask(f"alone {n}") for n in range(20)))
        assert [response.status for response in answers] == [200] * 20
        assert await outcomes(gateway) - before == Counter({"ok": 20})
        assert await gateway.metric("carpool_queue_wait_seconds_count") - waited == 20


async def test_every_metric_is_shown_by_those_who_should(tmp_path: Path, redis_server: RedisServer) -> None:
    # What is off has no metrics. Nobody need be there to receive traces.
    on = {"tracking.store": "sqlite", "tracing.otlp_endpoint": "http://127.0.0.1:9", "webhooks.hosts": "example.com"}
    on["webhooks.secrets"] = SECRET
    settings = {"broker.namespace": tmp_path.name, "broker.persistence": "forbidden", **on}
    shown: dict[str, set[str]] = {}

    async def look(who: str, process: GatewayProcess) -> None:
        page = (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()
        families = {f.name: f.type for f in text_string_to_metric_families(page) if f.name.startswith("carpool_")}
        assert families.items() <= {metric.name: metric.kind for metric in METRICS}.items()
        shown[who] = set(families)

    async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
        await look("gateways", (await fleet.add("gateway", "--upstream", SIM)).process)
        await look("batchers", (await fleet.add("batcher", "--upstream", SIM)).process)
    async with running_gateway(tmp_path / "alone", SIM, settings=on) as alone:
        await look("alone", alone)
    said = {"all": set(shown), "over Redis": {"gateways", "batchers"}, "gateways, alone": {"gateways", "alone"}}
    for metric in METRICS:
        assert {who for who in shown if metric.name in shown[who]} == said.get(metric.shown, {metric.shown}), metric
