"""Pages of other origins (CORS), where `gateway.cors_origins` lets them.

1. An origin is allowed if it stands in the list, or if `*` does. The gateway never allows cookies along: a page
   sends its credential itself, in a header.
2. A preflight is answered for every path, with the headers that it asks for. An origin that is not allowed gets an
   ordinary answer, which the browser does not show to the page.
3. Every answer to an allowed origin says so, errors too, also those to requests that could not be read whole.
4. Without `gateway.cors_origins` none of this is in the way.
"""

import re
from collections.abc import Callable, Iterable

from carpool.face.http.exchange import Exchange

EXPOSED = b"Location, Retry-After, RateLimit, RateLimit-Policy, X-Request-Id"
METHODS = b"GET, POST, DELETE"
# How long a browser may keep the answer to a preflight.
PREFLIGHT_S = 7200
_header_names = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}\Z").match


class Cors:
    """Decides which origins are allowed, and stands before the routes."""

    def __init__(self, origins: Iterable[str], serve: Callable[[Exchange], None]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._is_open = b"*" in self._origins
        self._serve = serve

    def allows(self, origin: bytes) -> bool:
        """Whether pages of this origin may ask."""
        return self._is_open or origin in self._origins

    def lines(self, headers: dict[bytes, bytes]) -> bytes:
        """The CORS lines of the answer to a request with these headers."""
        origin = headers.get(b"origin")
        if origin is None:
            return b""
        if not self.allows(origin):
            return b"Vary: Origin\r\n"
        allowed = b"*\r\n" if self._is_open else b"%b\r\nVary: Origin\r\n" % origin
        return b"Access-Control-Allow-Origin: %bAccess-Control-Expose-Headers: %b\r\n" % (allowed, EXPOSED)

    def __call__(self, exchange: Exchange) -> None:
        """Serve an exchange."""
        headers = exchange.headers
        if b"origin" in headers:
            exchange.extra_lines = self.lines(headers)
            exchange.is_plain = False
            is_preflight = exchange.method == b"OPTIONS" and b"access-control-request-method" in headers
            if is_preflight and self.allows(headers[b"origin"]):
                asked = headers.get(b"access-control-request-headers", b"")
                lines = b"Access-Control-Allow-Methods: %b\r\nAccess-Control-Max-Age: %d\r\n" % (METHODS, PREFLIGHT_S)
                if _header_names(asked):
                    lines += b"Access-Control-Allow-Headers: %b\r\n" % asked
                exchange.respond(204, b"", b"", lines)
                return
        self._serve(exchange)
