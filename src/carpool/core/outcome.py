"""What became of one request: an Output, or one error of the error tree."""

from typing import Any

import msgspec

from carpool.core.errors import CarpoolError


class CallFacts(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What is known of the call that brought the outputs of a batch; one object for all its members."""

    batch_size: int
    upstream_s: float
    model_version: str | None = None
    cached: bool = False


class Output(msgspec.Struct, frozen=True, gc=False):
    """The model's answer to one request."""

    # For the gateway: a slice of the upstream's own JSON bytes (anything with the buffer protocol, never parsed).
    # For the library: whatever object the function returned.
    value: Any
    call: CallFacts
    tokens_used: int | None = None


Outcome = Output | CarpoolError
