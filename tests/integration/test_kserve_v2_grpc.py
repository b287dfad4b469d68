"""KServe V2 over gRPC for clients: raw and typed contents, rows that ride apart, and what is refused."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from support.gateway import eventually, metric, serving
from support.grpc_client import GrpcClient, Refusal, grpc_client, message
from support.processes import PATIENCE_S, GatewayProcess
from support.tensor_gpu import CONFIGURATION, tensor_gpu

pytestmark = pytest.mark.xdist_group("kserve v2 grpc")

SERVICE = "inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with tensor_gpu(latency_ms=20, slots=2) as gpu:
        (folder / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
        with serving(folder, "", "--grpc-port=0") as running:
            yield running
            assert running.log_messages("error") == []


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[GrpcClient]:
    with grpc_client(gateway.grpc_port) as client:
        yield client


def call(client: GrpcClient, method: str, **fields: Any) -> Any:
    asked = message(f"inference.{method}Request")(**fields)
    return client.method(f"{SERVICE}/{method}")(asked, timeout=PATIENCE_S)


def refused(client: GrpcClient, **fields: Any) -> Refusal:
    return client.refused(f"{SERVICE}/ModelInfer", message("inference.ModelInferRequest")(**fields))


def texts(*values: str) -> bytes:
    return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)


def test_what_there_is(client: GrpcClient) -> None:
    assert call(client, "ServerLive").live and call(client, "ServerReady").ready
    assert call(client, "ModelReady", name="mirror").ready
    assert call(client, "ModelReady", name="vector", version="3").ready
    for wrong in ({"name": "nobody"}, {"name": "words"}, {"name": "vector", "version": "4"}):
        assert not call(client, "ModelReady", **wrong).ready
    assert call(client, "ServerMetadata").name == "carpool"
    about = call(client, "ModelMetadata", name="vector")
    assert (about.name, list(about.versions)) == ("vector", ["3"])
    assert (about.inputs[0].name, about.inputs[0].datatype, list(about.inputs[0].shape)) == ("VECTOR", "FP32", [-1, 4])


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_raw_contents(client: GrpcClient, rows: int) -> None:
    numbers = struct.pack(f"<{rows * 2}f", *range(rows * 2))
    words = [f"№{row} naïve" for row in range(rows)]
    answer = call(
        client,
        "ModelInfer",
        model_name="mirror",
        id="my-call",
        inputs=[
            {"name": "V", "datatype": "FP32", "shape": [rows, 2]},
            {"name": "T", "datatype": "BYTES", "shape": [rows, 1]},
        ],
        outputs=[{"name": "T"}, {"name": "V"}],
        raw_input_contents=[numbers, texts(*words)],
    )
    assert (answer.id, answer.model_name) == ("my-call", "mirror")
    assert [(each.name, list(each.shape)) for each in answer.outputs] == [("T", [rows, 1]), ("V", [rows, 2])]
    assert list(answer.raw_output_contents) == [texts(*(word[::-1] for word in words)), numbers]


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.0]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"ab", b""]),
    ],
)
def test_typed_contents(client: GrpcClient, datatype: str, field: str, values: list[Any]) -> None:
    tensor = {"name": "X", "datatype": datatype, "shape": [2, 1], "contents": {field: values}}
    answer = call(client, "ModelInfer", model_name="mirror", inputs=[tensor], parameters={"a": {"int64_param": 1}})
    (output,) = answer.outputs
    assert not answer.raw_output_contents and list(output.shape) == [2, 1]
    found = list(getattr(output.contents, field))
    assert found == ([b"ba", b""] if datatype == "BYTES" else values)


GOOD = {"name": "X", "datatype": "FP32", "shape": [1, 2]}
SHARED = {"shared_memory_region": {"string_param": "x"}}


@pytest.mark.parametrize(
    "fields", [{"model_name": "nobody"}, {"model_name": "words"}, {"model_name": "vector", "model_version": "9"}]
)
def test_no_such_model(client: GrpcClient, fields: dict[str, Any]) -> None:
    refusal = refused(client, inputs=[GOOD], **fields)
    assert (refusal.code, refusal.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": []},
        {"raw_input_contents": []},
        {"raw_input_contents": [b"short"]},
        {"raw_input_contents": [bytes(8), b""]},
        {"inputs": [GOOD] * 2, "raw_input_contents": [bytes(8)] * 2},
        {"inputs": [{**GOOD, "shape": [-1, 2]}]},
        {"inputs": [{**GOOD, "shape": [1] * 40}]},
        {"inputs": [{**GOOD, "shape": [3000, 0]}], "raw_input_contents": [b""]},
        {"inputs": [{**GOOD, "datatype": "X"}]},
        {"inputs": [{**GOOD, "parameters": SHARED}]},
        {"inputs": [{**GOOD, "contents": {"fp32_contents": [1, 2]}}]},
        {"inputs": [{**GOOD, "contents": {"fp32_contents": [1]}}], "raw_input_contents": []},
        {"inputs": [{**GOOD, "datatype": "INT8", "contents": {"int_contents": [1, 300]}}], "raw_input_contents": []},
        {"parameters": {"sequence_id": {"int64_param": 7}}},
        {"parameters": {"x": {"double_param": float("nan")}}},
        {"parameters": {"x": {}}},
        {"parameters": {"timeout": {"int64_param": -1}}},
        {"outputs": [{"name": "Y"}]},
        {"outputs": [{"name": "X", "parameters": {"classification": {"int64_param": 1}}}]},
        {"id": "x" * 257},
    ],
)
def test_bad_calls(client: GrpcClient, fields: dict[str, Any]) -> None:
    good = {"model_name": "mirror", "inputs": [GOOD], "raw_input_contents": [bytes(8)]}
    refusal = refused(client, **(good | fields))
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "MALFORMED")


def test_whoever_leaves_takes_all_rows_with_it(gateway: GatewayProcess, client: GrpcClient) -> None:
    rows = 2000
    tensor = {"name": "X", "datatype": "FP32", "shape": [rows, 1]}
    asked = message("inference.ModelInferRequest")(
        model_name="mirror", inputs=[tensor], raw_input_contents=[bytes(4 * rows)]
    )
    running = client.method(f"{SERVICE}/ModelInfer").future(asked)
    assert eventually(lambda: metric(gateway, "carpool_held_requests") > 0)
    running.cancel()
    assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
    assert call(client, "ServerLive").live
    assert Path(gateway.log).read_text().count("Traceback") == 0


def test_a_task_of_bytes_has_a_result_that_every_face_can_read(client: GrpcClient, gateway: GatewayProcess) -> None:
    numbers = struct.pack("<4f", 1, 2, 3, 4)
    asked = {"model_id": "vector", "input_data": numbers}
    at_once = client.method("Predict")(message("PredictRequest")(**asked), timeout=PATIENCE_S)
    task = client.method("Submit")(message("SubmitRequest")(request=asked), timeout=PATIENCE_S)
    look = message("GetResultRequest")(task_id=task.task_id, wait_ms=30_000)
    result = client.method("GetResult")(look, timeout=PATIENCE_S)
    assert json.loads(result.output) == json.loads(at_once.output)
    with urlopen(f"http://127.0.0.1:{gateway.port}/v1/result/{task.task_id}", timeout=PATIENCE_S) as polled:
        assert json.load(polled)["output"] == json.loads(at_once.output)
