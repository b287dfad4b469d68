"""Tensors of the V2 protocol: datatypes, elements as JSON and raw, and inputs and outputs that travel packed. Pure.

Raw is little-endian, row-major, and for BYTES each element after its length as u32.

An input or an output is JSON, or packed: raw tensors with what they are, so that no byte of them goes through base64.
A packed one differs from JSON by its first byte, which no JSON begins with:

    0 | length of the head, u32 little-endian | head | the tensors' bytes, one behind the other
    head: a JSON array of [name, datatype, shape with the batch dimension, bytes]

Code that shows one to a person, or to a client that reads JSON, calls `shown`, or `as_input`.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import isfinite
from operator import methodcaller
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

DIMENSIONS_MAX = 32
# No dimension, and no tensor, is larger.
DIMENSION_MAX = 1 << 40
# Each element of BYTES has a length that must be looked at: a tensor may have so many of them.
BYTES_ELEMENTS_MAX = 65_536
# Elements are parsed, and written, so many bytes at a time: as objects of Python all of them would be much larger.
PIECE_BYTES = 64 * 1024
# Rows of more elements are found some elements at a time.
FEW_ELEMENTS = 64
_SPAN = methodcaller("span", 1)
_NESTING = b"[]"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STRINGS = re.compile(rb"[\[\],\s]*+(?:%b[\[\],\s]*+){0,%d}+" % (_STRING.pattern, BYTES_ELEMENTS_MAX), re.DOTALL)
_LENGTH = struct.Struct("<I")
# The characters of numbers, and of whole numbers; and those between them.
_BETWEEN = b", \t\r\n"
_OF_WHOLES, _OF_NUMBERS = b"0123456789-" + _BETWEEN, b"0123456789-+.eE" + _BETWEEN
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_decode_floats = msgspec.json.Decoder(list[float]).decode

# Bytes, often a view of the message in which they came.
Data = bytes | memoryview
Shape = tuple[Annotated[int, Meta(ge=0, le=DIMENSION_MAX)], ...]


class Datatype(msgspec.Struct, frozen=True):
    """One datatype of the protocol."""

    # Bytes of an element; 0 for BYTES, whose elements have lengths of their own.
    size: int
    # Its letter in `struct`; "" where that has none.
    letter: str
    # Checks a flat JSON array of it; None where JSON has no form for it.
    parse: Callable[[bytes], list[Any]] | None


def _numbers(size: int, letter: str, element: Any) -> Datatype:
    return Datatype(size, letter, msgspec.json.Decoder(list[element]).decode)


def _floats(text: bytes) -> list[float]:
    # With an exponent some numbers, such as 1e300, take msgspec 10 µs each, and Python half of one.
    if b"e" not in text and b"E" not in text:
        return _decode_floats(text)
    if not are_of_kind(text, "FP64"):
        raise ValueError("something else than numbers")
    elements = list(map(float, text[1:-1].split(b",")))
    if not all(map(isfinite, elements)):
        raise ValueError("beyond a double")
    return elements


def _whole(size: int, letter: str, low: int, high: int) -> Datatype:
    # msgspec takes no bound beyond 64 bits with sign; `pack` finds what is too large for UINT64.
    limits = Meta(ge=low, le=high) if high < 1 << 63 else Meta(ge=low)
    return _numbers(size, letter, Annotated[int, limits])


DATATYPES = {
    "BOOL": _numbers(1, "?", bool),
    **{
        f"UINT{8 * n}": _whole(n, letter, 0, (1 << 8 * n) - 1) for n, letter in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))
    },
    **{
        f"INT{8 * n}": _whole(n, letter, -(1 << 8 * n - 1), (1 << 8 * n - 1) - 1)
        for n, letter in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
    },
    "FP16": Datatype(2, "e", None),
    "BF16": Datatype(2, "", None),
    "FP32": Datatype(4, "f", _floats),
    "FP64": Datatype(8, "d", _floats),
    "BYTES": Datatype(0, "", msgspec.json.Decoder(list[str]).decode),
}


# Elements: JSON


def flat(text: bytes, datatype: str) -> bytes:
    """A JSON array of numbers or strings without inner brackets."""
    if text.find(b"[", 1) < 0:
        return text
    if datatype != "BYTES":
        inner = text.translate(None, _NESTING)
        # Arrays without elements leave their commas behind.
        return b"[" + inner + b"]" if inner.strip(b", \t\r\n") else b"[]"
    return msgspec.json.encode(list(_leaves(msgspec.json.decode(text))))


def flat_input(text: bytes, datatype: str) -> bytes:
    """The same of a stranger's array, in which no number of brackets, or of elements, becomes objects.

    Raises ValueError for BYTES that are more than may be, or no strings.
    """
    if datatype != "BYTES":
        return flat(text, datatype)
    if _STRINGS.fullmatch(text) is None:
        raise ValueError("too many elements, or others than strings")
    return text if text.find(b"[", 1) < 0 else b"[" + b",".join(_STRING.findall(text)) + b"]"


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [leaf for inner in value for leaf in _leaves(inner)]


def are_of_kind(text: bytes, datatype: str) -> bool:
    """Whether a flat and valid JSON array has numbers in it, whole ones, or true and false, as this datatype has.

    Without an object for each. Whether they fit is another question, and BYTES are not for this.
    """
    if datatype == "BOOL":
        return text.replace(b"true", b"").replace(b"false", b"").translate(None, _BETWEEN) == b"[]"
    return text.translate(None, _OF_WHOLES if "INT" in datatype else _OF_NUMBERS) == b"[]"


def count_of(text: bytes, datatype: str) -> int:
    """How many elements a flat and valid JSON array has, whose numbers are none beyond a double; raises as `parsed`.

    They are parsed only where some whole number has so many digits that it may not fit.
    """
    kind = DATATYPES[datatype]
    if kind.parse is None or datatype == "BYTES":
        return sum(map(len, parsed(text, datatype)))
    if not are_of_kind(text, datatype):
        raise ValueError("elements of another kind")
    if "INT" in datatype and _may_not_fit(text, kind.size, is_signed=datatype.startswith("INT")):
        return sum(map(len, parsed(text, datatype)))
    return text.count(b",") + 1 if text[1:-1].strip() else 0


def _may_not_fit(text: bytes, size: int, *, is_signed: bool) -> bool:
    """Whether a whole number may need more than `size` bytes: by its digits, and a sign where there may be none."""
    digits = b"0" * (len(str(1 << 8 * size - 1)) if is_signed else len(str((1 << 8 * size) - 1)))
    return (not is_signed and b"-" in text) or digits in text.translate(_TO_ZEROS)


def cut_numbers(text: bytes, rows: int, count: int) -> list[Data]:
    """The elements of each row of a flat JSON array that has exactly `count` for each: views, without brackets."""
    view, parts, start = memoryview(text), list[Data](), 1
    if count <= FEW_ELEMENTS:
        found = _rows_of(count)(text, 1, len(text) - 1)
        return [view[start:end] for start, end in map(_SPAN, islice(found, rows))]
    for _ in range(rows - 1):
        end = _skip(text, start, count)
        parts.append(view[start:end])
        start = end + 1
    return [*parts, view[start:-1]]


def _skip(text: bytes, start: int, count: int) -> int:
    """Where the comma behind so many elements is. They are counted some at a time: one by one would be slow."""
    while count > FEW_ELEMENTS:
        end = start + 2 * count  # an element has a character and a comma at least
        step = text.count(b",", start, end)
        if not step:
            break
        last = text.rindex(b",", start, end)
        start, count = last + 1, count - step
        if not count:
            return last
    for _ in range(count):
        start = text.index(b",", start) + 1
    return start - 1


@lru_cache(FEW_ELEMENTS)
def _rows_of(count: int) -> Callable[[bytes, int, int], Iterator[re.Match[bytes]]]:
    """Finds rows of so many elements; a step for each of them, or even for each row, would be slow."""
    return re.compile(rb"((?:[^,]*+,){%d}[^,]*+),?" % (count - 1)).finditer


def parsed(text: bytes, datatype: str) -> Iterator[list[Any]]:
    """The elements of a flat JSON array, some at a time.

    Raises ValueError (msgspec's are such) or RecursionError if it is none, or its elements are not of that datatype.
    """
    parse = DATATYPES[datatype].parse
    if parse is None:
        raise ValueError(f"{datatype} has no form in JSON")
    if datatype == "BYTES":
        # Each has two quotes, and those inside are not many; a longer one is not parsed in order to be refused.
        if text.count(b'"') - 2 * text.count(b'\\"') > 2 * BYTES_ELEMENTS_MAX:
            raise ValueError("too many elements")
        yield parse(text)
        return
    start, last = 1, len(text) - 1
    if b"," not in text and not text[start:last].strip():
        return
    while start <= last:
        end = text.find(b",", start + PIECE_BYTES, last)
        end = last if end < 0 else end
        if not (elements := parse(b"[" + text[start:end] + b"]")):
            raise ValueError("a comma without an element")
        yield elements
        start = end + 1


def raw_of_json(text: bytes, datatype: str) -> bytes:
    """The elements of a flat JSON array as raw bytes; raises as `parsed`, and struct.error or OverflowError."""
    return b"".join([pack(elements, datatype) for elements in parsed(text, datatype)])


def json_of_raw(data: Data, datatype: str) -> Iterator[bytes]:
    """The elements of raw bytes as JSON, some at a time, to be joined by commas; raises UnicodeDecodeError."""
    view = memoryview(data)
    step = PIECE_BYTES
    if datatype == "BYTES":
        bounds = element_starts(view)
        for first in range(0, len(bounds) - 1, 1024):
            part = view[bounds[first] : bounds[min(first + 1024, len(bounds) - 1)]]
            yield msgspec.json.encode(unpack(part, datatype))[1:-1]
        return
    for start in range(0, len(view), step):
        yield msgspec.json.encode(unpack(view[start : start + step], datatype))[1:-1]


# Elements: raw


def pack(elements: Sequence[Any], datatype: str) -> bytes:
    """Raw bytes of parsed elements; raises struct.error or OverflowError for a number that does not fit."""
    if datatype == "BYTES":
        encoded = [element.encode() if isinstance(element, str) else bytes(element) for element in elements]
        return b"".join([part for element in encoded for part in (_LENGTH.pack(len(element)), element)])
    return struct.pack(f"<{len(elements)}{DATATYPES[datatype].letter}", *elements)


def unpack(part: Data, datatype: str) -> Sequence[Any]:
    """The elements of raw bytes; raises UnicodeDecodeError."""
    view = memoryview(part)
    if datatype == "BYTES":
        return [str(view[start + _LENGTH.size : end], "utf-8") for start, end in pairwise(element_starts(view))]
    if datatype == "BF16":  # the upper half of an FP32
        halves = struct.unpack(f"<{len(view) // 2}H", view)
        return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *[half << 16 for half in halves]))
    kind = DATATYPES[datatype]
    return struct.unpack(f"<{len(view) // kind.size}{kind.letter}", view)


def element_starts(data: Data, most: int = DIMENSION_MAX) -> list[int]:
    """Where each element of raw BYTES starts, and where the last one ends.

    Raises ValueError if that is not the end, or if there are more than `most`.
    """
    view = memoryview(data)
    starts = [0]
    end = len(view)
    place = 0
    while place < end:
        if end - place < _LENGTH.size or len(starts) > most:
            raise ValueError("cut off, or too many")
        place += _LENGTH.size + _LENGTH.unpack_from(view, place)[0]
        starts.append(place)
    if place != end:
        raise ValueError("cut off")
    return starts


def row_bounds(data: Data, datatype: str, rows: int, count: int) -> Sequence[int]:
    """Where each row of `count` elements starts in raw bytes, and where the last one ends.

    Raises ValueError unless there are exactly so many.
    """
    view = memoryview(data)
    if datatype != "BYTES":
        width = count * DATATYPES[datatype].size
        if len(view) != rows * width:
            raise ValueError(f"{len(view)} bytes, not {rows * width}")
        return range(0, rows * width + 1, width) if width else [0] * (rows + 1)
    unpack_from, end, place, bounds = _LENGTH.unpack_from, len(view), 0, [0]
    for _ in range(rows):
        for _ in range(count):
            if end - place < _LENGTH.size:
                raise ValueError("fewer elements, or one is cut off")
            place += _LENGTH.size + unpack_from(view, place)[0]
        bounds.append(place)
    if place != end:
        raise ValueError("more elements, or one is cut off")
    return bounds


def length_of(element: Data) -> bytes:
    """What stands before an element of raw BYTES."""
    return _LENGTH.pack(len(memoryview(element)))


# Packed inputs and outputs

PACKED = b"\0"


class RawTensor(NamedTuple):
    """One tensor with its raw bytes."""

    name: str
    datatype: str
    # With the batch dimension.
    shape: Sequence[int]
    data: Data


class _Described(msgspec.Struct, frozen=True, array_like=True):
    name: str
    datatype: str
    shape: Shape
    size: Annotated[int, Meta(ge=0)]


_decode_head = msgspec.json.Decoder(list[_Described]).decode
_encode = msgspec.json.Encoder().encode


def is_packed(value: Data) -> bool:
    """Whether an input or an output is packed, not JSON."""
    return memoryview(value)[:1] == PACKED


def pack_tensors(tensors: Sequence[RawTensor], before: bytes = b"") -> bytes:
    """An input or an output of these; `before` goes before the bytes of the first of them."""
    return b"".join([packed_head(tensors, before), before, *[tensor.data for tensor in tensors]])


def packed_head(tensors: Sequence[RawTensor], before: bytes = b"") -> bytes:
    """What stands before the bytes of these tensors."""
    described: list[_Described] = []
    for tensor in tensors:
        size = len(memoryview(tensor.data)) + (0 if described else len(before))
        described.append(_Described(tensor.name, tensor.datatype, tuple(tensor.shape), size))
    head = _encode(described)
    return b"".join([PACKED, _LENGTH.pack(len(head)), head])


def unpack_tensors(value: Data) -> list[RawTensor]:
    """What is in a packed input or output; nothing is copied. Raises ValueError."""
    view = memoryview(value)
    if len(view) < 1 + _LENGTH.size:
        raise ValueError("cut off")
    place = 1 + _LENGTH.size + _LENGTH.unpack_from(view, 1)[0]
    tensors: list[RawTensor] = []
    for name, datatype, shape, size in map(msgspec.structs.astuple, _decode_head(view[1 + _LENGTH.size : place])):
        tensors.append(RawTensor(name, datatype, shape, view[place : place + size]))
        place += size
    if place != len(view):
        raise ValueError("not as long as its head says")
    return tensors


def shown(value: Data) -> Data:
    """An output as JSON: what it is, or of a packed one the array of its tensors, with their bytes as base64."""
    if not is_packed(value):
        return value
    return b"[" + b",".join([_json_of(tensor) for tensor in unpack_tensors(value)]) + b"]"


def as_input(value: Data) -> Data:
    """An input as the JSON that a client would send for it."""
    if not is_packed(value):
        return value
    tensors = unpack_tensors(value)
    if len(tensors) == 1:
        return _json_of(tensors[0])
    return b"{" + b",".join([_encode(tensor.name) + b":" + _json_of(tensor) for tensor in tensors]) + b"}"


def _json_of(tensor: RawTensor) -> bytes:
    return _encode({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "b64": tensor.data})


def texts_in(value: Data) -> list[Data]:
    """The texts of a packed input: names, and the elements of BYTES. Raises ValueError."""
    texts: list[Data] = []
    for tensor in unpack_tensors(value):
        texts += (tensor.name.encode(), tensor.datatype.encode())
        if tensor.datatype == "BYTES":
            view = memoryview(tensor.data)
            starts = element_starts(view, BYTES_ELEMENTS_MAX)
            texts += [view[start + _LENGTH.size : end] for start, end in pairwise(starts)]
    return texts
