"""`/v1/embeddings`: what its requests carry, and whether an answer is their own.

The input is the same text as over `/v1/inference`. The vector is compared with what the simulated GPU makes of that
text, which begins with a checksum of 24 bits.
"""

from array import array
from base64 import b64decode
from functools import lru_cache
from typing import Literal

import msgspec

from carpool.tools.bench.payload import NOT_TOLD, Journey, Payload
from carpool.upstream.simulated import first_of_vector, rest_of_vector

Face = Literal["http", "openai"]


class _Embedding(msgspec.Struct):
    embedding: str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


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
        first = first_of_vector(b'"%b"' % self.expected_output(number)[::-1].encode())
        if vector != array("f", [first]).tobytes() + _packed_rest(dimensions):
            return None
        self.dimensions = dimensions
        return NOT_TOLD


@lru_cache(4)
def _packed_rest(dimensions: int) -> bytes:
    return array("f", msgspec.json.decode(b"[0" + rest_of_vector(dimensions), type=list[float])[1:]).tobytes()


PAYLOADS: dict[Face, type[Payload]] = {"http": Payload, "openai": EmbeddingsPayload}
