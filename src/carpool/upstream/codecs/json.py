"""Plain JSON: `{"inputs":[…],"parameters":{…}?}` → `{"outputs":[…]}`; the three names are configurable.

Lane key: model and parameters. The model's name is not sent: an endpoint serves one model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from carpool.upstream.codecs.base import ProtocolFaultError, check_answer
from carpool.upstream.endpoint import Call


class JsonCodec:
    """The default protocol."""

    def __init__(
        self,
        inputs_field: str = "inputs",
        outputs_field: str = "outputs",
        parameters_field: str = "parameters",
    ) -> None:
        quoted = msgspec.json.encode
        self._start = b"{" + quoted(inputs_field) + b":["
        self._parameters = b"]," + quoted(parameters_field) + b":"
        self._outputs_field = outputs_field
        # A struct made for the configured name: only that field is looked at, the rest is skipped.
        answer = msgspec.defstruct(
            "Answer", [("outputs", list[msgspec.Raw] | None, None)], rename={"outputs": outputs_field}
        )
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(answer).decode

    def encode(self, model: str, parameters: bytes, inputs: Sequence[bytes]) -> Call:
        """The inputs' own bytes, joined by commas."""
        end = self._parameters + parameters + b"}" if parameters else b"]}"
        return Call(b"".join((self._start, b",".join(inputs), end)))

    def decode(self, body: bytes, count: int) -> Sequence[msgspec.Raw]:
        """Slices of the answer."""
        try:
            outputs: list[msgspec.Raw] | None = self._decode(body).outputs
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
            # msgspec's text names a place and a type, never a value
            raise ProtocolFaultError(f"the answer is not the JSON expected: {failure}") from None
        return check_answer(body, outputs, self._outputs_field, count)

    def binary_input(self, data: bytes) -> bytes:
        """A base64 string."""
        return msgspec.json.encode(data)
