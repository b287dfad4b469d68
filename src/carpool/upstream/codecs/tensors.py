"""Tensors of the V2 protocol: what a client sends, how a batch is joined, how an output is cut into its members' parts.

1. A tensor is what the server itself would take for a batch of one: the first dimension is the batch, and is 1.
2. Tensors are joined, and outputs cut, along that dimension; what the others are must be equal (the lane key says so).
3. On the wire a tensor is JSON text, the client's own bytes, or raw (core/tensors.py).
4. Whatever is sent has been checked: the datatype is known, there are as many elements as the shape says, and
   numbers fit. A tensor that fails this is its own client's fault alone.
5. A client gets the form that it sent: `data` for `data`, `b64` for `b64`, packed for packed.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.errors import Malformed
from carpool.core.tensors import (
    BYTES_ELEMENTS_MAX,
    DATATYPES,
    DIMENSION_MAX,
    DIMENSIONS_MAX,
    Data,
    RawTensor,
    are_of_kind,
    count_of,
    cut_numbers,
    element_starts,
    flat,
    flat_input,
    is_packed,
    pack,
    pack_tensors,
    parsed,
    row_bounds,
    unpack,
    unpack_tensors,
)
from carpool.upstream.codecs.base import Prepared, ProtocolFaultError

# The form in which a client sends its tensors, and gets its outputs.
Form = Literal["data", "b64", "packed"]


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One input tensor of one client."""

    name: str
    datatype: str
    # Without the batch dimension.
    shape: tuple[int, ...]
    # As it goes into the call: the elements as JSON separated by commas, or raw.
    data: Data


class TensorInput(msgspec.Struct, frozen=True):
    """A client's input: one tensor or several, in the order of their names."""

    tensors: tuple[Tensor, ...]
    # Whether `data` is raw.
    is_raw: bool
    form: Form


class TensorDefaults(msgspec.Struct, frozen=True):
    """What is configured for a tensor whose client leaves it out."""

    name: str = ""
    datatype: str = ""
    # With the batch dimension, 1; () for none.
    shape: tuple[int, ...] = ()
    # Send raw tensors also where clients send JSON.
    always_raw: bool = False


def tensor_defaults(text: str, *, always_raw: bool = False) -> TensorDefaults:
    """The same from `upstream.tensor`: a name, a datatype and a shape, as far as they are set."""
    name, datatype, shape, *_ = *text.split(" "), "", "", ""
    return TensorDefaults(name, datatype, tuple(map(int, shape.split(","))) if shape else (), always_raw)


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor as a client writes it."""

    name: str | None = None
    datatype: str | None = None
    shape: list[Annotated[int, Meta(ge=0, le=DIMENSION_MAX)]] | None = None
    data: msgspec.Raw | UnsetType = UNSET
    b64: bytes | UnsetType = UNSET


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_given = msgspec.json.Decoder(_Given).decode
_FORM = 'a tensor: {"name", "shape": [1, …], "datatype", and "data": […] or "b64"}'


def prepare_tensors(value: Data, defaults: TensorDefaults) -> Prepared:
    """Check a client's tensors and bring them into the form in which they are sent; raises Malformed."""
    form: Form
    if is_packed(value):
        form = "packed"
        tensors = _prepare_packed(value)
    else:
        given = _read(value)
        form = "b64" if any(tensor.b64 is not UNSET for tensor in given) else "data"
        is_raw = form == "b64" or defaults.always_raw
        tensors = tuple([_check(tensor, defaults, is_raw) for tensor in given])
    is_raw = form != "data" or defaults.always_raw
    lane = [is_raw, *([tensor.name, tensor.datatype, tensor.shape] for tensor in tensors)]
    return Prepared(TensorInput(tensors, is_raw, form), msgspec.json.encode(lane))


def _read(value: Data) -> list[_Given]:
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
    return given


