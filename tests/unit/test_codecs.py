"""Batches to bytes and back: what is trusted of an answer, and what is not."""

import base64
import json

import pytest

from carpool.upstream.codecs import Codec, JsonCodec, KServeV1Codec, ProtocolFaultError, make_codec

CODECS: list[tuple[Codec, bytes]] = [(JsonCodec(), b"outputs"), (KServeV1Codec(), b"predictions")]
each_codec = pytest.mark.parametrize(("codec", "field"), CODECS, ids=["json", "kserve_v1"])


def decoded(codec: Codec, body: bytes, count: int) -> list[bytes]:
    return [bytes(raw) for raw in codec.decode(body, count)]


def test_json_call() -> None:
    call = JsonCodec().encode("m", b"", [b'"a"', b"{ }", b"null"])
    assert call.body == b'{"inputs":["a",{ },null]}'
    assert (call.path, call.content_type) == ("", "application/json")


def test_json_call_with_parameters() -> None:
    call = JsonCodec().encode("m", b'{"t":0.5}', [b"1"])
    assert json.loads(call.body) == {"inputs": [1], "parameters": {"t": 0.5}}


def test_the_names_of_json_are_configurable() -> None:
    codec = make_codec("json", inputs_field='in "q"', outputs_field="résultats", parameters_field="options")
    assert json.loads(codec.encode("m", b'{"a":1}', [b"1"]).body) == {'in "q"': [1], "options": {"a": 1}}
    assert decoded(codec, '{"outputs":[0],"résultats":[7]}'.encode(), 1) == [b"7"]


def test_kserve_names_and_path() -> None:
    codec = make_codec("kserve_v1", inputs_field="x", outputs_field="y", parameters_field="z")
    call = codec.encode("resnet", b'{"a":1}', [b"1", b"2"])
    assert json.loads(call.body) == {"instances": [1, 2], "parameters": {"a": 1}}
    assert call.path == "/v1/models/resnet:predict"
    assert decoded(codec, b'{"predictions":[1,2]}', 2) == [b"1", b"2"]


@pytest.mark.parametrize("data", [b"", b"\x00\xff\x10binary", b'"}],'])
def test_binary_input(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert json.loads(JsonCodec().binary_input(data)) == text
    assert json.loads(KServeV1Codec().binary_input(data)) == {"b64": text}


@each_codec
def test_outputs_are_slices_of_the_answer(codec: Codec, field: bytes) -> None:
    body = b'{"id":"x","%b" : [ {"b": 1,  "a":2.50} ,"\\u00e9\xc3\xa9",[ ]],"more":{"n":[1]}}' % field
    assert decoded(codec, body, 3) == [b'{"b": 1,  "a":2.50}', b'"\\u00e9\xc3\xa9"', b"[ ]"]


@each_codec
def test_a_null_element_is_an_output(codec: Codec, field: bytes) -> None:
    assert decoded(codec, b'{"%b":[null,1]}' % field, 2) == [b"null", b"1"]


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
        pytest.param(b'{"FIELD":[NaN,2]}', id="NaN"),
        pytest.param(b'{"FIELD":[1,-Infinity]}', id="Infinity"),
        pytest.param(b'{"FIELD":["\xff\xfe",2]}', id="invalid UTF-8"),
        pytest.param(b'{"FIELD":[1,2],"note":"\xc3"}', id="invalid UTF-8 beside the outputs"),
        pytest.param(b'{"FIELD":["\\ud800",2]}', id="lone surrogate"),
        pytest.param(b'{"FIELD":[1,%b]}' % (b"[" * 100_000 + b"]" * 100_000), id="deep"),
        pytest.param(b'{"x":%b,"FIELD":[1,2]}' % (b"[" * 100_000 + b"]" * 100_000), id="deep beside the outputs"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_a_fault(codec: Codec, field: bytes, body: bytes) -> None:
    with pytest.raises(ProtocolFaultError):
        codec.decode(body.replace(b"FIELD", field), 2)


@each_codec
def test_a_fault_quotes_nothing_of_the_answer(codec: Codec, field: bytes) -> None:
    for body in (b'{"%b":["canary"]}', b'{"%b":"canary"}', b'{"%b":[canary]}', b'{"%b":["canary\xff",1]}'):
        with pytest.raises(ProtocolFaultError) as fault:
            codec.decode(body % field, 2)
        assert "canary" not in str(fault.value)
