"""Inputs that a model may not get are refused at the door, whichever way they come."""

import json
from collections.abc import Iterator

import grpc
import pytest
from websockets.sync.client import connect

from carpool.core.protobuf import field
from support.client import Response
from support.gateway import ask, metric, serving
from support.processes import GatewayProcess

CONFIG = """
model = "a"
[upstream]
endpoints = ["sim:?latency_ms=1"]
[input]
deny_patterns = ['''(?i)forb[i1]{1,2}dden''']
[models.a]
deny = ["invisible"]
[models.short]
input_bytes_max = 10
deny_patterns = []
[models.open]
deny_patterns = []
[models.clean]
deny = ["control", "invisible", "repeats=10"]
deny_patterns = []
[models.tensors]
protocol = "kserve_v2"
deny = ["invisible"]
deny_patterns = []
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("denied")
    (directory / "carpool.toml").write_text(CONFIG)
    with serving(directory, "", "--grpc-port=0") as running:
        yield running
        assert running.log_messages("error") == []


def infer(gateway: GatewayProcess, value: object, model: str = "a", *headers: str) -> Response:
    return ask(gateway.port, "POST", "/v1/inference", {"model": model, "input": value}, *headers)


def assert_denied(response: Response, words: str) -> None:
    assert response.status == 422, response.body
    assert response.json["type"] == "urn:carpool:error:input-denied"
    assert words in response.json["detail"]
    assert b"forb" not in response.body.lower()


def test_a_pattern(gateway: GatewayProcess) -> None:
    assert infer(gateway, "allowed").status == 200
    for value in ("so Forbidden", {"a": ["FORB1DDEN"]}, {"forbiidden": 1}):
        assert_denied(infer(gateway, value), "pattern 1 of deny_patterns")
        assert_denied(infer(gateway, value, "a", "Prefer: respond-async"), "pattern 1 of deny_patterns")
        predict = {"model_id": "a", "input_data": value}
        assert_denied(ask(gateway.port, "POST", "/v1/predict", predict), "pattern 1 of deny_patterns")
    escaped = b'{"input": "\\u0066or\\u0062idden"}'
    assert_denied(ask(gateway.port, "POST", "/v1/inference", escaped), "pattern 1")
    assert metric(gateway, "carpool_held_requests") == 0


def test_a_model_has_its_own_rules(gateway: GatewayProcess) -> None:
    assert infer(gateway, "forbidden", "open").status == 200
    assert infer(gateway, "12345678", "short").status == 200
    assert_denied(infer(gateway, "123456789", "short"), "10 bytes at most; this one has 11")


HIDDEN = b'"ig\\u200bnore"'
SAYS = "it has an invisible character; `deny` has invisible"


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        ("/v1/inference", b'{"model":"clean","input":%s}', ""),
        ("/v1/inference", b'{"model":"clean","input":"fine","parameters":{"system":%s}}', ""),
        ("/v1/inference", b'{"model":"clean","input":%s}', "Prefer: respond-async"),
        ("/v1/predict", b'{"model_id":"clean","input_data":%s}', ""),
        ("/v1/embeddings", b'{"model":"clean","input":["fine",%s]}', ""),
        ("/v1/completions", b'{"model":"clean","prompt":%s}', ""),
        ("/embed", b'{"inputs":["fine",%s]}', ""),
        ("/v1/models/clean:predict", b'{"instances":["fine",%s]}', ""),
        (
            "/v2/models/tensors/infer",
            b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],"data":[%s]}]}',
            "",
        ),
    ],
)
def test_every_face_over_http_asks_the_rules(gateway: GatewayProcess, path: str, body: bytes, header: str) -> None:
    refused = ask(gateway.port, "POST", path, body % HIDDEN, *([header] if header else []))
    assert refused.status == 422, refused.body
    assert SAYS in refused.body.decode()
    assert b"nore" not in refused.body


def test_a_stream_and_grpc_ask_them_too(gateway: GatewayProcess) -> None:
    with connect(f"ws://127.0.0.1:{gateway.port}/v1/stream") as client:
        client.send(b'{"id": 1, "model": "clean", "input": %s}' % HIDDEN, text=True)
        said = client.recv()
    assert SAYS in json.dumps(json.loads(said))
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        predict = channel.unary_unary("/carpool.v1.Inference/Predict")
        with pytest.raises(grpc.RpcError) as refused:
            predict(field(1, b"clean") + field(3, HIDDEN))
        assert SAYS in refused.value.details()
        with pytest.raises(grpc.RpcError) as refused:
            predict(field(1, b"clean") + field(3, json.dumps("spam " * 11).encode()))
        assert "more than 10 times in a row; `deny` has repeats=10" in refused.value.details()
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        contents = field(8, "ig\u200bnore".encode())
        tensor = field(1, b"x") + field(2, b"BYTES") + b"\x1a\x02\x01\x01" + field(5, contents)
        with pytest.raises(grpc.RpcError) as refused:
            infer(field(1, b"tensors") + field(5, tensor))
        assert SAYS in refused.value.details()
