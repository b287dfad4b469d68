"""Request ids: the client's own where it sent a usable one, else one of ours."""

import re

from carpool.face.intake import new_request_id

# What a client may choose: it is echoed in headers and JSON, and shown to operators.
_acceptable = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z").match


def given_id(headers: dict[bytes, bytes]) -> str | None:
    """The client's X-Request-Id, if it can be passed on safely."""
    given = headers.get(b"x-request-id")
    return given.decode() if given is not None and _acceptable(given) else None


def acceptable_id(text: str) -> str | None:
    """An id that a client gave elsewhere than in a header, if it can be passed on safely."""
    return text if _acceptable(text.encode()) else None


def request_id(headers: dict[bytes, bytes]) -> str:
    """The id of the request with these headers."""
    given = given_id(headers) if b"x-request-id" in headers else None
    return given or new_request_id()


def echo_line(headers: dict[bytes, bytes]) -> bytes:
    """The header line that echoes the client's X-Request-Id; b"" if it sent none."""
    given = given_id(headers) if b"x-request-id" in headers else None
    return b"" if given is None else b"X-Request-Id: %b\r\n" % given.encode()
