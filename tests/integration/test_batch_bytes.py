"""Batches that are bounded in bytes, in real processes: nothing hangs, and no call is larger than it may be."""

import asyncio
from pathlib import Path

from support.redis_servers import RedisServer
from support.stage import stage

INPUT_BYTES = 1000
# Three inputs in a batch, and two batches at once where there are slots for four.
SETTINGS = {"batching.batch_bytes_max": 3 * INPUT_BYTES + 500, "carpool.service.IN_FLIGHT_BYTES_MAX": 7 * INPUT_BYTES}
SIM = "sim:?latency_ms=20&slots=4"


async def test_large_inputs_come_through_in_small_batches(tmp_path: Path, redis_server: RedisServer) -> None:
    async with stage(tmp_path, ["--upstream", SIM], "redis", SETTINGS, redis_server) as (gateway, *_):
        texts = [f"{number:08}" + "x" * (INPUT_BYTES - 10) for number in range(60)]
        answers = await asyncio.gather(*(gateway.ask(text) for text in texts))
        assert [answer.status for answer in answers] == [200] * 60
        assert len({str(answer.json["output"]) for answer in answers}) == 60
        assert max(answer.json["metadata"]["batch_size"] for answer in answers) == 3
        for task in await asyncio.gather(*(gateway.submit(text) for text in texts)):
            assert (await gateway.result(task))["status"] == "SUCCESS"
        # One that is larger than all bounds is alone.
        huge = await gateway.ask("x" * 20 * INPUT_BYTES)
        assert (huge.status, huge.json["metadata"]["batch_size"]) == (200, 1)
