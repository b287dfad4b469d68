"""`/openapi.json` is true: schemathesis reads it, tries what it allows and what it forbids, and finds nothing."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from carpool.core.dead_letter import Replayed, ReplayReport
from carpool.core.problem import Problem
from carpool.core.snapshot import FleetState, Health
from carpool.core.tensors import DATATYPES, DIMENSIONS_MAX
from carpool.core.timeline import RequestState
from carpool.face.http.admin import LETTER_ID_MAX, LISTED, LISTED_MAX
from carpool.face.http.answers import (
    InferenceAnswer,
    LettersDropped,
    LetterShown,
    LettersListed,
    PredictAnswer,
    Ready,
    TaskAccepted,
    TaskState,
    WebhooksListed,
    WebhooksRetried,
)
from carpool.face.http.list_bodies import INPUTS_MAX, TOKEN_ID_MAX
from carpool.face.http.openapi import admin_openapi, gateway_openapi
from carpool.face.http.v2_wire import ID_CHARS_MAX
from carpool.face.tensor_rows import NAME_BYTES_MAX, ROWS_MAX, TENSORS_MAX
from support.client import Response
from support.embedder import Embedder
from support.gateway import ask, serving
from support.processes import PATIENCE_S, GatewayProcess

POISON = "arsenic"
# Where it matters what a model makes of a text.
TEXT_PATHS = ("/v1/embeddings", "/embed", "/v1/completions")
# Half a minute on a machine that has nothing else to do.
SCHEMATHESIS_S_MAX = 300
# Not: missing_test_data. Whether there is a dead letter with an id drawn by chance says nothing of the document.
DOCUMENT_WARNINGS = "missing_auth,base_url_mismatch,validation_mismatch,missing_deserializer,unresolvable_reference"
# Of each operation.
EXAMPLES = settings().max_examples // 8


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    patient = {
        "broker.queue_timeout_s": 600,
        "broker.total_timeout_s": 600,
        "upstream.timeout_s": 600,
        "shedding.mode": "off",
    }
    upstream = f"sim:?latency_ms=2&slots=64&poison={POISON}"
    with serving(tmp_path_factory.mktemp("gateway"), upstream, settings=patient) as running:
        yield running


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One model embeds, and one completes."""
    directory = tmp_path_factory.mktemp("of texts")
    with Embedder().running() as embedder:
        protocols = {"ada": "openai_embeddings", "gpt": "openai_completions"}
        models = [
            f"[models.{name}]\nendpoints = ['{embedder.url}']\nprotocol = '{protocol}'\nslots = 8\n"
            for name, protocol in protocols.items()
        ]
        (directory / "carpool.toml").write_text("".join(models))
        with serving(directory, "") as running:
            yield running


