"""Batches to bytes and back: what is trusted of an answer, what an error means, and what a client is told to change."""

import asyncio
import base64
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest

from carpool.core.errors import ClientLeft, Malformed
from carpool.core.names import ProtocolName
from carpool.core.request import Request
from carpool.core.tensors import RawTensor, pack_tensors, unpack_tensors
from carpool.testing import Witness, make_request
from carpool.upstream.call_ids import CallIds, is_for_another_call
from carpool.upstream.codecs import Codec, JsonCodec, KServeV1Codec, ProtocolFaultError, make_codec
from carpool.upstream.codecs.base import TOKENS_MAX
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall, UpstreamResponse
from carpool.upstream.grpc_endpoint import GrpcEndpoint
from support.grpc_client import message
from support.processes import PATIENCE_S, until

CODECS: list[tuple[Codec, bytes]] = [(JsonCodec(), b"outputs"), (KServeV1Codec(), b"predictions")]
each_codec = pytest.mark.parametrize(("codec", "field"), CODECS, ids=["json", "kserve_v1"])


def members(codec: Codec, values: list[bytes], parameters: bytes = b"", model: str = "m") -> list[Request]:
    """A batch as it comes to the codec, its inputs prepared where the codec does that."""
    waiter = Witness()
    batch = []
    for number, value in enumerate(values):
        request = make_request(str(number), waiter, now=0.0, model=model, parameters=parameters, value=value)
        if codec.prepares:
            prepared = codec.prepare(value)
            request.prepared, request.lane = prepared.value, prepared.lane
        batch.append(request)
    assert len({request.lane for request in batch}) <= 1, "these may not share a batch"
    return batch


def decoded(codec: Codec, body: bytes, batch: list[Request] | int) -> list[bytes]:
    if isinstance(batch, int):
        batch = members(JsonCodec(), [b"0"] * batch)
    return [bytes(part.value) for part in codec.decode(UpstreamResponse(200, body), batch)]  # type: ignore[call-overload]


# json and kserve_v1


def test_the_names_of_json_are_configurable() -> None:
    codec = make_codec("json", inputs_field='in "q"', outputs_field="résultats", parameters_field="options")
    assert json.loads(codec.encode(members(codec, [b"1"], b'{"a":1}')).body) == {'in "q"': [1], "options": {"a": 1}}
    assert decoded(codec, '{"outputs":[0],"résultats":[7]}'.encode(), 1) == [b"7"]


def told(codec: Codec, fields: dict[str, Any], sizes: tuple[int, ...] = (4, 8)) -> list[tuple[Any, Any]]:
    """Tokens and version of each member, whose inputs are this long."""
    body = json.dumps({"outputs": [0] * len(sizes), **fields}).encode()
    batch = members(codec, [b"1" * size for size in sizes])
    return [(part.tokens_used, part.model_version) for part in codec.decode(UpstreamResponse(200, body), batch)]


def test_json_tells_tokens_and_versions() -> None:
    """One for all, of which tokens are shared out by length; or one for each."""
    assert told(JsonCodec(), {"tokens_used": 12, "model_version": "v7"}) == [(4, "v7"), (8, "v7")]
    assert told(JsonCodec(), {"tokens_used": [0, 5], "model_version": ["a", 3]}) == [(0, "a"), (5, "3")]
    assert told(JsonCodec(), {"model_version": 3}) == [(None, "3")] * 2
    assert told(JsonCodec(), {"tokens_used": TOKENS_MAX}, (1,)) == [(TOKENS_MAX, None)]
    named = make_codec("json", tokens_field="usage", version_field="rev")
    assert told(named, {"usage": 3, "rev": "x", "tokens_used": 9, "model_version": "y"}) == [(1, "x"), (2, "x")]


@pytest.mark.parametrize("field", ["tokens_used", "model_version"])
@pytest.mark.parametrize(
    "other", [None, {}, {"total": 5}, True, 0.5, -1, 10**24, [], [1], [1, 2, 3], [1, None], [[1, 2]], "x" * 129]
)
def test_outputs_are_none_the_worse_for_what_is_told_beside_them(field: str, other: object) -> None:
    assert told(JsonCodec(), {field: other}) == [(None, None)] * 2


def test_kserve_names_and_path() -> None:
    codec = make_codec("kserve_v1")
    call = codec.encode(members(codec, [b"1", b"2"], b'{"a":1,"signature_name":"s"}', model="resnet"))
    assert json.loads(call.body) == {"instances": [1, 2], "signature_name": "s", "parameters": {"a": 1}}
    assert call.path == "/v1/models/resnet:predict"
    versioned = make_codec("kserve_v1", model_version="3").encode(members(codec, [b"1"], b'{"signature_name":"s"}'))
    assert (versioned.path, versioned.body) == (
        "/v1/models/m/versions/3:predict",
        b'{"instances":[1],"signature_name":"s"}',
    )
    assert decoded(codec, b'{"predictions":[1,2]}', 2) == [b"1", b"2"]


