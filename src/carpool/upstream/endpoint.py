"""What the upstream stage asks of one endpoint, whatever stands behind it."""

from typing import Protocol

import msgspec

from carpool.core.tensors import Data


class UpstreamCall(msgspec.Struct, frozen=True, gc=False):
    """One batch, encoded for the fixed API."""

    body: bytes
    # Added to the endpoint's own path, for protocols that name the model there.
    path: str = ""
    content_type: str = "application/json"
    # Further headers, for protocols that have some.
    headers: tuple[tuple[str, str], ...] = ()
    # What follows the body, for protocols that have large inputs: those themselves, not a copy.
    tail: tuple[Data, ...] = ()

    @property
    def size(self) -> int:
        """All its bytes."""
        return len(self.body) + sum(map(len, self.tail))


class UpstreamResponse(msgspec.Struct, frozen=True, gc=False):
    """What the fixed API answered, read whole and within the size limit."""

    status: int
    body: bytes
    # What the endpoint says of its load with it: 1 is full. None where it says nothing.
    load: float | None = None


class AttemptFailedError(Exception):
    """No answer: refused, reset, timed out, broken off, too long. The text names no payload."""


class NoAnswerError(AttemptFailedError):
    """No answer came in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:.2f} s")


class ConnectionWasDeadError(AttemptFailedError):
    """A connection that had been used before broke off, and no byte of an answer had come.

    Servers close idle connections, and may do so just when one is used again. That says little against the endpoint,
    and the next call will have a new connection. Whether the call is sent once more is for the caller to say.
    """


class Endpoint(Protocol):
    """One endpoint of the fixed API."""

    # For logs and metrics; without credentials.
    name: str

    @property
    def slots(self) -> int | None:
        """How many batches it takes at once; None: that is found out."""

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Send one call, once, and read its answer; raises AttemptFailedError, or is cancelled."""

    async def accepts_connections(self) -> bool:
        """Whether it can be reached right now (for readiness)."""

    async def close(self) -> None:
        """Give up its connections."""
