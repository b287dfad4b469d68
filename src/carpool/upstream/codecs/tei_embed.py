"""text-embeddings-inference, `POST /embed`: `{"inputs":[…]}` → `[[…],…]`, a bare array.

`input` is a text or an array of token ids. Parameters are fields of the call: `truncate`, `normalize`, ….
Lane key: model, parameters, and whether the input is a text or token ids.
"""

from collections.abc import Sequence

import msgspec

from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Decoded,
    Refusal,
    TextCodec,
    as_fields,
    check_count,
    check_fields,
    check_text,
    parse_answer,
)
from carpool.upstream.codecs.refusals import classify_status, limit_words
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

_LIMIT = limit_words(r"batch size SIZE > maximum allowed batch size MAX")


class _Info(msgspec.Struct):
    max_client_batch_size: int | None = None


_decode_embeddings = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_info = msgspec.json.Decoder(_Info).decode


class TeiEmbedCodec(TextCodec):
    """One text in, one embedding out, in the order of the call: the protocol has no index."""

    def check_parameters(self, parameters: bytes) -> None:
        """All but the inputs themselves."""
        check_fields(parameters, ("inputs",))

    def health_path(self, model: str) -> str | None:
        """Its health page."""
        return "/health"

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The inputs' own bytes."""
        first = batch[0]
        self.check_parameters(first.parameters)
        inputs = b",".join([request.input for request in batch])
        return UpstreamCall(b'{"inputs":[' + inputs + b"]" + as_fields(first.parameters) + b"}", path="/embed")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Slices of the answer."""
        embeddings = parse_answer(_decode_embeddings, answer.body)
        check_count(len(embeddings), len(batch))
        check_text(answer.body)
        return [Decoded(embedding) for embedding in embeddings]

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        """By the status; too large a batch is a 422 like a bad input, and its words tell the two apart."""
        return classify_status(answer, size, _LIMIT)

    def info_path(self, model: str) -> str | None:
        """The server's own facts."""
        return "/info"

    def batch_max_from_info(self, body: bytes) -> int | None:
        """Its `max_client_batch_size`."""
        try:
            limit = _decode_info(body).max_client_batch_size
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        return limit if limit and limit > 0 else None
