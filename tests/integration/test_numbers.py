"""What operators are told of a fleet: outcomes counted once, every request's state, every endpoint's state."""

import asyncio
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.telemetry.metrics import METRICS
from support.client import ask_once
from support.processes import GatewayProcess, running_gateway, until
from support.redis_fleet import Fleet, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream
from support.webhooks import SECRET

ASYNC = "Prefer: respond-async\r\n"
SIM = "sim:?latency_ms=5&slots=4"


async def submit(process: GatewayProcess, text: str) -> str:
    body = json.dumps({"input": text, "client_id": f"client of {text}"}).encode()
    accepted = await ask_once(process.port, "POST", "/v1/inference", body, ASYNC)
    assert accepted.status == 202, accepted.body
    task_id: str = accepted.json["task_id"]
    return task_id


async def is_in(process: GatewayProcess, request_id: str, status: str) -> bool:
    found = await process.state(request_id)
    return bool(found != 404 and found["status"] == status)


async def outcomes(*processes: GatewayProcess) -> Counter[str]:
    """`carpool_requests_total` by outcome, summed over processes as Prometheus does."""
    counted: Counter[str] = Counter()
    for process in processes:
        page = (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()
        for code, number in re.findall(r'^carpool_requests_total{outcome="(.+)"} (\S+)$', page, re.M):
            counted[code] += int(float(number))
    return +counted


async def waits(*processes: GatewayProcess) -> int:
    return int(sum([await process.metric("carpool_queue_wait_seconds_count") for process in processes]))


def all_of(fleet: Fleet) -> list[GatewayProcess]:
    return [place.process for place in (*fleet.gateways, *fleet.batchers)]


# Outcomes


@pytest.mark.parametrize("roles", [("gateway", "batcher"), ("serve", "gateway")], ids="+".join)
async def test_every_outcome_counts_once_over_the_fleet(
    tmp_path: Path, redis_server: RedisServer, roles: tuple[str, ...]
) -> None:
    settings = {"broker.namespace": f"{tmp_path.name}-{roles[0]}"}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, settings) as fleet:
        upstream.poison = "bad"
        for role in roles:
            await fleet.add(role, *(() if role == "gateway" else ("--upstream", upstream.url)))
        await fleet.wait_until_ready()
        first, last = fleet.gateways[0].process, fleet.gateways[-1].process
        asked = await asyncio.gather(*((last if n % 2 else first).ask(f"good {n}") for n in range(30)))
        assert {response.status for response in asked} == {200}
        assert (await last.ask("bad")).status == 422
        tasks = [await first.submit(f"task {n}") for n in range(10)]
        assert {(await last.result(task))["status"] for task in tasks} == {"SUCCESS"}
        assert (await first.result(await first.submit("a bad one")))["status"] == "FAILED"
        upstream.gate.clear()
        deleted = await first.submit("deleted")
        for _ in range(2):  # the second time there is no such task
            await ask_once(last.port, "DELETE", f"/v1/result/{deleted}")
        upstream.gate.set()
        assert (await ask_once(first.port, "DELETE", f"/v1/result/{tasks[0]}")).status == 204  # it has its outcome
        expected = Counter({"ok": 40, "input-refused": 2, "client-left": 1})
        assert await outcomes(*all_of(fleet)) == expected
        assert await waits(*all_of(fleet)) >= 40
        # A batcher that is no gateway counts what no gateway can know: the tasks.
        if "batcher" in roles:
            assert await outcomes(fleet.batchers[0].process) == Counter({"ok": 10, "input-refused": 1})
            assert await waits(*all_of(fleet)) <= 43


@pytest.mark.parametrize("role", ["gateway", "serve"])
async def test_direct_mode_counts(tmp_path: Path, role: str) -> None:
    async with running_redis(tmp_path / "redis") as server, fleet_over(tmp_path, server.url) as fleet:
        gateway = (await fleet.add(role, "--upstream", SIM)).process
        server.kill()

        async def is_direct() -> bool:
            return await gateway.metric("carpool_broker_mode") == 2

        await until(is_direct)
        before, waited = await outcomes(gateway), await waits(gateway)
        answers = await asyncio.gather(*(gateway.ask(f"alone {n}") for n in range(20)))
        assert [response.status for response in answers] == [200] * 20
        assert await outcomes(gateway) - before == Counter({"ok": 20})
        assert await waits(gateway) - waited == 20


