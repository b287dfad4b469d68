"""What became of one request: an Output, or one error of the error tree."""

from typing import Any

import msgspec

from carpool.core.errors import CarpoolError


class CallFacts(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """What is known of the call that brought the outputs of a batch; one object for all its members.

    Over Redis it is written in this order. Older programs skip what they do not know: new facts come last.
    """

    batch_size: int
    upstream_s: float
    model_version: str | None = None
    cached: bool = False
    # The endpoint that answered, by its name in `/internal/fleet`; "" for a function of the library.
    endpoint: str = ""
    # Which attempt that was; 1 for the first.
    attempts: int = 1
    # When the call began, in seconds after its batch was taken: earlier attempts and their pauses are in it. A
    # difference, since it is read in other processes, whose clocks do not agree.
    started_s: float = 0.0
    # The id of its batch; "" where batches have none (the library).
    batch_id: str = ""
    # What counts for each request of its seconds: all requests that it answered share them equally.
    gpu_s: float = 0.0
    # Why its batch left (batching/policy.py).
    reason: str = ""
    # Its batch was refused, and a search looked for the input at fault: how long that took, of `started_s`. And the
    # same of the time in the queue, for a request that a search had cleared before and that waited again.
    search_s: float = 0.0
    searched_s: float = 0.0
    # The span of its batch is kept: spans and records of a request may refer to it.
    is_traced: bool = False
    # How the call failed, in Carpool's own words; "" if it was answered.
    failure: str = ""


# For requests of whose call nothing is known.
NO_CALL = CallFacts(0, 0.0, attempts=0)


class Output(msgspec.Struct, frozen=True, gc=False):
    """The model's answer to one request."""

    # For the gateway: a slice of the upstream's own JSON bytes (anything with the buffer protocol, never parsed).
    # For the library: whatever object the function returned.
    value: Any
    call: CallFacts
    tokens_used: int | None = None


Outcome = Output | CarpoolError
