"""KServe V2 for clients, and octet-streams: real processes, real sockets, every answer checked by value."""

import base64
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.tools.sim_gpu import GpuFleet
from support.client import Response
from support.gateway import ask, serving
from support.processes import PATIENCE_S, GatewayProcess
from support.tensor_gpu import CONFIGURATION, tensor_gpu

pytestmark = pytest.mark.xdist_group("kserve_v2_face")
POISON = "arsenic"
INFER = "/v2/models/mirror/infer"
OCTETS = "Content-Type: application/octet-stream"
ASKS_FOR_OCTETS = "Accept: application/octet-stream"
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuFleet]:
    with tensor_gpu(latency_ms=5, slots=2, poison=POISON) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, gpu: GpuFleet) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
    with serving(directory, "") as running:
        yield running


def packed_texts(*texts: str) -> bytes:
    return b"".join([struct.pack("<I", len(text.encode())) + text.encode() for text in texts])


def infer(gateway: GatewayProcess, head: dict[str, Any], tail: bytes = b"", target: str = INFER) -> Response:
    text = json.dumps(head).encode()
    length = [f"Inference-Header-Content-Length: {len(text)}"] if tail else []
    return ask(gateway.port, "POST", target, text + tail, *length)


def split(answer: Response) -> tuple[dict[str, Any], bytes]:
    length = int(answer.headers["inference-header-content-length"])
    return json.loads(answer.body[:length]), answer.body[length:]


def raw(name: str, datatype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}


def test_what_there_is(gateway: GatewayProcess) -> None:
    about = ask(gateway.port, "GET", "/v2")
    assert about.json["name"] == "carpool" and "binary_tensor_data" in about.json["extensions"]
    assert ask(gateway.port, "GET", "/v2/health/live").json == {"live": True}
    assert ask(gateway.port, "GET", "/v2/health/ready").json == {"ready": True}
    assert ask(gateway.port, "GET", "/v2/models/vector/versions/3").json == {
        "name": "vector",
        "versions": ["3"],
        "platform": "carpool",
        "inputs": [{"name": "VECTOR", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [],
    }
    assert ask(gateway.port, "GET", "/v2/models/mirror").json["inputs"] == []
    assert ask(gateway.port, "GET", "/v2/models/mirror/ready").json == {"name": "mirror", "ready": True}
    for path in ("", "/ready", "/versions/3", "/versions/3/ready"):  # names may have slashes
        assert ask(gateway.port, "GET", f"/v2/models/org%2Fmirror{path}").json["name"] == "org/mirror"
    assert ask(gateway.port, "GET", "/v2/models/vector%2F3").status == 404


def test_rows_as_json_come_back_in_their_order(gateway: GatewayProcess) -> None:
    inputs = [
        {"name": "T", "datatype": "BYTES", "shape": [3, 1], "data": ["one", "zwei", "trés"]},
        {"name": "N", "datatype": "FP32", "shape": [3, 2], "data": [[1, 2], [3, 4], [5, 6.5]]},
    ]
    answer = infer(gateway, {"id": "mine", "inputs": inputs})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "model_name": "mirror",
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {"name": "N", "datatype": "FP32", "shape": [3, 2], "data": [1, 2, 3, 4, 5, 6.5]},
            {"name": "T", "datatype": "BYTES", "shape": [3, 1], "data": ["eno", "iewz", "sért"]},
        ],
    }


