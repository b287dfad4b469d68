"""Batches that are bounded in bytes, in real processes: nothing hangs, and no call is larger than it may be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.client import Response, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_servers import RedisServer

JSON = "Content-Type: application/json\r\n"
ASYNC = JSON + "Prefer: respond-async\r\n"
INPUT_BYTES = 1000
# Three inputs in a batch, and two batches at once where there are slots for four.
SETTINGS = {"batching.batch_bytes_max": 3 * INPUT_BYTES + 500, "batching.in_flight_bytes_max": 7 * INPUT_BYTES}
SIM = "sim:?latency_ms=20&slots=4"


@asynccontextmanager
async def gateway_over(broker: str, directory: Path, redis: RedisServer) -> AsyncIterator[GatewayProcess]:
    """A gateway whose requests wait in itself, or in Redis."""
    if broker == "memory":
        async with running_gateway(directory, SIM, settings=SETTINGS) as gateway:
            yield gateway
        return
    settings = {**SETTINGS, "broker.url": redis.url, "broker.namespace": directory.name}
    async with (
        running_role(directory / "b", "batcher", "--upstream", SIM, settings=settings),
        running_role(directory / "g", "gateway", settings=settings) as gateway,
    ):

        async def is_ready() -> bool:
            return (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 200

        await until(is_ready)
        yield gateway


@pytest.mark.parametrize("broker", ["memory", "redis"])
async def test_large_inputs_come_through_in_small_batches(
    broker: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway_over(broker, tmp_path, redis_server) as gateway:

        async def ask(number: int, headers: str = JSON) -> Response:
            text = f"{number:08}" + "x" * (INPUT_BYTES - 10)
            return await ask_once(gateway.port, "POST", "/v1/inference", inference_body(text), headers)

        answers = await asyncio.gather(*(ask(number) for number in range(60)))
        assert [answer.status for answer in answers] == [200] * 60
        assert len({str(answer.json["output"]) for answer in answers}) == 60
        sizes = {answer.json["metadata"]["batch_size"] for answer in answers}
        assert max(sizes) == 3

        accepted = await asyncio.gather(*(ask(number, ASYNC) for number in range(60)))
        for each in accepted:
            result = await ask_once(gateway.port, "GET", f"/v1/result/{each.json['task_id']}?wait_ms=10000")
            assert result.json["status"] == "SUCCESS"

        # One that is larger than all bounds is alone.
        text = "x" * 20 * INPUT_BYTES
        huge = await ask_once(gateway.port, "POST", "/v1/inference", inference_body(text), JSON)
        assert (huge.status, huge.json["metadata"]["batch_size"]) == (200, 1)
