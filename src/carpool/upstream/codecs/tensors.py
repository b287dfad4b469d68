"""Tensors of the V2 protocol: what a client sends, how a batch is joined, how an output is cut into its members' parts.

1. A tensor is what the server itself would take for a batch of one: the first dimension is the batch, and is 1.
2. Tensors are joined, and outputs cut, along that dimension; what the others are must be equal (the lane key says so).
3. On the wire a tensor is JSON text, the client's own bytes, or raw: little-endian, row-major, and for BYTES each
   element after its length as u32.
4. Whatever is sent has been checked: the datatype is known, there are as many elements as the shape says, and
   numbers fit. A tensor that fails this is its own client's fault alone.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.errors import Malformed
from carpool.upstream.codecs.base import Prepared, ProtocolFaultError

DIMENSIONS_MAX = 32
_NESTING = b"[]"
_LENGTH = struct.Struct("<I")


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
    "FP32": _numbers(4, "f", float),
    "FP64": _numbers(8, "d", float),
    "BYTES": Datatype(0, "", msgspec.json.Decoder(list[str]).decode),
}


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One input tensor of one client."""

    name: str
    datatype: str
    # Without the batch dimension.
    shape: tuple[int, ...]
    # As it goes into the call: the elements as JSON separated by commas, or raw.
    data: bytes


class TensorInput(msgspec.Struct, frozen=True):
    """A client's input: one tensor or several, in the order of their names."""

    tensors: tuple[Tensor, ...]
    # Whether `data` is raw.
    is_raw: bool
    # Whether the client sent base64, and gets it back.
    wants_b64: bool


class TensorDefaults(msgspec.Struct, frozen=True):
    """What is configured for a tensor whose client leaves it out."""

    name: str = ""
    datatype: str = ""
    # With the batch dimension, 1; () for none.
    shape: tuple[int, ...] = ()
    # Send raw tensors also where clients send JSON.
    always_raw: bool = False


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor as a client writes it."""

    name: str | None = None
    datatype: str | None = None
    shape: list[Annotated[int, Meta(ge=0, le=1 << 40)]] | None = None
    data: msgspec.Raw | UnsetType = UNSET
    b64: bytes | UnsetType = UNSET


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_given = msgspec.json.Decoder(_Given).decode
_FORM = 'a tensor: {"name", "shape": [1, …], "datatype", and "data": […] or "b64"}'


def prepare_tensors(value: bytes, defaults: TensorDefaults) -> Prepared:
    """Check a client's tensors and bring them into the form in which they are sent; raises Malformed."""
    try:
        fields = _decode_object(value)
        if bytes(fields.get("data", b""))[:1] == b"[" or bytes(fields.get("b64", b""))[:1] == b'"':
            given = [_decode_given(value)]
        else:
            given = []
            for name, raw in sorted(fields.items()):
                given.append(_decode_given(raw))
                given[-1].name = name
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise Malformed(f"`input` must be {_FORM}, or an object of these by name: {failure}") from None
    if not given:
        raise Malformed(f"`input` must be {_FORM}, or an object of these by name")
    wants_b64 = any(tensor.b64 is not UNSET for tensor in given)
    is_raw = wants_b64 or defaults.always_raw
    tensors = tuple([_check(tensor, defaults, is_raw) for tensor in given])
    lane = [is_raw, *([tensor.name, tensor.datatype, tensor.shape] for tensor in tensors)]
    return Prepared(TensorInput(tensors, is_raw, wants_b64), msgspec.json.encode(lane))


