"""KServe V2 (Open Inference Protocol) over gRPC, `inference.GRPCInferenceService/ModelInfer`, with raw contents.

Clients send what they send for `kserve_v2`, and get the form that they sent. Towards the server all tensors are
raw, so all forms share batches. Parameters may be texts, numbers, true or false.
Lane key: model, parameters, and of each tensor its name, datatype and `shape[1:]`.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from carpool.core.errors import Malformed
from carpool.core.finite import finite_float
from carpool.core.protobuf import BYTES, BadMessageError, as_bytes, as_numbers, as_text, field, fields, tag, varint
from carpool.core.request import Request
from carpool.core.tensor_messages import raw_of_contents, write_parameter
from carpool.core.tensors import Data
from carpool.upstream.codecs.base import Decoded, ProtocolFaultError, check_id
from carpool.upstream.codecs.kserve_v2 import TensorCodec, forms_of
from carpool.upstream.codecs.tensors import OutputTensor, TensorDefaults, cut_outputs
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

_INT64_MAX = (1 << 63) - 1
_decode_parameters = msgspec.json.Decoder(dict[str, Any], float_hook=finite_float).decode


class KServeV2GrpcCodec(TensorCodec):
    """Tensors in, tensors out, by the batch dimension; the call's body is a protobuf message."""

    def __init__(self, defaults: TensorDefaults | None = None, model_version: str = "") -> None:
        super().__init__(msgspec.structs.replace(defaults or TensorDefaults(), always_raw=True), model_version)

    def check_parameters(self, parameters: bytes) -> None:
        """What the message has a form for."""
        _parse_parameters(parameters)

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """A ModelInferRequest."""
        inputs = self._inputs_of(batch)
        tensors = inputs[0].tensors
        message = encode_request(
            batch[0].model,
            self.model_version,
            call_id,
            _parse_parameters(batch[0].parameters),
            [(tensor.name, tensor.datatype, (len(batch), *tensor.shape)) for tensor in tensors],
            [[member.tensors[index].data for member in inputs] for index in range(len(tensors))],
        )
        return UpstreamCall(message, content_type="application/grpc")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """A ModelInferResponse, each output cut along its first dimension."""
        response = decode_response(answer.body)
        check_id(response.id, call_id)
        parts = cut_outputs(response.outputs, forms_of(batch))
        return [Decoded(part, model_version=response.model_version) for part in parts]


def _parse_parameters(parameters: bytes) -> dict[str, bool | int | float | str]:
    parsed: dict[str, Any] = _decode_parameters(parameters) if parameters else {}
    for value in parsed.values():
        if not isinstance(value, bool | int | float | str) or (isinstance(value, int) and abs(value) > _INT64_MAX):
            raise Malformed("over gRPC, `parameters` may have texts, numbers of 64 bits, true and false only")
    return parsed


# ModelInfer's two messages (core/protobuf.py): those of their fields that Carpool needs.

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
