"""KServe V2 (Open Inference Protocol) over gRPC, `inference.GRPCInferenceService/ModelInfer`, with raw contents.

Clients send what they send for `kserve_v2`, and get the form that they sent. Towards the server all tensors are
raw, so all forms share batches. Parameters may be texts, numbers, true or false.
Lane key: model, parameters, and of each tensor its name, datatype and `shape[1:]`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from carpool.core.errors import Malformed
from carpool.core.finite import finite_float
from carpool.core.request import Request
from carpool.upstream.codecs.base import Decoded, check_id
from carpool.upstream.codecs.kserve_v2 import TensorCodec, forms_of
from carpool.upstream.codecs.tensors import TensorDefaults, cut_outputs
from carpool.upstream.codecs.v2_messages import decode_response, encode_request
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
