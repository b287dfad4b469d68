"""An error as the problem object of RFC 9457, the form in which clients and the result store see it."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from carpool.core.errors import CarpoolError

TYPE_PREFIX = "urn:carpool:error:"

_encode = msgspec.json.Encoder().encode


class Problem(msgspec.Struct):
    """What was wrong, and what to do."""

    type: Annotated[str, msgspec.Meta(description=f"{TYPE_PREFIX}<code>")]
    title: str
    status: int
    detail: str
    request_id: str
    predicted_wait_ms: (
        Annotated[int, msgspec.Meta(description="how long a request that was shed would have waited for a slot")]
        | UnsetType
    ) = UNSET


class _Typed(msgspec.Struct):
    type: str


_decode = msgspec.json.Decoder(_Typed).decode


def problem_json(error: CarpoolError, request_id: str) -> bytes:
    """The problem object of one error."""
    wait_ms = UNSET if error.predicted_wait_ms is None else error.predicted_wait_ms
    return _encode(Problem(TYPE_PREFIX + error.code, error.title, error.status, error.detail, request_id, wait_ms))


def code_of(problem: bytes) -> str:
    """The code of the error that a problem object tells of."""
    return _decode(problem).type.removeprefix(TYPE_PREFIX)
