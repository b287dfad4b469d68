"""A long body is read in few steps of Python: what is done for each of its elements is done in C, or not at all.

Steps are counted, not seconds: a call of a megabyte that took one for each of its elements would hold up the event
loop, and with it everybody else, for a tenth of a second and more.
"""

import json
import sys
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from msgspec import Raw

from carpool.core.errors import Malformed
from carpool.core.tensors import count_of, parsed
from carpool.face.http.list_bodies import fields_of, texts_of, values_of
from carpool.face.http.strict_json import json_fault
from carpool.face.http.v2_wire import parse_call
from carpool.face.http.wire import canonical_parameters, decode_inference
from carpool.upstream.codecs.tensors import OutputTensor, cut_outputs

MIB = 1024 * 1024
# A few for each of 2,048 rows, or 65,536 elements of BYTES; a body of a megabyte may have 500,000 elements.
STEPS_MAX = 100_000


def steps_of(work: Callable[[], object]) -> int:
    """How often Python calls something meanwhile."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    except Malformed:
        pass
    finally:
        sys.setprofile(before)
    return count


def repeated(element: bytes, size: int = MIB) -> bytes:
    return b"[" + b",".join([element] * (size // (len(element) + 1))) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"input":' + repeated(b"1") + b"}", id="token ids"),
        pytest.param(b'{"input":' + repeated(b"1")[:-1] + b",-1]}", id="token ids, the last is none"),
        pytest.param(b'{"input":' + repeated(b"[1,1]")[:-1] + b"]}", id="lists of token ids"),
        pytest.param(b'{"input":' + repeated(b"1.0") + b"}", id="token ids as floats"),
        pytest.param(b'{"input":' + repeated(b'""') + b"}", id="texts"),
        pytest.param(b'{"input":"a",' + b",".join([b'"%x":1' % n for n in range(90_000)]) + b"}", id="fields"),
    ],
)
def test_lists(body: bytes) -> None:
    assert steps_of(lambda: texts_of(fields_of(body).get("input"), "input")) < STEPS_MAX


@pytest.mark.parametrize("element", [b"0", b"[0]", b'""'])
def test_a_list_that_is_far_too_long_is_not_read_to_its_end(element: bytes) -> None:
    value = fields_of(b'{"instances":' + repeated(element) + b"}")["instances"]
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="maximum length 2048, but got a longer one"):
            values_of(value, "instances")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < MIB


@pytest.mark.parametrize("last", [b"1", b"1.0", b"-1", b"2000000000"])
def test_of_many_ids_no_objects_are_made(last: bytes) -> None:
    value = fields_of(b'{"input":' + repeated(b"1")[:-1] + b",%b]}" % last)["input"]
    tracemalloc.start()
    try:
        if last == b"1":
            assert texts_of(value, "input") == [bytes(value)]
        else:
            with pytest.raises(Malformed, match="whole numbers"):
                texts_of(value, "input")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 * MIB


def test_a_long_list_is_read_as_a_short_one_is() -> None:
    for number in (1, 2048):
        text = b'"%b"' % (b"a," * (MIB // 2 // number))
        assert values_of(Raw(repeated(text, number * (len(text) + 1))), "instances") == [text] * number
    with pytest.raises(Malformed, match="must be a list"):
        values_of(Raw(b'"%b"' % (b"a" * MIB)), "instances")
    with pytest.raises(Malformed, match="is empty"):
        values_of(Raw(b"[%b]" % (b" " * MIB)), "instances")


def test_many_fields_are_not_made_into_objects() -> None:
    body = b'{"input":"a",' + b",".join([b'"%x":1' % n for n in range(90_000)]) + b"}"
    with pytest.raises(Malformed, match="beside the inputs"):
        fields_of(body)
    assert list(fields_of(b'{"input":"%b","user":"me"}' % (b"a" * MIB))) == ["input", "user"]


def tensor(data: bytes, datatype: str = "BYTES", shape: str = "[1,1]", name: str = "a") -> bytes:
    return b'{"name":"%b","datatype":"%b","shape":%b,"data":%b}' % (
        name.encode(),
        datatype.encode(),
        shape.encode(),
        data,
    )


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([tensor(repeated(b"[]"))], id="BYTES, brackets"),
        pytest.param([tensor(b"[[]," + repeated(b"1")[1:])], id="BYTES, numbers"),
        pytest.param([tensor(b"[[]," + repeated(rb'"\"\""')[1:])], id="BYTES, quotes"),
        pytest.param([tensor(repeated(b"0"), "UINT8", f"[2048,{MIB // 4096}]")], id="one tensor"),
        pytest.param(
            [tensor(repeated(b"0", 2048 * 2 * 20), "UINT8", "[2048,20]", name) for name in "abcdefghijkl"],
            id="twelve tensors",
        ),
    ],
)
def test_tensors(tensors: list[bytes]) -> None:
    body = b'{"inputs":[' + b",".join(tensors) + b"]}"
    assert steps_of(lambda: parse_call({}, body)) < STEPS_MAX


HARD = {
    "objects": repeated(b'1e100,{"a":{}}'),
    "empty strings": b"[1e300," + repeated(b'""')[1:],
    "strings": b"[1e300," + repeated(b'"ab"')[1:],
    "arrays": b"[1e300," + repeated(b"[]")[1:],
    "nested": repeated(b"[" * 60 + b"]" * 60),
    "near a double": repeated(b"1e300"),
    "denormal": repeated(b"1e-320"),
    "long numbers": repeated(b"1" * 100 + b"e9"),
    "escapes": b'[1e300,"' + rb"\\\"" * (MIB // 4) + b'"]',
}


@pytest.mark.parametrize("value", HARD.values(), ids=HARD)
def test_hard_json_is_checked_without_an_object_for_each_of_its_parts(value: bytes) -> None:
    decode_inference(b'{"input":' + value + b"}")  # it is valid
    tracemalloc.start()
    try:
        # A few for each of 10,000 long numbers, or of LARGE_NUMBERS_MAX; calls of C count twice.
        assert steps_of(lambda: json_fault(value)) < 2 * STEPS_MAX
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some copies of it, in other letters, and the parts of a piece.
    assert most_bytes < 8 * MIB


@pytest.mark.parametrize("number", [b"1e300", b"1e-320", b"1.7976931348623157e308"])
def test_no_number_with_an_exponent_is_parsed_by_msgspec(number: bytes) -> None:
    """Which takes 10 µs for each of these. They are the numbers that they were all the same."""
    text = repeated(number, 8192)
    floats = next(parsed(text, "FP64"))
    assert set(floats) == {float(number)} and count_of(text, "FP64") == len(floats)
    assert json.loads(canonical_parameters(Raw(b'{"a":' + text + b"}"))) == {"a": floats}
    with pytest.raises(Malformed, match="too large for a double"):
        canonical_parameters(Raw(b'{"a":1e999}'))
    with pytest.raises(Malformed, match="whole numbers"):
        texts_of(Raw(b"[1.0," + text[1:]), "input")


def test_an_answer_of_many_numbers_is_cut_without_an_object_for_each() -> None:
    data = repeated(b"1")
    output = OutputTensor("a", "INT32", [2, (data.count(b",") + 1) // 2], data, False)
    tracemalloc.start()
    try:
        assert steps_of(lambda: cut_outputs([output], ["data", "data"])) < STEPS_MAX
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 * MIB


def test_raw_tensors() -> None:
    sizes = {"binary_data_size": 2048 * 30}
    inputs = [
        {"name": name, "datatype": "UINT8", "shape": [2048, 30], "parameters": sizes} for name in "abcdefghijklmnop"
    ]
    head = msgspec.json.encode({"inputs": inputs})
    body = head + bytes(16 * 2048 * 30)
    headers = {b"inference-header-content-length": b"%d" % len(head)}
    assert steps_of(lambda: parse_call(headers, body)) < STEPS_MAX
    assert len(parse_call(headers, body).rows) == 2048
