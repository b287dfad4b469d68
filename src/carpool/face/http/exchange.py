"""One request and its response on one connection: what the routes see of HTTP."""

from typing import TYPE_CHECKING, Any

import msgspec

from carpool.core.tensors import Data

if TYPE_CHECKING:
    from carpool.face.http.connection import Connection

JSON = b"application/json"
# A body, or parts of one: the connection joins them, so that a long body is copied once.
Body = bytes | tuple[Data, ...]

REASONS = {
    101: b"Switching Protocols",
    200: b"OK",
    202: b"Accepted",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    417: b"Expectation Failed",
    422: b"Unprocessable Content",
    426: b"Upgrade Required",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


# The context of an exchange whose client has left. No field of its own: one for each request would cost more.
LEFT = object()
# The context of one whose long body is received, and not read yet.
AWAITS_TURN = object()


class ExchangeWorker:
    """Works on exchanges: a route, or an object that it made for one exchange."""

    def client_left(self, exchange: "Exchange") -> None:
        """The client left before its answer was complete."""

    def writable(self, exchange: "Exchange") -> None:
        """A writer that had to wait may go on."""


class Exchange(msgspec.Struct, eq=False):
    """One received request, and the way to answer it. Answers may come in any order; they leave in order.

    It is answered once: with `respond`, or with `begin`, any number of `write` and `end`. Both do nothing if the client
    has left.
    """

    sink: "Connection"
    method: bytes
    # As the client sent it, without scheme and authority: path and query.
    target: bytes
    # Names in lower case; repeated ones joined by a comma.
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    # It is known that its head asks for nothing special (`known_heads.is_plain`): routes need not check it.
    is_plain: bool = False
    # Header lines with the state of the rate limit, sent with any answer.
    limit_lines: bytes = b""
    # What is known of the response and has not left yet; it leaves when those before it on the connection have left.
    response: bytes | None = None
    # What the route keeps for this exchange (for an inference: the Request), and the worker that answers it.
    # Both may refer back to the exchange: see `let_go`.
    context: Any = None
    worker: "ExchangeWorker | None" = None
    # While true, more of the response is to come. A writer that has to wait is called when there is room again.
    is_unfinished: bool = False
    is_told_to_wait: bool = False
    # How long it took to arrive, if in more than one read, and to wait for its turn.
    received_s: float = 0.0
    # A response in parts has no chunks (HTTP/1.0, or an upgrade): its end is the end of the connection.
    is_unframed: bool = False
    # Header lines sent with any answer; an exchange with some is not plain.
    extra_lines: bytes = b""

    @property
    def has_left(self) -> bool:
        """Whether its client left before it was answered."""
        return self.context is LEFT

    def let_go(self) -> None:
        """Forget the worker and context of this exchange: its answer has left, or its client has.

        An exchange that referred to them would be part of a reference cycle, and stay in memory with its body and its
        answer until the garbage collector runs, which is rare (app.py).
        """
        self.context = self.worker = None
        self.response = b""

    def respond(self, status: int, body: Body, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Answer at once; `headers` are extra header lines, each with its line end."""
        self.sink.respond(self, status, body, content_type, headers)

    def begin(self, status: int, content_type: bytes, headers: bytes = b"") -> None:
        """Answer in parts, of which this is the head."""
        self.sink.begin(self, status, content_type, headers)

    def write(self, part: bytes) -> bool:
        """One more part of the body. False: write the next one when `writable` is called, for much is unread."""
        return self.sink.write(self, part)

    def end(self) -> None:
        """The body is complete."""
        self.sink.end(self)

    def break_off(self) -> None:
        """End the connection at once, whatever else was to come."""
        self.sink.break_off()
