"""Where the time of requests went, and who waits: a gateway and a batcher together tell all of it."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.client import ask_once
from support.processes import GatewayProcess, until
from support.redis_servers import RedisServer
from support.stage import stage
from support.upstreams import scripted_upstream

NUMBER = 4
AFTER_THE_DOOR = ("queue", "dispatch", "upstream", "reply")


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


async def test_the_stages_of_requests_and_who_waits(tmp_path: Path, redis_server: RedisServer) -> None:
    # Nobody leaves the queue before it was looked at, however busy the machine is.
    patient = {"broker.queue_timeout_s": 200, "broker.total_timeout_s": 250, "upstream.timeout_s": 240}
    async with (
        scripted_upstream() as upstream,
        stage(tmp_path, ["--upstream", upstream.url, "--max-batch", "1"], "redis", patient, redis_server) as on,
        asyncio.TaskGroup() as clients,
    ):
        upstream.gate.clear()
        running = [on.gateway, on.batcher]

        async def are_waiting(number: int) -> bool:
            """In Redis for a batcher: each process tells it of the whole fleet."""
            found = [await numbers([process], "carpool_waiting", "tier") for process in running]
            return all(each == {"enterprise": 0, "paid": 0, "free": number} for each in found)

        for number in range(NUMBER):
            clients.create_task(on.gateway.ask(f"{number}"))
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
            await on.gateway.ask("one more")
