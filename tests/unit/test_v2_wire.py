"""KServe V2 bodies: what is understood, what is refused, and what a short body may become."""

import json
import struct
import tracemalloc
from typing import Any

import pytest

from carpool.core.errors import Malformed, UpstreamProtocolFault
from carpool.core.tensors import RawTensor, pack, pack_tensors
from carpool.face.http.v2_wire import V2Answer, V2Call, WantedOutputs, parse_call, write_answer
from carpool.face.octets import Octets, bytes_in, bytes_out, octets_in, wants_octets
from carpool.face.tensor_rows import ROWS_MAX, join_rows, read_row
from carpool.upstream.codecs import make_codec

FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "X", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]} | changes


def binary(head: dict[str, Any], tail: bytes) -> tuple[dict[bytes, bytes], bytes]:
    text = json.dumps(head).encode()
    return {b"inference-header-content-length": b"%d" % len(text)}, text + tail


def raw_tensor(size: int = 16, **changes: Any) -> dict[str, Any]:
    given = tensor(parameters={"binary_data_size": size}, **changes)
    del given["data"]
    return given


def read(*inputs: dict[str, Any], **fields: Any) -> V2Call:
    return parse_call({}, json.dumps({"inputs": inputs, **fields}).encode())


def test_what_the_gateway_looks_at_does_not_enter_the_lane() -> None:
    call = read(tensor(), id="mine", parameters={"timeout": 1500, "binary_data_output": True, "b": 1, "a": "x"})
    assert (call.id, call.parameters, call.timeout_s) == ("mine", b'{"a":"x","b":1}', 0.0015)
    assert call.wanted == WantedOutputs(None, True)
    assert read(tensor(), parameters=None, outputs=None, id=None).wanted == WantedOutputs(None, False)


def test_outputs_that_are_asked_for() -> None:
    outputs = [{"name": "B", "parameters": {"binary_data": True}}, {"name": "A"}]
    assert read(tensor(), outputs=outputs).wanted.by_name == {"B": True, "A": False}
    assert read(tensor(), outputs=outputs, parameters={"binary_data_output": True}).wanted.by_name == {
        "B": True,
        "A": True,
    }


