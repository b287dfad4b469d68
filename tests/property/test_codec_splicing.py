"""No input that the face accepts can break out of its place in a batch, and every member gets its own output.

The second half runs whole round trips against reference servers, written here with `json` and `struct` alone: they
read a call as the protocol's documents say, and answer in each of the forms that they allow.
"""

import base64
import json
import random
import struct
from collections.abc import Callable
from math import isfinite, isnan, prod
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from carpool.core.errors import Malformed
from carpool.core.request import Request
from carpool.face.http.strict_json import json_fault
from carpool.testing import Witness, make_request
from carpool.upstream.codecs import Codec, JsonCodec, KServeV1Codec, ProtocolFaultError, make_codec
from carpool.upstream.codecs.base import Decoded, apportion
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

CODECS: list[tuple[Codec, str]] = [(JsonCodec(), "inputs"), (KServeV1Codec(), "instances")]
each_codec = pytest.mark.parametrize(("codec", "field"), CODECS, ids=["json", "kserve_v1"])

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# JSON as clients write it: any spacing, escapes or plain UTF-8.
texts = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent).encode("utf-8", "surrogatepass"),
    values,
    st.booleans(),
    st.none() | st.just(1),
)
# Bytes that try to be something else: JSON's own signs, bad numbers, broken UTF-8, in any order.
signs = [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b" ", b"\n", b"\x00", b'"a":', b"\\u", b"d800", b"dc00"]
numbers = [b"1", b"-", b"e999", b".5", b"0", b"9" * 400, b"null", b"NaN", b"true"]
shards = st.sampled_from([*signs, *numbers, b"\xff", b"\xc3\xa9", b"[" * 70, b"]" * 70])
loose = st.lists(shards, min_size=1, max_size=8).map(b"".join) | st.binary(max_size=12)
hostile = loose | loose.map(lambda inner: b'"' + inner + b'"') | loose.map(lambda inner: b"[" + inner + b"]")


def accepted(data: bytes) -> bytes | None:
    """What the face would keep of this input, or None if it would refuse it."""
    try:
        raw = bytes(msgspec.json.decode(b'{"input":' + data + b"}", type=dict[str, msgspec.Raw])["input"])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, KeyError):
        return None
    return raw if json_fault(raw) is None else None


