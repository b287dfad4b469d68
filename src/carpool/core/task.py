"""A task as its submitter sees it."""

from typing import Literal

import msgspec


class QueuePlace(msgspec.Struct, frozen=True, gc=False):
    """Where a task stands."""

    # 1 for the next task; 0 for a task that is being worked on.
    place: int
    # Until it is taken, as far as is known; None if it is not known.
    estimated_wait_ms: int | None


class StoredTask(msgspec.Struct, frozen=True, gc=False):
    """The state of a task: waiting for its outcome, or finished with one."""

    id: str
    owner: str
    status: Literal["PENDING", "SUCCESS", "FAILED"]
    # The model's own JSON bytes; only with SUCCESS.
    output: bytes | None
    # A problem object; only with FAILED.
    error: bytes | None
    # Unix time of the result; of the submission while there is none.
    timestamp_wall: float
    # Unix time of the submission, where the store tells it.
    submitted_wall: float = 0.0
    # What its submitter calls itself.
    client_id: str = ""
    # Only with PENDING, where it is known.
    queue: QueuePlace | None = None


def place_behind(ahead: float, capacity_rps: float) -> QueuePlace:
    """The place behind so many, where so many are served in a second; 0 for a capacity that is not known."""
    place = round(ahead) + 1
    return QueuePlace(place, round(place / capacity_rps * 1000) if capacity_rps > 0 else None)


TAKEN = QueuePlace(0, 0)
