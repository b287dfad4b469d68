"""A call of n rows is n inputs, and n outputs are one answer: whatever goes apart comes together again."""

import json
import struct
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import Malformed
from carpool.core.tensors import is_packed, pack, unpack_tensors
from carpool.face.tensor_rows import GivenTensor, join_rows, read_row, split_rows
from carpool.upstream.codecs.tensors import TensorDefaults, prepare_tensors

NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "UINT8": st.integers(0, 255),
    "INT64": st.integers(-(1 << 63), (1 << 63) - 1),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
    "BYTES": st.text(max_size=5),
}


class Sent:
    """A tensor, its elements, and how it is sent."""

    def __init__(self, name: str, datatype: str, shape: list[int], elements: list[Any], is_raw: bool) -> None:
        self.name, self.datatype, self.shape, self.elements = name, datatype, shape, elements
        self.raw = pack(elements, datatype)
        text = json.dumps(self.nested() if len(shape) % 2 else elements).encode()
        self.given = GivenTensor(
            name, datatype, shape, memoryview(self.raw) if is_raw else None, b"" if is_raw else text
        )

    def nested(self) -> list[Any]:
        per_row = prod(self.shape[1:])
        return [self.elements[row * per_row : (row + 1) * per_row] for row in range(self.shape[0])]


@st.composite
def calls(draw: st.DrawFn) -> list[Sent]:
    rows = draw(st.integers(1, 5))
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
    sent = []
    for name in names:
        datatype = draw(st.sampled_from(sorted(NUMBERS)))
        shape = [rows, *draw(st.lists(st.integers(0, 3), max_size=2))]
        count = prod(shape)
        elements = draw(st.lists(NUMBERS[datatype], min_size=count, max_size=count))
        sent.append(Sent(name, datatype, shape, elements, draw(st.booleans())))
    return sent


def as_output(row: bytes) -> bytes:
    """The output of a model that gives back what it gets."""
    if is_packed(row):
        return row
    given = json.loads(row)
    is_one = isinstance(given.get("data"), list)
    tensors = [given] if is_one else [value | {"name": name} for name, value in given.items()]
    return json.dumps(tensors).encode()


@given(calls())
def test_what_goes_apart_comes_together(sent: list[Sent]) -> None:
    rows = split_rows([tensor.given for tensor in sent], 1000)
    assert len(rows) == sent[0].shape[0]
    assert len({is_packed(row) for row in rows}) == 1
    joined = {output.name: output for output in join_rows([read_row(as_output(row)) for row in rows])}
    assert set(joined) == {tensor.name for tensor in sent}
    for tensor in sent:
        output = joined[tensor.name]
        assert (output.datatype, list(output.shape)) == (tensor.datatype, tensor.shape)
        assert b"".join(output.raw()) == tensor.raw
        text = json.loads(b"[" + b",".join(output.text()) + b"]")
        expected = tensor.elements
        if tensor.datatype == "FP32":  # raw, it has become a number of 32 bits
            expected = list(struct.unpack(f"<{len(text)}f", tensor.raw))
            text = list(struct.unpack(f"<{len(text)}f", struct.pack(f"<{len(text)}f", *text)))
        assert text == expected


@given(calls())
def test_each_row_is_an_input_that_the_codec_takes(sent: list[Sent]) -> None:
    rows = split_rows([tensor.given for tensor in sent], 1000)
    lanes = set()
    for number, row in enumerate(rows):
        prepared = prepare_tensors(row, TensorDefaults(always_raw=True))
        lanes.add(prepared.lane)
        value: Any = prepared.value
        by_name = {tensor.name: bytes(tensor.data) for tensor in value.tensors}
        for tensor in sent:
            per_row = prod(tensor.shape[1:])
            own = tensor.elements[number * per_row : (number + 1) * per_row]
            assert by_name[tensor.name] == pack(own, tensor.datatype)
    assert len(lanes) == 1


@given(calls(), st.integers(-3, 3).filter(bool), st.data())
def test_a_tensor_that_is_not_as_long_as_its_shape_says_is_refused(
    sent: list[Sent], change: int, data: st.DataObject
) -> None:
    wrong = data.draw(st.sampled_from(sent))
    if wrong.given.raw is not None:
        raw = bytes(wrong.given.raw)
        changed = raw[:change] if change < 0 else raw + bytes(change)
        if changed == raw:
            changed = b"\1"
        tensors = [GivenTensor(t.name, t.datatype, t.shape, changed) if t is wrong else t.given for t in sent]
    else:
        elements = [*wrong.elements, *[wrong.elements[0] if wrong.elements else "x"]]
        text = json.dumps(elements).encode()
        tensors = [GivenTensor(t.name, t.datatype, t.shape, None, text) if t is wrong else t.given for t in sent]
    with pytest.raises(Malformed):
        [prepare_tensors(row, TensorDefaults()) for row in split_rows(tensors, 1000)]


@given(st.binary(max_size=60))
def test_bytes_that_say_they_are_packed_are_read_or_refused(data: bytes) -> None:
    try:
        unpack_tensors(b"\0" + data)
    except ValueError:
        pass
    with pytest.raises(Malformed):
        prepare_tensors(b"\0" + data, TensorDefaults())
