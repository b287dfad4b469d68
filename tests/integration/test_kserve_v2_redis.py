"""Raw tensors over Redis: a gateway packs them, a batcher sends them, and nothing is lost on the way back."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.client import Response, ask_once
from support.processes import GatewayProcess, running_role, until
from support.redis_servers import RedisServer
from support.tensor_gpu import CONFIGURATION, tensor_gpu

OCTETS = "Content-Type: application/octet-stream\r\n"
POISON = "arsenic"


@asynccontextmanager
async def halves(directory: Path, redis_url: str) -> AsyncIterator[GatewayProcess]:
    """A gateway and a batcher, with a GPU behind them."""
    settings = {"broker.url": redis_url, "broker.namespace": directory.name}
    with tensor_gpu(latency_ms=5, slots=2, poison=POISON) as gpu:
        for name in ("g", "b"):
            (directory / name).mkdir()
            (directory / name / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
        async with (
            running_role(directory / "b", "batcher", settings=settings),
            running_role(directory / "g", "gateway", settings=settings) as gateway,
        ):
            await gateway.until_ready()
            yield gateway


async def infer(gateway: GatewayProcess, head: dict[str, Any], tail: bytes) -> Response:
    text = json.dumps(head).encode()
    length = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return await ask_once(gateway.port, "POST", "/v2/models/mirror/infer", text + tail, length)


async def test_raw_tensors_there_and_back(tmp_path: Path, redis_server: RedisServer) -> None:
    async with halves(tmp_path, redis_server.url) as gateway:
        numbers = struct.pack("<300f", *range(300))
        tensor = {"name": "N", "datatype": "FP32", "shape": [100, 3], "parameters": {"binary_data_size": len(numbers)}}
        head = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        answer = await infer(gateway, head, numbers)
        assert answer.status == 200 and answer.body.endswith(numbers)
        images = [b"\xff" + bytes([number]) * 5_000_000 for number in range(3)]
        accept = "Accept: application/octet-stream\r\n"
        answers = await asyncio.gather(
            *(ask_once(gateway.port, "POST", "/v1/predict?model_id=image", image, OCTETS + accept) for image in images)
        )
        # No text, so it comes back as it was.
        assert [each.body for each in answers] == images
        # A letter of a raw input is kept in Redis, shown as JSON, and replayed as a task.
        assert (await ask_once(gateway.port, "POST", "/v1/predict?model_id=image", b"good", OCTETS)).status == 200
        refused = await ask_once(gateway.port, "POST", "/v1/predict?model_id=image", POISON.encode(), OCTETS)
        assert refused.status == 422
        admin = gateway.admin_port

        async def is_kept() -> bool:
            return (await gateway.dead_letters()) == 1

        await until(is_kept)
        [letter] = (await ask_once(admin, "GET", "/internal/dead-letters")).json["dead_letters"]
        shown = (await ask_once(admin, "GET", f"/internal/dead-letters/{letter['id']}")).json["input"]
        assert base64.b64decode(shown["b64"]).endswith(POISON.encode())
        replayed = await ask_once(admin, "POST", f"/internal/dead-letters/{letter['id']}/replay")
        target = f"/v1/result/{replayed.json['task_id']}?wait_ms=30000"
        assert (await ask_once(gateway.port, "GET", target)).json["status"] == "FAILED"