@pytest.mark.parametrize("data", [b"", b"\x00\xff\x10binary", b'"}],'])
def test_binary_input(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert json.loads(JsonCodec().binary_input(data)) == text
    assert json.loads(KServeV1Codec().binary_input(data)) == {"b64": text}


@each_codec
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"FIELD":[1]}', id="short"),
        pytest.param(b'{"FIELD":[]}', id="empty"),
        pytest.param(b'{"FIELD":[1,2,3]}', id="long"),
        pytest.param(b'{"FIELD":null}', id="null array"),
        pytest.param(b"{}", id="missing field"),
        pytest.param(b'{"FIELD":{"0":1,"1":2}}', id="not an array"),
        pytest.param(b'{"FIELD":"12"}', id="a string"),
        pytest.param(b"[1,2]", id="no object"),
        pytest.param(b"null", id="null"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"FIELD":[1,2]', id="cut off"),
        pytest.param(b'{"FIELD":[1,2]}}', id="something after"),
        pytest.param(b'{"FIELD":[1,2,]}', id="trailing comma"),
        pytest.param(b"<html>502 Bad Gateway</html>", id="html"),
        pytest.param(b"\x1f\x8b\x08\x00garbage", id="gzip"),
        pytest.param(b'{"FIELD":["\xff\xfe",2]}', id="invalid UTF-8"),
        pytest.param(b'{"FIELD":[1,2],"note":"\xc3"}', id="invalid UTF-8 beside the outputs"),
        pytest.param(b'{"FIELD":["\\ud800",2]}', id="lone surrogate"),
        pytest.param(b'{"FIELD":[1,%b]}' % (b"[" * 100_000 + b"]" * 100_000), id="deep"),
        pytest.param(b'{"x":%b,"FIELD":[1,2]}' % (b"[" * 100_000 + b"]" * 100_000), id="deep beside the outputs"),
        pytest.param(b'{"FIELD":[NaN]}', id="NaN and short"),
        pytest.param(b'{"FIELD":[1,1NaN]}', id="NaN in a number"),
        pytest.param(b'{"FIELD":[1,"NaN]}', id="NaN in a string without an end"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_a_fault(codec: Codec, field: bytes, body: bytes) -> None:
    with pytest.raises(ProtocolFaultError):
        decoded(codec, body.replace(b"FIELD", field), 2)


@each_codec
def test_a_fault_quotes_nothing_of_the_answer(codec: Codec, field: bytes) -> None:
    for body in (b'{"%b":["canary"]}', b'{"%b":"canary"}', b'{"%b":[canary]}', b'{"%b":["canary\xff",1]}'):
        with pytest.raises(ProtocolFaultError) as fault:
            decoded(codec, body % field, 2)
        assert "canary" not in str(fault.value)


def test_a_columnar_answer_is_a_fault() -> None:
    with pytest.raises(ProtocolFaultError, match="columnar"):
        decoded(KServeV1Codec(), b'{"outputs":[1,2]}', 2)


# texts

EMBEDDINGS, COMPLETIONS, TEI = (
    make_codec("openai_embeddings"),
    make_codec("openai_completions"),
    make_codec("tei_embed"),
)
each_text_codec = pytest.mark.parametrize("codec", [EMBEDDINGS, COMPLETIONS, TEI], ids=["embed", "complete", "tei"])


def test_calls_with_texts() -> None:
    call = EMBEDDINGS.encode(members(EMBEDDINGS, [b'"a"', b'"b"'], b'{"dimensions":3}', model="org/m"))
    assert (call.path, call.body) == ("/v1/embeddings", b'{"model":"org/m","input":["a","b"],"dimensions":3}')
    call = COMPLETIONS.encode(members(COMPLETIONS, [b"[1,2]", b"[3]"], b'{"best_of":1,"max_tokens":5,"n":1}'))
    assert call.path == "/v1/completions"
    assert call.body == b'{"model":"m","prompt":[[1,2],[3]],"best_of":1,"max_tokens":5,"n":1}'
    call = TEI.encode(members(TEI, [b'"a"'], b'{"truncate":true}'))
    assert (call.path, call.body) == ("/embed", b'{"inputs":["a"],"truncate":true}')
    assert TEI.encode(members(TEI, [b'"a"'], b"{}")).body == b'{"inputs":["a"]}'


@each_text_codec
@pytest.mark.parametrize("value", [b"1", b"null", b'{"a":1}', b'["a"]', b"[]", b"[1.5]", b"[-1]", b"[[1]]", b"true"])
def test_what_is_no_text_is_refused_at_the_door(codec: Codec, value: bytes) -> None:
    with pytest.raises(Malformed):
        codec.prepare(value)


@each_text_codec
def test_texts_have_no_binary_form(codec: Codec) -> None:
    with pytest.raises(Malformed):
        codec.binary_input(b"\x00")


@pytest.mark.parametrize(
    ("codec", "parameters"),
    [
        (EMBEDDINGS, b'{"input":["x"]}'),
        (EMBEDDINGS, b'{"model":"other"}'),
        (COMPLETIONS, b'{"prompt":"x"}'),
        (COMPLETIONS, b'{"n":2}'),
        (COMPLETIONS, b'{"best_of":4}'),
        (COMPLETIONS, b'{"stream":true}'),
        (TEI, b'{"inputs":[]}'),
        (make_codec("kserve_v2_grpc"), b'{"a":{"b":1}}'),
        (make_codec("kserve_v2_grpc"), b'{"a":9223372036854775808}'),
        (make_codec("kserve_v2_grpc"), b'{"a":null}'),
    ],
)
def test_parameters_that_cannot_be_sent_are_refused(codec: Codec, parameters: bytes) -> None:
    with pytest.raises(Malformed):
        codec.check_parameters(parameters)


@pytest.mark.parametrize("name", get_args(ProtocolName))
def test_ordinary_parameters_are_not(name: ProtocolName) -> None:
    for parameters in (b"", b"{}", b'{"a":1,"n":1,"t":0.5,"u":"x","v":false}'):
        make_codec(name).check_parameters(parameters)


@pytest.mark.parametrize("indices", [[0], [0, 1, 2], [0, 0], [1, 2], [-1, 0], [None, 1], ["0", 1], []])
def test_indices_that_are_not_each_once_are_a_fault(indices: list[Any]) -> None:
    data = [{"embedding": [1], **({"index": i} if i is not None else {})} for i in indices]
    with pytest.raises(ProtocolFaultError):
        decoded(EMBEDDINGS, json.dumps({"data": data}).encode(), 2)
    choices = [{"text": "t", **({"index": i} if i is not None else {})} for i in indices]
    with pytest.raises(ProtocolFaultError):
        decoded(COMPLETIONS, json.dumps({"choices": choices}).encode(), 2)


@pytest.mark.parametrize("body", [b"{}", b'{"data":null}', b'{"data":[{"index":0}]}', b"[[1]]", b'{"choices":[]}'])
def test_what_is_no_list_of_embeddings_is_a_fault(body: bytes) -> None:
    for codec in (EMBEDDINGS, COMPLETIONS):
        with pytest.raises(ProtocolFaultError):
            decoded(codec, body, 1)


def test_completions_can_be_their_texts() -> None:
    codec = make_codec("openai_completions", completion_text=True)
    batch = members(codec, [b'"aa"', b'"bb"'])
    choices = [{"text": 'long "text"', "index": 1, "finish_reason": "stop"}, {"text": "x", "index": 0}]
    for usage, tokens in (({}, [None, None]), ({"usage": {"prompt_tokens": 8, "completion_tokens": 9}}, [5, 12])):
        body = json.dumps({"choices": choices, **usage}).encode()
        assert decoded(codec, body, batch) == [b'"x"', b'"long \\"text\\""']
        assert [part.tokens_used for part in codec.decode(UpstreamResponse(200, body), batch)] == tokens
    for text in ("null", "5", "{}"):
        with pytest.raises(ProtocolFaultError, match="`text` of a choice"):
            decoded(codec, b'{"choices":[{"text":%b,"index":0}]}' % text.encode(), batch[:1])


def test_tokens_are_unknown_where_the_server_does_not_say() -> None:
    answer = UpstreamResponse(200, b'{"choices":[{"text":"x","index":0}]}')
    assert COMPLETIONS.decode(answer, members(COMPLETIONS, [b'"a"']))[0].tokens_used is None
    answer = UpstreamResponse(200, b'{"data":[{"embedding":[1],"index":0}]}')
    assert EMBEDDINGS.decode(answer, members(EMBEDDINGS, [b'"a"']))[0].tokens_used is None


@pytest.mark.parametrize("field", ["total_tokens", "prompt_tokens", "completion_tokens"])
def test_tokens_that_nobody_can_have_used_are_a_fault(field: str) -> None:
    """A reply with such a number could not be written, and cost its neighbours their outcomes."""
    codec = EMBEDDINGS if field == "total_tokens" else COMPLETIONS
    part = {"index": 0, "embedding": [1], "text": "x"}

    def tokens_used(number: float) -> int | None:
        usage = {"prompt_tokens": 0, field: number} if codec is COMPLETIONS else {field: number}
        body = json.dumps({"data": [part], "choices": [part], "usage": usage}).encode()
        return codec.decode(UpstreamResponse(200, body), members(codec, [b'"a"']))[0].tokens_used

    assert [tokens_used(number) for number in (0, 7, TOKENS_MAX)] == [0, 7, TOKENS_MAX]
    for number in (-1, TOKENS_MAX + 1, 2**63, 2**64, 10**24, -(10**24), 0.5):
        with pytest.raises(ProtocolFaultError) as fault:
            tokens_used(number)
        assert str(number) not in str(fault.value)


def test_tei_answers_a_bare_array() -> None:
    assert decoded(TEI, b"[[1.0, 2],[3]]", 2) == [b"[1.0, 2]", b"[3]"]
    for body in (b"[[1]]", b"[]", b'{"data":[[1],[2]]}', b"null", b"[[1],[2]", b'["\xff",1]'):
        with pytest.raises(ProtocolFaultError):
            decoded(TEI, body, 2)


# tensors

V2, GRPC = make_codec("kserve_v2"), make_codec("kserve_v2_grpc")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tensor(**fields: object) -> bytes:
    return json.dumps({"name": "x", "datatype": "FP32", **fields}).encode()


def test_v2_json_call_has_the_clients_own_bytes() -> None:
    values = [
        b'{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.50, 2e0]}',
        b'{"data":[[3,\n4]],"name":"x","shape":[1,2],"datatype":"FP32"}',
    ]
    call = V2.encode(members(V2, values, b'{"priority":1}', model="resnet"))
    assert call.path == "/v2/models/resnet/infer"
    assert call.content_type == "application/json"
    assert call.body == (
        b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1.50, 2e0,3,\n4]}],'
        b'"parameters":{"priority":1}}'
    )
    versioned = make_codec("kserve_v2", model_version="7")
    assert versioned.encode(members(versioned, values)).path == "/v2/models/m/versions/7/infer"


