"""ModelInfer's two messages in protobuf's wire format: those of their fields that Carpool needs.

Written by hand because it is little, and because the generated alternative costs more than it gives: the `protobuf`
package comes in versions that exclude one another, so that a gateway that pins one gets in the way of whatever else
is installed beside it; and it copies every tensor once more. Tests compare this file with real protobuf.

1. A message is a run of fields, each a tag (number << 3 | wire type) and a value. Unknown fields are skipped.
2. Repeated numbers come packed or one by one; both are read.
3. Whatever ends outside of its message is a ProtocolFaultError.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from carpool.core.tensors import Data, pack
from carpool.upstream.codecs.base import ProtocolFaultError
from carpool.upstream.codecs.tensors import OutputTensor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DOUBLE = struct.Struct("<d")

# ModelInferRequest
_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _INPUTS, _RAW_INPUTS = 1, 2, 3, 4, 5, 7
# ModelInferResponse; its model version and id have the same numbers
_OUTPUTS, _RAW_OUTPUTS = 5, 6
# InferInputTensor, InferOutputTensor
_NAME, _DATATYPE, _SHAPE, _CONTENTS = 1, 2, 3, 5
# InferParameter
_BOOL, _INT64, _STRING, _FP64 = 1, 2, 3, 4
# InferTensorContents: the field of a datatype, and what it has in common with others of that field.
_CONTENTS_FIELD = {
    "BOOL": 1,
    **dict.fromkeys(("INT8", "INT16", "INT32"), 2),
    "INT64": 3,
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), 4),
    "UINT64": 5,
    "FP32": 6,
    "FP64": 7,
    "BYTES": 8,
}


class InferResponse(msgspec.Struct, frozen=True):
    """What Carpool needs of a ModelInferResponse."""

    outputs: Sequence[OutputTensor]
    model_version: str | None
    # "": the server does not repeat it.
    id: str


def encode_request(
    model: str,
    version: str,
    call_id: str,
    parameters: Mapping[str, bool | int | float | str],
    inputs: Sequence[tuple[str, str, Sequence[int]]],
    raw: Sequence[Sequence[Data]],
) -> bytes:
    """A ModelInferRequest: for each input its name, datatype and shape, and the parts of its raw content."""
    parts: list[Data] = [_field(_MODEL_NAME, model.encode())]
    if version:
        parts.append(_field(_MODEL_VERSION, version.encode()))
    if call_id:
        parts.append(_field(_ID, call_id.encode()))
    for key, value in parameters.items():
        parts.append(_field(_PARAMETERS, _field(1, key.encode()) + _field(2, _parameter(value))))
    for name, datatype, shape in inputs:
        dimensions = b"".join([_varint(dimension) for dimension in shape])
        tensor = _field(_NAME, name.encode()) + _field(_DATATYPE, datatype.encode()) + _field(_SHAPE, dimensions)
        parts.append(_field(_INPUTS, tensor))
    for content in raw:
        parts += (_tag(_RAW_INPUTS, _BYTES), _varint(sum(map(len, content))), *content)
    return b"".join(parts)


def decode_response(body: bytes) -> InferResponse:
    """A ModelInferResponse; raises ProtocolFaultError."""
    version = call_id = ""
    tensors: list[bytes] = []
    raw: list[bytes] = []
    for number, value in _fields(body):
        if number == _MODEL_VERSION:
            version = _text(value)
        elif number == _ID:
            call_id = _text(value)
        elif number == _OUTPUTS:
            tensors.append(_bytes(value))
        elif number == _RAW_OUTPUTS:
            raw.append(_bytes(value))
    if raw and len(raw) != len(tensors):
        raise ProtocolFaultError(f"{len(raw)} raw contents came for {len(tensors)} outputs")
    contents: Sequence[bytes | None] = raw or [None] * len(tensors)
    outputs = [_output(tensor, content) for tensor, content in zip(tensors, contents, strict=True)]
    return InferResponse(outputs, version or None, call_id)


def _output(tensor: bytes, raw: bytes | None) -> OutputTensor:
    name = datatype = ""
    shape: list[int] = []
    contents = b""
    for number, value in _fields(tensor):
        if number == _NAME:
            name = _text(value)
        elif number == _DATATYPE:
            datatype = _text(value)
        elif number == _SHAPE:
            shape += _signed(value)
        elif number == _CONTENTS:
            contents += _bytes(value)  # a message in several pieces is their concatenation
    return OutputTensor(name, datatype, shape, _raw_of(contents, datatype) if raw is None else raw, is_raw=True)


def _raw_of(contents: bytes, datatype: str) -> bytes:
    """The elements of an InferTensorContents in raw form, which servers may leave to us."""
    wanted = _CONTENTS_FIELD.get(datatype)
    values = [value for number, value in _fields(contents) if number == wanted]
    if datatype in ("FP32", "FP64"):  # packed, that is the raw form; one by one, it is their concatenation
        return b"".join([_bytes(value) for value in values])
    try:
        if datatype == "BYTES":
            return pack([_bytes(value) for value in values], datatype)
        elements: list[Any] = [number for value in values for number in _signed(value)]
        if datatype.startswith("UINT"):
            elements = [number & 0xFFFF_FFFF_FFFF_FFFF for number in elements]
        return pack(elements, datatype) if wanted else b""
    except struct.error:
        raise ProtocolFaultError("an output has a number that its datatype cannot hold") from None


def _parameter(value: bool | int | float | str) -> bytes:
    """An InferParameter."""
    if isinstance(value, bool):
        return _tag(_BOOL, _VARINT) + _varint(value)
    if isinstance(value, int):
        return _tag(_INT64, _VARINT) + _varint(value)
    if isinstance(value, float):
        return _tag(_FP64, _FIXED64) + _DOUBLE.pack(value)
    return _field(_STRING, value.encode())


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, content: bytes) -> bytes:
    return _tag(number, _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers as their 64-bit complement
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at `place`, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place
    raise ProtocolFaultError("the message is cut off")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: numbers as int, everything else as bytes."""
    place, end = 0, len(data)
    while place < end:
        tag, place = _read_varint(data, place)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, place = _read_varint(data, place)
            yield tag >> 3, number
            continue
        if wire_type == _BYTES:
            length, place = _read_varint(data, place)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise ProtocolFaultError("the message has a field of an unknown kind")
        if length > end - place:
            raise ProtocolFaultError("the message is cut off")
        yield tag >> 3, data[place : place + length]
        place += length


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ProtocolFaultError("a field of the message has the wrong type")
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise ProtocolFaultError("a text in the message is not valid UTF-8") from None


def _signed(value: int | bytes) -> list[int]:
    """Numbers with sign, packed or one alone."""
    numbers: list[int] = []
    if isinstance(value, int):
        numbers.append(value)
    else:
        place = 0
        while place < len(value):
            number, place = _read_varint(value, place)
            numbers.append(number)
    return [number - (1 << 64) if number >> 63 else number for number in numbers]
