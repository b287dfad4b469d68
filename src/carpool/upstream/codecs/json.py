"""Plain JSON: `{"inputs":[…],"parameters":{…}?}` → `{"outputs":[…]}`; the three names are configurable.

Lane key: model and parameters. The model's name is not sent: an endpoint serves one model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from carpool.core.request import Request
from carpool.upstream.codecs.base import (
    Codec,
    Decoded,
    ProtocolFaultError,
    Refusal,
    check_count,
    check_text,
    parse_answer,
)
from carpool.upstream.codecs.refusals import classify_status, limit_words
from carpool.upstream.endpoint import Answer, Call

# Whole messages that an API of one's own may have for too large a batch; the first is that of `carpool sim-gpu`.
_LIMIT = limit_words(
    r"(?i:batch size SIZE > maximum (?:allowed )?(?:batch size )?MAX\.?)",
    r"(?i:batch size SIZE exceeds (?:the )?(?:maximum|limit)(?: batch size)?(?: of)? MAX\.?)",
    r"(?i:too many (?:inputs|instances|items): SIZE, the (?:maximum|limit) is MAX\.?)",
)


class JsonCodec(Codec):
    """The default protocol."""

    def __init__(
        self, inputs_field: str = "inputs", outputs_field: str = "outputs", parameters_field: str = "parameters"
    ) -> None:
        quoted = msgspec.json.encode
        self._start = b"{" + quoted(inputs_field) + b":["
        self._parameters = b"]," + quoted(parameters_field) + b":"
        self.inputs_field = inputs_field
        self.outputs_field = outputs_field
        # A struct made for the configured name: only that field is looked at, the rest is skipped.
        answer = msgspec.defstruct(
            "Answer", [("outputs", list[msgspec.Raw] | None, None)], rename={"outputs": outputs_field}
        )
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(answer).decode

    def encode(self, batch: Sequence[Request], call_id: str = "") -> Call:
        """The inputs' own bytes, joined by commas."""
        parameters = batch[0].parameters
        end = self._parameters + parameters + b"}" if parameters else b"]}"
        inputs = [request.input for request in batch]
        # Into the first and last part, so that the whole is copied only once.
        inputs[0] = self._start + inputs[0]
        inputs[-1] += end
        return Call(b",".join(inputs))

    def decode(self, answer: Answer, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Slices of the answer."""
        body = answer.body
        outputs: list[msgspec.Raw] | None = parse_answer(self._decode, body).outputs
        if outputs is None:
            raise ProtocolFaultError(f"the answer has no array `{self.outputs_field}`")
        check_count(len(outputs), len(batch))
        check_text(body)
        return [Decoded(output) for output in outputs]

    def classify(self, answer: Answer, size: int, call_id: str = "") -> Refusal:
        """By the status, and some usual words for too large a batch."""
        return classify_status(answer, size, _LIMIT, inputs_field=self.inputs_field)