def test_v2_binary_call() -> None:
    raw = [struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)]
    batch = members(V2, [tensor(shape=[1, 2], b64=b64(data)) for data in raw], b'{"priority":1}')
    call = V2.encode(batch)
    assert call.content_type == "application/octet-stream"
    [(header, length)] = call.headers
    assert header == "Inference-Header-Content-Length"
    head, tail = call.body, b"".join(call.tail)
    assert len(head) == int(length) and call.size == len(head) + len(tail)
    assert tail == b"".join(raw)
    assert json.loads(head) == {
        "inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
        "parameters": {"priority": 1, "binary_data_output": True},
    }


def test_what_is_configured_fills_in_for_what_is_not_given() -> None:
    codec = make_codec("kserve_v2", tensor="image UINT8 1,2,2")
    [described] = json.loads(codec.encode(members(codec, [b'{"data":[1,2,3,4]}'])).body)["inputs"]
    assert described == {"name": "image", "shape": [1, 2, 2], "datatype": "UINT8", "data": [1, 2, 3, 4]}
    with pytest.raises(Malformed, match="stands for 4 elements, but 1 came"):
        codec.prepare(b'{"data":[1]}')
    unshaped = make_codec("kserve_v2", tensor="image UINT8")
    assert json.loads(unshaped.encode(members(unshaped, [b'{"data":[1,2]}'])).body)["inputs"][0]["shape"] == [1, 2]