def _prepare_packed(value: Data) -> tuple[Tensor, ...]:
    """The tensors of a packed input: views of its bytes."""
    try:
        given = sorted(unpack_tensors(value), key=lambda tensor: tensor.name)
    except (ValueError, RecursionError):
        raise Malformed("the input's raw tensors cannot be read") from None
    if not given:
        raise Malformed("the input has no tensors")
    return tuple(
        [
            _checked(_named(name), datatype, shape, data, _count_raw(_known(datatype), data))
            for name, datatype, shape, data in given
        ]
    )


def _check(given: _Given, defaults: TensorDefaults, is_raw: bool) -> Tensor:
    """One tensor, as it is sent."""
    name = _named(given.name or defaults.name)
    datatype = _known(given.datatype or defaults.datatype)
    if (given.data is UNSET) == (given.b64 is UNSET):
        raise Malformed("a tensor must have either `data` or `b64`")
    data: Data
    if isinstance(given.b64, bytes):
        data, count = given.b64, _count_raw(datatype, given.b64)
    else:
        assert not isinstance(given.data, UnsetType)
        data, count = _from_json(bytes(given.data), datatype, is_raw)
    shape = given.shape if given.shape is not None else defaults.shape or (1, count)
    return _checked(name, datatype, shape, data, count)


def _named(name: str) -> str:
    if not name:
        raise Malformed("the tensor has no `name`")
    return name


def _known(datatype: str) -> str:
    """A datatype of the protocol; raises Malformed for any other."""
    if datatype not in DATATYPES:
        raise Malformed(f"the tensor's `datatype` must be one of {', '.join(DATATYPES)}")
    return datatype


def _checked(name: str, datatype: str, shape: Sequence[int], data: Data, count: int) -> Tensor:
    if not shape or shape[0] != 1 or len(shape) > DIMENSIONS_MAX:
        raise Malformed(
            f"the tensor's `shape` must start with 1, the batch dimension: a request is one item; "
            f"at most {DIMENSIONS_MAX} dimensions"
        )
    if prod(shape) != count:
        raise Malformed(f"the tensor's `shape` stands for {prod(shape)} elements, but {count} came")
    return Tensor(name, datatype, tuple(shape[1:]), data)


def _count_raw(datatype: str, data: Data) -> int:
    size = DATATYPES[datatype].size
    if size:
        if len(data) % size:
            raise Malformed(f"{len(data)} bytes are no whole number of {datatype} elements")
        return len(data) // size
    try:
        return len(element_starts(data, BYTES_ELEMENTS_MAX)) - 1
    except ValueError:
        raise Malformed(
            "each element of a BYTES tensor must follow its length, as 4 bytes, little-endian; "
            f"at most {BYTES_ELEMENTS_MAX} elements"
        ) from None


def _from_json(text: bytes, datatype: str, is_raw: bool) -> tuple[bytes, int]:
    """The elements of a JSON array as they are sent, and how many there are. How they are nested is not looked at."""
    if DATATYPES[datatype].parse is None:
        raise Malformed(f"{datatype} has no form in JSON; send `b64`")
    try:
        given, text = text, flat_input(text, datatype)
        if text is not given:  # an empty array inside leaves two commas behind
            msgspec.json.decode(text, type=msgspec.Raw)
        if is_raw:
            packed = [(len(elements), pack(elements, datatype)) for elements in parsed(text, datatype)]
            return b"".join([part for _, part in packed]), sum(count for count, _ in packed)
        count = count_of(text, datatype)
        # Without elements there may still be white space, which must not stand between commas.
        return text[1:-1] if count else b"", count
    except (ValueError, RecursionError, struct.error, OverflowError):
        raise Malformed(f"`data` must be an array of {datatype} elements that fit") from None


class OutputTensor(msgspec.Struct, frozen=True, gc=False):
    """One output tensor of a whole batch."""

    name: str
    datatype: str
    shape: Sequence[int]
    # A JSON array, or raw.
    data: Data
    is_raw: bool


class _Cut(msgspec.Struct, frozen=True):
    """One output tensor, cut."""

    name: str
    datatype: str
    # Of one member's part.
    shape: Sequence[int]
    parts: Sequence[Data]
    is_raw: bool