def _check(given: _Given, defaults: TensorDefaults, is_raw: bool) -> Tensor:
    """One tensor, as it is sent."""
    name = given.name or defaults.name
    if not name:
        raise Malformed("the tensor has no `name`")
    datatype = given.datatype or defaults.datatype
    if datatype not in DATATYPES:
        raise Malformed(f"the tensor's `datatype` must be one of {', '.join(DATATYPES)}")
    if (given.data is UNSET) == (given.b64 is UNSET):
        raise Malformed("a tensor must have either `data` or `b64`")
    if isinstance(given.b64, bytes):
        data, count = given.b64, _count_raw(given.b64, datatype)
    else:
        assert not isinstance(given.data, UnsetType)
        data, count = _from_json(bytes(given.data), datatype, is_raw)
    shape = tuple(given.shape if given.shape is not None else defaults.shape or (1, count))
    if not shape or shape[0] != 1 or len(shape) > DIMENSIONS_MAX:
        raise Malformed(
            f"the tensor's `shape` must start with 1, the batch dimension: a request is one item; "
            f"at most {DIMENSIONS_MAX} dimensions"
        )
    if prod(shape) != count:
        raise Malformed(f"the tensor's `shape` stands for {prod(shape)} elements, but {count} came")
    return Tensor(name, datatype, shape[1:], data)


def _count_raw(data: bytes, datatype: str) -> int:
    size = DATATYPES[datatype].size
    if size:
        if len(data) % size:
            raise Malformed(f"{len(data)} bytes are no whole number of {datatype} elements")
        return len(data) // size
    try:
        return len(element_starts(data)) - 1
    except ValueError:
        raise Malformed("each element of a BYTES tensor must follow its length, as 4 bytes, little-endian") from None


def _from_json(text: bytes, datatype: str, is_raw: bool) -> tuple[bytes, int]:
    """The elements of a JSON array as they are sent, and how many there are. How they are nested is not looked at."""
    kind = DATATYPES[datatype]
    if kind.parse is None:
        raise Malformed(f"{datatype} has no form in JSON; send `b64`")
    try:
        text = flat(text, datatype)
        elements = kind.parse(text)
        # Without elements there may still be white space, which must not stand between commas.
        return (pack(elements, datatype) if is_raw else text[1:-1] if elements else b""), len(elements)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, struct.error, OverflowError):
        raise Malformed(f"`data` must be an array of {datatype} elements that fit") from None


def flat(text: bytes, datatype: str) -> bytes:
    """A JSON array of numbers or strings without inner brackets."""
    if b"[" not in text[1:]:
        return text
    if datatype != "BYTES":
        inner = text.translate(None, _NESTING)
        # Arrays without elements leave their commas behind.
        return b"[" + inner + b"]" if inner.strip(b", \t\r\n") else b"[]"
    return msgspec.json.encode(list(_leaves(msgspec.json.decode(text))))


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [leaf for inner in value for leaf in _leaves(inner)]


def pack(elements: Sequence[Any], datatype: str) -> bytes:
    """Raw bytes of parsed elements; raises struct.error or OverflowError for a number that does not fit."""
    if datatype == "BYTES":
        encoded = [element.encode() if isinstance(element, str) else bytes(element) for element in elements]
        return b"".join([part for element in encoded for part in (_LENGTH.pack(len(element)), element)])
    return struct.pack(f"<{len(elements)}{DATATYPES[datatype].letter}", *elements)


def element_starts(data: bytes) -> list[int]:
    """Where each element of raw BYTES starts, and where the last one ends; raises ValueError if that is not the end."""
    starts = [0]
    end = len(data)
    place = 0
    while place < end:
        if end - place < _LENGTH.size:
            raise ValueError("cut off")
        place += _LENGTH.size + _LENGTH.unpack_from(data, place)[0]
        starts.append(place)
    if place != end:
        raise ValueError("cut off")
    return starts


class OutputTensor(msgspec.Struct, frozen=True, gc=False):
    """One output tensor of a whole batch."""

    name: str
    datatype: str
    shape: Sequence[int]
    # A JSON array, or raw.
    data: bytes
    is_raw: bool


def cut_outputs(outputs: Sequence[OutputTensor], wants_b64: Sequence[bool]) -> list[bytes]:
    """Each member's part of all outputs, as a JSON array of tensors; raises ProtocolFaultError.

    `wants_b64`, one for each member: raw data as base64, or as JSON.
    """
    if not outputs:
        raise ProtocolFaultError("the answer has no outputs")
    columns = [_cut(output, wants_b64) for output in outputs]
    return [b"[" + b",".join(parts) + b"]" for parts in zip(*columns, strict=True)]