def test_octet_stream_bodies() -> None:
    image = make_codec("kserve_v2", tensor="x UINT8")
    call = image.encode(members(image, [image.binary_input(b"\x01\x02\xff")]))
    assert b"".join(call.tail) == b"\x01\x02\xff"
    assert b'"shape":[1,3]' in call.body
    file = make_codec("kserve_v2", tensor="x BYTES")
    call = file.encode(members(file, [file.binary_input(b"abc"), file.binary_input(b"")]))
    assert b"".join(call.tail) == b"\x03\x00\x00\x00abc\x00\x00\x00\x00"
    assert b'"shape":[2,1]' in call.body
    with pytest.raises(Malformed, match="`upstream"):
        V2.binary_input(b"abc")


def packed(data: bytes) -> bytes:
    return pack_tensors([RawTensor("x", "FP32", (1, 1), data)])


def test_each_gets_its_outputs_in_the_form_that_it_sent() -> None:
    floats = struct.pack("<2f", 1, 2)
    batch = members(V2, [packed(floats[:4]), tensor(shape=[1, 1], b64=b64(floats[4:]))])
    own, others = decoded(V2, raw_answer(floats, shape=[2, 1]), batch)
    [output] = unpack_tensors(own)
    assert (output.name, tuple(output.shape), bytes(output.data)) == ("y", (1, 1), floats[:4])
    assert base64.b64decode(json.loads(others)[0]["b64"]) == floats[4:]
    # From a server that answers JSON even so.
    assert json.loads(decoded(V2, v2_answer(2, shape=[2, 1], data=[1, 2]), batch)[0])[0]["data"] == [1]
    # Whoever left gets nothing made.
    batch[0].settle(ClientLeft("left"), 1.0)
    assert decoded(V2, raw_answer(floats, shape=[2, 1]), batch)[0] == b""


@pytest.mark.parametrize(
    "value",
    [
        b"\0",
        packed(b"1234")[:-1],
        packed(b"12345"),
        pack_tensors([]),
        pack_tensors([RawTensor("", "FP32", (1, 1), b"1234")]),
        pack_tensors([RawTensor("x", "FP31", (1, 1), b"1234")]),
        pack_tensors([RawTensor("x", "FP32", (2, 1), b"12341234")]),
        pack_tensors([RawTensor("x", "BYTES", (1, 1), b"1234")]),
    ],
)
def test_packed_inputs_that_cannot_be_sent_are_refused(value: bytes) -> None:
    with pytest.raises(Malformed):
        V2.prepare(value)


