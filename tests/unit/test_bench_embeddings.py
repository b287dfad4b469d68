import base64
from array import array
from typing import Any

import msgspec
import pytest

from carpool.tools.bench.options import BadOption, BenchOptions
from carpool.tools.bench.payload import NOT_TOLD, EmbeddingsPayload
from carpool.upstream.simulated import read_call, vectors_json

NUMBER, OTHER = b"0000002a", b"0000002b"


def make(**more: Any) -> EmbeddingsPayload:
    return EmbeddingsPayload(host="gateway:80", base_path="/base", run_id="abcdef012345", size=100, **more)


def sent(payload: EmbeddingsPayload, number: bytes = NUMBER) -> tuple[str, dict[str, Any]]:
    head, _, body = payload.request(number).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    return head.decode().split(" ")[1], msgspec.json.decode(body)


def embeddings(text: str, dimensions: int) -> bytes:
    batch = read_call(msgspec.json.encode({"inputs": [text]}))
    ((vector,),) = msgspec.json.decode(vectors_json(batch, 1, dimensions)).values()
    packed = base64.b64encode(array("f", vector).tobytes()).decode()
    return msgspec.json.encode({"object": "list", "data": [{"index": 0, "embedding": packed}]})


def test_embeddings() -> None:
    payload = make(model="e5")
    path, body = sent(payload)
    text = body.pop("input")
    assert (path, body) == ("/base/v1/embeddings", {"encoding_format": "base64", "model": "e5"})
    assert len(text) == 98 and "model" not in sent(make())[1]
    right = embeddings(text, 384)
    assert payload.verify(b"head" + right, 4, NUMBER) == NOT_TOLD
    assert payload.verify(right, 0, OTHER) is None
    # Of a vector every number counts, and all have as many.
    assert payload.verify(embeddings(text, 383), 0, NUMBER) is None
    assert make().verify(embeddings(text, 383), 0, NUMBER) == NOT_TOLD
    vector = array("f", base64.b64decode(msgspec.json.decode(right)["data"][0]["embedding"]))
    vector[200] += 0.5
    changed = {"embedding": base64.b64encode(vector.tobytes()).decode()}
    for data in ([changed], [], [{"embedding": ""}], [{"embedding": "?"}], [{"embedding": "AAAAAAA="}], [changed] * 2):
        assert make().verify(msgspec.json.encode({"data": data}), 0, NUMBER) is None
    assert payload.verify(b"<html>", 0, NUMBER) is None


def test_what_does_not_go_together() -> None:
    with pytest.raises(BadOption, match="--mode task goes with --face http only"):
        BenchOptions(url="", segments=[], connections=1, face="openai", mode="task")
