"""ModelInfer's two messages in protobuf's wire format (core/protobuf.py): those of their fields that Carpool needs."""

import struct
from collections.abc import Mapping, Sequence

import msgspec

from carpool.core.protobuf import BYTES, BadMessageError, as_bytes, as_numbers, as_text, field, fields, tag, varint
from carpool.core.tensor_messages import raw_of_contents, write_parameter
from carpool.core.tensors import Data
from carpool.upstream.codecs.base import ProtocolFaultError
from carpool.upstream.codecs.tensors import OutputTensor

# ModelInferRequest
_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _INPUTS, _RAW_INPUTS = 1, 2, 3, 4, 5, 7
# ModelInferResponse; its model version and id have the same numbers
_OUTPUTS, _RAW_OUTPUTS = 5, 6
# InferInputTensor, InferOutputTensor
_NAME, _DATATYPE, _SHAPE, _CONTENTS = 1, 2, 3, 5


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
    parts: list[Data] = [field(_MODEL_NAME, model.encode())]
    if version:
        parts.append(field(_MODEL_VERSION, version.encode()))
    if call_id:
        parts.append(field(_ID, call_id.encode()))
    for key, value in parameters.items():
        parts.append(field(_PARAMETERS, field(1, key.encode()) + field(2, write_parameter(value))))
    for name, datatype, shape in inputs:
        dimensions = b"".join([varint(dimension) for dimension in shape])
        tensor = field(_NAME, name.encode()) + field(_DATATYPE, datatype.encode()) + field(_SHAPE, dimensions)
        parts.append(field(_INPUTS, tensor))
    for content in raw:
        parts += (tag(_RAW_INPUTS, BYTES), varint(sum(map(len, content))), *content)
    return b"".join(parts)


def decode_response(body: bytes) -> InferResponse:
    """A ModelInferResponse; raises ProtocolFaultError."""
    try:
        return _read_response(body)
    except BadMessageError as fault:
        raise ProtocolFaultError(str(fault)) from None


def _read_response(body: bytes) -> InferResponse:
    version = call_id = ""
    tensors: list[bytes] = []
    raw: list[bytes] = []
    for number, value in fields(body):
        if number == _MODEL_VERSION:
            version = as_text(value)
        elif number == _ID:
            call_id = as_text(value)
        elif number == _OUTPUTS:
            tensors.append(as_bytes(value))
        elif number == _RAW_OUTPUTS:
            raw.append(as_bytes(value))
    if raw and len(raw) != len(tensors):
        raise ProtocolFaultError(f"{len(raw)} raw contents came for {len(tensors)} outputs")
    contents: Sequence[bytes | None] = raw or [None] * len(tensors)
    outputs = [_output(tensor, content) for tensor, content in zip(tensors, contents, strict=True)]
    return InferResponse(outputs, version or None, call_id)


def _output(tensor: bytes, raw: bytes | None) -> OutputTensor:
    name = datatype = ""
    shape: list[int] = []
    contents = b""
    for number, value in fields(tensor):
        if number == _NAME:
            name = as_text(value)
        elif number == _DATATYPE:
            datatype = as_text(value)
        elif number == _SHAPE:
            shape += as_numbers(value)
        elif number == _CONTENTS:
            contents += as_bytes(value)  # a message in several pieces is their concatenation
    return OutputTensor(name, datatype, shape, _raw_of(contents, datatype) if raw is None else raw, is_raw=True)


def _raw_of(contents: bytes, datatype: str) -> bytes:
    """The elements of an InferTensorContents in raw form, which servers may leave to us."""
    try:
        return b"".join(raw_of_contents(contents, datatype))
    except struct.error:
        raise ProtocolFaultError("an output has a number that its datatype cannot hold") from None
