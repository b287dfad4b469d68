"""What requests to the other faces carry, and whether an answer is their own.

The input is the same text as over `/v1/inference`. Answers are decoded and compared by value; those of embeddings with
what the simulated GPU makes of that input, which begins with a checksum of 24 bits.
"""

from array import array
from base64 import b64decode
from functools import lru_cache
from typing import Literal
from urllib.parse import quote

import msgspec

from carpool.core.protobuf import field, start_of_field
from carpool.tools.bench.payload import NOT_TOLD, Journey, Payload
from carpool.upstream.simulated import first_of_vector, rest_of_vector

Face = Literal["http", "openai", "grpc", "kserve"]

# What a model must do for its answers to be verified, for people who bench another one.
NEEDS: dict[Face, str] = {
    "http": "a model that gives texts back reversed, as `carpool sim-gpu` does",
    "openai": "a model that embeds as `carpool sim-gpu --dimensions N` does, or `sim:?dimensions=N`",
    "grpc": "a model that gives texts back reversed, as `carpool sim-gpu` does",
    "kserve": "a model that gives tensors of text back reversed, as `carpool sim-gpu` does behind `kserve_v2`",
}
# The model in the path of V2, which must name one.
DEFAULT_MODEL = "default"


class _Embedding(msgspec.Struct):
    embedding: str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Tensor(msgspec.Struct):
    datatype: str
    shape: list[int]
    data: list[str]


class _Tensors(msgspec.Struct):
    outputs: list[_Tensor]


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode
_decode_tensors = msgspec.json.Decoder(_Tensors).decode


class EmbeddingsPayload(Payload):
    """`/v1/embeddings` of one text, in base64, which SDKs ask for by default."""

    # Set by the first right answer; a vector of another length is wrong from then on. 0: none came yet.
    dimensions = 0

    def _body(self, model: str | None) -> tuple[str, bytes, bytes]:
        named = b"" if model is None else b',"model":%b' % msgspec.json.encode(model)
        return "/v1/embeddings", b'{"input":', b',"encoding_format":"base64"%b}' % named

    def verify(self, data: bytes, start: int, number: bytes) -> Journey | None:
        """Whether it is the one vector of this text."""
        try:
            (found,) = _decode_embeddings(data[start:]).data
            vector = b64decode(found.embedding, validate=True)
        except (msgspec.DecodeError, ValueError):
            return None
        dimensions, odd = divmod(len(vector), 4)
        if odd or not dimensions or dimensions != (self.dimensions or dimensions):
            return None
        text = self.expected_output(number)
        first = first_of_vector(b'"%b"' % (text[::-1] if self._reversed else text).encode())
        if vector != array("f", [first]).tobytes() + _packed_rest(dimensions):
            return None
        self.dimensions = dimensions
        return NOT_TOLD


@lru_cache(4)
def _packed_rest(dimensions: int) -> bytes:
    return array("f", msgspec.json.decode(b"[0" + rest_of_vector(dimensions), type=list[float])[1:]).tobytes()


class TensorPayload(Payload):
    """`/v2/models/{model}/infer` of one row: a tensor with one text, in JSON."""

    __slots__ = ()

    def _body(self, model: str | None) -> tuple[str, bytes, bytes]:
        opening = b'{"inputs":[{"name":"TEXT","datatype":"BYTES","shape":[1],"data":['
        return f"/v2/models/{quote(model or DEFAULT_MODEL, safe='')}/infer", opening, b"]}]}"

    def verify(self, data: bytes, start: int, number: bytes) -> Journey | None:
        """Whether the one row is this text's."""
        try:
            (tensor,) = _decode_tensors(data[start:]).outputs
        except (msgspec.DecodeError, ValueError):
            return None
        is_right = tensor == _Tensor("BYTES", [1], [self.expected_output(number)])
        return NOT_TOLD if is_right else None


class PredictPayload(Payload):
    """`carpool.v1.Inference/Predict`: messages, and the metadata that goes with each."""

    __slots__ = ("metadata",)

    def _around(self, size: int, host: str, base_path: str, model: str | None, options: str) -> tuple[bytes, bytes]:
        _, _, token = self.credential.strip().partition(": ")
        self.metadata = (("authorization", token),) if token else ()
        return field(1, (model or "").encode()) + start_of_field(3, size), b""

    def verify(self, data: bytes, start: int, number: bytes) -> Journey | None:
        """What the PredictResponse tells about its way, or None if its output is wrong."""
        from carpool.tools.bench.grpc_calls import read_response  # here: the other faces do without grpcio

        try:
            response = read_response(data)
            is_right = self.is_expected(msgspec.json.decode(response.output), number)
        except (ValueError, msgspec.DecodeError):
            return None
        told = response.metadata
        journey = (told.queue_ms, told.batch_size) if response.HasField("metadata") else NOT_TOLD
        return journey if is_right else None


PAYLOADS: dict[Face, type[Payload]] = {
    "http": Payload,
    "openai": EmbeddingsPayload,
    "grpc": PredictPayload,
    "kserve": TensorPayload,
}
