"""Errors as `application/problem+json` (RFC 9457)."""

import msgspec

from carpool.core.errors import CarpoolError
from carpool.face.http.exchange import Exchange

PROBLEM = b"application/problem+json"
TYPE_PREFIX = "urn:carpool:error:"

_encode = msgspec.json.Encoder().encode


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


def problem_headers(error: CarpoolError) -> bytes:
    """The header lines that belong to an error."""
    lines = b""
    if error.retry_after_s is not None:
        lines += b"Retry-After: %d\r\n" % error.retry_after_s
    if error.allow is not None:
        lines += b"Allow: %b\r\n" % error.allow.encode()
    if error.status == 401:
        lines += b"WWW-Authenticate: Bearer\r\n"
    return lines


def respond_problem(
    exchange: Exchange, error: CarpoolError, request_id: str | None = None, headers: bytes = b""
) -> None:
    """Answer an exchange with an error; `headers` are extra header lines."""
    exchange.respond(error.status, problem_json(error, request_id), PROBLEM, headers + problem_headers(error))