@pytest.mark.parametrize("codec", [V2, GRPC], ids=["http", "grpc"])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"1", id="a number"),
        pytest.param(b"[1,2]", id="an array"),
        pytest.param(b"{}", id="nothing"),
        pytest.param(b'{"x":1}', id="a named number"),
        pytest.param(b'{"shape":[1],"datatype":"FP32","data":[1]}', id="no name"),
        pytest.param(b'{"name":"x","shape":[1],"data":[1]}', id="no datatype"),
        pytest.param(tensor(datatype="FP31", shape=[1], data=[1]), id="unknown datatype"),
        pytest.param(tensor(shape=[1, 2], data=[1]), id="too few"),
        pytest.param(tensor(shape=[1, 2], data=[[1, 2], [3]]), id="too many"),
        pytest.param(tensor(shape=[2, 1], data=[1, 2]), id="two items"),
        pytest.param(tensor(shape=[], data=[1]), id="no batch dimension"),
        pytest.param(tensor(shape=[1, -1], data=[1]), id="negative"),
        pytest.param(tensor(shape=[1] * 33, data=[1]), id="too many dimensions"),
        pytest.param(tensor(shape=[1, 1], data=["1"]), id="a string for a number"),
        pytest.param(tensor(shape=[1, 1], data=[None]), id="null for a number"),
        pytest.param(tensor(shape=[1, 1], data=[{"a": 1}]), id="an object for a number"),
        pytest.param(tensor(shape=[1, 2], data=[1, [], 2]), id="an empty array inside"),
        pytest.param(tensor(shape=[1, 1], data=1), id="data is no array"),
        pytest.param(tensor(shape=[1, 1], data=[1], b64="AAAA"), id="data and b64"),
        pytest.param(tensor(shape=[1, 1], b64="AAAA"), id="three bytes for a float"),
        pytest.param(tensor(shape=[1, 1], b64="!"), id="no base64"),
        pytest.param(tensor(shape=[1, 1], data=[1], more=1), id="an unknown field"),
        pytest.param(tensor(datatype="UINT8", shape=[1, 1], data=[256]), id="over its range"),
        pytest.param(tensor(datatype="INT8", shape=[1, 1], data=[-129]), id="under its range"),
        pytest.param(tensor(datatype="INT32", shape=[1, 1], data=[0.5]), id="a fraction"),
        pytest.param(tensor(datatype="BOOL", shape=[1, 1], data=[1]), id="a number for a boolean"),
        pytest.param(tensor(datatype="FP16", shape=[1, 1], data=[1]), id="FP16 as JSON"),
        pytest.param(tensor(datatype="BYTES", shape=[1, 1], data=[1]), id="a number for a string"),
        pytest.param(tensor(datatype="BYTES", shape=[1, 1], b64=b64(b"\x02\0\0\0a")), id="an element cut off"),
        pytest.param(tensor(datatype="BYTES", shape=[1, 1], b64=b64(b"\x02\0")), id="a length cut off"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_refused_at_the_door(codec: Codec, value: bytes) -> None:
    with pytest.raises(Malformed):
        codec.prepare(value)


def test_a_number_too_large_for_raw_is_refused_at_the_door() -> None:
    for datatype, number in (("UINT64", 1 << 64), ("FP32", 1e300)):
        with pytest.raises(Malformed):
            GRPC.prepare(tensor(datatype=datatype, shape=[1, 1], data=[number]))


def v2_answer(batch: int, **output: object) -> bytes:
    described = {"name": "y", "datatype": "FP32", "shape": [batch, 2], **output}
    return json.dumps({"model_name": "m", "model_version": "3", "outputs": [described]}).encode()


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]], ids=["flat", "nested"])
def test_v2_json_answer(data: list[Any]) -> None:
    batch = members(V2, [tensor(shape=[1, 1], data=[1])] * 2)
    parts = V2.decode(UpstreamResponse(200, v2_answer(2, data=data)), batch)
    assert [json.loads(bytes(part.value)) for part in parts] == [  # type: ignore[call-overload]
        [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}],
        [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}],
    ]
    assert {part.model_version for part in parts} == {"3"}


def test_v2_json_answer_with_numbers_that_json_does_not_have() -> None:
    body = v2_answer(1, data=[float("nan"), float("-inf")])
    assert json.loads(decoded(V2, body, 1)[0])[0]["data"] == [None, None]


def raw_answer(tail: bytes, **output: object) -> bytes:
    head = v2_answer(2, parameters={"binary_data_size": len(tail)}, **output)
    return head + tail


def test_v2_raw_answers() -> None:
    strings = b"\x01\0\0\0a\x00\0\0\0\x02\0\0\0bc\x01\0\0\0\xff"
    parts = [json.loads(part)[0] for part in decoded(V2, raw_answer(strings, datatype="BYTES"), 2)]
    assert parts[0]["data"] == ["a", ""]
    assert base64.b64decode(parts[1]["b64"]) == strings[9:], "what is not UTF-8 stays base64"
    brain = b"".join(struct.pack("<f", value)[2:] for value in (1, 2, 0.5, -4))
    assert [json.loads(part)[0]["data"] for part in decoded(V2, raw_answer(brain, datatype="BF16"), 2)] == [
        [1, 2],
        [0.5, -4],
    ]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"outputs":[]}', id="no outputs"),
        pytest.param(b'{"error":"x"}', id="an error"),
        pytest.param(v2_answer(1, data=[1, 2]), id="one for two"),
        pytest.param(v2_answer(3, data=[1, 2, 3, 4, 5, 6]), id="three for two"),
        pytest.param(v2_answer(2, data=[1, 2, 3]), id="too few elements"),
        pytest.param(v2_answer(2, data=[1, 2, 3, 4, 5]), id="too many elements"),
        pytest.param(v2_answer(2, data=[[1, 2], [3, []]]), id="an empty array inside"),
        pytest.param(v2_answer(2, data=["1,2", "3,4"]), id="strings for numbers"),
        pytest.param(v2_answer(2, data=[{"a": 1}, 2, 3, 4]), id="an object for a number"),
        pytest.param(v2_answer(2, data=[True, 2, 3, 4]), id="true for a number"),
        pytest.param(v2_answer(2, datatype="INT32", data=[1.5, 2, 3, 4]), id="a fraction for a whole number"),
        pytest.param(v2_answer(2, datatype="UINT8", data=[1, None, 3, 4]), id="null for a whole number"),
        pytest.param(v2_answer(2, datatype="BOOL", data=[True, False, 1, 0]), id="numbers for true and false"),
        pytest.param(v2_answer(2, datatype="BYTES", data=["a", "b", 3, "d"]), id="a number for a string"),
        pytest.param(
            json.dumps({"outputs": 2 * json.loads(v2_answer(2, data=[1, 2, 3, 4]))["outputs"]}).encode(),
            id="two outputs of one name",
        ),
        pytest.param(v2_answer(2, data="1234"), id="no array"),
        pytest.param(v2_answer(2, data=None), id="null"),
        pytest.param(v2_answer(2), id="no data"),
        pytest.param(v2_answer(2, shape=[], data=[1, 2]), id="no shape"),
        pytest.param(v2_answer(2, shape=[2, -1], data=[1, 2]), id="negative"),
        pytest.param(v2_answer(2, datatype="FP31", data=[1, 2, 3, 4]), id="unknown datatype"),
        pytest.param(v2_answer(2, datatype="BYTES", data=["a"] * 3), id="too few strings"),
        pytest.param(raw_answer(b"\0" * 15), id="raw, short"),
        pytest.param(raw_answer(b"\0" * 16)[:-1], id="raw, cut off"),
        pytest.param(raw_answer(b"\0" * 16) + b"\0", id="raw, longer than it says"),
        pytest.param(raw_answer(b"\x01\0\0\0a" * 3, datatype="BYTES"), id="raw, too few strings"),
        pytest.param(raw_answer(b"\x01\0\0\0a" * 3 + b"\x02\0\0\0a", datatype="BYTES"), id="raw, string cut off"),
        pytest.param(v2_answer(2, data=[1, 2, 3, 4])[:-1], id="cut off"),
        pytest.param(v2_answer(2, parameters={"binary_data_size": -8}) + b"\0" * 8, id="a negative size"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"<html>", id="html"),
    ],
)
def test_a_v2_answer_that_cannot_be_trusted_is_a_fault(body: bytes) -> None:
    with pytest.raises(ProtocolFaultError):
        decoded(V2, body, 2)