# One request


async def test_a_task_is_told_at_any_gateway_in_every_state(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.namespace": tmp_path.name}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, settings) as fleet:
        one, other = (await fleet.add("gateway")).process, (await fleet.add("gateway")).process
        upstream.gate.clear()
        batcher = (await fleet.add("batcher", "--upstream", upstream.url, "--max-batch", "1")).process
        await fleet.wait_until_ready()
        taken = await submit(one, "taken")
        await until(lambda: upstream.in_flight == 1)
        waits = await submit(one, "waits")
        for process in (one, other, batcher):
            await until(lambda process=process: is_in(process, taken, "processing"))
            found = await process.state(waits)
            assert (found["status"], found["error"], found["client_id"]) == ("queued", None, "client of waits")
            assert 0 <= found["latency_ms"] < 60_000
        await asyncio.sleep(0.2)
        upstream.gate.set()
        assert [(await other.result(task))["status"] for task in (taken, waits)] == ["SUCCESS", "SUCCESS"]
        upstream.poison = "bad"
        bad = await submit(other, "bad")
        assert (await one.result(bad))["status"] == "FAILED"
        for process in (one, other, batcher):
            found = await process.state(taken)
            assert (found["status"], found["error"], found["client_id"]) == ("completed", None, "client of taken")
            assert 190 <= found["latency_ms"] < 60_000
            assert (await process.state(bad))["status"] == "failed"
            assert (await process.state(bad))["error"] == "input-refused"
            assert await process.state("0" * 32) == 404


async def test_without_redis_a_finished_task_is_told_after_a_restart(tmp_path: Path) -> None:
    async with scripted_upstream() as upstream:
        async with running_gateway(tmp_path, upstream.url) as gateway:
            good = await submit(gateway, "good")
            assert (await gateway.result(good))["status"] == "SUCCESS"
            upstream.poison = "bad"
            bad = await submit(gateway, "bad")
            assert (await gateway.result(bad))["status"] == "FAILED"
            before = [await gateway.state(good), await gateway.state(bad)]
            gateway.kill()
        async with running_gateway(tmp_path, upstream.url) as gateway:
            after = [await gateway.state(good), await gateway.state(bad)]
            assert [found["status"] for found in after] == ["completed", "failed"] == [f["status"] for f in before]
            assert [found["error"] for found in after] == [None, "input-refused"]
            assert all(0 < found["latency_ms"] < 60_000 for found in after)


# The fleet


async def test_every_endpoint_has_a_state_and_was_heard_of(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.namespace": tmp_path.name, "carpool.service.HEALTH_INTERVAL_S": 3600}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, settings) as fleet:
        gateway = (await fleet.add("gateway")).process
        batchers = [(await fleet.add("batcher", "--upstream", url)).process for url in (SIM, upstream.url)]

        async def shown() -> dict[str, dict[str, Any]]:
            page = (await ask_once(gateway.admin_port, "GET", "/internal/fleet")).json
            return {row["endpoint"]: row for row in page["models"].get("default", {"endpoints": []})["endpoints"]}

        async def are(**states: str) -> bool:
            rows = await shown()
            heard = all(row["last_heartbeat"] is not None for row in rows.values())
            return heard and {row["batcher"]: row["state"] for row in rows.values()} == states

        first, second = (batcher.name for batcher in batchers)
        # Nobody has called them yet, and the first interval is far from over.
        await until(lambda: are(**{first: "healthy", second: "healthy"}))
        age = datetime.now().astimezone() - datetime.fromisoformat((await shown())[SIM]["last_heartbeat"])
        assert -1 < age.total_seconds() < 60
        batchers[0].kill()
        await until(lambda: are(**{first: "offline", second: "healthy"}))
        assert (await gateway.fleet())["healthy_slots"] == 1


# The page of metrics


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