def strictly(body: bytes) -> Any:
    """Parse as an upstream would that takes the standard at its word: UTF-8 alone, and numbers that a double holds."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def number(text: str) -> float:
        assert len(text) <= 300 and isfinite(float(text))
        return float(text)

    return json.loads(body.decode("utf-8"), parse_constant=refuse, parse_int=number, parse_float=number)


def members(codec: Codec, inputs: list[bytes], parameters: bytes = b"") -> list[Request]:
    """A batch as it comes to the codec, its inputs prepared where the codec does that."""
    waiter = Witness()
    batch = []
    for index, value in enumerate(inputs):
        request = make_request(str(index), waiter, now=0.0, parameters=parameters, value=value)
        if codec.prepares:
            prepared = codec.prepare(value)
            request.prepared, request.lane = prepared.value, prepared.lane
        batch.append(request)
    assert len({request.lane for request in batch}) <= 1
    return batch


def output_of(part: Decoded) -> bytes:
    assert isinstance(part.value, bytes | msgspec.Raw)
    return bytes(part.value)


@each_codec
@given(data=st.lists(texts | hostile, min_size=1, max_size=8), parameters=st.sampled_from([b"", b'{"a":[1]}']))
@example(data=[b'1],"inputs":[2', b"2"], parameters=b"")
@example(data=[b'"\\', b'"'], parameters=b"")
@example(data=[b"1e308", b"1e309", b"[1e309]", b"9" * 400, b"[-%b]" % (b"9" * 310)], parameters=b"")
@example(data=[b'"\xff"', b'{"\xff":1}', b'"\xed\xa0\x80"', b'"\\ud800"', b"[" * 65 + b"]" * 65], parameters=b"")
def test_what_is_accepted_can_be_spliced(codec: Codec, field: str, data: list[bytes], parameters: bytes) -> None:
    inputs = [value for value in map(accepted, data) if value is not None]
    assume(inputs)
    body = strictly(codec.encode(members(codec, inputs, parameters)).body)
    assert set(body) == ({field, "parameters"} if parameters else {field})
    assert repr(body[field]) == repr([strictly(value) for value in inputs])  # by repr: -0.0 and 1.0 stay themselves


@pytest.mark.parametrize("name", ["openai_embeddings", "openai_completions", "tei_embed"])
@given(data=st.lists(texts | hostile, min_size=1, max_size=8), parameters=st.sampled_from([b"", b'{"a":[1]}']))
@example(data=[b'"a"', b"5", b"[5]", b"[]"], parameters=b"")
def test_what_text_protocols_accept_can_be_spliced(name: Any, data: list[bytes], parameters: bytes) -> None:
    codec = make_codec(name)
    by_lane: dict[bytes, list[bytes]] = {}
    for value in map(accepted, data):
        if value is not None:
            try:
                by_lane.setdefault(codec.prepare(value).lane, []).append(value)
            except Malformed:
                assert value[:1] != b'"'
    field = {"openai_embeddings": "input", "openai_completions": "prompt", "tei_embed": "inputs"}[name]
    for inputs in by_lane.values():
        body = strictly(codec.encode(members(codec, inputs, parameters)).body)
        assert body.keys() == {field, *(("model",) if name != "tei_embed" else ()), *(("a",) if parameters else ())}
        assert body[field] == [strictly(value) for value in inputs]
        assert {type(value) for value in body[field]} in ({str}, {list})


@given(st.lists(texts, min_size=1, max_size=8))
def test_what_clients_write_is_accepted(data: list[bytes]) -> None:
    """The tests above are not true for want of inputs."""
    for value in data:
        kept = accepted(value)
        if kept is None:  # too long a number, or a lone surrogate in a Python string
            assert b"\\ud" in value or b"\xed" in value or json_fault(value)
        else:
            assert kept == value


@each_codec
@given(outputs=st.lists(texts.filter(lambda text: accepted(text) is not None), max_size=8))
def test_each_output_comes_back_as_the_bytes_it_was(codec: Codec, field: str, outputs: list[bytes]) -> None:
    name = {"inputs": b"outputs", "instances": b"predictions"}[field]
    body = b'{"%b": [%b]}' % (name, b" , ".join(outputs))
    parts = codec.decode(UpstreamResponse(200, body), members(codec, [b"0"] * len(outputs)))
    assert [output_of(part) for part in parts] == outputs


# Round trips: values that JSON has

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def serve_json(call: UpstreamCall, shuffle: random.Random) -> bytes:
    body = json.loads(call.body)
    return json.dumps({"outputs": [{"for": value} for value in body["inputs"]]}).encode()


def serve_kserve_v1(call: UpstreamCall, shuffle: random.Random) -> bytes:
    assert call.path == "/v1/models/m:predict"
    rows = [{"for": value, "nan": float("nan")} for value in json.loads(call.body)["instances"]]
    return json.dumps({"predictions": rows}).encode()


def serve_embeddings(call: UpstreamCall, shuffle: random.Random) -> bytes:
    body = json.loads(call.body)
    data = [{"index": index, "embedding": {"for": value}} for index, value in enumerate(body["input"])]
    shuffle.shuffle(data)
    return json.dumps({"data": data, "usage": {"total_tokens": 17}}).encode()


def serve_completions(call: UpstreamCall, shuffle: random.Random) -> bytes:
    body = json.loads(call.body)
    choices = [{"text": "t", "for": value, "index": index} for index, value in enumerate(body["prompt"])]
    shuffle.shuffle(choices)
    return json.dumps({"choices": choices, "usage": {"prompt_tokens": 10, "completion_tokens": 7}}).encode()


def serve_tei(call: UpstreamCall, shuffle: random.Random) -> bytes:
    return json.dumps([{"for": value} for value in json.loads(call.body)["inputs"]]).encode()


@pytest.mark.parametrize(
    ("name", "serve"),
    [
        ("json", serve_json),
        ("kserve_v1", serve_kserve_v1),
        ("openai_embeddings", serve_embeddings),
        ("openai_completions", serve_completions),
        ("tei_embed", serve_tei),
    ],
)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_each_member_gets_the_output_for_its_input(
    name: Any, serve: Callable[[UpstreamCall, random.Random], bytes], data: st.DataObject, seed: int
) -> None:
    codec = make_codec(name)
    tokens = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5)
    inputs = data.draw(
        st.lists(values if name in ("json", "kserve_v1") else plain_text, min_size=1, max_size=8)
        | st.lists(tokens, min_size=1, max_size=8)
    )
    written = [accepted(json.dumps(value).encode()) for value in inputs]
    assume(all(value is not None for value in written))
    batch = members(codec, [value for value in written if value is not None])
    parts = codec.decode(UpstreamResponse(200, serve(codec.encode(batch), random.Random(seed))), batch)
    assert [json.loads(output_of(part))["for"] for part in parts] == inputs
    if name.startswith("openai"):
        assert sum(part.tokens_used or 0 for part in parts) == 17


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=64))
def test_shares_sum_up_and_are_fair(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total and min(shares) >= 0
    if sum(weights):
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / sum(weights)) <= 1


# Round trips: tensors

STRUCT_LETTERS = {
    "BOOL": "?",
    **{"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
    **{"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"FP16": "e", "FP32": "f", "FP64": "d"},
}


def elements_of(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BYTES":
        return plain_text
    if datatype == "BOOL":
        return st.booleans()
    bits = int(datatype.strip("UINTFP"))
    if datatype.startswith("FP"):
        return st.floats(width=bits, allow_nan=False, allow_infinity=False)  # type: ignore[arg-type]
    if datatype.startswith("U"):
        return st.integers(0, (1 << bits) - 1)
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


def to_raw(elements: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in elements)
    return b"".join(struct.pack("<" + STRUCT_LETTERS[datatype], element) for element in elements)


def from_raw(raw: bytes, datatype: str) -> list[Any]:
    elements: list[Any] = []
    while raw:
        if datatype == "BYTES":
            length = 4 + struct.unpack("<I", raw[:4])[0]
            assert len(raw) >= length
            elements.append(raw[4:length].decode())
        else:
            length = struct.calcsize("<" + STRUCT_LETTERS[datatype])
            elements.append(struct.unpack("<" + STRUCT_LETTERS[datatype], raw[:length])[0])
        raw = raw[length:]
    return elements


def nested(elements: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) <= 1:
        return elements
    width = prod(shape[1:])
    return [nested(elements[index * width : (index + 1) * width], shape[1:]) for index in range(shape[0])]


class Described(msgspec.Struct):
    """One kind of input tensor, the same for all members."""

    name: str
    datatype: str
    shape: list[int]


def described(draw: st.DrawFn, datatypes: list[str]) -> list[Described]:
    names = draw(st.lists(plain_text.filter(bool), min_size=1, max_size=3, unique=True))
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return [Described(name, draw(st.sampled_from(datatypes)), draw(shapes)) for name in sorted(names)]


@st.composite
def tensor_batches(draw: st.DrawFn, *, raw: bool) -> tuple[list[Described], list[list[list[Any]]]]:
    """The tensors that each member sends, and the elements of each of them."""
    datatypes = [*STRUCT_LETTERS, "BYTES"] if raw else [name for name in (*STRUCT_LETTERS, "BYTES") if name != "FP16"]
    kinds = described(draw, datatypes)
    batch = [
        [
            draw(st.lists(elements_of(kind.datatype), min_size=prod(kind.shape), max_size=prod(kind.shape)))
            for kind in kinds
        ]
        for _ in range(draw(st.integers(1, 6)))
    ]
    return kinds, batch


def client_input(kinds: list[Described], elements: list[list[Any]], *, raw: bool, is_nested: bool) -> bytes:
    tensors = {}
    for kind, own in zip(kinds, elements, strict=True):
        shape = [1, *kind.shape]
        data: dict[str, Any] = {"data": nested(own, shape) if is_nested else own}
        if raw:
            data = {"b64": base64.b64encode(to_raw(own, kind.datatype)).decode()}
        tensors[kind.name] = {"shape": shape, "datatype": kind.datatype, **data}
    if len(tensors) == 1 and is_nested:
        [(name, tensor)] = tensors.items()
        return json.dumps({"name": name, **tensor}).encode()
    return json.dumps(tensors).encode()


def read_v2_call(call: UpstreamCall) -> list[tuple[str, str, list[int], list[Any]]]:
    """Name, datatype, shape and elements of each input of a V2 call over HTTP."""
    headers = dict(call.headers)
    assert int(headers.get("Inference-Header-Content-Length", len(call.body))) == len(call.body)
    head, tail = json.loads(call.body), b"".join(call.tail)
    tensors = []
    for tensor in head["inputs"]:
        elements = tensor.get("data")
        if elements is None:
            size = tensor["parameters"]["binary_data_size"]
            elements, tail = from_raw(tail[:size], tensor["datatype"]), tail[size:]
        assert len(elements) == prod(tensor["shape"])
        tensors.append((tensor["name"], tensor["datatype"], tensor["shape"], elements))
    assert tail == b""
    return tensors


def write_v2_answer(tensors: list[tuple[str, str, list[int], list[Any]]], form: str) -> bytes:
    """Each input is echoed as an output, in one of the forms that the protocol allows."""
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name, datatype, shape, elements in tensors:
        output: dict[str, Any] = {"name": "out " + name, "datatype": datatype, "shape": shape}
        if form == "raw":
            raw = to_raw(elements, datatype)
            tail += raw
            output["parameters"] = {"binary_data_size": len(raw)}
        else:
            output["data"] = nested(elements, shape) if form == "nested" else elements
        outputs.append(output)
    return json.dumps({"model_name": "m", "outputs": outputs}).encode() + tail


def check_outputs(parts: list[Decoded], kinds: list[Described], batch: list[list[list[Any]]]) -> None:
    for part, own in zip(parts, batch, strict=True):
        outputs = json.loads(output_of(part))
        assert [output["name"] for output in outputs] == ["out " + kind.name for kind in kinds]
        for output, kind, elements in zip(outputs, kinds, own, strict=True):
            assert (output["datatype"], output["shape"]) == (kind.datatype, [1, *kind.shape])
            if "b64" in output:
                data = base64.b64decode(output["b64"])
                assert data == to_raw(elements, kind.datatype)
            else:
                assert repr(output["data"]) == repr(elements) or output["data"] == elements


@pytest.mark.parametrize("form", ["flat", "nested", "raw"])
@pytest.mark.parametrize("always_raw", [False, True], ids=["as sent", "always raw"])
@given(sent=tensor_batches(raw=False), is_nested=st.booleans())
def test_json_tensors_over_http(form: str, always_raw: bool, sent: Any, is_nested: bool) -> None:
    kinds, batch = sent
    codec = make_codec("kserve_v2", tensor_binary=always_raw)
    requests = members(codec, [client_input(kinds, own, raw=False, is_nested=is_nested) for own in batch])
    read = read_v2_call(codec.encode(requests))
    assert [tensor[:3] for tensor in read] == [(k.name, k.datatype, [len(batch), *k.shape]) for k in kinds]
    body = write_v2_answer(read, form)
    check_outputs(list(codec.decode(UpstreamResponse(200, body), requests)), kinds, batch)


@given(sent=tensor_batches(raw=True), is_nested=st.booleans())
def test_raw_tensors_over_http(sent: Any, is_nested: bool) -> None:
    kinds, batch = sent
    codec = make_codec("kserve_v2")
    requests = members(codec, [client_input(kinds, own, raw=True, is_nested=is_nested) for own in batch])
    call = codec.encode(requests)
    assert call.content_type == "application/octet-stream"
    body = write_v2_answer(read_v2_call(call), "raw")
    parts = list(codec.decode(UpstreamResponse(200, body), requests))
    assert all("b64" in output for part in parts for output in json.loads(output_of(part)))
    check_outputs(parts, kinds, batch)


def read_message(data: bytes) -> dict[int, list[Any]]:
    """Protobuf's wire format, as its documents describe it."""

    def varint() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    fields: dict[int, list[Any]] = {}
    while data:
        tag = varint()
        if tag & 7 == 0:
            value: Any = varint()
        else:
            assert tag & 7 == 2
            length = varint()
            value, data = data[:length], data[length:]
            assert len(value) == length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def write_field(number: int, content: bytes) -> bytes:
    return write_varint(number << 3 | 2) + write_varint(len(content)) + content