def test_a_v2_fault_quotes_nothing_of_the_answer() -> None:
    for body in (v2_answer(2, data=["canary"]), v2_answer(2, datatype="canary", data=[1]), b'{"canary":"canary'):
        with pytest.raises(ProtocolFaultError) as fault:
            decoded(V2, body, 2)
        assert "canary" not in str(fault.value)


# An answer belongs to its call.

MINE, OTHERS = "carpool-5a17-7", ["carpool-5a17-6", "carpool-5a17-77", "carpool-0ther-7", "carpool-"]


def test_a_call_bears_its_id() -> None:
    values = [tensor(shape=[1, 1], data=[1])]
    as_json = json.loads(V2.encode(members(V2, values), MINE).body)
    assert list(as_json) == ["id", "inputs"] and as_json["id"] == MINE
    raw = V2.encode(members(V2, [tensor(shape=[1, 1], b64=b64(b"\0\0\0\0"))]), MINE)
    assert json.loads(raw.body[: int(dict(raw.headers)["Inference-Header-Content-Length"])])["id"] == MINE
    assert b"\x1a\x0e" + MINE.encode() in GRPC.encode(members(GRPC, values), MINE).body


@pytest.mark.parametrize("other", OTHERS)
def test_an_answer_for_another_call_is_a_fault(other: str) -> None:
    body = json.loads(v2_answer(1, data=[1, 2])) | {"id": other}
    with pytest.raises(ProtocolFaultError, match="for another call") as fault:
        V2.decode(UpstreamResponse(200, json.dumps(body).encode()), members(JsonCodec(), [b"0"]), MINE)
    assert other not in str(fault.value)
    message = RESPONSE_BYTES.replace(b"\x1a\x03abc", b"\x1a" + bytes([len(other)]) + other.encode())
    with pytest.raises(ProtocolFaultError, match="for another call"):
        GRPC.decode(UpstreamResponse(200, message), members(JsonCodec(), [b"0"] * 2), MINE)


def test_no_two_calls_have_the_same_id() -> None:
    ids = CallIds("5a17")
    found = [ids.next() for _ in range(3)]
    assert found == ["carpool-5a17-1", "carpool-5a17-2", "carpool-5a17-3"]
    assert all(is_for_another_call(one, other) == (one != other) for one in found for other in found)


# what servers tell beside calls


def test_limits_that_servers_tell() -> None:
    assert TEI.info_path("m") == "/info"
    assert TEI.batch_max_from_info(b'{"model_id":"x","max_client_batch_size":32}') == 32
    assert V2.info_path("m") == "/v2/models/m/config"
    assert V2.batch_max_from_info(b'{"name":"m","max_batch_size":8}') == 8
    assert V2.batch_max_from_info(b'{"name":"m","max_batch_size":0}') is None
    for codec in (TEI, V2):
        for body in (b"{}", b"", b"<html>", b'{"max_batch_size":"x","max_client_batch_size":-1}'):
            assert codec.batch_max_from_info(body) is None
    assert JsonCodec().info_path("m") is None


# gRPC messages