def test_raw_rows_come_back_raw_or_as_json(gateway: GatewayProcess) -> None:
    numbers = struct.pack("<6f", *range(6))
    head = {"inputs": [raw("N", "FP32", [3, 2], numbers)], "parameters": {"binary_data_output": True}}
    answer, tail = split(infer(gateway, head, numbers))
    assert answer["outputs"] == [raw("N", "FP32", [3, 2], numbers)] and tail == numbers
    head["parameters"] = {}
    assert infer(gateway, head, numbers).json["outputs"][0]["data"] == [0, 1, 2, 3, 4, 5]
    # JSON in, raw out; and one of two outputs alone.
    both = [
        {"name": "T", "datatype": "BYTES", "shape": [2], "data": ["ab", "cd"]},
        {"name": "N", "datatype": "INT64", "shape": [2], "data": [7, -8]},
    ]
    wanted = [{"name": "T", "parameters": {"binary_data": True}}]
    answer, tail = split(infer(gateway, {"inputs": both, "outputs": wanted}))
    assert [output["name"] for output in answer["outputs"]] == ["T"] and tail == packed_texts("ba", "dc")


def test_a_version_that_is_served(gateway: GatewayProcess) -> None:
    head = {"inputs": [{"name": "VECTOR", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    assert infer(gateway, head, target="/v2/models/vector/versions/3/infer").status == 200
    refused = infer(gateway, head, target="/v2/models/vector/versions/4/infer")
    assert refused.status == 404 and "version 3" in refused.json["error"]


def test_a_call_of_many_rows_takes_as_many_seats(gateway: GatewayProcess, gpu: GpuFleet) -> None:
    before = gpu.total()
    texts = [f"row {number}" for number in range(200)]
    tail = packed_texts(*texts)
    head = {"inputs": [raw("T", "BYTES", [200, 1], tail)], "parameters": {"binary_data_output": True}}
    _, back = split(infer(gateway, head, tail))
    assert back == packed_texts(*[text[::-1] for text in texts])
    after = gpu.total()
    assert after.inputs - before.inputs == 200 and after.calls - before.calls >= 4
    assert after.largest_batch <= 64


def test_other_errors_have_the_form_too(gateway: GatewayProcess) -> None:
    good = {"inputs": [{"name": "T", "datatype": "FP32", "shape": [1], "data": [1]}]}
    for method, target, status, says in (
        ("GET", INFER, 405, "POST"),
        ("POST", "/v2/models/mirror", 405, "GET"),
        ("GET", "/v2/nowhere", 404, "openapi"),
        ("GET", "/v2/models/a/b/c", 404, "openapi"),
        ("GET", "/v2/models/missing", 404, "mirror"),
        ("POST", "/v2/models/words/infer", 404, "/v1/inference"),
    ):
        answer = ask(gateway.port, method, target, good)
        assert (answer.status, says in answer.json["error"]) == (status, True), target
    asked = ask(gateway.port, "OPTIONS", INFER)
    assert asked.status == 204 and asked.headers["allow"] == "POST, OPTIONS"
    text = json.dumps(good).encode()
    assert ask(gateway.port, "POST", INFER, text, "Content-Encoding: gzip").status == 415
    # A page of another site can send a text without asking.
    for page in ("Origin: https://elsewhere.example", "Sec-Fetch-Site: cross-site"):
        assert ask(gateway.port, "POST", INFER, text, page).status == 415
        assert ask(gateway.port, "POST", INFER, text, page, "Content-Type: text/plain").status == 415
        assert ask(gateway.port, "POST", INFER, text, page, "Content-Type: application/json").status == 200
    assert ask(gateway.port, "POST", INFER, text, "Content-Type: text/plain").status == 200
    too_long = infer(gateway, {"inputs": [raw("T", "UINT8", [1, 17 << 20], bytes(17 << 20))]}, bytes(17 << 20))
    assert too_long.status == 413


def test_one_bad_row_fails_its_call_and_nobody_elses(gateway: GatewayProcess) -> None:
    def call(*texts: str) -> Response:
        return infer(
            gateway, {"inputs": [{"name": "T", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}]}
        )

    assert call("good").status == 200
    refused = call("a", POISON, "b")
    assert refused.status == 422 and list(refused.json) == ["error"]
    assert call("a", "b").json["outputs"][0]["data"] == ["a", "b"]


def test_octets_both_ways(gateway: GatewayProcess) -> None:
    image = bytes(range(256)) * 4
    target = "/v1/predict?model_id=image"
    answer = ask(gateway.port, "POST", target, image, OCTETS, ASKS_FOR_OCTETS, "X-Request-Id: mine")
    assert answer.status == 200 and answer.body == image
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (answer.headers["x-tensor-datatype"], answer.headers["x-tensor-shape"]) == ("BYTES", "1,1")
    assert answer.headers["x-request-id"] == "mine"
    # The same as JSON, for whoever accepts that.
    [tensor] = ask(gateway.port, "POST", target, image, OCTETS).json["output"]
    assert base64.b64decode(tensor["b64"]) == struct.pack("<I", len(image)) + image
    vector = struct.pack("<4f", 1, 2, 3, 4)
    answer = ask(gateway.port, "POST", "/v1/predict?model_id=vector", vector, OCTETS, ASKS_FOR_OCTETS)
    assert (answer.body, answer.headers["x-tensor-shape"]) == (vector, "1,4")
    wrong = ask(gateway.port, "POST", "/v1/predict?model_id=vector", vector[:-1], OCTETS)
    assert wrong.status == 400 and wrong.headers["content-type"] == "application/problem+json"


def test_results_of_raw_tensors_are_kept(gateway: GatewayProcess, gpu: GpuFleet) -> None:
    vector = struct.pack("<4f", 9, 8, 7, 6)
    head = {"inputs": [raw("VECTOR", "FP32", [2, 4], vector * 2)], "parameters": {"binary_data_output": True}}

    def call() -> bytes:
        return split(infer(gateway, head, vector * 2, "/v2/models/vector/infer"))[1]

    assert call() == vector * 2
    before = gpu.total().inputs
    answer = ask(gateway.port, "POST", "/v1/predict?model_id=vector", vector, OCTETS, ASKS_FOR_OCTETS)
    assert call() == vector * 2 and answer.body == vector
    assert gpu.total().inputs == before


def test_octets_of_a_model_that_speaks_json(gateway: GatewayProcess) -> None:
    # It gives back the base64 text, reversed: that is base64 of something else, or of nothing.
    answer = ask(gateway.port, "POST", "/v1/predict?model_id=words", b"abc", OCTETS, ASKS_FOR_OCTETS)
    assert answer.body == base64.b64decode(base64.b64encode(b"abc")[::-1])
    answer = ask(gateway.port, "POST", "/v1/predict?model_id=words", b"a", OCTETS, ASKS_FOR_OCTETS)
    assert answer.headers["content-type"] == "application/json" and answer.json["output"] == "==QY"


def test_a_call_counts_as_its_rows(tmp_path: Path, gpu: GpuFleet) -> None:
    (tmp_path / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))

    def call(gateway: GatewayProcess, rows: int) -> Response:
        data = struct.pack(f"<{rows}f", *range(rows))
        return infer(gateway, {"inputs": [raw("N", "FP32", [rows], data)]}, data)

    with serving(tmp_path, "", settings={"limits.anonymous": 60, "limits.burst": 20}) as gateway:
        answer = call(gateway, 15)
        assert answer.status == 200 and "r=5;" in answer.headers["ratelimit"]
        refused = call(gateway, 15)
        assert refused.status == 429 and "counts as 15" in refused.json["error"]
        assert int(refused.headers["retry-after"]) >= 1
        # What cannot be read counts as one, and what is refused takes nothing.
        assert infer(gateway, {"inputs": []}).status == 400
        assert call(gateway, 3).status == 200


def test_schemathesis_finds_nothing(gateway: GatewayProcess, tmp_path: Path) -> None:
    # That a tensor has as many elements as its shape says, no schema can say: so what is valid by it may be refused.
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{gateway.port}/openapi.json"]
    command += ["--include-path-regex", "^/v2", "--exclude-checks", "positive_data_acceptance"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "4", "--seed", "1"]
    command += ["--request-timeout", str(PATIENCE_S)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    assert gateway.log_messages("error") == []