def write_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + write_varint(value >> 7)


def serve_grpc(call: UpstreamCall) -> bytes:
    """Each input is echoed as an output."""
    request = read_message(call.body)
    assert request[1] == [b"m"]
    answer = write_field(1, b"m") + write_field(2, b"1")
    for tensor in request[5]:
        fields = read_message(tensor)
        echoed = write_field(1, b"out " + fields[1][0]) + write_field(2, fields[2][0]) + write_field(3, fields[3][0])
        answer += write_field(5, echoed)
    return answer + b"".join(write_field(6, raw) for raw in request[7])


@given(sent=tensor_batches(raw=False), forms=st.lists(st.booleans(), min_size=6, max_size=6))
def test_tensors_over_grpc_where_forms_share_a_batch(sent: Any, forms: list[bool]) -> None:
    kinds, batch = sent
    codec = make_codec("kserve_v2_grpc")
    inputs = [client_input(kinds, own, raw=raw, is_nested=False) for own, raw in zip(batch, forms, strict=False)]
    requests = members(codec, inputs)
    parts = list(codec.decode(UpstreamResponse(200, serve_grpc(codec.encode(requests))), requests))
    check_outputs(parts, kinds, batch)
    for part, raw in zip(parts, forms, strict=False):
        assert all(("b64" in output) == raw for output in json.loads(output_of(part)))


