"""OpenAI's `POST /v1/completions` with a list of prompts, also of vLLM and others: → `{"choices":[…]}`.

`input` is the prompt: a text or an array of token ids. The output is its choice without `index`: `text`,
`finish_reason` and whatever else the server says; with `usage`, its share of the tokens, where the server tells them.
Or, where that is configured, the output is the text alone.
Parameters are fields of the call: `max_tokens`, `temperature`, ….
One completion a prompt: with more, servers disagree on what an index means. No streaming.
Lane key: model, parameters, and whether the prompt is a text or token ids.
"""

from collections.abc import Sequence

import msgspec

from carpool.core.errors import Malformed
from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Decoded,
    ProtocolFaultError,
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
from carpool.upstream.codecs.openai_embeddings import LIMIT
from carpool.upstream.codecs.refusals import classify_status
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

# What these may say, if they are given at all.
_ONLY = {"n": (b"1", b"null"), "best_of": (b"1", b"null"), "stream": (b"false", b"null")}


class _Usage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


class _Choices(msgspec.Struct):
    choices: list[dict[str, msgspec.Raw]]
    usage: _Usage | None = None


_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_index = msgspec.json.Decoder(int).decode


class OpenAiCompletionsCodec(TextCodec):
    """One prompt in, one choice out, by index; or its text."""

    def __init__(self, *, is_text: bool = False) -> None:
        self._is_text = is_text

    def check_parameters(self, parameters: bytes) -> None:
        """One whole completion a prompt."""
        fields = check_fields(parameters, ("model", "prompt"))
        for name, allowed in _ONLY.items():
            if name in fields and bytes(fields[name]) not in allowed:
                raise Malformed(f"`parameters.{name}` must be {allowed[0].decode()}, or left out")

    def health_path(self, model: str) -> str | None:
        """The list of models."""
        return "/v1/models"

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The prompts' own bytes."""
        first = batch[0]
        self.check_parameters(first.parameters)
        start = b'{"model":' + msgspec.json.encode(first.model) + b',"prompt":['
        prompts = b",".join([request.input for request in batch])
        return UpstreamCall(start + prompts + b"]" + as_fields(first.parameters) + b"}", path="/v1/completions")

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

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        """By the status, and the words of several servers for too large a batch."""
        return classify_status(answer, size, LIMIT, inputs_field="prompt")
