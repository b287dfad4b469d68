"""What every codec does, and the splicing they share: inputs and outputs are bytes, never parsed."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from carpool.upstream.endpoint import Call


class ProtocolFaultError(Exception):
    """The answer is not what the protocol says. The text names no payload."""


class Codec(Protocol):
    """Turns a batch into a call, and its answer into one output for each member."""

    def encode(self, model: str, parameters: bytes, inputs: Sequence[bytes]) -> Call:
        """One call for these inputs, in their order."""
        ...

    def decode(self, body: bytes, count: int) -> Sequence[msgspec.Raw]:
        """The outputs, one for each input in order; raises ProtocolFaultError, also when their number differs."""
        ...

    def binary_input(self, data: bytes) -> bytes:
        """Binary input as the JSON value that this protocol has for it."""
        ...


def check_answer(body: bytes, outputs: Sequence[msgspec.Raw] | None, field: str, count: int) -> Sequence[msgspec.Raw]:
    """The outputs if they can be trusted: present, as many as inputs, and valid UTF-8 (Raw does not look)."""
    if outputs is None:
        raise ProtocolFaultError(f"the answer has no array `{field}`")
    if len(outputs) != count:
        raise ProtocolFaultError(f"{len(outputs)} outputs came for {count} inputs")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise ProtocolFaultError("the answer is not valid UTF-8") from None
    return outputs
