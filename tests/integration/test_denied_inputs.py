"""Inputs that a model may not get are refused at the door, whichever way they come."""

from collections.abc import Iterator

import pytest

from support.client import Response
from support.gateway import ask, metric, serving
from support.processes import GatewayProcess

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
