"""Calls of the V2 protocol and the requests that they are: n rows of tensors are n inputs, n outputs are tensors again.

Pure, and the same for HTTP and gRPC:

1. The first dimension of every tensor is the rows. A row is an input as any client of the model could send it alone:
   packed where one of its tensors came raw, JSON where all of them came as JSON, with the client's own digits.
2. Rows are put together in their order, outputs by their names. An output whose rows do not fit together is a fault.
3. One call builds no more than about a copy of its body: what is repeated with every row, names and shapes, may have
   as many bytes as the body and HEADS_BYTES_MAX; what JSON has in few characters and raw form in many, RAW_BYTES_MAX.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import msgspec

from carpool.core.errors import Malformed, UpstreamProtocolFault
from carpool.core.tensors import (
    BYTES_ELEMENTS_MAX,
    DATATYPES,
    DIMENSION_MAX,
    DIMENSIONS_MAX,
    Data,
    RawTensor,
    cut_numbers,
    flat_input,
    is_packed,
    json_of_raw,
    pack_tensors,
    packed_head,
    raw_of_json,
    row_bounds,
    unpack_tensors,
)

ROWS_MAX = 2048
TENSORS_MAX = 64
NAME_BYTES_MAX = 256
HEADS_BYTES_MAX = 512 * 1024
RAW_BYTES_MAX = 1024 * 1024

_encode = msgspec.json.Encoder().encode


class GivenTensor(msgspec.Struct, frozen=True):
    """One input tensor of a call: raw bytes, or the text of a JSON array."""

    name: str
    datatype: str
    shape: Sequence[int]
    raw: Data | None
    text: bytes = b""


def split_rows(tensors: Sequence[GivenTensor], body_bytes: int) -> list[bytes]:
    """One input for each row of these tensors, of a body of so many bytes; raises Malformed."""
    rows = _check(tensors)
    is_raw = any(tensor.raw is not None for tensor in tensors)
    heads_bytes_max = body_bytes + HEADS_BYTES_MAX
    shapes = [(1, *tensor.shape[1:]) for tensor in tensors]
    described = [
        _encode({"name": tensor.name, "datatype": tensor.datatype, "shape": shape})[:-1]
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    if rows * sum(map(len, described)) > heads_bytes_max:
        raise Malformed("the names and shapes of the tensors are too long for so many rows; send fewer rows in a call")
    if not is_raw:
        columns = [_cut_text(tensor, rows) for tensor in tensors]
        starts, end = _around_elements(tensors, described)
        return [_json_row(starts, row, end) for row in zip(*columns, strict=True)]
    raw = [_cut_raw(tensor, rows) for tensor in tensors]
    if not any(tensor.datatype == "BYTES" for tensor in tensors):
        first = [
            RawTensor(tensor.name, tensor.datatype, shape, column[0])
            for tensor, shape, column in zip(tensors, shapes, raw, strict=True)
        ]
        head = packed_head(first)  # the same for all rows
        return [b"".join((head, *row)) for row in zip(*raw, strict=True)]
    return [
        pack_tensors(
            [
                RawTensor(tensor.name, tensor.datatype, shape, part)
                for tensor, shape, part in zip(tensors, shapes, row, strict=True)
            ]
        )
        for row in zip(*raw, strict=True)
    ]


def _around_elements(tensors: Sequence[GivenTensor], described: Sequence[bytes]) -> tuple[list[bytes], bytes]:
    """What stands before the elements of each tensor, and behind the last: the same in every row."""
    if len(tensors) == 1:
        return [described[0] + b',"data":['], b"]}"
    starts = [
        (b"]}," if number else b"{") + _encode(tensor.name) + b":" + start + b',"data":['
        for number, (tensor, start) in enumerate(zip(tensors, described, strict=True))
    ]
    return starts, b"]}}"


def _json_row(starts: Sequence[bytes], row: Sequence[Data], end: bytes) -> bytes:
    # One copy of the elements, however many tensors there are.
    parts = [piece for pair in zip(starts, row, strict=True) for piece in pair]
    return b"".join((*parts, end))


def _check(tensors: Sequence[GivenTensor]) -> int:
    """How many rows these tensors have; raises Malformed."""
    if not 0 < len(tensors) <= TENSORS_MAX:
        raise Malformed(f"`inputs` must have 1 to {TENSORS_MAX} tensors")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise Malformed("two of the `inputs` have the same name")
    for number, tensor in enumerate(tensors):
        # A name is a client's own words: the place tells which it is.
        which = f"inputs[{number}]"
        if not 0 < len(tensor.name.encode()) <= NAME_BYTES_MAX:
            raise Malformed(f"the name of {which} must have 1 to {NAME_BYTES_MAX} bytes")
        if tensor.datatype not in DATATYPES:
            raise Malformed(f"the datatype of {which} must be one of {', '.join(DATATYPES)}")
        shape = tensor.shape
        if not 0 < len(shape) <= DIMENSIONS_MAX or not all(0 <= size <= DIMENSION_MAX for size in shape):
            raise Malformed(
                f"the shape of {which} must have 1 to {DIMENSIONS_MAX} dimensions, none of them negative or above "
                f"{DIMENSION_MAX}; the first one is the rows"
            )
        if shape[0] != tensors[0].shape[0]:
            raise Malformed(f"{which} has another number of rows (its first dimension) than inputs[0]")
    if sum(prod(tensor.shape) for tensor in tensors if tensor.datatype == "BYTES") > BYTES_ELEMENTS_MAX:
        raise Malformed(f"a call may have {BYTES_ELEMENTS_MAX} elements of BYTES at most; send fewer rows in a call")
    rows = tensors[0].shape[0]
    if not 0 < rows <= ROWS_MAX:
        raise Malformed(f"a call must have 1 to {ROWS_MAX} rows; the first dimension of each tensor is the rows")
    return rows


def _cut_raw(tensor: GivenTensor, rows: int) -> list[memoryview]:
    """The raw bytes of each row: views of those that came."""
    count = prod(tensor.shape[1:])
    data = tensor.raw
    if data is None:
        data = _raw_of_text(tensor, rows * count)
    try:
        bounds = row_bounds(data, tensor.datatype, rows, count)
    except ValueError:
        is_bytes = tensor.datatype == "BYTES"
        framing = "; each element of BYTES follows its length, as 4 bytes, little-endian" if is_bytes else ""
        raise Malformed(f"a tensor has not as many bytes as its shape and datatype say{framing}") from None
    view = memoryview(data)
    return [view[start:end] for start, end in pairwise(bounds)]


def _raw_of_text(tensor: GivenTensor, count: int) -> bytes:
    """A tensor that came as JSON beside others that came raw."""
    if count * DATATYPES[tensor.datatype].size > RAW_BYTES_MAX:
        raise Malformed("beside raw tensors, one of this size must be raw as well; send all of them so")
    try:
        return raw_of_json(_flat(tensor), tensor.datatype)
    except (ValueError, RecursionError, struct.error, OverflowError):
        raise _not_of_its_kind(tensor) from None


def _cut_text(tensor: GivenTensor, rows: int) -> list[Data]:
    """The elements of each row as JSON, without brackets. Whether they are of their datatype is looked at later."""
    text, count = _flat(tensor), prod(tensor.shape[1:])
    if tensor.datatype == "BYTES":
        elements = msgspec.json.decode(text, type=list[msgspec.Raw])
        if len(elements) != rows * count:
            raise _wrong_count(rows * count)
        return [b",".join(elements[row * count : (row + 1) * count]) for row in range(rows)]
    if b'"' in text or b"{" in text:  # a comma in them would be no end of an element
        raise _not_of_its_kind(tensor)
    if b"," not in text and not text[1:-1].strip():
        if count:
            raise _wrong_count(rows * count)
        return [b""] * rows
    if text.count(b",") + 1 != rows * count:
        raise _wrong_count(rows * count)
    return cut_numbers(text, rows, count)


def _flat(tensor: GivenTensor) -> bytes:
    text = tensor.text
    if text[:1] != b"[":
        raise Malformed("a tensor must have `data`, an array, or raw bytes (`binary_data_size`)")
    try:
        return flat_input(text, tensor.datatype)
    except ValueError:
        raise _not_of_its_kind(tensor) from None


def _wrong_count(count: int) -> Malformed:
    return Malformed(f"the shape of a tensor stands for {count} elements, but its `data` has another number")


def _not_of_its_kind(tensor: GivenTensor) -> Malformed:
    return Malformed(f"`data` of a tensor must be an array of {tensor.datatype} elements that fit")


# Outputs


class RowTensor(NamedTuple):
    """One tensor of the output of a row: raw bytes, or the text of JSON elements without brackets."""

    datatype: str
    # Without the batch.
    shape: Sequence[int]
    data: Data
    is_raw: bool


# By name.
Row = dict[str, RowTensor]


class OutputRows(msgspec.Struct, frozen=True):
    """One output tensor of a call, in rows."""

    name: str
    datatype: str
    # With all rows.
    shape: Sequence[int]
    parts: Sequence[RowTensor]

    def raw(self) -> Iterator[Data]:
        """Its raw bytes, to be put one behind the other; raises UpstreamProtocolFault."""
        for part in self.parts:
            try:
                yield part.data if part.is_raw else raw_of_json(b"".join((b"[", part.data, b"]")), self.datatype)
            except (ValueError, RecursionError, struct.error, OverflowError):
                raise UpstreamProtocolFault("the inference API gave an output that has no raw form") from None

    def text(self) -> Iterator[Data]:
        """Its elements as JSON, some at a time, to be joined by commas; raises Malformed."""
        for part in self.parts:
            if not part.is_raw:
                yield from [part.data] if part.data else []
                continue
            try:
                yield from json_of_raw(part.data, self.datatype)
            except UnicodeDecodeError:
                raise Malformed(
                    "an output has bytes that are no text, so JSON cannot carry it; ask for it with `binary_data`"
                ) from None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    b64: bytes | None = None


_decode_outputs = msgspec.json.Decoder(list[_Output]).decode


def join_rows(rows: Sequence[Row]) -> list[OutputRows]:
    """The output tensors of a call, from what was read of each of its rows; raises UpstreamProtocolFault."""
    first = rows[0]
    for row in rows[1:]:
        is_alike = row.keys() == first.keys() and all(row[name][:2] == tensor[:2] for name, tensor in first.items())
        if not is_alike:
            raise UpstreamProtocolFault(
                "the rows of this call have outputs of different names, datatypes or shapes, which are no one tensor; "
                "send each row in a call of its own"
            )
    return [
        OutputRows(name, tensor.datatype, (len(rows), *tensor.shape), [row[name] for row in rows])
        for name, tensor in first.items()
    ]


def read_row(value: Data) -> Row:
    """The output of one row; raises UpstreamProtocolFault. To be called as it comes: all at once would take long."""
    try:
        if is_packed(value):
            tensors = [
                (tensor.name, RowTensor(tensor.datatype, tuple(tensor.shape[1:]), tensor.data, True))
                for tensor in unpack_tensors(value)
            ]
        else:
            tensors = [(output.name, _row_of(output)) for output in _decode_outputs(value)]
    except (ValueError, RecursionError):
        raise UpstreamProtocolFault("the inference API gave an output that is no tensor") from None
    row = dict(tensors)
    if len(row) != len(tensors):
        raise UpstreamProtocolFault("the inference API gave two outputs of one name")
    return row


def _row_of(output: _Output) -> RowTensor:
    data = memoryview(output.data)[1:-1] if output.b64 is None else output.b64
    return RowTensor(output.datatype, tuple(output.shape[1:]), data, output.b64 is not None)
