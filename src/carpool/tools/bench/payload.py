"""What a request carries, and whether an answer is its own.

The input is a JSON string: a run id and the request's number (together a nonce that no other request has), then filler
to its size, which the number tells, too. Filler is cut from one text that is the same for all. The upstream answers it
reversed, so the answer is known in advance. All but number and length is built once: making a request is one join. Over
`/v1/embeddings` the input is the same text, and its vector is what the simulated GPU makes of that, which begins with a
checksum of 24 bits.
"""

from array import array
from base64 import b64decode
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from carpool.upstream.simulated import first_of_vector, rest_of_vector

Face = Literal["http", "openai"]

NUMBER_DIGITS = 8
RUN_ID_DIGITS = 12
# Quotes, run id and number: a shorter input could not be distinguished from another one.
PAYLOAD_BYTES_MIN = 2 + RUN_ID_DIGITS + NUMBER_DIGITS

# No character repeats within reach of its neighbours: a shifted or cut filler cannot pass for the right one.
FILLER_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

# What an answer tells about its way: queue_ms (below 0: unknown) and batch_size (0: unknown).
Journey = tuple[float, int]
NOT_TOLD: Journey = (-1.0, 0)


class _Metadata(msgspec.Struct):
    queue_ms: float | None = None
    batch_size: int | None = None


class _Answer(msgspec.Struct):
    # Any JSON is an answer; only the expected string is a right one.
    output: Any
    metadata: _Metadata | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Payload:
    """Makes the requests of one run and verifies their answers."""

    def __init__(
        self,
        *,
        host: str,
        base_path: str,
        run_id: str,
        sizes: Sequence[int],
        model: str | None = None,
        respond_async: bool = False,
        key: str = "",
        poison: str = "",
        poison_every: int = 0,
    ) -> None:
        identity = run_id.encode().rjust(RUN_ID_DIGITS, b"0")
        # Of filler: what each request has, by its number, and the most.
        self._fill = [size - PAYLOAD_BYTES_MIN for size in sizes]
        self._fill_max = max(self._fill)
        self._filler = (FILLER_ALPHABET * (self._fill_max // len(FILLER_ALPHABET) + 1))[: self._fill_max]
        # The header line of the credential; the bench also polls tasks with it.
        self.credential = f"Authorization: Bearer {key}\r\n" if key else ""
        options = "Prefer: respond-async\r\n" if respond_async else ""
        path, opening, ending = self._body(model)
        head = (
            f"POST {base_path}{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"{options}{self.credential}Content-Length: "
        )
        # What a request has before its length, between that and its number, and behind its filler.
        self._head, self._opening, self._ending = head.encode(), b'\r\n\r\n%b"%b' % (opening, identity), b'"' + ending
        self._unfilled = len(opening) + PAYLOAD_BYTES_MIN + len(ending)
        # Every so many requests carry the text instead of as much filler, if they have that much; 0: none does.
        self._poison_every = poison_every if poison else 0
        self._poison_bytes = len(poison.encode())
        self._poisoned = poison.encode() + self._filler
        # What an output has before and behind its number.
        self._before, self._after = self._filler[::-1].decode(), identity[::-1].decode()

    def _body(self, model: str | None) -> tuple[str, bytes, bytes]:
        """The path, and what the body has before and behind the input."""
        return "/v1/inference", b'{"input":', b"}" if model is None else b',"model":%b}' % msgspec.json.encode(model)

    def request(self, number: bytes) -> bytes:
        """The whole HTTP request that carries `number` (8 hexadecimal digits)."""
        place = int(number, 16)
        fill = self._fill[place % len(self._fill)]
        filler = self._filler
        if self._poison_every and place % self._poison_every == 0 and fill >= self._poison_bytes:
            filler = self._poisoned
        length = b"%d" % (self._unfilled + fill)
        return b"".join((self._head, length, self._opening, number, filler[:fill], self._ending))

    def expected_output(self, number: bytes) -> str:
        """The string that the answer to `number` must have as its output."""
        fill = self._fill[int(number, 16) % len(self._fill)]
        return f"{self._before[self._fill_max - fill :]}{number[::-1].decode()}{self._after}"

    def verify(self, data: bytes, start: int, number: bytes) -> Journey | None:
        """What the answer that begins at `start` tells about its way, or None if its output is wrong."""
        try:
            answer = _decode_answer(data[start:])
        except msgspec.DecodeError:
            return None
        if answer.output != self.expected_output(number):
            return None
        if answer.metadata is None:
            return NOT_TOLD
        queue_ms, batch_size = answer.metadata.queue_ms, answer.metadata.batch_size
        return (-1.0 if queue_ms is None else queue_ms, batch_size or 0)


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
