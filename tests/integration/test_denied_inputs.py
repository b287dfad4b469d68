"""Inputs that a model may not get are refused at the door, whichever way they come."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client import Response
from support.gateway import ask, metric, serving
from support.processes import GatewayProcess, carpool

CONFIG = """
model = "a"
[upstream]
endpoints = ["sim:?latency_ms=1"]
[input]
deny_patterns = ['''(?i)forb[i1]{1,2}dden''']
[models.a]
[models.short]
input_bytes_max = 10
deny_patterns = []
[models.open]
deny_patterns = []
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("denied")
    (directory / "carpool.toml").write_text(CONFIG)
    with serving(directory, "") as running:
        yield running
        assert running.log_messages("error") == []


def infer(gateway: GatewayProcess, value: object, model: str = "a", *headers: str) -> Response:
    return ask(gateway.port, "POST", "/v1/inference", {"model": model, "input": value}, *headers)


def assert_denied(response: Response, words: str) -> None:
    assert response.status == 422, response.body
    assert response.json["type"] == "urn:carpool:error:input-denied"
    assert words in response.json["detail"]
    assert b"forb" not in response.body.lower()


def test_a_pattern(gateway: GatewayProcess) -> None:
    assert infer(gateway, "allowed").status == 200
    for value in ("so Forbidden", {"a": ["FORB1DDEN"]}, {"forbiidden": 1}):
        assert_denied(infer(gateway, value), "pattern 1 of deny_patterns")
        assert_denied(infer(gateway, value, "a", "Prefer: respond-async"), "pattern 1 of deny_patterns")
        predict = {"model_id": "a", "input_data": value}
        assert_denied(ask(gateway.port, "POST", "/v1/predict", predict), "pattern 1 of deny_patterns")
    escaped = b'{"input": "\\u0066or\\u0062idden"}'
    assert_denied(ask(gateway.port, "POST", "/v1/inference", escaped), "pattern 1")
    assert metric(gateway, "carpool_held_requests") == 0


def test_a_model_has_its_own_rules(gateway: GatewayProcess) -> None:
    assert infer(gateway, "forbidden", "open").status == 200
    assert infer(gateway, "12345678", "short").status == 200
    assert_denied(infer(gateway, "123456789", "short"), "10 bytes at most; this one has 11")


def test_nobody_looks_into_binary_input(gateway: GatewayProcess) -> None:
    """But its length counts, as the base64 text that it becomes."""
    binary = ("Content-Type: application/octet-stream",)
    sent = ask(gateway.port, "POST", "/v1/predict?model_id=a", b"forbidden", *binary)
    assert sent.status == 200
    assert base64.b64encode(b"forbidden").decode()[::-1] == sent.json["output"]
    assert_denied(ask(gateway.port, "POST", "/v1/predict?model_id=short", b"1234567", *binary), "10 bytes at most")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            "[input]\ndeny_patterns = ['fine', '(']",
            "input.deny_patterns has pattern 2, which cannot be used: missing )",
        ),
        (
            "[models.b]\ndeny_patterns = ['x*']\n[models.default]",
            "models.b.deny_patterns has pattern 1, which is found",
        ),
    ],
)
def test_a_bad_pattern_is_told_before_anything_starts(tmp_path: Path, section: str, says: str) -> None:
    (tmp_path / "carpool.toml").write_text(section + "\n[upstream]\nendpoints = ['sim:']\n")
    done = carpool("serve", "--port", "0", cwd=tmp_path)
    assert done.returncode != 0
    assert says.replace(" ", "") in done.stderr.replace(" ", "").replace("(carpool.toml)", "")
