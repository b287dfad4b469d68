"""From a request target to the function that serves it, and what every path has: 404, 405, HEAD, OPTIONS."""

import re
from collections.abc import Callable
from urllib.parse import parse_qsl, unquote_to_bytes

from carpool.core.errors import CarpoolError, Malformed, MethodNotAllowed, NotFound
from carpool.face.http.exchange import Exchange
from carpool.face.http.problem import respond_problem

Route = Callable[[Exchange, str], None]
QUERY_FIELDS_MAX = 16


class Router:
    """Routes by exact path, or by a pattern in which each `*` is a segment, or what stands in it before a colon.

    The route gets what the first of these is.
    """

    def __init__(self, refuse: Callable[[Exchange, CarpoolError], None] = respond_problem) -> None:
        self._refuse = refuse
        # By path, then method: whole paths, and those with a `*`; and one expression that finds which of these it is.
        self._routes: dict[bytes, dict[bytes, Route]] = {}
        self._patterns: dict[bytes, dict[bytes, Route]] = {}
        self._find = re.compile(rb"(?!)").fullmatch
        # By the number of the expression's group: the routes of the pattern that it is.
        self._found: dict[int, dict[bytes, Route]] = {}
        # By the first segment: the function that serves all paths that begin with it.
        self._mounts: dict[bytes, Callable[[Exchange], None]] = {}

    def mount(self, start: bytes, serve: Callable[[Exchange], None]) -> None:
        """Give all exchanges whose path begins with this segment to `serve`."""
        self._mounts[start] = serve

    def add(self, method: bytes, path: bytes, route: Route) -> None:
        """Serve a method of a path. A slash at its end takes one more segment."""
        pattern = path + b"*" if path.endswith(b"/") and path != b"/" else path
        routes = self._patterns if b"*" in pattern else self._routes
        routes.setdefault(pattern, {})[method] = route
        # The longest first: `/v1/models/*:predict` before `/v1/models/*`.
        longest_first = sorted(self._patterns, key=len, reverse=True)
        group = 1
        for found in longest_first:
            self._found[group] = self._patterns[found]
            group += 1 + found.count(b"*")
        # Before a colon it may have to give characters back.
        each = [
            b"(%b)" % re.escape(found).replace(rb"\*:", rb"([^/]+):").replace(rb"\*", rb"([^/]++)")
            for found in longest_first
        ]
        self._find = re.compile(b"|".join(each) or rb"(?!)").fullmatch

    def serve(self, exchange: Exchange) -> None:
        """Serve one exchange. What a route raises of the error tree becomes its answer."""
        try:
            try:
                route = self._routes[exchange.target][exchange.method]
            except KeyError:
                self._search(exchange)
            else:
                route(exchange, "")  # the hot path: an exact target with a method that is served
        except CarpoolError as error:
            self._refuse(exchange, error)

    def _search(self, exchange: Exchange) -> None:
        path = split_target(exchange.target)[0]
        mount = self._mounts.get(path[: end if (end := path.find(b"/", 1)) > 0 else None])
        if mount is not None:
            mount(exchange)
            return
        routes, rest = self._routes.get(path), b""
        if routes is None and (found := self._find(path)) is not None:
            group = found.lastindex or 0
            routes, rest = self._found[group], found[group + 1]
        if path == b"*" and exchange.method == b"OPTIONS":
            exchange.respond(204, b"", b"", b"Allow: GET, HEAD, POST, DELETE, OPTIONS\r\n")
            return
        if routes is None:
            raise NotFound("there is nothing at this path; GET /openapi.json lists what there is")
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        route = routes.get(method)
        if route is not None:
            route(exchange, unquote_to_bytes(rest).decode("latin-1"))
            return
        allowed = sorted(routes) + ([b"HEAD"] if b"GET" in routes else []) + [b"OPTIONS"]
        allow = b", ".join(allowed)
        if method == b"OPTIONS":
            exchange.respond(204, b"", b"", b"Allow: %b\r\n" % allow)
            return
        raise MethodNotAllowed(f"this path takes {allow.decode()}", allow=allow.decode())


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target, in origin form or absolute form."""
    path, _, query = target.partition(b"?")
    if path[:7].lower() == b"http://" or path[:8].lower() == b"https://":
        _, slash, rest = path.split(b"//", 1)[1].partition(b"/")
        path = slash + rest if slash else b"/"
    return path, query


def query_of(exchange: Exchange) -> dict[str, str]:
    """The query fields; the last of a repeated one counts."""
    query = split_target(exchange.target)[1]
    if not query:
        return {}
    try:
        return dict(parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict"))
    except ValueError:
        raise Malformed(f"the query is not valid UTF-8 or has more than {QUERY_FIELDS_MAX} fields") from None
