"""The HTTP contract of DESIGN.md, over real sockets against a real `carpool serve`."""

import re
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.certificates import Certificates
from support.client import Response
from support.gateway import HeldGpu, Peer, ask, eventually, metric, request_bytes, serving
from support.processes import PATIENCE_S, GatewayProcess

JSON = "Content-Type: application/json"
UNKNOWN_TASK = "0" * 32
pytestmark = pytest.mark.xdist_group("http face")

# A long poll: as long as one may be.
WAIT_MS = 30_000
# Timeouts that nobody meets.
PATIENT = {"broker.queue_timeout_s": 600, "broker.total_timeout_s": 600, "upstream.timeout_s": 600}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One that answers in about 20 ms."""
    with serving(tmp_path_factory.mktemp("gateway")) as running:
        yield running
        assert running.log_messages("error") == []


@pytest.fixture
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        held.hold()
        yield held


def assert_problem(response: Response, status: int, words: str = "") -> dict[str, Any]:
    assert response.status == status, response.body
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json
    assert set(problem) == {"type", "title", "status", "detail", "request_id"}
    assert problem["status"] == status
    assert problem["type"].startswith("urn:carpool:error:")
    assert problem["title"] and problem["request_id"]
    assert words in problem["detail"]
    return problem


# POST /v1/inference


def test_inference(gateway: GatewayProcess) -> None:
    response = ask(gateway.port, "POST", "/v1/inference", {"input": "abc", "client_id": "me", "model": "default"}, JSON)
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json
    assert set(answer) == {"request_id", "output", "metadata"}
    assert answer["output"] == "cba"
    metadata = answer["metadata"]
    assert set(metadata) == {"latency_ms", "queue_ms", "upstream_ms", "batch_size", "model", "cached"}
    assert metadata["upstream_ms"] >= 15  # a timer of the event loop may be a little early
    assert metadata["latency_ms"] >= metadata["upstream_ms"] - 1
    assert (metadata["batch_size"], metadata["model"], metadata["cached"]) == (1, "default", False)
    assert "x-request-id" not in response.headers


def test_duplicate_keys_inside_the_input_pass_untouched(gateway: GatewayProcess) -> None:
    body = b'{"input": {"a" :1,"a":2, "b":1.50} }'
    assert b'{"a" :1,"a":2, "b":1.50}' in ask(gateway.port, "POST", "/v1/inference", body).body


@pytest.mark.parametrize("target", ["/v1/inference", "/v1/predict?model_id=default"])
def test_an_id_is_echoed(gateway: GatewayProcess, target: str) -> None:
    body = {"input": "a"} if "inference" in target else {"model_id": "default", "input_data": "a"}
    response = ask(gateway.port, "POST", target, body, "X-Request-Id: my.id_1:2-3")
    assert (response.headers["x-request-id"], response.json["request_id"]) == ("my.id_1:2-3", "my.id_1:2-3")


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, 'a"b', "ä", "a,b", "<script>"])
def test_an_id_that_cannot_be_passed_on_is_replaced(gateway: GatewayProcess, bad: str) -> None:
    response = ask(gateway.port, "POST", "/v1/inference", {"input": "a"}, f"X-Request-Id: {bad}")
    assert response.status == 200
    assert "x-request-id" not in response.headers
    assert response.json["request_id"].startswith("req_")


def test_an_id_is_echoed_with_a_problem_too(gateway: GatewayProcess) -> None:
    response = ask(gateway.port, "POST", "/v1/inference", b"nonsense", "X-Request-Id: mine")
    assert assert_problem(response, 400)["request_id"] == "mine"
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", (), 400, "truncated"),
        (b"nonsense", (), 400, "malformed"),
        (b"{}", (), 400, "`input`"),
        (b"[1]", (), 400, "object"),
        (b'{"input":1,"inptu":2}', (), 400, "`inptu`"),
        (b'{"input":1,"model":2}', (), 400, "model"),
        (b'{"input":1,"parameters":"x"}', (), 400, "`parameters`"),
        (b'{"input":1,"mode":"later"}', (), 400, "`mode`"),
        (b'{"input":1,"client_id":5}', (), 400, "client_id"),
        (b'{"input":1,"model":"other"}', (), 404, "default"),
        (b'{"input":1}', ("Content-Type: text/plain",), 415, "application/json"),
        (b'{"input":1}', ("Content-Type: multipart/form-data",), 415, "application/json"),
        (b'{"input":1}', ("Content-Encoding: gzip",), 415, "Content-Encoding"),
        (b'{"input":"%b"}' % (b"x" * 1024 * 1024), (), 413, "1048576"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_calls(gateway: GatewayProcess, body: bytes, headers: tuple[str, ...], status: int, words: str) -> None:
    with Peer(gateway.port) as peer:
        assert_problem(peer.ask("POST", "/v1/inference", body, *headers), status, words)
        if status != 413:  # the connection goes on
            assert peer.ask("POST", "/v1/inference", b'{"input":"a"}').status == 200


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/json ;x=y"]
)
def test_json_by_any_name(gateway: GatewayProcess, content_type: str) -> None:
    assert ask(gateway.port, "POST", "/v1/inference", {"input": 1}, f"Content-Type: {content_type}").status == 200


# POST /v1/predict


def test_predict(gateway: GatewayProcess) -> None:
    response = ask(gateway.port, "POST", "/v1/predict", {"model_id": "default", "input_data": [1, 2]}, JSON)
    assert response.status == 200
    assert set(response.json) == {"request_id", "output", "latency_ms"}
    assert response.json["output"] == {"echo": [1, 2]}
    assert response.json["latency_ms"] >= 15


def test_predict_of_bytes(gateway: GatewayProcess) -> None:
    data = bytes(range(256))
    binary = "Content-Type: application/octet-stream"
    response = ask(gateway.port, "POST", "/v1/predict?model_id=default", data, binary)
    assert response.json["output"] == b64encode(data).decode()[::-1]
    assert ask(gateway.port, "POST", "/v1/predict", data, binary).status == 200
    assert_problem(ask(gateway.port, "POST", "/v1/predict?model_id=default", b"", binary), 400, "empty")
    assert_problem(ask(gateway.port, "POST", "/v1/predict?model_id=other", data, binary), 404, "default")


def test_bad_predictions(gateway: GatewayProcess) -> None:
    assert_problem(ask(gateway.port, "POST", "/v1/predict", {"model_id": "default"}), 400, "`input_data`")
    assert_problem(ask(gateway.port, "POST", "/v1/predict", {"input_data": 1}), 400, "`model_id`")
    assert_problem(ask(gateway.port, "POST", "/v1/predict", {"model_id": "other", "input_data": 1}), 404, "default")
    both = ask(gateway.port, "POST", "/v1/predict?model_id=other", {"model_id": "default", "input_data": 1})
    assert_problem(both, 400, "`model_id`")
    assert_problem(ask(gateway.port, "POST", "/v1/predict", b"x", "Content-Type: text/csv"), 415, "octet-stream")


# Tasks


def submit(gateway: GatewayProcess, value: object, *headers: str) -> str:
    response = ask(gateway.port, "POST", "/v1/inference", {"input": value, "mode": "async"}, *headers)
    assert response.status == 202, response.body
    answer = response.json
    assert set(answer) == {"task_id", "status"}
    assert answer["status"] == "PENDING"
    assert re.fullmatch("[0-9a-f]{32}", answer["task_id"])
    assert response.headers["location"] == f"/v1/result/{answer['task_id']}"
    task_id: str = answer["task_id"]
    return task_id


def look(gateway: GatewayProcess, task_id: str, wait_ms: int = 0) -> Response:
    return ask(gateway.port, "GET", f"/v1/result/{task_id}" + (f"?wait_ms={wait_ms}" if wait_ms else ""))


def assert_unknown(gateway: GatewayProcess, task_id: str) -> None:
    assert assert_problem(look(gateway, task_id), 404)["type"] == "urn:carpool:error:unknown-task"


def test_a_task(gateway: GatewayProcess) -> None:
    before = time.time()
    task_id = submit(gateway, "abc")
    response = look(gateway, task_id, WAIT_MS)
    assert response.status == 200
    answer = response.json
    assert set(answer) == {"task_id", "status", "output", "timestamp"}
    assert (answer["task_id"], answer["status"], answer["output"]) == (task_id, "SUCCESS", "cba")
    when = datetime.strptime(answer["timestamp"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert before - 0.1 <= when.timestamp() <= time.time() + 0.1
    assert look(gateway, task_id).json == answer  # and once more


@pytest.mark.parametrize("prefer", ["respond-async", "wait=5, respond-async", "Respond-Async; x=y"])
def test_a_task_by_preference(gateway: GatewayProcess, prefer: str) -> None:
    response = ask(gateway.port, "POST", "/v1/inference", {"input": "a"}, f"Prefer: {prefer}", "X-Request-Id: mine")
    assert (response.status, response.headers["x-request-id"]) == (202, "mine")
    other = ask(gateway.port, "POST", "/v1/inference", {"input": "a"}, "Prefer: return=minimal")
    assert other.status == 200


def test_ids_of_tasks_have_nothing_in_common(gateway: GatewayProcess) -> None:
    ids = [submit(gateway, "a") for _ in range(20)]
    assert len({task_id[:8] for task_id in ids}) == 20
    assert len({task_id[-8:] for task_id in ids}) == 20


@pytest.mark.parametrize("task_id", [UNKNOWN_TASK, "x", "..", "%00", "a" * 33, "A" * 32, "%2e%2e%2f", "'--"])
def test_unknown_tasks(gateway: GatewayProcess, task_id: str) -> None:
    assert_unknown(gateway, task_id)
    response = ask(gateway.port, "DELETE", f"/v1/result/{task_id}")
    assert assert_problem(response, 404)["type"] == "urn:carpool:error:unknown-task"


@pytest.mark.parametrize("wait", ["-1", "30001", "1e3", "", "x", "٣", "999999999999", "1.5", "%31%00"])
def test_a_bad_wait(gateway: GatewayProcess, wait: str) -> None:
    target = f"/v1/result/{UNKNOWN_TASK}?wait_ms={wait}"
    with Peer(gateway.port) as peer:
        peer.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert_problem(peer.read(), 400, "`wait_ms`" if wait.isascii() else "")


# Paths, methods, the connection


def test_unknown_paths(gateway: GatewayProcess) -> None:
    for target in ("//", "/v1", "/v1/inference/", "/internal/health", "/metrics", "/v1/result/"):
        assert_problem(ask(gateway.port, "GET", target), 404, "/openapi.json")


def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    flags = ("--tls-cert", certificates.pem("server"), "--tls-key", certificates.key("server"))
    with serving(tmp_path, "sim:?latency_ms=1&slots=4", *flags) as gateway:
        context = ssl.create_default_context(cafile=certificates.pem("ca"))
        context.set_alpn_protocols(["h2", "http/1.1"])
        with Peer(gateway.port, tls=context) as peer:
            assert isinstance(peer.socket, ssl.SSLSocket)
            assert peer.socket.selected_alpn_protocol() == "http/1.1"
            for _ in range(2):
                assert peer.ask("POST", "/v1/inference", b'{"input":"abc"}').json["output"] == "cba"
            peer.send(request_bytes("POST", "/v1/inference", b'{"input":"abc"}') * 100)
            assert [peer.read().status for _ in range(100)] == [200] * 100
            assert_problem(peer.ask("POST", "/v1/inference", b"x" * 2_000_000), 413)
        with Peer(gateway.port) as plain:
            plain.send(request_bytes("GET", "/openapi.json"))
            assert plain.ended() or b"HTTP" not in plain.unread
        assert ask(gateway.admin_port, "GET", "/internal/health").status == 200  # the admin port has no TLS


# The admin port


def test_health_and_ready(gateway: GatewayProcess) -> None:
    health = ask(gateway.admin_port, "GET", "/internal/health").json
    assert set(health) == {"status", "gpu_utilization", "queue_depth", "requests_per_second"}
    assert health["status"] == "healthy"
    assert 0 <= health["gpu_utilization"] <= 1
    assert ask(gateway.admin_port, "GET", "/internal/ready").json == {"ready": True}


def test_not_ready_without_an_upstream(tmp_path: Path) -> None:
    with serving(tmp_path, "http://127.0.0.1:9/infer", settings={"service.token": "hunter2"}) as gateway:
        port, token = gateway.admin_port, "Authorization: Bearer hunter2"
        response = ask(port, "GET", "/internal/ready", b"", token)
        assert (response.status, response.json["ready"]) == (503, False)
        assert "no endpoint" in response.json["reason"]

        # And with a token configured, nothing is told without it.
        # `/` is the page itself, which asks for the token.
        for target in ("/internal/health", "/internal/ready", "/internal/requests/x", "/metrics", "/internal/live"):
            # Guesses have a pace (admin_guard.py): both kinds at one of them.
            guesses = (("Authorization: Bearer hunter3",), ("Authorization: hunter2",)) if target == "/metrics" else ()
            for headers in ((), *guesses):
                refused = ask(port, "GET", target, b"", *headers)
                assert_problem(refused, 401, "Authorization")
                assert refused.headers["www-authenticate"] == "Bearer"
        assert ask(port, "GET", "/openapi.json").status == 401
        assert ask(port, "GET", "/metrics", b"", token).status == 200
        assert_problem(ask(gateway.port, "POST", "/v1/inference", {"input": 1}), 502)


# The end


def test_sigterm_answers_what_was_received(tmp_path: Path, gpu: HeldGpu) -> None:
    with serving(tmp_path, gpu.url, "--slots", "4", settings={"gateway.drain_grace_s": 3, **PATIENT}) as gateway:
        kept = Peer(gateway.port)
        with Peer(gateway.port) as pipelined, Peer(gateway.port) as single, Peer(gateway.port) as silent, kept:
            assert not kept.ask("GET", "/openapi.json").is_last
            pipelined.send(request_bytes("POST", "/v1/inference", b'{"input":"ab"}') * 50)
            single.send(request_bytes("POST", "/v1/inference", b'{"input":"ab"}'))
            # Of one connection, 32 at a time.
            assert eventually(lambda: metric(gateway, "carpool_held_requests") == 33)
            gateway.terminate()
            assert eventually(lambda: ask(gateway.admin_port, "GET", "/internal/ready").status == 503)
            with Peer(gateway.port) as late:
                for each in (late, kept):
                    each.send(request_bytes("POST", "/v1/inference", b'{"input":"ab"}'))
                assert eventually(lambda: metric(gateway, "carpool_held_requests") == 35)
                gpu.release()
                answers = [late.read(), kept.read()]
            assert [(answer.status, answer.is_last) for answer in answers] == [(200, True)] * 2
            flags = [(response.json["output"], response.is_last) for response in (pipelined.read() for _ in range(50))]
            assert flags == [("ba", False)] * 49 + [("ba", True)]
            assert single.read().is_last
            assert silent.ended()
        assert gateway.process.wait(PATIENCE_S) == 0