def _cut(output: OutputTensor, wants_b64: Sequence[bool]) -> list[bytes]:
    """Each member's part of one output, as a JSON object."""
    size, shape = len(wants_b64), output.shape
    if output.datatype not in DATATYPES:
        raise ProtocolFaultError("an output has a datatype that the protocol does not know")
    if not shape or shape[0] != size or min(shape) < 0:
        raise ProtocolFaultError(f"the first dimension of an output is not the batch of {size}")
    count = prod(shape[1:])
    named = {"name": output.name, "datatype": output.datatype, "shape": [1, *shape[1:]]}
    start = msgspec.json.encode(named)[:-1]
    if not output.is_raw:
        return [start + b',"data":[' + part + b"]}" for part in _cut_json(output, size, count)]
    parts = _cut_raw(output, size, count)
    return [start + _shown(part, output.datatype, b64) for part, b64 in zip(parts, wants_b64, strict=True)]


def _cut_raw(output: OutputTensor, size: int, count: int) -> list[bytes]:
    data, width = output.data, count * DATATYPES[output.datatype].size
    if output.datatype == "BYTES":
        try:
            starts = element_starts(data)
        except ValueError:
            raise ProtocolFaultError("an output of BYTES is cut off") from None
        if len(starts) - 1 != size * count:
            raise ProtocolFaultError("an output has not as many elements as its shape says")
        bounds = starts[::count] if count else [0] * (size + 1)
    else:
        if len(data) != size * width:
            raise ProtocolFaultError("an output has not as many bytes as its shape says")
        bounds = [index * width for index in range(size + 1)]
    return [data[start:end] for start, end in pairwise(bounds)]


def _cut_json(output: OutputTensor, size: int, count: int) -> list[bytes]:
    """The elements' own bytes, separated by commas."""
    elements: Sequence[bytes | msgspec.Raw]
    try:
        text = flat(output.data, output.datatype)
        if text[:1] != b"[":
            raise ProtocolFaultError("the data of an output is no array")
        if output.datatype == "BYTES":
            elements = msgspec.json.decode(text, type=list[msgspec.Raw])
        elif b'"' in text or b"{" in text:  # what has strings cannot be cut at commas
            raise ProtocolFaultError("an output of numbers has something else in it")
        else:
            if text is not output.data:  # an empty array inside leaves two commas behind
                msgspec.json.decode(text, type=msgspec.Raw)
            elements = text[1:-1].split(b",") if text[1:-1].strip() else []
    except (msgspec.DecodeError, RecursionError):
        raise ProtocolFaultError("the data of an output is no array of its datatype") from None
    if len(elements) != size * count:
        raise ProtocolFaultError("an output has not as many elements as its shape says")
    return [b",".join(elements[index * count : (index + 1) * count]) for index in range(size)]


def _shown(part: bytes, datatype: str, b64: bool) -> bytes:
    """The rest of a tensor's JSON object. What JSON has no form for, strings that are not UTF-8, stays base64."""
    if not b64:
        try:
            return b',"data":' + msgspec.json.encode(unpack(part, datatype)) + b"}"
        except UnicodeDecodeError:
            pass
    return b',"b64":' + msgspec.json.encode(part) + b"}"


def unpack(part: bytes, datatype: str) -> Sequence[Any]:
    """The elements of raw bytes; raises UnicodeDecodeError."""
    if datatype == "BYTES":
        return [part[start + _LENGTH.size : end].decode() for start, end in pairwise(element_starts(part))]
    if datatype == "BF16":  # the upper half of an FP32
        halves = struct.unpack(f"<{len(part) // 2}H", part)
        return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *[half << 16 for half in halves]))
    kind = DATATYPES[datatype]
    return struct.unpack(f"<{len(part) // kind.size}{kind.letter}", part)
