"""Whatever face a request came over, and however it ended: metrics, tracking and the live page count the same."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.asyncio.client import connect

from carpool.core.protobuf import field
from support.client import Connection, ask_once, inference_body
from support.live import viewing
from support.processes import GatewayProcess, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer
from support.tracking import outcomes, page, rows, rows_by_outcome, until_written
from support.upstreams import ScriptedUpstream, scripted_upstream

ASYNC = "Prefer: respond-async\r\n"
LIST = "/v1/models/default:predict"
SETTINGS = {"tracking.store": "sqlite", "upstream.cache": "true", "shedding.mode": "off"}


@asynccontextmanager
async def gateways(
    directory: Path, upstream: ScriptedUpstream, redis: RedisServer | None
) -> AsyncIterator[tuple[list[GatewayProcess], list[GatewayProcess]]]:
    """Where clients come in, and all processes: one alone, or two gateways and two batchers."""
    settings = {**SETTINGS, "tasks.data_dir": str(directory)}
    if redis is None:
        async with running_gateway(directory, upstream.url, "--grpc-port=0", settings=settings) as alone:
            yield [alone], [alone]
        return
    settings |= {"broker.namespace": directory.name}
    async with fleet_over(directory, redis.url, settings) as fleet:
        for _ in range(2):
            await fleet.add("gateway", "--grpc-port=0")
            await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        shedders = [place.process for place in fleet.gateways]
        yield shedders, [*shedders, *(place.process for place in fleet.batchers)]


async def over_http(door: GatewayProcess, target: str, body: bytes, headers: str = "") -> None:
    await ask_once(door.port, "POST", target, body, headers)


async def hangs_up(door: GatewayProcess, target: str, body: bytes) -> None:
    connection = await Connection.open(door.port)
    connection.send("POST", target, body)
    await asyncio.sleep(0.2)
    await connection.close()


async def over_grpc(door: GatewayProcess, texts: list[str]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{door.grpc_port}") as channel:
        predict = channel.unary_unary("/carpool.v1.Inference/Predict")
        left = predict(field(3, json.dumps(f"{texts[0]} left").encode()))
        streamed = [
            field(1, field(1, f"{n}".encode()) + field(2, field(3, json.dumps(text).encode())))
            for n, text in enumerate(texts)
        ]
        stream = channel.stream_stream("/carpool.v1.Inference/PredictStream")(
            iter([b"".join(streamed), field(2, b"0")])
        )
        answers = [*(predict(field(3, json.dumps(text).encode())) for text in texts), read_all(stream)]
        await asyncio.sleep(0.2)
        left.cancel()
        await asyncio.gather(*answers)


async def read_all(stream: Any) -> None:
    async for _ in stream:
        pass


async def over_a_websocket(door: GatewayProcess, texts: list[str]) -> None:
    for leaves in (False, True):
        async with connect(f"ws://127.0.0.1:{door.port}/v1/stream") as client:
            calls = [{"id": n, "input": text} for n, text in enumerate(texts)]
            await client.send(json.dumps([*calls, {"id": "late", "input": "late", "timeout_ms": 50}, {"id": "bad"}]))
            answered = 0
            while not leaves and answered < len(texts) + 2:
                answered += len(json.loads(await client.recv()))
            await asyncio.sleep(0.1 * leaves)


async def a_task(door: GatewayProcess, text: str, other: GatewayProcess, *, is_deleted: bool = False) -> None:
    accepted = await ask_once(door.port, "POST", "/v1/inference", inference_body(text), ASYNC)
    assert accepted.status == 202
    if is_deleted:
        await ask_once(other.port, "DELETE", f"/v1/result/{accepted.json['task_id']}")
        return
    found: dict[str, Any] = {}
    while found.get("status", "PENDING") == "PENDING":
        found = (await ask_once(other.port, "GET", f"/v1/result/{accepted.json['task_id']}?wait_ms=20000")).json


def many(text: str, number: int) -> bytes:
    return json.dumps({"instances": [f"{text} {n % 200}" for n in range(number)]}).encode()


async def all_sorts(shedders: list[GatewayProcess], upstream: ScriptedUpstream) -> None:
    """Many of each kind at a time, at random doors."""
    drawn = random.Random(4)
    upstream.poison = "arsenic"
    for turn in range(3):
        upstream.gate.clear()

        def door() -> GatewayProcess:
            return drawn.choice(shedders)

        work = [
            over_http(door(), LIST, many(f"list {turn}", 3)),
            over_http(door(), LIST, many("the same list", 300)),
            over_http(door(), LIST, many("the same list", 40)),
            over_http(door(), LIST, many(f"late {turn}", 30), "X-Request-Timeout-Ms: 100\r\n"),
            over_http(door(), LIST, json.dumps({"instances": ["fine", "arsenic", "too"]}).encode()),
            hangs_up(door(), LIST, many(f"left {turn}", 20)),
            hangs_up(door(), "/v1/inference", inference_body("same")),
            *(over_http(door(), "/v1/inference", inference_body("same")) for _ in range(5)),
            over_http(door(), "/v1/inference", inference_body("same"), "X-Request-Timeout-Ms: 50\r\n"),
            over_http(door(), "/v1/inference", inference_body("same"), "Cache-Control: no-cache\r\n"),
            over_http(door(), "/v1/inference", inference_body("same"), "Cache-Control: no-store\r\n"),
            over_http(door(), "/v1/inference", b"{"),
            *(over_http(door(), "/v1/inference", inference_body("arsenic")) for _ in range(2)),
            over_grpc(door(), ["same", f"by gRPC {turn}"]),
            over_a_websocket(door(), ["same", f"on a socket {turn}"]),
            a_task(door(), "same", door()),
            a_task(door(), f"task {turn}", door()),
            a_task(door(), f"deleted {turn}", door(), is_deleted=True),
        ]
        running = asyncio.gather(*work)
        await asyncio.sleep(0.5)
        upstream.gate.set()
        await running


async def counted(name: str, processes: list[GatewayProcess]) -> float:
    """The sum of a series over its labels and over processes."""
    pages = [await page(process) for process in processes]
    return sum(float(value) for each in pages for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", each, re.M))


@pytest.mark.parametrize("broker", ["memory", "redis"])
async def test_all_who_count_agree(tmp_path: Path, redis_server: RedisServer, broker: str) -> None:
    path = tmp_path / "tracking.db"
    redis = redis_server if broker == "redis" else None
    async with scripted_upstream() as upstream, gateways(tmp_path, upstream, redis) as (shedders, everybody):
        await all_sorts(shedders, upstream)

        async def is_quiet() -> bool:
            return await counted("carpool_held_requests", shedders) == 0 and upstream.in_flight == 0

        await until(is_quiet)

        async def is_all_written() -> bool:
            await until_written(*everybody)
            return rows_by_outcome(path) == await outcomes(*everybody)

        await until(is_all_written)
        kinds = set(rows_by_outcome(path))
        assert {"ok", "client-left", "deadline-exceeded", "input-refused"} <= kinds
        with viewing(shedders[-1].admin_port) as viewer:
            total = await outcomes(*everybody)
            shown = await asyncio.to_thread(viewer.until, lambda event: Counter(event["requests"]) == total)
        assert shown["requests"] == dict(total)
        answered = "error IS NULL AND NOT is_task AND NOT cached"
        [[number]] = rows(path, f"SELECT count(*) FROM carpool_requests WHERE {answered}")
        assert await counted("carpool_request_seconds_count", everybody) == number
        [[seconds]] = rows(path, f"SELECT sum(completed_at - created_at) / 1e6 FROM carpool_requests WHERE {answered}")
        assert await counted("carpool_request_seconds_sum", everybody) == pytest.approx(seconds, abs=1e-3)
        # A call whose members have all left counts for nobody.
        [[gpu_seconds]] = rows(path, "SELECT sum(gpu_seconds) FROM carpool_requests")
        assert 0 < gpu_seconds <= await counted("carpool_upstream_latency_seconds_sum", everybody) + 1e-6