@contextmanager
def dead_letters_coming(gateway: GatewayProcess) -> Iterator[None]:
    """There are always some to show, replay and drop, however many are dropped."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.05):
            # The good one shows that the endpoint is well, so that it is the other input that is bad.
            for text, status in (("good", 200), (POISON, 422)):
                answer = ask(gateway.port, "POST", "/v1/inference", {"input": text}, "Content-Type: application/json")
                assert answer.status == status

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.timeout(2 * SCHEMATHESIS_S_MAX)
@pytest.mark.parametrize("side", ["gateway", "admin"])
def test_schemathesis_finds_nothing(gateway: GatewayProcess, side: str, tmp_path: Path) -> None:
    port = gateway.port if side == "gateway" else gateway.admin_port
    command = schemathesis(port)
    for path in TEXT_PATHS:
        command += ["--exclude-path", path]
    with dead_letters_coming(gateway):
        check_finds_nothing(command, tmp_path, 50)
    assert gateway.log_messages("error") == []


@pytest.mark.timeout(2 * SCHEMATHESIS_S_MAX)
def test_schemathesis_finds_nothing_in_faces_of_texts(of_texts: GatewayProcess, tmp_path: Path) -> None:
    command = [*schemathesis(of_texts.port), "--phases", "examples,coverage,fuzzing"]  # no links are among them
    for path in TEXT_PATHS:
        command += ["--include-path", path]
    check_finds_nothing(command, tmp_path, 20)
    assert of_texts.log_messages("error") == []


def schemathesis(port: int) -> list[str]:
    """The command that tries what the document of a port says."""
    return [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"http://127.0.0.1:{port}/openapi.json",
        "--warnings",
        DOCUMENT_WARNINGS,
        "--checks",
        "all",
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        "1",
        "--request-timeout",
        str(PATIENCE_S),
        # A WebSocket: to whoever speaks plain HTTP it answers 426, whatever is asked.
        "--exclude-path",
        "/v1/stream",
    ]


def check_finds_nothing(command: list[str], directory: Path, cases_min: int) -> None:
    """Run it; nothing is wrong, and enough was tried."""
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=SCHEMATHESIS_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert found is not None and int(found[1]) > cases_min, done.stdout[-3000:]
    assert "No issues found" in done.stdout, done.stdout[-3000:]


def test_answers_say_no_more_and_no_less_than_their_types(gateway: GatewayProcess) -> None:
    def inference(text: str, *headers: str) -> Response:
        return ask(gateway.port, "POST", "/v1/inference", {"input": text}, "X-Request-Id: known", *headers)

    def result(text: str) -> TaskState:
        task_id = inference(text, "Prefer: respond-async").read_as(TaskAccepted).task_id
        return ask(gateway.port, "GET", f"/v1/result/{task_id}?wait_ms=30000").read_as(TaskState)

    def admin(method: str, target: str) -> Response:
        return ask(gateway.admin_port, method, f"/internal/{target}")

    assert inference("good").read_as(InferenceAnswer).metadata.batch_size == 1
    assert admin("GET", "requests/known").read_as(RequestState).status == "completed"
    assert ask(gateway.port, "POST", "/v1/predict", {"model_id": "default", "input_data": 1}).read_as(PredictAnswer)
    assert (result("good").status, result(POISON).status) == ("SUCCESS", "FAILED")
    assert inference(POISON).read_as(Problem).status == 422
    assert admin("GET", "health").read_as(Health).status == "healthy"
    assert admin("GET", "ready").read_as(Ready).ready
    assert admin("GET", "fleet").read_as(FleetState).models
    letter, *_ = admin("GET", "dead-letters").read_as(LettersListed).dead_letters
    assert admin("GET", f"dead-letters/{letter.id}").read_as(LetterShown).cause == "input-refused"
    assert admin("POST", f"dead-letters/{letter.id}/replay").read_as(Replayed).id == letter.id
    assert admin("POST", "dead-letters/replay").read_as(ReplayReport).tasks
    assert admin("DELETE", "dead-letters?all=true").read_as(LettersDropped)
    assert admin("GET", "webhooks").read_as(WebhooksListed).total == 0
    assert admin("POST", "webhooks/retry").read_as(WebhooksRetried).retried == 0


def test_every_path_takes_the_methods_that_are_described(gateway: GatewayProcess) -> None:
    for port in (gateway.port, gateway.admin_port):
        for path, item in ask(port, "GET", "/openapi.json").json["paths"].items():
            allow = ask(port, "OPTIONS", re.sub(r"{\w+}", "x", path)).headers["allow"]
            described = {method.upper() for method in item if method != "parameters"}
            assert set(allow.split(", ")) - {"HEAD", "OPTIONS"} == described, path


def test_limits_are_those_of_the_code() -> None:
    schemas = json.loads(gateway_openapi(["a"], "a", 30_000, ["a"]))["components"]["schemas"]
    rows, tensor = schemas["V2Request"]["properties"], schemas["V2Tensor"]["properties"]
    assert (rows["inputs"]["maxItems"], rows["id"]["anyOf"][0]["maxLength"]) == (TENSORS_MAX, ID_CHARS_MAX)
    assert f"1 to {ROWS_MAX} rows" in rows["inputs"]["description"]
    assert (tensor["name"]["maxLength"], tensor["shape"]["maxItems"]) == (NAME_BYTES_MAX, DIMENSIONS_MAX)
    assert tensor["datatype"]["enum"] == list(DATATYPES)
    assert schemas["Instances"]["properties"]["instances"]["maxItems"] == INPUTS_MAX
    assert schemas["Tokens"]["items"]["maximum"] == TOKEN_ID_MAX
    paths = json.loads(admin_openapi())["paths"]
    letters, webhooks = (paths[f"/internal/{name}"]["get"]["parameters"] for name in ("dead-letters", "webhooks"))
    one, one_again = (paths[f"/internal/dead-letters/{{id}}{end}"]["parameters"][0] for end in ("", "/replay"))
    limits = {"minimum": 1, "maximum": LISTED_MAX, "default": LISTED}
    assert letters[0]["schema"] == {"type": "integer", **limits}
    assert letters[1]["schema"] == {"type": "integer", "minimum": 0, "maximum": LETTER_ID_MAX, "default": 0}
    assert one["schema"] == one_again["schema"] == {"type": "integer", "minimum": 1, "maximum": LETTER_ID_MAX}
    limits = {"minimum": 1, "maximum": LISTED_MAX, "default": LISTED}
    assert webhooks[0]["schema"] == {"type": "integer", **limits}


GATEWAY_PATHS = """
    / /openapi.json /v1/inference /v1/predict /v1/result/{task_id} /v1/result/{task_id}/events /v1/stream
    /v1/stream/tickets /v1/embeddings /v1/completions /v1/chat/completions /v1/models /v1/models/{name}
    /v1/models/{name}:predict /embed /v2 /v2/health/live /v2/health/ready /v2/models/{model} /v2/models/{model}/ready
    /v2/models/{model}/infer /v2/models/{model}/versions/{version} /v2/models/{model}/versions/{version}/ready
    /v2/models/{model}/versions/{version}/infer
"""
ADMIN_PATHS = """
    /openapi.json /metrics /internal/health /internal/ready /internal/requests/{id} /internal/fleet /internal/scale
    /internal/dead-letters /internal/dead-letters/replay /internal/dead-letters/{id} /internal/dead-letters/{id}/replay
    /internal/webhooks /internal/webhooks/retry /internal/webhooks/{task_id}/retry
"""


def test_every_operation_and_reference_is_there() -> None:
    of_gateway = gateway_openapi(["a", "b"], "a", 30_000, ["b"])
    for text, paths in ((of_gateway, GATEWAY_PATHS), (admin_openapi(), ADMIN_PATHS)):
        document = json.loads(text)
        assert set(document["paths"]) == set(paths.split())
        schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert set(re.findall(r'"\$ref":"([^"]+)"', text.decode())) <= schemas
        operations = [
            operation
            for path in document["paths"].values()
            for method, operation in path.items()
            if method != "parameters"
        ]
        assert len({operation["operationId"] for operation in operations}) == len(operations)
        for operation in operations:
            for status, response in operation["responses"].items():
                assert response["description"], (operation["operationId"], status)
