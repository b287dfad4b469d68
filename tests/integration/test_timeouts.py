"""Which setting ended a request: told by every face, and at the start where one can never be reached."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.sync.client import connect

from support.client import Response
from support.gateway import HeldGpu, Peer, serving
from support.grpc_client import grpc_client
from support.processes import PATIENCE_S, GatewayProcess

TOTAL = "no result within 0.3 s (`broker.total_timeout_s`)"
JSON = "Content-Type: application/json"
TENSOR = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}


@pytest.fixture(scope="module")
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        yield held


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, gpu: HeldGpu) -> Iterator[GatewayProcess]:
    """Every request has a slot of its own, and no call ends."""
    directory = tmp_path_factory.mktemp("gateway")
    protocols = {"text": "json", "v2": "kserve_v2"}
    models = [f"[models.{name}]\nprotocol = '{protocol}'\n" for name, protocol in protocols.items()]
    times = "[broker]\nqueue_timeout_s = 0.3\ntotal_timeout_s = 0.3\n"
    upstream = f"[upstream]\nendpoints = ['{gpu.url}']\nslots = 64\ntimeout_s = 60\n"
    (directory / "carpool.toml").write_text(times + upstream + "".join(models))
    gpu.hold()
    free: dict[str, Any] = {"broker.queue_timeout_s": None, "broker.total_timeout_s": None, "upstream.timeout_s": None}
    free |= {"carpool.service.BREAKER_FAILURES": 1000}
    with serving(directory, "", "--grpc-port=0", "--max-batch=1", settings=free) as running:
        yield running


def post(gateway: GatewayProcess, path: str, body: Any, *headers: str) -> Response:
    with Peer(gateway.port) as peer:
        return peer.ask("POST", path, json.dumps(body).encode(), JSON, *headers)


def by_http(path: str, body: Any, detail: Callable[[Any], str], gateway: GatewayProcess) -> str:
    answer = post(gateway, path, body)
    assert answer.status == 504
    return detail(answer.json)


def by_websocket(gateway: GatewayProcess) -> str:
    with connect(f"ws://127.0.0.1:{gateway.port}/v1/stream") as client:
        client.send(json.dumps({"id": 1, "input": "x"}))
        (answer,) = json.loads(client.recv(PATIENCE_S))
    detail: str = answer["error"]["detail"]
    return detail


def by_grpc(gateway: GatewayProcess) -> str:
    with grpc_client(gateway.grpc_port) as client, pytest.raises(grpc.RpcError) as raised:
        client.predict()
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    details: str = raised.value.details()
    return details


FACES: dict[str, Callable[[GatewayProcess], str]] = {
    "inference": partial(by_http, "/v1/inference", {"input": "x"}, lambda told: told["detail"]),
    "predict": partial(by_http, "/v1/predict", {"model_id": "text", "input_data": 1}, lambda told: told["detail"]),
    "openai": partial(
        by_http, "/v1/embeddings", {"model": "text", "input": ["a", "b"]}, lambda told: told["error"]["message"]
    ),
    "kserve v1": partial(by_http, "/v1/models/text:predict", {"instances": [1]}, lambda told: told["error"]),
    "kserve v2": partial(by_http, "/v2/models/v2/infer", TENSOR, lambda told: told["error"]),
    "websocket": by_websocket,
    "grpc": by_grpc,
}


@pytest.mark.parametrize("face", FACES)
def test_every_face_names_the_total(gateway: GatewayProcess, face: str) -> None:
    assert TOTAL in FACES[face](gateway)


def test_what_can_never_be_reached_is_said_at_the_start(gateway: GatewayProcess) -> None:
    queue, call = (text for text in gateway.log_messages("warning") if "is not below" in text)
    assert queue.startswith("broker.queue_timeout_s (0.3 s) is not below broker.total_timeout_s (0.3 s)")
    assert call.startswith("upstream.timeout_s (60 s) is not below broker.total_timeout_s (0.3 s)")


def test_the_time_of_a_call(gpu: HeldGpu, tmp_path: Path) -> None:
    gpu.hold()
    with serving(tmp_path, gpu.url, settings={"upstream.timeout_s": 0.5, "upstream.attempts": 1}) as gateway:
        told = post(gateway, "/v1/inference", {"input": "x"})
        assert told.status == 502
        assert "no answer within 0.50 s (`upstream.timeout_s`)" in told.json["detail"]
