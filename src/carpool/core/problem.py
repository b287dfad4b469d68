"""An error as the problem object of RFC 9457, the form in which clients and the result store see it."""

import msgspec

from carpool.core.errors import CarpoolError

TYPE_PREFIX = "urn:carpool:error:"

_encode = msgspec.json.Encoder().encode


class _Typed(msgspec.Struct):
    type: str


_decode = msgspec.json.Decoder(_Typed).decode


def problem_json(error: CarpoolError, request_id: str | None = None) -> bytes:
    """The problem object of one error."""
    problem: dict[str, str | int] = {
        "type": TYPE_PREFIX + error.code,
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
    }
    if request_id:
        problem["request_id"] = request_id
    return _encode(problem)


def code_of(problem: bytes) -> str:
    """The code of the error that a problem object tells of."""
    return _decode(problem).type.removeprefix(TYPE_PREFIX)
