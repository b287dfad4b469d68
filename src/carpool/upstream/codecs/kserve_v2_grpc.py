"""KServe V2 (Open Inference Protocol) over gRPC, `inference.GRPCInferenceService/ModelInfer`, with raw contents.

Clients send what they send for `kserve_v2`, and get the form that they sent. Towards the server all tensors are
raw, so all forms share batches. Parameters may be texts, numbers, true or false.
Lane key: model, parameters, and of each tensor its name, datatype and `shape[1:]`.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from carpool.core.errors import Malformed
from carpool.core.finite import finite_float
from carpool.core.messages import DecodeError, inference
from carpool.core.protobuf import BadMessageError, cut_out, start_of_field
from carpool.core.request import Request
from carpool.core.tensor_messages import parameter_of, raw_of_contents
from carpool.core.tensors import Data
from carpool.upstream.codecs.base import Decoded, ProtocolFaultError, check_id
from carpool.upstream.codecs.kserve_v2 import TensorCodec, forms_of
from carpool.upstream.codecs.tensors import OutputTensor, TensorDefaults, cut_outputs
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

_INT64_MAX = (1 << 63) - 1
# Of an answer: outputs, their raw contents and parameters.
FIELDS_MAX = 1024
_decode_parameters = msgspec.json.Decoder(dict[str, Any], float_hook=finite_float).decode

_RAW_INPUTS = inference.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUTS = inference.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


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
        message = inference.ModelInferRequest(model_name=batch[0].model, model_version=self.model_version, id=call_id)
        for name, value in _parse_parameters(batch[0].parameters).items():
            message.parameters[name].CopyFrom(parameter_of(value))
        tail: list[Data] = []
        for index, tensor in enumerate(inputs[0].tensors):
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=(len(batch), *tensor.shape))
            content = [member.tensors[index].data for member in inputs]
            tail += (start_of_field(_RAW_INPUTS, sum(map(len, content))), *content)
        return UpstreamCall(b"".join((message.SerializeToString(), *tail)), content_type="application/grpc")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """A ModelInferResponse, each output cut along its first dimension."""
        try:
            rest, raw = cut_out(answer.body, (_RAW_OUTPUTS,), FIELDS_MAX)
            response = inference.ModelInferResponse.FromString(rest)
        except (BadMessageError, DecodeError):
            raise ProtocolFaultError("the answer is no ModelInferResponse") from None
        if raw and len(raw) != len(response.outputs):
            raise ProtocolFaultError(f"{len(raw)} raw contents came for {len(response.outputs)} outputs")
        check_id(response.id, call_id)
        outputs = [_output(tensor, raw[place][1] if raw else None) for place, tensor in enumerate(response.outputs)]
        parts = cut_outputs(outputs, forms_of(batch))
        return [Decoded(part, model_version=response.model_version or None) for part in parts]


def _output(tensor: Any, raw: Data | None) -> OutputTensor:
    if raw is None:  # servers may leave the raw form to us
        try:
            raw = b"".join(raw_of_contents(tensor.contents, tensor.datatype))
        except (struct.error, BadMessageError):
            raise ProtocolFaultError("an output has contents that its datatype cannot hold") from None
    return OutputTensor(tensor.name, tensor.datatype, list(tensor.shape), raw, is_raw=True)


def _parse_parameters(parameters: bytes) -> dict[str, bool | int | float | str]:
    parsed: dict[str, Any] = _decode_parameters(parameters) if parameters else {}
    for value in parsed.values():
        if not isinstance(value, bool | int | float | str) or (isinstance(value, int) and abs(value) > _INT64_MAX):
            raise Malformed("over gRPC, `parameters` may have texts, numbers of 64 bits, true and false only")
    return parsed