def cut_outputs(outputs: Sequence[OutputTensor], forms: Sequence[Form | None]) -> list[bytes]:
    """Each member's part of all outputs, as a JSON array of tensors, or packed; raises ProtocolFaultError.

    `forms`, one for each member: how it wants them; None: not at all.
    """
    if not outputs:
        raise ProtocolFaultError("the answer has no outputs")
    if len({output.name for output in outputs}) != len(outputs):
        raise ProtocolFaultError("two outputs have the same name")
    cuts = [_cut(output, len(forms)) for output in outputs]
    return [b"" if form is None else _part(cuts, number, form) for number, form in enumerate(forms)]


def _part(cuts: Sequence[_Cut], number: int, form: Form) -> bytes:
    if form == "packed" and all(cut.is_raw for cut in cuts):
        return pack_tensors([RawTensor(cut.name, cut.datatype, cut.shape, cut.parts[number]) for cut in cuts])
    # A server may answer JSON though raw tensors were asked for.
    return b"[" + b",".join([_json_part(cut, cut.parts[number], form) for cut in cuts]) + b"]"


def _json_part(cut: _Cut, part: Data, form: Form) -> bytes:
    start = msgspec.json.encode({"name": cut.name, "datatype": cut.datatype, "shape": cut.shape})[:-1]
    if not cut.is_raw:
        return b"".join((start, b',"data":[', part, b"]}"))
    if form == "data":
        try:
            return start + b',"data":' + msgspec.json.encode(unpack(part, cut.datatype)) + b"}"
        except UnicodeDecodeError:
            pass  # what JSON has no form for, strings that are not UTF-8, stays base64
    return start + b',"b64":' + msgspec.json.encode(part) + b"}"


def _cut(output: OutputTensor, size: int) -> _Cut:
    shape = output.shape
    if output.datatype not in DATATYPES:
        raise ProtocolFaultError("an output has a datatype that the protocol does not know")
    if not shape or shape[0] != size or min(shape) < 0:
        raise ProtocolFaultError(f"the first dimension of an output is not the batch of {size}")
    count = prod(shape[1:])
    parts = (_cut_raw if output.is_raw else _cut_json)(output, size, count)
    return _Cut(output.name, output.datatype, [1, *shape[1:]], parts, output.is_raw)


def _cut_raw(output: OutputTensor, size: int, count: int) -> Sequence[Data]:
    """Views of its bytes."""
    view = memoryview(output.data)
    try:
        bounds = row_bounds(view, output.datatype, size, count)
    except ValueError:
        raise ProtocolFaultError("an output has not as many elements as its shape says, or is cut off") from None
    return [view[start:end] for start, end in pairwise(bounds)]


def _cut_json(output: OutputTensor, size: int, count: int) -> Sequence[Data]:
    """The elements' own bytes, separated by commas."""
    data = bytes(output.data)
    try:
        text = flat(data, output.datatype)
        if text[:1] != b"[":
            raise ProtocolFaultError("the data of an output is no array")
        if output.datatype == "BYTES":
            return _cut_strings(text, size, count)
        # What is no number is null.
        numbers = text if "INT" in output.datatype or output.datatype == "BOOL" else text.replace(b"null", b"")
        if not are_of_kind(numbers, output.datatype):  # what has strings cannot be cut at commas
            raise ProtocolFaultError(f"an output of {output.datatype} has elements of another kind")
        if text is not data:  # an empty array inside leaves two commas behind
            msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        raise ProtocolFaultError("the data of an output is no array of its datatype") from None
    if (text.count(b",") + 1 if text[1:-1].strip() else 0) != size * count:
        raise _wrong_count()
    return cut_numbers(text, size, count) if count else [b""] * size


def _cut_strings(text: bytes, size: int, count: int) -> list[bytes]:
    elements = msgspec.json.decode(text, type=list[msgspec.Raw])
    if any(bytes(element)[:1] != b'"' for element in elements):
        raise ProtocolFaultError("an output of BYTES has something else than strings in it")
    if len(elements) != size * count:
        raise _wrong_count()
    return [b",".join(elements[index * count : (index + 1) * count]) for index in range(size)]


def _wrong_count() -> ProtocolFaultError:
    return ProtocolFaultError("an output has not as many elements as its shape says")
