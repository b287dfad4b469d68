"""A long body is read in few steps of Python: what is done for each of its elements is done in C, or not at all.

Steps are counted, not seconds: a call of a megabyte that took one for each of its elements would hold up the event
loop, and with it everybody else, for a tenth of a second and more.
"""

import sys
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from msgspec import Raw

from carpool.core.errors import Malformed
from carpool.face.http.list_bodies import fields_of, texts_of, values_of
from carpool.face.http.v2_wire import parse_call

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
