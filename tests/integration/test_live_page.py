"""The live page and its stream, by HTTP: what it is made of, who may read it, and that its numbers are true."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.face.http.page import NAMES
from support.client import Response
from support.gateway import Peer, ask, eventually, serving
from support.live import viewing
from support.processes import GatewayProcess, carpool

JSON = "Content-Type: application/json"
POISON = "arsenic"
PATHS = ["/", *(f"/page/{name}" for name in NAMES if name != "index.html")]
TOKEN = "a-service-token-of-some-length"

pytestmark = pytest.mark.xdist_group("live_page")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    upstream = f"sim:?latency_ms=20&slots=8&poison={POISON}"
    with serving(tmp_path_factory.mktemp("gateway"), upstream) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    settings = {"service.token": TOKEN}
    with serving(tmp_path_factory.mktemp("guarded"), settings=settings) as running:
        yield running


def infer(gateway: GatewayProcess, text: str) -> Response:
    return ask(gateway.port, "POST", "/v1/inference", {"input": text}, JSON)


def metrics(gateway: GatewayProcess, name: str, label: str) -> dict[str, int]:
    """A counter by its one label."""
    text = ask(gateway.admin_port, "GET", "/metrics").body.decode()
    found = re.findall(rf'^{name}_total{{{label}="(.+)"}} (\S+)$', text, re.M)
    return {value: int(float(number)) for value, number in found}


# The page


@pytest.mark.parametrize("path", PATHS)
def test_nothing_from_elsewhere_can_come_into_the_page(gateway: GatewayProcess, path: str) -> None:
    answer = ask(gateway.admin_port, "GET", path)
    assert answer.status == 200
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) <= {"'self'", "'none'"}
    assert rules["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    # But for the names of namespaces, which nobody fetches.
    assert set(re.findall(rb"https?://[^\s\"')]+", answer.body)) <= {b"http://www.w3.org/2000/svg"}
    # What the rules would stop, and then it would be missed.
    assert not re.search(rb"<style|style=\"| on[a-z]+=\"|<script(?! type=\"module\" src=)", answer.body)


def test_the_page_is_small(gateway: GatewayProcess) -> None:
    packed = 0
    for path in PATHS:
        answer = ask(gateway.admin_port, "GET", path, b"", "Accept-Encoding: br, gzip")
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == ask(gateway.admin_port, "GET", path).body
        packed += len(answer.body)
    assert packed < 150_000


# The stream


def test_a_stream_of_seconds(gateway: GatewayProcess) -> None:
    with viewing(gateway.admin_port) as viewer:
        assert viewer.response.headers["content-type"] == "text/event-stream"
        assert viewer.response.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in viewer.response.headers
        assert viewer.line() == b"retry: 1000\n"
        assert viewer.line() == b"\n"
        first = viewer.next()
        assert viewer.line() == b"\n"
        assert [endpoint["state"] for endpoint in first["fleet"]["models"]["default"]["endpoints"]] == ["healthy"]
        assert first["max_batch"] == {"default": 64}
        assert viewer.next()["seconds"] > 0


def test_nothing_that_a_client_sent_is_shown(gateway: GatewayProcess) -> None:
    canary = "canary-7f3a"
    with viewing(gateway.admin_port) as viewer:
        body = {"input": canary, "parameters": {"voice": canary}}
        assert ask(gateway.port, "POST", "/v1/inference", body, JSON).status == 200
        event = viewer.until(lambda event: event["batches_ended"] > 0)
    assert canary not in json.dumps(event)


def test_whoever_looks_keeps_nobody_from_leaving(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("leaving"), settings={"gateway.drain_grace_s": 0.1}) as leaving:
        with viewing(leaving.admin_port) as viewer:
            viewer.next()
            leaving.terminate()
            while viewer.line():
                pass
        assert eventually(lambda: leaving.process.poll() == 0)


# Who may


@pytest.mark.parametrize("path", ["/internal/dead-letters?all=true", "/internal/login"])
@pytest.mark.parametrize("header", ["Origin: http://127.0.0.1:9", "Origin: null", "Sec-Fetch-Site: cross-site"])
def test_another_origin_changes_nothing(gateway: GatewayProcess, path: str, header: str) -> None:
    assert ask(gateway.admin_port, "DELETE", path, b"", header).status == 403


def test_another_host_reads_nothing(gateway: GatewayProcess) -> None:
    for path in ("/", "/internal/live"):
        with_host = b"GET %b HTTP/1.1\r\nHost: evil.example\r\n\r\n" % path.encode()
        assert raw(gateway.admin_port, with_host).status == 403


def raw(port: int, request: bytes) -> Response:
    with Peer(port) as peer:
        peer.send(request)
        return peer.read()


def test_a_login_is_a_cookie(guarded: GatewayProcess) -> None:
    port = guarded.admin_port
    for path in PATHS:
        assert ask(port, "GET", path).status == 200  # the form must come from somewhere
    assert ask(port, "GET", "/internal/live").status == 401
    assert ask(port, "POST", "/internal/login", b"wrong").status == 401
    answer = ask(port, "POST", "/internal/login", TOKEN.encode(), f"Origin: http://127.0.0.1:{port}", "Host: x")
    assert answer.status == 400  # two hosts
    answer = ask(port, "POST", "/internal/login", TOKEN.encode())
    assert answer.status == 204
    cookie, *attributes = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(attributes)
    assert TOKEN not in cookie
    with viewing(port, Cookie=cookie) as viewer:
        assert viewer.next()["health"]["status"] == "healthy"
    assert ask(port, "GET", "/internal/live", b"", f"Cookie: {cookie}", "Sec-Fetch-Site: same-site").status == 401
    assert ask(port, "GET", "/internal/dead-letters", b"", f"Cookie: {cookie}").status == 200
    assert ask(port, "DELETE", "/internal/login").headers["set-cookie"].startswith("carpool_admin=;")


# `carpool top`


def test_top_prints_once(gateway: GatewayProcess) -> None:
    admin = f"http://127.0.0.1:{gateway.admin_port}"
    infer(gateway, "one more")
    done = carpool("top", "--once", "--json", "--admin", admin)
    assert (done.returncode, done.stderr) == (0, "")
    event = json.loads(done.stdout)
    assert event["seconds"] > 0
    assert event["requests"] == metrics(gateway, "carpool_requests", "outcome")
    shown = carpool("top", "--once", "--admin", admin)
    assert (shown.returncode, shown.stderr) == (0, "")
    for word in ("healthy", "enterprise", "free", "sim:", "p99"):
        assert word in shown.stdout
    assert "\x1b" not in shown.stdout


def test_top_wants_the_token(guarded: GatewayProcess) -> None:
    admin = f"http://127.0.0.1:{guarded.admin_port}"
    refused = carpool("top", "--once", "--admin", admin)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "CARPOOL_SERVICE_TOKEN" in refused.stderr
    done = carpool("top", "--once", "--json", "--admin", admin, CARPOOL_SERVICE_TOKEN=TOKEN)
    assert json.loads(done.stdout)["health"]["status"] == "healthy"


def test_top_says_that_nobody_is_there(tmp_path: Path) -> None:
    done = carpool("top", "--once", "--admin", "http://127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no gateway" in done.stderr
