"""Plain JSON: `{"inputs":[…],"parameters":{…}?}` → `{"outputs":[…]}`; the names are configurable.

An answer may tell `tokens_used` and `model_version`, under names that are configurable too: one for all inputs, or an
array with one for each. The tokens of all are shared out by the length of the inputs. What is neither is passed over:
outputs are none the worse for it.
Lane key: model and parameters. The model's name is not sent: an endpoint serves one model.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Codec,
    Decoded,
    ProtocolFaultError,
    TokenCount,
    apportion,
    check_count,
    check_text,
    input_lengths,
    parse_answer,
)
from carpool.upstream.codecs.refusals import limit_words
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

# It is shown to clients, and kept with results.
VERSION_CHARS_MAX = 128
_Version = Annotated[str, msgspec.Meta(max_length=VERSION_CHARS_MAX)] | Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_decode_tokens = msgspec.json.Decoder(TokenCount | list[TokenCount]).decode
_decode_version = msgspec.json.Decoder(_Version | list[_Version]).decode
_NOTHING = msgspec.Raw()


class JsonCodec(Codec):
    """The default protocol."""

    # What an API of one's own may say; the first is what `carpool sim-gpu` says.
    limit_words = limit_words(
        r"(?i:batch size SIZE > maximum (?:allowed )?(?:batch size )?MAX\.?)",
        r"(?i:batch size SIZE exceeds (?:the )?(?:maximum|limit)(?: batch size)?(?: of)? MAX\.?)",
        r"(?i:too many (?:inputs|instances|items): SIZE, the (?:maximum|limit) is MAX\.?)",
    )

    def __init__(
        self,
        inputs_field: str = "inputs",
        outputs_field: str = "outputs",
        parameters_field: str = "parameters",
        tokens_field: str = "tokens_used",
        version_field: str = "model_version",
    ) -> None:
        quoted = msgspec.json.encode
        self._start = b"{" + quoted(inputs_field) + b":["
        self._parameters = b"]," + quoted(parameters_field) + b":"
        self.inputs_field = self.array = inputs_field
        self.outputs_field = outputs_field
        # A struct made for the configured names: only these fields are looked at, the rest is skipped.
        answer = msgspec.defstruct(
            "Answer",
            [
                ("outputs", list[msgspec.Raw] | None, None),
                ("tokens", msgspec.Raw, _NOTHING),
                ("version", msgspec.Raw, _NOTHING),
            ],
            rename={"outputs": outputs_field, "tokens": tokens_field, "version": version_field},
        )
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(answer).decode

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The inputs' own bytes, joined by commas."""
        parameters = batch[0].parameters
        end = self._parameters + parameters + b"}" if parameters else b"]}"
        inputs = [request.input for request in batch]
        # Into the first and last part, so that the whole is copied only once.
        inputs[0] = self._start + inputs[0]
        inputs[-1] += end
        return UpstreamCall(b",".join(inputs))

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Slices of the answer."""
        body = answer.body
        parsed = parse_answer(self._decode, body)
        outputs: list[msgspec.Raw] | None = parsed.outputs
        if outputs is None:
            raise ProtocolFaultError(f"the answer has no array `{self.outputs_field}`")
        check_count(len(outputs), len(batch))
        check_text(body)
        if parsed.tokens is _NOTHING and parsed.version is _NOTHING:  # the usual case
            return [Decoded(output) for output in outputs]
        tokens = _told(_decode_tokens, parsed.tokens, len(batch))
        if isinstance(tokens, int):
            tokens = apportion(tokens, input_lengths(batch))
        versions = _told(_decode_version, parsed.version, len(batch))
        if not isinstance(versions, list):
            versions = [versions] * len(batch)
        return [
            Decoded(output, used, None if version is None else str(version))
            for output, used, version in zip(outputs, tokens or [None] * len(batch), versions, strict=True)
        ]


def _told(decode: Callable[[msgspec.Raw], Any], field: msgspec.Raw, count: int) -> Any:
    """What an answer says beside its outputs: one value for all, or a list with one for each; else None."""
    if field is _NOTHING:
        return None
    try:
        found = decode(field)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if not isinstance(found, list) or len(found) == count else None
