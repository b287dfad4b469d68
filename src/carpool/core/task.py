"""A task as its submitter sees it."""

from typing import Literal

import msgspec


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