# Written by protobuf 7.36.2 from the same values.
REQUEST_BYTES = bytes.fromhex(
    "0a066dc3b664656c12013222070a01621202080122100a0169120b10fbffffffffffffffff01220b0a017312061a0474657874220e0a"
    "017a120921000000000000d03f2a0d0a01781204465033321a0203022a0e0a0179120542595445531a0203013a180101010101010101"
    "020202020202020203030303030303033ad701010000006100000000ca00000062630000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000"
)
RESPONSE_BYTES = bytes.fromhex(
    "0a016d1201371a0361626322080a016b12031a01762a160a01791204465033321a02020122070a016b120208012a0d0a017a1205494e"
    "5436341a010232080000c03f000020403210ffffffffffffffff2c01000000000000"
)
CONTENTS_BYTES = bytes.fromhex(
    "0a016d2a120a016f1204424f4f4c1a01022a040a0201002a1b0a016f1204494e54381a01022a0d120b80ffffffffffffffff017f2a1c"
    "0a016f1205494e5433321a01022a0d120bfbffffffffffffffff01072a1d0a016f1205494e5436341a01022a0e1a0c80808080808080"
    "808001ac022a140a016f120555494e54381a01022a05220300ff012a180a016f120655494e5433321a01022a08220601ffffffff0f2a"
    "1d0a016f120655494e5436341a01022a0d2a0b01ffffffffffffffffff012a180a016f1204465033321a01022a0a32080000c03f0000"
    "20c02a200a016f1204465036341a01022a123a109a9999999999b93f00000000000004c02a170a016f120542595445531a01022a0842"
    "0161420362ff63"
)


def test_a_request_is_what_protobuf_writes() -> None:
    codec = make_codec("kserve_v2_grpc", model_version="2")
    numbers = [b"\x01" * 8, b"\x02" * 8, b"\x03" * 8]
    texts = [b"\x01\0\0\0a", b"\0\0\0\0", b"\xca\0\0\0bc" + b"\0" * 200]
    rows = [
        pack_tensors([RawTensor("x", "FP32", (1, 2), number), RawTensor("y", "BYTES", (1, 1), text)])
        for number, text in zip(numbers, texts, strict=True)
    ]
    batch = members(codec, rows, b'{"b":true,"i":-5,"s":"text","z":0.25}', "mödel")
    request = message("inference.ModelInferRequest")
    expected = request.FromString(REQUEST_BYTES)
    assert request.FromString(codec.encode(batch).body) == expected
    expected.id = "abc"
    assert request.FromString(codec.encode(batch, "abc").body) == expected


def test_contents_that_are_not_raw_are_read() -> None:
    response = message("inference.ModelInferResponse")
    batch = members(GRPC, [pack_tensors([RawTensor("x", "INT8", (1, 1), b"\1")])] * 2)
    found: dict[str, bytes] = {}
    for tensor in response.FromString(CONTENTS_BYTES).outputs:
        parts = decoded(GRPC, response(outputs=[tensor]).SerializeToString(), batch)
        found[tensor.datatype] = b"".join(bytes(unpack_tensors(part)[0].data) for part in parts)
    assert found == {
        "BOOL": b"\x01\x00",
        "INT8": struct.pack("<2b", -128, 127),
        "INT32": struct.pack("<2i", -5, 7),
        "INT64": struct.pack("<2q", -(1 << 63), 300),
        "UINT8": b"\x00\xff",
        "UINT32": struct.pack("<2I", 1, (1 << 32) - 1),
        "UINT64": struct.pack("<2Q", 1, (1 << 64) - 1),
        "FP32": struct.pack("<2f", 1.5, -2.5),
        "FP64": struct.pack("<2d", 0.1, -2.5),
        "BYTES": b"\x01\0\0\0a\x03\0\0\0b\xffc",
    }


