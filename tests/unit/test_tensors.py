"""Tensors: elements as JSON and raw, and inputs and outputs that travel packed."""

import json
import struct
import tracemalloc
from collections.abc import Callable

import pytest

from carpool.core.tensors import (
    BYTES_ELEMENTS_MAX,
    DATATYPES,
    RawTensor,
    as_input,
    count_of,
    element_starts,
    is_packed,
    json_of_raw,
    pack,
    pack_tensors,
    parsed,
    raw_of_json,
    row_bounds,
    shown,
    texts_in,
    unpack_tensors,
)

IMAGE = RawTensor("IMAGE", "UINT8", (1, 3), b"\x00\xff{")
WORDS = RawTensor("WORDS", "BYTES", (1, 2), pack(["naïve", ""], "BYTES"))


def test_packed_tensors_come_back_as_they_were() -> None:
    packed = pack_tensors([IMAGE, WORDS])
    assert is_packed(packed) and not is_packed(b'{"a":1}') and not is_packed(b"")
    assert [(t.name, t.datatype, tuple(t.shape), bytes(t.data)) for t in unpack_tensors(packed)] == [IMAGE, WORDS]


def test_nothing_is_copied_when_they_are_unpacked() -> None:
    packed = pack_tensors([RawTensor("I", "UINT8", (1, 3), b"abc")])
    [tensor] = unpack_tensors(memoryview(packed))
    assert isinstance(tensor.data, memoryview) and tensor.data.obj is packed


def test_a_beginning_goes_before_the_first_tensor() -> None:
    [tensor] = unpack_tensors(pack_tensors([RawTensor("I", "BYTES", (1, 1), b"abc")], struct.pack("<I", 3)))
    assert bytes(tensor.data) == b"\x03\0\0\0abc"


@pytest.mark.parametrize("cut", range(len(pack_tensors([IMAGE]))))
def test_whatever_is_cut_off_is_noticed(cut: int) -> None:
    whole = pack_tensors([IMAGE])
    with pytest.raises(ValueError, match=r"."):
        unpack_tensors(whole[:cut])


def test_bytes_behind_the_last_tensor_are_noticed() -> None:
    with pytest.raises(ValueError, match="not as long"):
        unpack_tensors(pack_tensors([IMAGE]) + b"\0")


def test_they_are_shown_as_json() -> None:
    one = {"name": "IMAGE", "datatype": "UINT8", "shape": [1, 3], "b64": "AP97"}
    assert json.loads(bytes(shown(pack_tensors([IMAGE])))) == [one]
    assert json.loads(bytes(as_input(pack_tensors([IMAGE])))) == one
    both = json.loads(bytes(as_input(pack_tensors([IMAGE, WORDS]))))
    assert both["IMAGE"] == one and both["WORDS"]["datatype"] == "BYTES"
    assert shown(b"[1]") == as_input(b"[1]") == b"[1]"


def test_texts_are_names_and_elements() -> None:
    assert list(map(bytes, texts_in(pack_tensors([IMAGE, WORDS])))) == [
        b"IMAGE",
        b"UINT8",
        b"WORDS",
        b"BYTES",
        "naïve".encode(),
        b"",
    ]


def test_elements_are_parsed_some_at_a_time() -> None:
    text = b"[" + b",".join([b"%d" % (number % 7) for number in range(200_000)]) + b"]"
    pieces = list(parsed(text, "INT32"))
    assert len(pieces) > 1 and [each for piece in pieces for each in piece] == json.loads(text)
    assert raw_of_json(text, "UINT8") == bytes(number % 7 for number in range(200_000))


def test_many_short_numbers_do_not_become_many_objects() -> None:
    text = b"[" + b"1.5," * 500_000 + b"1.5]"
    tracemalloc.start()
    try:
        assert sum(map(len, parsed(text, "FP32"))) == 500_001
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", [b"[1,,2]", b"[1,]", b"[,1]", b"[,]", b'["1"]', b"[null]", b"[1.5]", b"[300]", b"[{}]"]
)
def test_what_is_not_of_its_datatype_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        list(parsed(text, "UINT8"))


EDGES = [b"0", b"-1", b"99", b"100", b"127", b"128", b"-128", b"-129", b"255", b"256", b"true", b"null", b"1.5", b"1e3"]
EDGES += [
    b"%d" % (sign * (1 << bits) - less) for bits in (15, 16, 31, 32, 63, 64) for sign in (1, -1) for less in (0, 1)
]


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
@pytest.mark.parametrize("element", EDGES)
def test_elements_are_counted_as_if_they_were_parsed(datatype: str, element: bytes) -> None:
    def told(count: Callable[[bytes], int]) -> list[int | None]:
        found: list[int | None] = []
        for text in (b"[%b]", b"[ 1,%b ]", b"[%b,true]"):
            try:
                found.append(count(text.replace(b"%b", element)))
            except ValueError:
                found.append(None)
        return found

    assert told(lambda text: count_of(text, datatype)) == told(lambda text: sum(map(len, parsed(text, datatype))))


def test_a_comma_without_an_element_is_noticed_where_pieces_meet() -> None:
    long = b"[" + b"1," * 100_000 + b"]"
    with pytest.raises(ValueError, match=r"."):
        list(parsed(long, "UINT8"))


def test_strings_beyond_their_number_are_refused_before_they_are_parsed() -> None:
    text = b"[" + b'"",' * BYTES_ELEMENTS_MAX + b'""]'
    with pytest.raises(ValueError, match="too many"):
        list(parsed(text, "BYTES"))
    with pytest.raises(ValueError, match=r"."):
        element_starts(bytes(4 * (BYTES_ELEMENTS_MAX + 1)), BYTES_ELEMENTS_MAX)


def test_raw_bytes_become_json_some_at_a_time() -> None:
    values = [float(number) for number in range(40_000)]
    pieces = list(json_of_raw(struct.pack("<40000f", *values), "FP32"))
    assert len(pieces) > 1 and json.loads(b"[" + b",".join(pieces) + b"]") == values
    words = [f"№{number}" for number in range(3000)]
    assert json.loads(b"[" + b",".join(json_of_raw(pack(words, "BYTES"), "BYTES")) + b"]") == words


def test_rows_of_raw_bytes() -> None:
    assert list(row_bounds(bytes(12), "INT16", 3, 2)) == [0, 4, 8, 12]
    assert list(row_bounds(b"", "INT16", 3, 0)) == [0, 0, 0, 0]
    assert list(row_bounds(pack(["a", "", "bc", "d"], "BYTES"), "BYTES", 2, 2)) == [0, 9, 20]
    for data, rows, count in ((bytes(11), 3, 2), (pack(["a"], "BYTES"), 2, 1), (pack(["a", "b"], "BYTES"), 1, 1)):
        with pytest.raises(ValueError, match=r"."):
            row_bounds(data, "BYTES" if len(data) != 11 else "INT16", rows, count)
    with pytest.raises(ValueError, match=r"."):
        row_bounds(b"\xff\xff\xff\xff", "BYTES", 1, 1)
