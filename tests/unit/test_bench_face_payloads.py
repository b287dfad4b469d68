import base64
from array import array
from typing import Any

import msgspec
import pytest

from carpool.core.errors import CarpoolError, all_errors
from carpool.core.protobuf import field, varint
from carpool.face.grpc.messages import status_message
from carpool.tools.bench.faces import PAYLOADS, EmbeddingsPayload, Face, PredictPayload, TensorPayload
from carpool.tools.bench.grpc_calls import read_refusal
from carpool.tools.bench.payload import NOT_TOLD
from carpool.tools.bench.run import BadOption, BenchOptions, resolve
from carpool.upstream.simulated import read_call, vectors_json
from support.grpc_client import message

NUMBER, OTHER = b"0000002a", b"0000002b"


def make(face: Face, **more: Any) -> Any:
    return PAYLOADS[face](host="gateway:80", base_path="/base", run_id="abcdef012345", size=100, **more)


def sent(payload: Any, number: bytes = NUMBER) -> tuple[str, dict[str, Any]]:
    head, _, body = payload.request(number).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    return head.decode().split(" ")[1], msgspec.json.decode(body)


def embeddings(text: str, dimensions: int) -> bytes:
    batch = read_call(msgspec.json.encode({"inputs": [text]}))
    ((vector,),) = msgspec.json.decode(vectors_json(batch, 1, dimensions)).values()
    packed = base64.b64encode(array("f", vector).tobytes()).decode()
    return msgspec.json.encode({"object": "list", "data": [{"index": 0, "embedding": packed}]})


def test_embeddings() -> None:
    payload: EmbeddingsPayload = make("openai", model="e5")
    path, body = sent(payload)
    text = body.pop("input")
    assert (path, body) == ("/base/v1/embeddings", {"encoding_format": "base64", "model": "e5"})
    assert len(text) == 98 and "model" not in sent(make("openai"))[1]
    right = embeddings(text, 384)
    assert payload.verify(b"head" + right, 4, NUMBER) == NOT_TOLD
    assert payload.verify(right, 0, OTHER) is None
    # Of a vector every number counts, and all have as many.
    assert payload.verify(embeddings(text, 383), 0, NUMBER) is None
    assert make("openai").verify(embeddings(text, 383), 0, NUMBER) == NOT_TOLD
    vector = array("f", base64.b64decode(msgspec.json.decode(right)["data"][0]["embedding"]))
    vector[200] += 0.5
    changed = {"embedding": base64.b64encode(vector.tobytes()).decode()}
    for data in ([changed], [], [{"embedding": ""}], [{"embedding": "?"}], [{"embedding": "AAAAAAA="}], [changed] * 2):
        assert make("openai").verify(msgspec.json.encode({"data": data}), 0, NUMBER) is None
    assert payload.verify(b"<html>", 0, NUMBER) is None


def test_tensors() -> None:
    payload: TensorPayload = make("kserve", model="a/b")
    path, body = sent(payload)
    (tensor,) = body["inputs"]
    assert path == "/base/v2/models/a%2Fb/infer" and sent(make("kserve"))[0] == "/base/v2/models/default/infer"
    assert (tensor["datatype"], tensor["shape"]) == ("BYTES", [1])
    (text,) = tensor["data"]

    def answer(**changes: Any) -> bytes:
        return msgspec.json.encode({"outputs": [{**tensor, "data": [text[::-1]], **changes}]})

    assert payload.verify(b"head" + answer(), 4, NUMBER) == NOT_TOLD
    assert payload.verify(answer(), 0, OTHER) is None
    for changes in ({"data": [text]}, {"data": [text[::-1]] * 2}, {"data": [1]}, {"shape": [2]}, {"datatype": "FP32"}):
        assert payload.verify(answer(**changes), 0, NUMBER) is None
    assert payload.verify(b'{"outputs":[]}', 0, NUMBER) is None


def test_messages_of_grpc() -> None:
    payload: PredictPayload = make("grpc", model="m", key="cp_key")
    assert payload.metadata == (("authorization", "Bearer cp_key"),) and make("grpc").metadata == ()
    call = message("PredictRequest").FromString(payload.request(NUMBER))
    output = call.input_json[::-1].encode()
    assert call.model_id == "m" and len(output) == 100
    answer = message("PredictResponse")
    right = answer(request_id="r", output=output, metadata={"queue_ms": 1.5, "batch_size": 7}).SerializeToString()
    assert payload.verify(right, 0, NUMBER) == (1.5, 7)
    assert payload.verify(field(2, output), 0, NUMBER) == NOT_TOLD
    assert payload.verify(right, 0, OTHER) is None
    for wrong in (field(2, output[::-1]), field(2, b"null"), b"", right[:-1], varint(2 << 3) + varint(1)):
        assert payload.verify(wrong, 0, NUMBER) is None


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.code)
def test_refusals_of_grpc_have_the_status_of_http(error: type[CarpoolError]) -> None:
    assert read_refusal(status_message(error("why", retry_after_s=7), "r")) == (error, 7.0)
    assert read_refusal(status_message(error("why"), "r")) == (error, 1.0)


@pytest.mark.parametrize("status", [b"", b"\xff", field(3, b"\xff"), b"\x18\x01", field(3, b"\x08\x02")])
def test_refusals_of_others_have_none(status: bytes) -> None:
    assert read_refusal(status) == (None, 1.0)


def test_what_does_not_go_together() -> None:
    with pytest.raises(BadOption, match="--mode task goes with --face http only"):
        BenchOptions(url="", segments=[], connections=1, face="openai", mode="task")
    with pytest.raises(BadOption, match="must have no path"):
        resolve("http://127.0.0.1:8002/base", "grpc")
