"""OpenAI's `POST /v1/embeddings`, also of vLLM, infinity, TEI and others: `{"model","input":[…]}` → `{"data":[…]}`.

`input` is a text or an array of token ids; the output is its embedding. Parameters are fields of the call:
`dimensions`, `encoding_format`, `user`, …. The URL may name a path of its own, like infinity's `/embeddings`.
Lane key: model, parameters, and whether the input is a text or token ids.
"""

from collections.abc import Sequence

import msgspec

from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Decoded,
    Refusal,
    TextCodec,
    TokenCount,
    apportion,
    as_fields,
    check_count,
    check_fields,
    check_text,
    in_order_of_index,
    input_lengths,
    parse_answer,
)
from carpool.upstream.codecs.refusals import classify_status, limit_words
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

# OpenAI's words, and those of TEI's OpenAI route.
LIMIT = limit_words(
    r"Invalid '(?:input|prompt)': array too long\. Expected an array with maximum length MAX, "
    r"but got an array with length SIZE instead\.",
    r"batch size SIZE > maximum allowed batch size MAX",
)


class _Embedding(msgspec.Struct):
    index: int
    # Numbers, or base64 if that was asked for.
    embedding: msgspec.Raw


class _Usage(msgspec.Struct):
    total_tokens: TokenCount | None = None


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


class OpenAiEmbeddingsCodec(TextCodec):
    """One text in, one embedding out, by index."""

    def check_parameters(self, parameters: bytes) -> None:
        """All but the model and the inputs."""
        check_fields(parameters, ("model", "input"))

    def health_path(self, model: str) -> str | None:
        """The list of models."""
        return "/v1/models"

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The inputs' own bytes."""
        first = batch[0]
        self.check_parameters(first.parameters)
        start = b'{"model":' + msgspec.json.encode(first.model) + b',"input":['
        inputs = b",".join([request.input for request in batch])
        return UpstreamCall(start + inputs + b"]" + as_fields(first.parameters) + b"}", path="/v1/embeddings")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Each embedding by its index; the tokens of the call are shared out by the length of the inputs."""
        parsed = parse_answer(_decode_embeddings, answer.body)
        data = parsed.data
        check_count(len(data), len(batch))
        places = in_order_of_index([part.index for part in data])
        check_text(answer.body)
        total = parsed.usage.total_tokens if parsed.usage else None
        if total is None:
            return [Decoded(data[place].embedding) for place in places]
        tokens = apportion(total, input_lengths(batch))
        return [Decoded(data[place].embedding, used) for place, used in zip(places, tokens, strict=True)]

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        """By the status, and the words of several servers for too large a batch."""
        return classify_status(answer, size, LIMIT, inputs_field="input")
