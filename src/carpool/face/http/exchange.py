"""One request and its response on one connection: what the routes see of HTTP."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from carpool.face.http.connection import Connection

JSON = b"application/json"

REASONS = {
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
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


class Exchange(msgspec.Struct, eq=False):
    """One received request, and the way to answer it. Answers may come in any order; they leave in order."""

    connection: "Connection"
    method: bytes
    # As the client sent it, without scheme and authority: path and query.
    target: bytes
    # Names in lower case; repeated ones joined by a comma.
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    # The whole response once it is known; it leaves when those before it on the connection have left.
    response: bytes | None = None
    # What the route keeps for this exchange (for an inference: the Request), and whom to tell if the client leaves.
    context: Any = None
    when_client_leaves: Callable[["Exchange"], None] | None = None

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Answer once; `headers` are extra header lines, each with its line end. Does nothing if the client left."""
        connection = self.connection
        server = connection.server
        if server.draining and self.keep_alive:
            self.keep_alive = not connection.make_last(self)
        if not self.keep_alive:
            headers += b"Connection: close\r\n"
        elif b"connection" in self.headers:
            # An HTTP/1.0 client that asked to stay is told so; to an HTTP/1.1 client it is no news.
            headers += b"Connection: keep-alive\r\n"
        if status == 204:
            self.response = b"%b%b\r\n" % (server.head(204, b""), headers)
        else:
            head = server.head_ok if status == 200 and content_type is JSON else server.head(status, content_type)
            sent = b"" if self.method == b"HEAD" else body
            self.response = b"%b%bContent-Length: %d\r\n\r\n%b" % (head, headers, len(body), sent)
        connection.flush()
