"""Protocols that take texts: OpenAI's embeddings and completions, and text-embeddings-inference.

`input` is a text, or an array of token ids. Parameters are fields of the call.
Lane key: model, parameters, and whether the input is a text or token ids.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from carpool.core.errors import Malformed
from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Codec,
    Decoded,
    Prepared,
    ProtocolFaultError,
    TokenCount,
    apportion,
    check_count,
    check_text,
    decode_object,
    input_lengths,
    parse_answer,
)
from carpool.upstream.codecs.refusals import limit_words
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

_decode_tokens = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]]).decode
# A call may have texts or token ids, not both.
_TEXT, _TOKENS = Prepared(None, b"text"), Prepared(None, b"tokens")


class TextCodec(Codec):
    """What they have in common."""

    prepares = True
    path: str
    # Whether the call names the model.
    names_model = True

    def prepare(self, value: bytes) -> Prepared:
        """A text, or the ids of its tokens. Bare numbers would melt together with their neighbours into one input."""
        if value[:1] == b'"':
            return _TEXT
        try:
            if _decode_tokens(value):
                return _TOKENS
        except (msgspec.DecodeError, RecursionError):
            pass
        raise Malformed("`input` must be a text, or the ids of its tokens as an array of whole numbers")

    def check_parameters(self, parameters: bytes) -> None:
        """Parameters must leave those fields alone that the codec writes itself."""
        fields = decode_object(parameters) if parameters else {}
        for name in ("model", self.array) if self.names_model else (self.array,):
            if name in fields:
                raise Malformed(f"`parameters` may not have `{name}`: that is for Carpool to fill in")

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The inputs' own bytes."""
        first = batch[0]
        start = b'"model":' + msgspec.json.encode(first.model) + b"," if self.names_model else b""
        inputs = b",".join([request.input for request in batch])
        fields = b"," + first.parameters[1:-1] if len(first.parameters) > 2 else b""
        return UpstreamCall(b'{%b"%b":[%b]%b}' % (start, self.array.encode(), inputs, fields), path=self.path)

    def binary_input(self, data: bytes) -> bytes:
        """There is none."""
        raise Malformed("this model takes texts; send JSON")


class TeiEmbedCodec(TextCodec):
    """text-embeddings-inference, `POST /embed`: `{"inputs":[…]}` → `[[…],…]`, a bare array in the order of the call."""

    path, array, names_model = "/embed", "inputs", False
    # A 422, like that of a bad input: the words tell the two apart.
    limit_words = limit_words(r"batch size SIZE > maximum allowed batch size MAX")
    health, info, info_field = "/health", "/info", "max_client_batch_size"

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Slices of the answer."""
        embeddings = parse_answer(_decode_bare, answer.body)
        check_count(len(embeddings), len(batch))
        check_text(answer.body)
        return [Decoded(embedding) for embedding in embeddings]


_decode_bare = msgspec.json.Decoder(list[msgspec.Raw]).decode


class OpenAiCodec(TextCodec):
    """What OpenAI's protocols have in common, also those of vLLM, infinity and others."""

    # OpenAI's words, and those of TEI's OpenAI route.
    limit_words = limit_words(
        r"Invalid '(?:input|prompt)': array too long\. Expected an array with maximum length MAX, "
        r"but got an array with length SIZE instead\.",
        r"batch size SIZE > maximum allowed batch size MAX",
    )
    health = "/v1/models"


class _Embedding(msgspec.Struct):
    index: int
    # Numbers, or base64 if that was asked for.
    embedding: msgspec.Raw


class _EmbeddingUsage(msgspec.Struct):
    total_tokens: TokenCount | None = None


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _EmbeddingUsage | None = None


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


class OpenAiEmbeddingsCodec(OpenAiCodec):
    """`POST /v1/embeddings`: `{"model","input":[…]}` → `{"data":[…]}`, by index. The output is the embedding.

    The URL may name a path of its own, like infinity's `/embeddings`.
    """

    path, array = "/v1/embeddings", "input"

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


# What these parameters may say, if they are given at all.
_ONLY = {"n": (b"1", b"null"), "best_of": (b"1", b"null"), "stream": (b"false", b"null")}


class _Usage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


class _Choices(msgspec.Struct):
    choices: list[dict[str, msgspec.Raw]]
    usage: _Usage | None = None


_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_index = msgspec.json.Decoder(int).decode


class OpenAiCompletionsCodec(OpenAiCodec):
    """`POST /v1/completions`: `{"model","prompt":[…]}` → `{"choices":[…]}`, by index.

    The output is the prompt's choice without `index`: `text`, `finish_reason` and whatever else the server says; with
    `usage`, its share of the tokens, where the server tells them. Or, where that is configured, the text alone.
    One completion a prompt: with more, servers disagree on what an index means. No streaming.
    """

    path, array = "/v1/completions", "prompt"

    def __init__(self, *, is_text: bool = False) -> None:
        self._is_text = is_text

    def check_parameters(self, parameters: bytes) -> None:
        """One whole completion a prompt."""
        super().check_parameters(parameters)
        fields = decode_object(parameters) if parameters else {}
        for name, allowed in _ONLY.items():
            if name in fields and bytes(fields[name]) not in allowed:
                raise Malformed(f"`parameters.{name}` must be {allowed[0].decode()}, or left out")

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Each choice by its index."""
        parsed = parse_answer(_decode_choices, answer.body)
        choices = parsed.choices
        check_count(len(choices), len(batch))
        if not all("index" in choice and "text" in choice for choice in choices):
            raise ProtocolFaultError("a choice has no `index` or no `text`")
        places = in_order_of_index([parse_answer(_decode_index, bytes(choice.pop("index"))) for choice in choices])
        check_text(answer.body)
        # The number was the place in a batch that is none of the client's business.
        ordered = [choices[place] for place in places]
        texts, usage = [choice["text"] for choice in ordered], parsed.usage
        if self._is_text and not all(bytes(text).startswith(b'"') for text in texts):
            raise ProtocolFaultError("the `text` of a choice is none")
        if usage is None or usage.prompt_tokens is None:
            return [Decoded(part) for part in (texts if self._is_text else map(msgspec.json.encode, ordered))]
        # Shared out: the tokens of prompts by their length, the others by that of the texts.
        read = apportion(usage.prompt_tokens, input_lengths(batch))
        written = apportion(usage.completion_tokens or 0, [len(bytes(text)) for text in texts])
        if self._is_text:
            return [Decoded(text, sum(used)) for text, *used in zip(texts, read, written, strict=True)]
        return [
            Decoded(msgspec.json.encode({**choice, "usage": _Usage(prompt, completion)}), prompt + completion)
            for choice, prompt, completion in zip(ordered, read, written, strict=True)
        ]


def in_order_of_index(indices: Sequence[int]) -> list[int]:
    """Where in the answer each member's part stands; raises ProtocolFaultError unless each index is there once."""
    places = [-1] * len(indices)
    for place, index in enumerate(indices):
        if not 0 <= index < len(places) or places[index] >= 0:
            raise ProtocolFaultError("the indices of the outputs are not those of the inputs, each once")
        places[index] = place
    return places
