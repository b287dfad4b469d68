"""Where the time of requests went, and who waits: the same names alone and over Redis."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.client import ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_servers import RedisServer
from support.upstreams import scripted_upstream

NUMBER = 4
AFTER_THE_DOOR = ("queue", "dispatch", "upstream", "reply")


@asynccontextmanager
async def processes(directory: Path, upstream: str, redis: RedisServer | None) -> AsyncIterator[list[GatewayProcess]]:
    """One alone, or a gateway and a batcher; the first is for clients. One request at a time is sent to the GPU."""
    flags = ("--max-batch", "1")
    # Nobody leaves the queue before it was looked at, however busy the machine is.
    settings: dict[str, object] = {
        "broker.queue_timeout_s": 200,
        "broker.total_timeout_s": 250,
        "upstream.timeout_s": 240,
    }
    if redis is None:
        async with running_gateway(directory, upstream, *flags, settings=settings) as alone:
            yield [alone]
        return
    settings |= {"broker.url": redis.url, "broker.namespace": directory.name}
    async with (
        running_role(directory, "batcher", "--upstream", upstream, *flags, settings=settings) as batcher,
        running_role(directory, "gateway", settings=settings) as gateway,
    ):

        async def is_ready() -> bool:
            return (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 200

        await until(is_ready)
        yield [gateway, batcher]


async def numbers(of: list[GatewayProcess], metric: str, label: str) -> Counter[str]:
    """The values of a series by a label, summed over processes."""
    found: Counter[str] = Counter()
    for process in of:
        page = (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == metric:
                    found[sample.labels[label]] += sample.value  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("broker", ["memory", "redis"])
async def test_the_stages_of_requests_and_who_waits(tmp_path: Path, redis_server: RedisServer, broker: str) -> None:
    redis = redis_server if broker == "redis" else None
    async with (
        scripted_upstream() as upstream,
        processes(tmp_path, upstream.url, redis) as running,
        asyncio.TaskGroup() as clients,
    ):
        upstream.gate.clear()
        door = running[0]

        async def are_waiting(number: int) -> bool:
            """In Redis for a batcher: each process tells it of the whole fleet."""
            found = [await numbers([process], "carpool_waiting", "tier") for process in running]
            return all(each == {"enterprise": 0, "paid": 0, "free": number} for each in found)

        for number in range(NUMBER):
            clients.create_task(ask_once(door.port, "POST", "/v1/inference", inference_body(f"{number}")))
        await until(lambda: are_waiting(NUMBER - 1))
        upstream.gate.set()

        async def are_counted() -> bool:
            return (await numbers(running, "carpool_request_seconds_count", "tier"))["free"] == NUMBER

        await until(are_counted)
        await until(lambda: are_waiting(0))
        counts = await numbers(running, "carpool_stage_seconds_count", "stage")
        assert {stage: counts[stage] for stage in AFTER_THE_DOOR} == dict.fromkeys(AFTER_THE_DOOR, NUMBER)
        sums = await numbers(running, "carpool_stage_seconds_sum", "stage")
        in_all = (await numbers(running, "carpool_request_seconds_sum", "tier"))["free"]
        assert sum(sums[stage] for stage in AFTER_THE_DOOR) == pytest.approx(in_all, abs=1e-6)
        assert sums["queue"] > 0.0
        assert sums["upstream"] > 0.0
        # Somebody comes again and again until one of them was timed.
        while not (await numbers(running, "carpool_stage_seconds_count", "stage"))["admit"]:
            await ask_once(door.port, "POST", "/v1/inference", inference_body("one more"))