def test_grpc_answers_are_cut_like_those_of_http() -> None:
    values = [tensor(shape=[1, 1], data=[1]), tensor(shape=[1, 1], b64=b64(b"\0\0\0\0"))]
    batch = members(GRPC, values)
    as_json, as_b64 = (json.loads(part) for part in decoded(GRPC, RESPONSE_BYTES, batch))
    assert as_json == [
        {"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [1.5]},
        {"name": "z", "datatype": "INT64", "shape": [1], "data": [-1]},
    ]
    assert base64.b64decode(as_b64[0]["b64"]) == struct.pack("<f", 2.5)
    assert base64.b64decode(as_b64[1]["b64"]) == struct.pack("<q", 300)
    assert {part.model_version for part in GRPC.decode(UpstreamResponse(200, RESPONSE_BYTES), batch)} == {"7"}
    with pytest.raises(ProtocolFaultError):
        decoded(GRPC, RESPONSE_BYTES, 3)


def test_a_message_that_is_cut_off_is_a_fault() -> None:
    for end in range(len(RESPONSE_BYTES)):
        try:
            decoded(GRPC, RESPONSE_BYTES[:end], 2)
        except ProtocolFaultError:
            continue
        pytest.fail(f"an answer of {end} bytes was taken for whole")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x2b", id="a group"),
        pytest.param(b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="a huge length"),
        pytest.param(b"\x2a" + b"\xff" * 11, id="a number without an end"),
        pytest.param(b"\x28\x01", id="a number for a tensor"),
        pytest.param(b"\x2a\x03\x0a\x01\xff", id="a name that is not UTF-8"),
        pytest.param(b"\x2a\x0d\x12\x04INT8\x1a\x01\x01\x0a\x09ab\x32\x01\x07", id="a name cut off"),
        pytest.param(
            b"\x2a\x0d\x12\x04INT8\x1a\x01\x01\x2a\x02\x10\x7f\x32\x00\x32\x00", id="more contents than outputs"
        ),
        pytest.param(b"\x2a\x0e\x12\x04INT8\x1a\x01\x01\x2a\x03\x10\x80\x01", id="a number that does not fit"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_message_that_cannot_be_trusted_is_a_fault(body: bytes) -> None:
    with pytest.raises(ProtocolFaultError):
        decoded(GRPC, body, 1)


# the gRPC endpoint

Behaviour = Callable[[bytes, Any], Awaitable[bytes]]
Serve = Callable[[Behaviour], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts gRPC servers on loopback that behave as told, and stops them."""
    servers = []

    async def start(behave: Behaviour) -> str:
        server = grpc.aio.server()
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(behave)}
        server.add_registered_method_handlers("inference.GRPCInferenceService", handlers)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"grpc://127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def echo(message: bytes, context: Any) -> bytes:
    return message[::-1]


async def test_grpc_bytes_in_and_out(serve: Serve) -> None:
    endpoint = GrpcEndpoint(await serve(echo), 2, 1 << 20)
    await until(endpoint.accepts_connections)  # which waits for a second, and the machine may be busy
    answers = await asyncio.gather(*(endpoint.post(UpstreamCall(b"abc%d" % n), PATIENCE_S) for n in range(3)))
    assert answers == [UpstreamResponse(200, b"%dcba" % n) for n in range(3)]
    await endpoint.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("NOT_FOUND", 404),
        ("UNAVAILABLE", 503),
        ("RESOURCE_EXHAUSTED", 429),
        ("DEADLINE_EXCEEDED", 504),
        ("UNIMPLEMENTED", 501),
        ("INTERNAL", 500),
        ("UNKNOWN", 502),
        ("CANCELLED", 502),
        ("DATA_LOSS", 502),
    ],
)
async def test_grpc_status(serve: Serve, code: str, status: int) -> None:
    async def fail(message: bytes, context: Any) -> bytes:
        await context.abort(getattr(grpc.StatusCode, code), 'what "happened"')
        raise AssertionError

    endpoint = GrpcEndpoint(await serve(fail), 1, 1 << 20)
    answer = await endpoint.post(UpstreamCall(b""), PATIENCE_S)
    assert (answer.status, json.loads(answer.body)) == (status, {"error": 'what "happened"'})
    await endpoint.close()


async def test_grpc_messages_over_a_limit(serve: Serve) -> None:
    url = await serve(echo)
    endpoint = GrpcEndpoint(url, 1, answer_bytes_max=1000)
    assert (await endpoint.post(UpstreamCall(b"x" * 900), PATIENCE_S)).status == 200
    with pytest.raises(AttemptFailedError, match="longer than 1000 bytes"):
        await endpoint.post(UpstreamCall(b"x" * 1100), PATIENCE_S)
    # More than the server takes by default: it is the batch that is too large.
    assert (await endpoint.post(UpstreamCall(b"x" * (5 << 20)), PATIENCE_S)).status == 413
    await endpoint.close()


@pytest.mark.parametrize(
    "text",
    [
        "the queue is full: 'Received message larger than max (3 vs. 1)'",
        "Received message larger than max (3 vs. 1) in your input",
        "Received message larger than max (4 vs. 1)",
        "CLIENT: Received message larger than max (3 vs. 1)",
        "CLIENT: Received message larger than max (3 vs. 1000) in your input",
        "message larger than max",
    ],
)
async def test_grpc_words_that_a_client_may_have_written_make_no_call_too_long(serve: Serve, text: str) -> None:
    async def fail(message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        raise AssertionError

    endpoint = GrpcEndpoint(await serve(fail), 1, answer_bytes_max=1000)
    assert (await endpoint.post(UpstreamCall(b"abc"), 5.0)).status == 429
    await endpoint.close()


@pytest.mark.parametrize("start", ["Received", "SERVER: Received", "grpc: received"])
async def test_grpc_servers_of_several_kinds_say_that_a_call_is_too_long(serve: Serve, start: str) -> None:
    async def fail(message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{start} message larger than max (3 vs. 1)")
        raise AssertionError

    endpoint = GrpcEndpoint(await serve(fail), 1, 1 << 20)
    assert (await endpoint.post(UpstreamCall(b"abc"), 5.0)).status == 413
    await endpoint.close()


async def test_grpc_no_answer_in_time(serve: Serve) -> None:
    async def sleep(message: bytes, context: Any) -> bytes:
        await asyncio.sleep(30)
        return b""

    endpoint = GrpcEndpoint(await serve(sleep), 1, 1 << 20)
    with pytest.raises(AttemptFailedError, match="no answer within"):
        await endpoint.post(UpstreamCall(b""), 0.2)
    call = asyncio.create_task(endpoint.post(UpstreamCall(b""), PATIENCE_S))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await endpoint.close()


async def test_grpc_nobody_there() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen; nobody else gets its port meanwhile
        port = silent.getsockname()[1]
        endpoint = GrpcEndpoint(f"grpc://user:secret@127.0.0.1:{port}", 1, 1 << 20)
        assert endpoint.name == f"grpc://127.0.0.1:{port}"
        with pytest.raises(AttemptFailedError, match="no connection"):
            await endpoint.post(UpstreamCall(b""), PATIENCE_S)
        assert not await endpoint.accepts_connections()
        await endpoint.close()


# the documents

DOCUMENT = Path(__file__).parents[2] / "docs" / "upstreams.md"


def test_every_protocol_is_documented() -> None:
    headings = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert set(get_args(ProtocolName)) <= set(headings)
    # tests/integration/test_docs_run.py runs them.
    configured = re.findall(r'^protocol = "(\w+)"$', DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(configured) == sorted(get_args(ProtocolName))
