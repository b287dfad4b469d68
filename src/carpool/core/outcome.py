"""What became of one request: an Output, or one error of the error tree."""

from typing import Any

import msgspec

from carpool.core.errors import CarpoolError


class Output(msgspec.Struct, frozen=True, gc=False):
    """The model's answer to one request, with what is known of the call that brought it."""

    # For the gateway: a slice of the upstream's own JSON bytes (anything with the buffer protocol, never parsed).
    # For the library: whatever object the function returned.
    value: Any
    batch_size: int = 1
    upstream_s: float = 0.0
    model_version: str | None = None
    tokens_used: int | None = None
    cached: bool = False


Outcome = Output | CarpoolError