WRONG: dict[str, tuple[dict[bytes, bytes], bytes]] = {
    name: ({}, json.dumps(body).encode())
    for name, body in {
        "no inputs": {"inputs": []},
        "inputs no array": {"inputs": {}},
        "no datatype": {"inputs": [{"name": "X", "shape": [1], "data": [1]}]},
        "unknown datatype": {"inputs": [tensor(datatype="FP8")]},
        "no name": {"inputs": [tensor(name="")]},
        "a long name": {"inputs": [tensor(name="n" * 300)]},
        "the same name twice": {"inputs": [tensor(), tensor()]},
        "a shape that is too large": {"inputs": [tensor(shape=[2, 3])]},
        "a shape that is too small": {"inputs": [tensor(shape=[2, 1])]},
        "a negative shape": {"inputs": [tensor(shape=[-2, -2])]},
        "a huge shape": {"inputs": [tensor(shape=[2, 1 << 62])]},
        "a shape of many dimensions": {"inputs": [tensor(shape=[2] + [1] * 40)]},
        "a shape of very many dimensions": {"inputs": [tensor(shape=[1] * 10_000)]},
        "no shape": {"inputs": [tensor(shape=[])]},
        "a shape of texts": {"inputs": [tensor(shape=["2"])]},
        "an empty batch": {"inputs": [tensor(shape=[0, 2], data=[])]},
        "too many rows": {"inputs": [tensor(shape=[ROWS_MAX + 1, 1], data=[1] * (ROWS_MAX + 1))]},
        "rows that differ": {"inputs": [tensor(), tensor(name="Y", shape=[1, 4])]},
        "no data": {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1]}]},
        "data that is no array": {"inputs": [tensor(data=1)]},
        "data of objects": {"inputs": [tensor(data=[{}, 1, 2, 3])]},
        "texts for numbers": {"inputs": [tensor(data=["1", "2", "3", "4"])]},
        "numbers beyond a double": {"inputs": [tensor(data="@")]},
        "numbers for texts": {"inputs": [tensor(datatype="BYTES", shape=[2, 1], data=[1])]},
        "too many texts": {"inputs": [tensor(datatype="BYTES", shape=[1, 70_000], data=["a"] * 70_000)]},
        "raw without its header": {"inputs": [raw_tensor()]},
        "too many tensors": {"inputs": [tensor(name=str(number)) for number in range(65)]},
        "parameters that are no object": {"inputs": [tensor()], "parameters": 1},
        "large parameters": {"inputs": [tensor()], "parameters": {"a": "x" * 20_000}},
        "a sequence": {"inputs": [tensor()], "parameters": {"sequence_id": 7}},
        "a negative timeout": {"inputs": [tensor()], "parameters": {"timeout": -1}},
        "outputs that are no array": {"inputs": [tensor()], "outputs": 1},
        "an output without a name": {"inputs": [tensor()], "outputs": [{}]},
        "classes": {"inputs": [tensor()], "outputs": [{"name": "A", "parameters": {"classification": 3}}]},
        "shared memory": {"inputs": [tensor(parameters={"shared_memory_region": "r"})]},
        "a flag that is none": {"inputs": [tensor()], "parameters": {"binary_data_output": 1}},
        "an id that is a number": {"inputs": [tensor()], "id": 1},
        "a long id": {"inputs": [tensor()], "id": "i" * 300},
    }.items()
}
WRONG["numbers beyond a double"] = ({}, WRONG["numbers beyond a double"][1].replace(b'"@"', b"[1e999,1,1,1]"))
WRONG["long numbers"] = (
    {},
    json.dumps({"inputs": [tensor(data="@")]}).encode().replace(b'"@"', b"[1.%b,1,1,1]" % (b"0" * 400)),
)
WRONG["NaN"] = ({}, json.dumps({"inputs": [tensor(data=[float("nan"), 1, 2, 3])]}).encode())
WRONG["no JSON"] = ({}, b"\x00\x01")
WRONG["nothing"] = ({}, b"")
WRONG["deep"] = ({}, b'{"inputs":' + b"[" * 100_000)
WRONG["not UTF-8"] = ({}, b'{"inputs":[{"name":"X","datatype":"BYTES","shape":[1],"data":["\xff"]}]}')
WRONG["raw, too short"] = binary({"inputs": [raw_tensor(12)]}, FLOATS[:12])
WRONG["raw, longer than it says"] = binary({"inputs": [raw_tensor()]}, FLOATS + b"\0")
WRONG["raw, says more than there is"] = binary({"inputs": [raw_tensor(17)]}, FLOATS)
WRONG["raw, a negative size"] = binary({"inputs": [raw_tensor(-1)]}, FLOATS)
WRONG["raw, a size that is no number"] = binary({"inputs": [tensor(parameters={"binary_data_size": "16"})]}, FLOATS)
WRONG["raw and data"] = binary({"inputs": [tensor(parameters={"binary_data_size": 16})]}, FLOATS)
WRONG["raw, strings cut off"] = binary(
    {"inputs": [raw_tensor(datatype="BYTES", shape=[1, 2])]}, b"\x0c\0\0\0" + bytes(12)
)
WRONG["raw, strings that lie"] = binary({"inputs": [raw_tensor(datatype="BYTES", shape=[1, 1])]}, b"\xff" * 16)
WRONG["a header beyond the body"] = ({b"inference-header-content-length": b"999999"}, b"{}")
WRONG["a header that is no number"] = ({b"inference-header-content-length": b"-1"}, b"{}")


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_with_words(name: str) -> None:
    headers, body = WRONG[name]
    with pytest.raises(Malformed) as refused:
        parse_call(headers, body)
    assert 10 < len(refused.value.detail) < 500 and "n" * 100 not in refused.value.detail


