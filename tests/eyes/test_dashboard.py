"""Every query of the dashboard, on a real Prometheus that looks at a loaded Carpool: alone, and over Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from support.client import Connection, ask_once, inference_body
from support.processes import running_gateway, running_role
from support.prometheus import JOB, Prometheus, running_prometheus
from support.redis_servers import RedisServer

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "carpool-rules.yml"
DASHBOARD = DEPLOY / "grafana" / "carpool.json"
POISON = "spoiled"
UPSTREAM = f"sim:?latency_ms=20&slots=4&poison={POISON}"
CLIENTS = 16
# Those that only one of both has.
ALONE = {"carpool_journal_bytes", "carpool_journal_fill", "carpool_journal_disk_free_share"}
OVER_REDIS = {"carpool_task_bytes", "carpool_broker_memory_share", "carpool_live_gateways", "carpool_live_batchers"}


def queries() -> dict[str, list[str]]:
    """By panel, as Grafana would send them."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        panel["title"]: [
            target["expr"].replace("$__rate_interval", "10s").replace("$job", JOB) for target in panel["targets"]
        ]
        for panel in panels
        if panel["type"] != "row"
    }


@asynccontextmanager
async def load(port: int) -> AsyncIterator[None]:
    """Clients that send one request after the other, now and then one that the model refuses; and a task at a time."""
    numbers = count()

    async def ask() -> None:
        connection = await Connection.open(port)
        try:
            while True:
                number = next(numbers)
                text = POISON if number % 500 == 0 else f"{number}"
                await connection.ask("POST", "/v1/inference", inference_body(text))
        finally:
            await connection.close()

    async def submit() -> None:
        while True:
            await ask_once(port, "POST", "/v1/inference", json.dumps({"input": "x", "mode": "async"}).encode())
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(ask()) for _ in range(CLIENTS)] + [asyncio.create_task(submit())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def no_panel_is_empty(prometheus: Prometheus, not_here: set[str]) -> None:
    """Each query finds something while there is load, but for those about what is not here."""
    for title, asked in queries().items():
        here = [query for query in asked if not any(name in query for name in not_here)]
        assert here, f"nothing of {title!r} is here"
        for query in here:
            try:
                await prometheus.until_found(query)
            except TimeoutError:
                pytest.fail(f"{title!r} is empty: {query}")
        for query in set(asked) - set(here):
            assert await prometheus.ask(query) == [], f"{query} is said not to be here"


async def test_alone(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path / "serve", UPSTREAM) as process,
        load(process.port),
        running_prometheus(tmp_path / "prometheus", [process.admin_port], [RULES]) as prometheus,
    ):
        await no_panel_is_empty(prometheus, not_here=OVER_REDIS)


async def test_over_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.url": redis_server.url, "broker.namespace": "dashboard"}
    async with (
        running_role(tmp_path / "batcher", "batcher", "--upstream", UPSTREAM, settings=settings) as batcher,
        running_role(tmp_path / "gateway", "gateway", settings=settings) as gateway,
        load(gateway.port),
        running_prometheus(tmp_path / "prometheus", [gateway.admin_port, batcher.admin_port], [RULES]) as prometheus,
    ):
        await no_panel_is_empty(prometheus, not_here=ALONE)
