"""JSON in and out of the inference routes."""

import json
from typing import Any

import msgspec
import pytest

from carpool.core.errors import Malformed
from carpool.core.outcome import CallFacts, Output
from carpool.face.http import wire
from carpool.face.http.stream import BadCall, decode_message
from carpool.testing import Witness, make_request


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "truncated"),
        (b"{}", "`input`"),
        (b"[]", "object"),
        (b"nonsense", "malformed"),
        (b'{"input":1', "truncated"),
        (b'{"input":1}{"input":2}', "malformed"),
        (b'{"input":1,"inputs":2}', "`inputs`"),
        (b'{"input":1,"model":7}', "$.model"),
        (b'{"input":1,"client_id":7}', "$.client_id"),
        (b'{"input":1,"client_id":"%b"}' % (b"x" * 257), "<= 256 - at `$.client_id`"),
        (b'{"input":1,"mode":"later-canary"}', '`mode` must be "sync" or "async"'),
        (b'{"input":1,"client_id":"\xff"}', "UTF-8"),
        (b'{"\xff":1}', "UTF-8"),
        (b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"input":NaN}', "malformed"),
        (b'{"input":-Infinity}', "malformed"),
        (b'{"input":"\\ud800xxxxxxx"}', "hex escape"),
        (b'{"input":"a\nb"}', "malformed"),
        (b'{"input":01}', "malformed"),
        (b'\xef\xbb\xbf{"input":1}', "malformed"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_call_that_is_refused_says_why(body: bytes, words: str) -> None:
    with pytest.raises(Malformed) as caught:
        wire.decode_inference(body)
    assert words in caught.value.detail
    assert "canary" not in caught.value.detail


def test_predict() -> None:
    call = wire.decode_predict(b'{"model_id":"m","input_data":[1]}')
    assert (call.model_id, bytes(call.input_data)) == ("m", b"[1]")
    for body in (b'{"model_id":"m"}', b'{"input_data":1}', b'{"model_id":"m","input_data":1,"mode":"sync"}', b"\xff"):
        with pytest.raises(Malformed):
            wire.decode_predict(body)


def canonical(raw: bytes) -> bytes:
    return wire.canonical_parameters(msgspec.Raw(raw))


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"1", b'"a"', b"true", b'{"a":1e999}', b'{"a":"\xff"}', b'{"a":"%b"}' % (b"x" * wire.PARAMETERS_BYTES_MAX)],
    ids=lambda raw: repr(raw)[:20],
)
def test_parameters_that_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed, match="`parameters`"):
        canonical(raw)


def test_the_canonical_forms_kept_are_bounded() -> None:
    first = canonical(b'{"n":-1}')
    assert canonical(b'{"n":-1}') is first
    for number in range(wire.CANONICAL_KEPT_MAX):
        canonical(b'{"n":%d}' % number)
    assert canonical(b'{"n":-1}') == first
    assert canonical(b'{"n":-1}') is not first, "it is remembered for ever"


def test_answers() -> None:
    request = make_request("id-1", Witness(), now=10.0, model='mo"del')
    request.taken, request.ended = 10.005, 10.25
    answers = wire.InferenceAnswers().pieces
    plain = Output(b'{"echo": 1}', CallFacts(3, 0.2))
    rich = Output(b"[]", CallFacts(1, 0.1, model_version='v"1', cached=True), tokens_used=7)
    metadata = {"latency_ms": 250, "queue_ms": 5.0, "model": 'mo"del'}
    assert b'"latency_ms":250,' in b"".join(answers(request, plain))
    for _ in range(2):
        assert json.loads(b"".join(answers(request, plain))) == {
            "request_id": "id-1",
            "output": {"echo": 1},
            "metadata": {**metadata, "upstream_ms": 200.0, "batch_size": 3, "cached": False},
        }
        more = {"model_version": 'v"1', "tokens_used": 7}
        assert json.loads(b"".join(answers(request, rich))) == {
            "request_id": "id-1",
            "output": [],
            "metadata": {**metadata, "upstream_ms": 100.0, "batch_size": 1, "cached": True, **more},
        }
    assert json.loads(b"".join(wire.predict_pieces(request, plain))) == {
        "request_id": "id-1",
        "output": {"echo": 1},
        "latency_ms": 250.0,
    }


@pytest.mark.parametrize(
    ("decode", "body", "told"),
    [
        (wire.decode_inference, {"inputs": ["a"]}, "unknown field `inputs`; did you mean `input`?"),
        (wire.decode_inference, {"prompt": "a"}, "unknown field `prompt`; did you mean `input`?"),
        (wire.decode_inference, {"input": 1, "model_id": "m"}, "unknown field `model_id`; did you mean `model`?"),
        (wire.decode_inference, {"input": 1, "params": {}}, "unknown field `params`; did you mean `parameters`?"),
        (wire.decode_predict, {"model_id": "m", "input": 1}, "unknown field `input`; did you mean `input_data`?"),
        (wire.decode_predict, {"model_id": "m", "parameters": {}}, "unknown field `parameters`"),
        (wire.decode_inference, {"input": 1, "temperature": 1}, "unknown field `temperature`"),
    ],
)
def test_a_usual_name_of_others_is_told_as_it_is_here(decode: Any, body: Any, told: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(json.dumps(body).encode())
    assert caught.value.detail.endswith(told)


def test_a_message_of_a_stream_is_told_so_too() -> None:
    (bad,) = decode_message(b'{"id": 7, "inputs": 1}')
    assert isinstance(bad, BadCall) and bad.id == 7
    assert bad.error.detail.endswith("did you mean `input`?")
