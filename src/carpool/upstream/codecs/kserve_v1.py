"""KServe V1 and TF Serving REST: `{"instances":[…]}` → `{"predictions":[…]}`.

The endpoint's URL is the whole path, `http://host:port/v1/models/NAME:predict`; a URL without a path gets it from the
model's name. Parameters are sent beside `instances`. Lane key: model and parameters.
"""

from collections.abc import Sequence

import msgspec

from carpool.upstream.codecs.json import JsonCodec
from carpool.upstream.endpoint import Call


class KServeV1Codec(JsonCodec):
    """The JSON codec with KServe's names and path."""

    def __init__(self) -> None:
        super().__init__("instances", "predictions", "parameters")

    def encode(self, model: str, parameters: bytes, inputs: Sequence[bytes]) -> Call:
        """As JSON, with the path that names the model."""
        return Call(super().encode(model, parameters, inputs).body, path=f"/v1/models/{model}:predict")

    def binary_input(self, data: bytes) -> bytes:
        """TF Serving's object for binary values."""
        return b'{"b64":' + msgspec.json.encode(data) + b"}"
