"""`shedding.mode = "thresholds"`: what waits at one gateway counts at all of them."""

import asyncio
from pathlib import Path

from support.client import Response, ask_once, inference_body
from support.processes import until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer
from support.upstreams import ScriptedUpstream, scripted_upstream

PATIENT = {"broker.queue_timeout_s": 300, "broker.total_timeout_s": 300, "upstream.timeout_s": 300}
SOON = "X-Request-Timeout-Ms: 300\r\n"


async def test_a_gateway_with_nothing_of_its_own_refuses_when_the_queue_is_full(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    upstream = ScriptedUpstream()
    upstream.latency_s = 0.02
    settings = {"broker.namespace": tmp_path.name, "shedding.mode": "thresholds", **PATIENT}
    async with scripted_upstream(upstream), fleet_over(tmp_path, redis_server.url, settings) as fleet:
        busy, idle = [(await fleet.add("gateway")).process for _ in range(2)]
        batcher = await fleet.add("batcher", "--upstream", upstream.url, "--max-batch", "4")
        await fleet.wait_until_ready()

        async def ask(port: int, text: str, header: str = "") -> Response:
            return await ask_once(port, "POST", "/v1/inference", inference_body(text), header)

        async def is_capacity_known() -> bool:
            await ask(busy.port, "before")
            return bool((await batcher.process.fleet())["capacity_rps"])

        await until(is_capacity_known)
        upstream.gate.clear()
        held: list[asyncio.Task[Response]] = []

        async def does_the_idle_one_refuse() -> bool:
            # It never has more than one request: by these alone it would not refuse.
            held.append(asyncio.create_task(ask(busy.port, f"held {len(held)}")))
            answer = await ask(idle.port, "probe", SOON)
            return answer.status == 503 and "thresholds" in answer.json["detail"]

        await until(does_the_idle_one_refuse)
        upstream.gate.set()
        answers = await asyncio.gather(*held)
        assert {answer.status for answer in answers} <= {200, 503}
        assert answers[0].status == 200

        async def lets_in_again() -> bool:
            return (await ask(idle.port, "after")).status == 200

        await until(lets_in_again)
