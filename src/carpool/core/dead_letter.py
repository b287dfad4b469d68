"""Dead letters: requests given up on, kept with their error for a person to replay or drop."""

from typing import Annotated, Literal

import msgspec

from carpool.core.errors import CarpoolError, DeadlineExceeded, InputRefused, UpstreamError, all_errors

# Which synchronous requests are kept: those that are poison, all that are worth a look, or none.
SynchronousKept = Literal["poison", "all", "none"]


class DeadLetterSummary(msgspec.Struct, frozen=True, gc=False):
    """What a list shows of a dead letter: never its input."""

    # Carpool's own number: ids of synchronous requests are chosen by clients, who may repeat them.
    id: int
    request_id: str
    model: str
    # The code of an error of the error tree, and the detail that its client got.
    cause: str
    detail: str
    # How often it was sent to an upstream.
    sends: int
    # Unix time.
    buried_wall: float
    # Bytes of input and parameters.
    size: int


class StoredDeadLetter(msgspec.Struct, frozen=True):
    """A whole dead letter."""

    summary: DeadLetterSummary
    owner: str
    tier: int
    # Canonical JSON, b"" for none.
    parameters: bytes
    # The client's own JSON bytes.
    input: bytes


class Replayed(msgspec.Struct, frozen=True, gc=False):
    """A dead letter that is a task again."""

    id: int
    task_id: str


class ReplayReport(msgspec.Struct, frozen=True):
    """What became of many dead letters."""

    tasks: list[Replayed]
    reason: Annotated[
        str | None,
        msgspec.Meta(description="why some were left: what ended it, or what is wrong with the last one left"),
    ]


def is_dead_letter(error: CarpoolError) -> bool:
    """Whether a request that failed so is worth a look: the upstream failed it, or the model refused it."""
    return isinstance(error, UpstreamError | InputRefused) and not isinstance(error, DeadlineExceeded)


def is_kept(kept: SynchronousKept, error: CarpoolError) -> bool:
    """Whether a synchronous request that failed so is kept: its client got the error, and can send it again."""
    if kept == "poison":
        return isinstance(error, InputRefused)
    return kept == "all" and is_dead_letter(error)


def dead_letter_causes() -> list[str]:
    """Every cause that a dead letter can have."""
    kinds: list[type[CarpoolError]] = [*all_errors(UpstreamError), InputRefused]
    return [kind.code for kind in kinds if not issubclass(kind, DeadlineExceeded)]
