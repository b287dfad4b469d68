"""Errors as `application/problem+json` (RFC 9457)."""

from typing import NamedTuple

from carpool.core.errors import CarpoolError
from carpool.core.problem import problem_json
from carpool.face.http.exchange import Exchange
from carpool.face.http.ids import echo_line, request_id

PROBLEM = b"application/problem+json"
_ID = b'"request_id":"'


def problem_headers(error: CarpoolError) -> bytes:
    """The header lines that belong to an error."""
    return error.header_lines + advice_lines(error)


def advice_lines(error: CarpoolError) -> bytes:
    """The header lines of an error that tell the client what to do."""
    lines = b""
    if error.retry_after_s is not None:
        lines += b"Retry-After: %d\r\n" % error.retry_after_s
    if error.allow is not None:
        lines += b"Allow: %b\r\n" % error.allow.encode()
    if error.status == 401:
        lines += b"WWW-Authenticate: Bearer\r\n"
    return lines


def respond_problem(exchange: Exchange, error: CarpoolError, known_id: str | None = None) -> None:
    """Answer an exchange with an error; a call that never became a Request gets an id too."""
    headers = exchange.headers
    exchange.sink.note_problem(exchange, error)
    body = problem_json(error, known_id or request_id(headers))
    exchange.respond(error.status, body, PROBLEM, echo_line(headers) + exchange.limit_lines + problem_headers(error))


class ReadyProblem(NamedTuple):
    """The answer to all clients that get the same error, without the id and the lines of a single client."""

    # How many bytes an id must have: the length of the body counts it.
    id_bytes: int
    # Status line, type and date.
    head: bytes
    # The header lines of the error, and the body up to the id.
    before: bytes
    after: bytes


def ready_problem(head: bytes, error: CarpoolError, id_bytes: int) -> ReadyProblem:
    """Write what all these answers have in common; `head` is that of their status."""
    # `_ID` cannot occur inside a text of the object: its quotes would be escaped.
    before, name, after = problem_json(error, "").partition(_ID)
    length = len(before) + len(name) + id_bytes + len(after)
    lines = b"%bContent-Length: %d\r\n\r\n" % (problem_headers(error), length)
    return ReadyProblem(id_bytes, head, lines + before + name, after)
