"""KServe V1 and TF Serving REST: `{"instances":[…]}` → `{"predictions":[…]}`.

The endpoint's URL is the whole path, `http://host:port/v1/models/NAME:predict`; a URL without a path gets it from the
model's name. `signature_name` among the parameters is sent beside `instances`, as TF Serving wants it, the others
as `parameters`. Lane key: model and parameters.
"""

from collections.abc import Sequence

import msgspec

from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Codec,
    Decoded,
    ProtocolFaultError,
    check_count,
    check_text,
    decode_object,
    nulls_for_not_a_number,
    parse_answer,
)
from carpool.upstream.codecs.refusals import limit_words
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

_SIGNATURE = "signature_name"


class _Predictions(msgspec.Struct):
    predictions: list[msgspec.Raw] | None = None
    # The columnar form: all values of one output together, which cannot be split by member.
    outputs: msgspec.Raw = msgspec.Raw()


_decode_predictions = msgspec.json.Decoder(_Predictions).decode


class KServeV1Codec(Codec):
    """One value in, one value out, in rows."""

    array = "instances"
    # TF Serving's.
    limit_words = limit_words(r"Task size SIZE is larger than maximum input batch size MAX")

    def __init__(self, model_version: str = "") -> None:
        self._version = f"/versions/{model_version}" if model_version else ""
        self.health = "/v1/models/{model}" + self._version

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The inputs' own bytes as `instances`, and the path that names the model."""
        first = batch[0]
        fields = b'{"instances":[' + b",".join([request.input for request in batch]) + b"]"
        if first.parameters:
            parameters = decode_object(first.parameters)
            signature = parameters.pop(_SIGNATURE, None)
            if signature is not None:
                fields += b',"signature_name":' + bytes(signature)
            if parameters:
                fields += b',"parameters":' + msgspec.json.encode(parameters)
        return UpstreamCall(fields + b"}", path=f"/v1/models/{first.model}{self._version}:predict")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Slices of the answer, with null for numbers that JSON does not have."""
        body = answer.body
        try:
            parsed = parse_answer(_decode_predictions, body)
        except ProtocolFaultError:
            repaired = nulls_for_not_a_number(body)
            if repaired is body:
                raise
            body = repaired
            parsed = parse_answer(_decode_predictions, body)
        if parsed.predictions is None:
            if parsed.outputs:
                raise ProtocolFaultError("the answer is columnar (`outputs`), and cannot be given to members by row")
            raise ProtocolFaultError("the answer has no array `predictions`")
        check_count(len(parsed.predictions), len(batch))
        check_text(body)
        return [Decoded(prediction) for prediction in parsed.predictions]

    def binary_input(self, data: bytes) -> bytes:
        """TF Serving's object for binary values."""
        return b'{"b64":' + msgspec.json.encode(data) + b"}"