@given(datatype=st.sampled_from(["FP16", "FP32", "FP64"]), raw=st.binary(min_size=8, max_size=8))
def test_any_float_can_be_shown(datatype: str, raw: bytes) -> None:
    """Also those that JSON does not have, which become null."""
    elements = from_raw(raw, datatype)
    head = {"name": "y", "datatype": datatype, "shape": [1, len(elements)], "parameters": {"binary_data_size": 8}}
    body = json.dumps({"outputs": [head]}).encode() + raw
    codec = make_codec("kserve_v2")
    [part] = codec.decode(UpstreamResponse(200, body), members(JsonCodec(), [b"0"]))
    shown = strictly(output_of(part))[0]["data"]
    assert shown == [element if isfinite(element) else None for element in elements]
    assert any(map(isnan, elements)) <= (None in shown)


@pytest.mark.parametrize("name", ["kserve_v2", "kserve_v2_grpc"])
@given(value=texts | hostile)
@example(value=b'{"data":[1],"name":"x","datatype":"INT8","shape":[1,1]}')
@example(value=b'{"data":[ ],"name":"x","datatype":"INT8","shape":[1,0]}')
@example(value=b'{"data":["],[\\""],"name":"x","datatype":"BYTES","shape":[1,1]}')
@example(value=b'{"b64":"AA==","name":"x","datatype":"INT8","shape":[1,1,0]}')
def test_whatever_a_client_sends_is_a_tensor_or_its_own_fault(name: Any, value: bytes) -> None:
    codec = make_codec(name)
    kept = accepted(value)
    assume(kept is not None)
    assert kept is not None
    try:
        requests = members(codec, [kept, kept, kept])
    except Malformed:
        return
    call = codec.encode(requests)
    if name == "kserve_v2":
        read_v2_call(call)
    else:
        read_message(call.body)


@pytest.mark.parametrize(
    "name", ["json", "kserve_v1", "kserve_v2", "openai_embeddings", "openai_completions", "tei_embed"]
)
@given(body=texts | hostile)
def test_whatever_a_server_answers_is_read_or_a_fault(name: Any, body: bytes) -> None:
    check_answer(name, body)


@given(
    body=st.binary(max_size=40)
    | st.lists(st.sampled_from([b"\x2a\x03\x1a\x01\x01", b"\x32\x00", b"\x0a"])).map(b"".join)
)
def test_whatever_bytes_a_grpc_server_answers_are_read_or_a_fault(body: bytes) -> None:
    check_answer("kserve_v2_grpc", body)


def check_answer(name: Any, body: bytes) -> None:
    codec = make_codec(name)
    batch = members(JsonCodec(), [b"0"])
    try:
        parts = codec.decode(UpstreamResponse(200, body), batch)
    except ProtocolFaultError:
        pass
    else:
        assert len(parts) == 1
        json.loads(output_of(parts[0]))
    codec.classify(UpstreamResponse(400, body), 64)
