"""Tensors: elements as JSON and raw, and inputs and outputs that travel packed."""

import json
from collections.abc import Callable

import pytest

from carpool.core.tensors import (
    BYTES_ELEMENTS_MAX,
    DATATYPES,
    RawTensor,
    as_input,
    count_of,
    element_starts,
    pack,
    pack_tensors,
    parsed,
    row_bounds,
    shown,
    texts_in,
    unpack_tensors,
)

IMAGE = RawTensor("IMAGE", "UINT8", (1, 3), b"\x00\xff{")
WORDS = RawTensor("WORDS", "BYTES", (1, 2), pack(["naïve", ""], "BYTES"))


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


def test_strings_beyond_their_number_are_refused_before_they_are_parsed() -> None:
    text = b"[" + b'"",' * BYTES_ELEMENTS_MAX + b'""]'
    with pytest.raises(ValueError, match="too many"):
        list(parsed(text, "BYTES"))
    with pytest.raises(ValueError, match=r"."):
        element_starts(bytes(4 * (BYTES_ELEMENTS_MAX + 1)), BYTES_ELEMENTS_MAX)


def test_rows_of_raw_bytes() -> None:
    assert list(row_bounds(bytes(12), "INT16", 3, 2)) == [0, 4, 8, 12]
    assert list(row_bounds(b"", "INT16", 3, 0)) == [0, 0, 0, 0]
    assert list(row_bounds(pack(["a", "", "bc", "d"], "BYTES"), "BYTES", 2, 2)) == [0, 9, 20]
    for data, rows, count in ((bytes(11), 3, 2), (pack(["a"], "BYTES"), 2, 1), (pack(["a", "b"], "BYTES"), 1, 1)):
        with pytest.raises(ValueError, match=r"."):
            row_bounds(data, "BYTES" if len(data) != 11 else "INT16", rows, count)
    with pytest.raises(ValueError, match=r"."):
        row_bounds(b"\xff\xff\xff\xff", "BYTES", 1, 1)
