"""From a target to a route, and what every path has."""

import pytest

from carpool.core.errors import Forbidden, Malformed
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.router import QUERY_FIELDS_MAX, Router, query_of
from carpool.face.http.state import HttpLimits, HttpState

served: list[tuple[str, str]] = []


def make_router() -> Router:
    router = Router()
    served.clear()

    def note(name: str) -> None:
        def route(exchange: Exchange, rest: str) -> None:
            served.append((name, rest))
            exchange.respond(200, b"{}")

        method, path = name.split()
        router.add(method.encode(), path.encode(), route)

    def forbidden(exchange: Exchange, rest: str) -> None:
        raise Forbidden("not you")

    for name in (
        "POST /v1/inference",
        "GET /v1/result/",
        "DELETE /v1/result/",
        "GET /one",
        "POST /letters/*/replay",
        "POST /letters/replay",
        "GET /letters/",
    ):
        note(name)
    router.add(b"GET", b"/forbidden", forbidden)
    return router


def ask(method: str, target: str) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer."""
    router = make_router()
    connection = Connection(HttpState(router.serve, HttpLimits()))
    exchange = Exchange(connection, method.encode(), target.encode("latin-1"), {}, b"", True)
    router.serve(exchange)
    assert exchange.response is not None
    line, *headers = exchange.response.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(line.split()[1]), dict(header.split(": ", 1) for header in headers)


@pytest.mark.parametrize(
    ("method", "target", "route", "rest"),
    [
        ("POST", "/v1/inference", "POST /v1/inference", ""),
        ("POST", "/v1/inference?a=b", "POST /v1/inference", ""),
        ("POST", "http://host/v1/inference", "POST /v1/inference", ""),
        ("POST", "HTTPS://host:1/v1/inference?x", "POST /v1/inference", ""),
        ("GET", "/one", "GET /one", ""),
        ("HEAD", "/one", "GET /one", ""),
        ("GET", "/v1/result/abc", "GET /v1/result/", "abc"),
        ("GET", "/v1/result/abc?wait_ms=1", "GET /v1/result/", "abc"),
        ("GET", "/v1/result/a%3Ab%2fc", "GET /v1/result/", "a:b/c"),
        ("HEAD", "/v1/result/abc", "GET /v1/result/", "abc"),
        ("DELETE", "/v1/result/abc", "DELETE /v1/result/", "abc"),
        ("POST", "/letters/7/replay", "POST /letters/*/replay", "7"),
        ("POST", "/letters/a%2Fb/replay?x=1", "POST /letters/*/replay", "a/b"),
        ("POST", "/letters/*/replay", "POST /letters/*/replay", "*"),
        ("POST", "/letters/replay", "POST /letters/replay", ""),
        ("GET", "/letters/*", "GET /letters/", "*"),
    ],
)
def test_served(method: str, target: str, route: str, rest: str) -> None:
    assert ask(method, target)[0] == 200
    assert served == [(route, rest)]


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/"),
        ("GET", "/nothing"),
        ("GET", "/v1/result/"),
        ("GET", "/v1/result"),
        ("GET", "/v1/result/a/b"),
        ("GET", "/v1/result/a/"),
        ("POST", "/v1/inference/"),
        ("POST", "//v1/inference"),
        ("POST", "/V1/INFERENCE"),
        ("GET", "*"),
        ("GET", "http://host?x=/v1/inference"),
        ("OPTIONS", "/nothing"),
        ("GET", "/v1/result/../inference"),
        ("POST", "/letters//replay"),
        ("POST", "/letters/7/replay/"),
        ("POST", "/letters/7/8/replay"),
        ("POST", "/letters/7/other"),
        ("POST", "/7/replay"),
    ],
)
def test_not_found(method: str, target: str) -> None:
    assert ask(method, target)[0] == 404
    assert served == []


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("GET", "/v1/inference", "POST, OPTIONS"),
        ("HEAD", "/v1/inference", "POST, OPTIONS"),
        ("POST", "/one", "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/result/abc", "DELETE, GET, HEAD, OPTIONS"),
        ("TRACE", "/one", "GET, HEAD, OPTIONS"),
        ("GET", "/letters/7/replay", "POST, OPTIONS"),
        ("GET", "/letters/replay", "POST, OPTIONS"),
    ],
)
def test_wrong_method(method: str, target: str, allow: str) -> None:
    status, headers = ask(method, target)
    assert (status, headers["Allow"]) == (405, allow)


def test_options() -> None:
    assert ask("OPTIONS", "/v1/result/x")[1]["Allow"] == "DELETE, GET, HEAD, OPTIONS"
    status, headers = ask("OPTIONS", "*")
    assert (status, headers["Allow"]) == (204, "GET, HEAD, POST, DELETE, OPTIONS")
    assert "Content-Length" not in headers


def query(target: bytes) -> dict[str, str]:
    connection = Connection(HttpState(make_router().serve, HttpLimits()))
    return query_of(Exchange(connection, b"GET", target, {}, b"", True))


def test_query() -> None:
    assert query(b"/a") == {}
    assert query(b"/a?x=1&y=%C3%A4+b&x=2&z=") == {"x": "2", "y": "ä b", "z": ""}
    for bad in (b"/a?x=%FF", b"/a?x=\xff", b"/a?" + b"&".join(b"a=1" for _ in range(QUERY_FIELDS_MAX + 1))):
        with pytest.raises(Malformed):
            query(bad)