def test_nan_is_named() -> None:
    with pytest.raises(Malformed, match="no NaN"):
        parse_call(*WRONG["NaN"])


LONG_NAME = "n" * 256
GREEDY: dict[str, tuple[dict[bytes, bytes], bytes]] = {
    "many tiny tensors": (
        {},
        b'{"inputs":[' + b",".join([b'{"name":"","shape":0,"datatype":""}'] * 50_000) + b"]}",
    ),
    "a shape of many numbers": ({}, b'{"inputs":[{"name":"","datatype":"","shape":[' + b"1," * 900_000 + b"1]}]}"),
    "parameters of many arrays": (
        {},
        b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1]}],"parameters":{"a":['
        + b"[]," * 600_000
        + b"1]}}",
    ),
    "many short numbers in a row": (
        {},
        b'{"inputs":[{"name":"X","datatype":"FP64","shape":[1,900000],"data":[' + b"1," * 899_999 + b"1]}]}",
    ),
    "many empty texts": (
        {},
        b'{"inputs":[{"name":"X","datatype":"BYTES","shape":[1,1],"data":[' + b'"",' * 600_000 + b'""]}]}',
    ),
    "many raw texts": binary(
        {"inputs": [raw_tensor(1_600_000, datatype="BYTES", shape=[1, 400_000])]}, bytes(1_600_000)
    ),
    "long names in many rows": (
        {},
        json.dumps(
            {"inputs": [tensor(name=f"{n}{LONG_NAME}"[:256], shape=[2048, 1], data=[1] * 2048) for n in range(60)]}
        ).encode(),
    ),
    "short numbers beside raw": binary(
        {
            "inputs": [
                raw_tensor(4, shape=[1, 1]),
                tensor(name="Y", datatype="FP64", shape=[1, 500_000], data=[1] * 500_000),
            ]
        },
        bytes(4),
    ),
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_body_never_becomes_much_more_than_twice_itself(name: str) -> None:
    headers, body = GREEDY[name]
    tracemalloc.start()
    try:
        try:
            parse_call(headers, body)
        except Malformed:
            pass
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The body itself is not counted: it was there before.
    assert most <= 2 * len(body) + 1024 * 1024


def written(outputs: list[bytes], wanted: WantedOutputs) -> V2Answer:
    steps = write_answer("m", "3", "mine", join_rows(list(map(read_row, outputs))), wanted)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: V2Answer = end.value
            return answer


def row(value: float, text: str) -> bytes:
    number = RawTensor("N", "FP32", (1, 1), struct.pack("<f", value))
    return pack_tensors([number, RawTensor("T", "BYTES", (1,), pack([text], "BYTES"))])


def test_an_answer_is_written_in_the_form_that_was_asked_for() -> None:
    rows = [row(1.5, "a"), row(2.5, "ü")]
    answer = written(rows, WantedOutputs({"T": False, "N": True}, False))
    body = b"".join(answer.body)
    assert answer.header_length is not None
    assert json.loads(body[: answer.header_length]) == {
        "model_name": "m",
        "model_version": "3",
        "id": "mine",
        "outputs": [
            {"name": "T", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
            {"name": "N", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert body[answer.header_length :] == struct.pack("<2f", 1.5, 2.5)
    plain = written(rows, WantedOutputs(None, False))
    assert plain.header_length is None
    assert [output["data"] for output in json.loads(b"".join(plain.body))["outputs"]] == [[1.5, 2.5], ["a", "ü"]]


def test_an_output_that_is_not_there_and_one_that_json_cannot_carry() -> None:
    with pytest.raises(Malformed, match="asked for"):
        written([row(1, "a")], WantedOutputs({"Z": True}, False))
    image = pack_tensors([RawTensor("I", "BYTES", (1,), b"\x02\0\0\0\xff\xfe")])
    with pytest.raises(Malformed, match="binary_data"):
        written([image], WantedOutputs(None, False))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (b"application/octet-stream", True),
        (b"Application/Octet-Stream; q=0.9, application/json;q=0.5", True),
        (b"application/json, application/octet-stream", False),
        (b"application/octet-stream;q=0", False),
        (b"*/*", False),
        (b"", False),
        (b"application/octet-stream;q=x", True),
    ],
)
def test_accept_decides(accept: bytes, wanted: bool) -> None:
    assert wants_octets(accept) is wanted


def test_bytes_of_an_output() -> None:
    floats = pack_tensors([RawTensor("N", "FP32", (1, 2), FLOATS[:8])])
    assert octets_in(floats) == Octets(FLOATS[:8], "FP32", (1, 2))
    image = pack_tensors([RawTensor("I", "BYTES", (1, 1), pack([b"jpg"], "BYTES"))])
    assert octets_in(image) == Octets(b"jpg", "BYTES", (1, 1))
    two = pack_tensors([RawTensor("I", "BYTES", (1, 2), pack([b"a", b"b"], "BYTES"))])
    assert octets_in(two) == Octets(pack([b"a", b"b"], "BYTES"), "BYTES", (1, 2))
    assert octets_in(row(1, "a")) is None
    assert octets_in(b'"aGk="') == octets_in(b'{"b64":"aGk="}') == Octets(b"hi")
    assert octets_in(b'[{"name":"N","datatype":"UINT8","shape":[1,2],"b64":"aGk="}]') == Octets(b"hi", "UINT8", (1, 2))
    smuggled = b'[{"b64":"aGk=","datatype":"X\\r\\nSet-Cookie: a=b","shape":[1]}]'
    long = b'[{"b64":"aGk=","datatype":"UINT8","shape":[%b]}]' % b",".join([b"1"] * 33)
    for other in (smuggled, long, b'"hello!"', b"[1,2]", b'{"label":"cat"}', b"null", b"[]"):
        assert octets_in(other) is None


def test_of_two_outputs_of_one_name_none_is_dropped() -> None:
    one = b'{"name":"Y","datatype":"FP32","shape":[1,1],"data":[1]}'
    packed = pack_tensors([RawTensor("Y", "UINT8", [1, 1], b"a"), RawTensor("Y", "UINT8", [1, 1], b"b")])
    for output in (b"[%b,%b]" % (one, one), packed):
        with pytest.raises(UpstreamProtocolFault, match="two outputs of one name"):
            read_row(output)
    with pytest.raises(Malformed, match="same name"):
        read(tensor(), outputs=[{"name": "Y"}, {"name": "Y", "parameters": {"binary_data": True}}])


def test_bytes_of_clients_are_what_the_model_has_for_them() -> None:
    codec = make_codec("json")
    inputs = {form: bytes_in(form, codec.binary_input) for form in ("base64", "text", "json")}
    assert inputs["base64"](b"hi") == b'"aGk="'
    assert json.loads(inputs["text"]('say "hü"'.encode())) == 'say "hü"'
    assert inputs["json"](b' {"a": 1} ').strip() == b'{"a": 1}'
    for form, wrong in (("text", b"\xff"), ("json", b"hi"), ("json", b'"\xff"'), ("json", b"1 2"), ("json", b"1e999")):
        with pytest.raises(Malformed):
            inputs[form](wrong)
    assert bytes_out("") is None
    for form, value, wanted in (
        ("base64", b'"aGk="', b"hi"),
        ("base64", b'{"label":1}', b'{"label":1}'),
        ("text", b'"h\\u00fc"', "hü".encode()),
        ("text", b"[1]", b"[1]"),
        ("json", b'"aGk="', b'"aGk="'),
    ):
        found = bytes_out(form)  # type: ignore[arg-type]
        assert found is not None and found(value).data == wanted
