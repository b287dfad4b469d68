"""What the doctor makes of an API's answers."""

import json
import tomllib

import pytest

from carpool.settings import Settings, models_of
from carpool.settings.loading import changes_toml
from carpool.settings.schema import UpstreamSettings
from carpool.tools.api_checks import (
    ELEMENTS_MAX,
    HEARD_CHARS_MAX,
    Tried,
    Where,
    check_call,
    check_limit,
    check_status,
    check_time,
    heard,
    missing_fields,
    output_fields,
    own_inputs,
    post_paths,
)
from carpool.upstream.codecs import make_codec
from carpool.upstream.codecs.base import Refusal
from carpool.upstream.endpoint import UpstreamResponse

WHERE = Where(Settings(), "default", UpstreamSettings(endpoints=["http://api:9/x"]))


def body(value: object) -> bytes:
    return json.dumps(value).encode()


def fault(*place: object, kind: str) -> bytes:
    return body({"detail": [{"loc": list(place), "msg": "…", "type": kind}]})


@pytest.mark.parametrize("kind", ["missing", "value_error.missing"])
def test_the_fields_that_fastapi_wants_are_read_from_loc(kind: str) -> None:
    assert missing_fields(fault("body", "texts", kind=kind)) == ["texts"]
    assert missing_fields(fault("query", "texts", kind=kind)) == []
    assert missing_fields(fault("body", "texts", 0, "id", kind=kind)) == []
    assert missing_fields(fault("body", "a\x1b[31m", kind=kind)) == []
    assert missing_fields(fault("body", "x" * 1000, kind=kind)) == []


@pytest.mark.parametrize(
    "odd",
    [b"", b"\xff", b"[" * 100_000, b"[]", b"7", body({"detail": "no"}), body({"detail": [1, None, {"loc": "body"}]})],
)
def test_answers_of_any_form_are_looked_at(odd: bytes) -> None:
    assert missing_fields(odd) == [] and output_fields(odd, 1) == [] and post_paths(odd) == []
    tried = Tried(1, 0.1, UpstreamResponse(422, odd), "status 422", inputs_field="inputs")
    assert check_call(tried, WHERE).level == "problem"
    assert len(heard(odd)) <= HEARD_CHARS_MAX + 1


def test_outputs_are_the_array_with_one_for_each_input_and_the_usual_name_first() -> None:
    answer = body(
        {"tokens_used": [1, 2], "warnings": ["a", "b"], "data": [1, 2], "embeddings": [1, 2], "outputs": [1], "took": 2}
    )
    assert output_fields(answer, 2, "texts") == ["embeddings", "data", "warnings", "tokens_used"]
    assert output_fields(answer, 2, "input") == ["data", "embeddings", "warnings", "tokens_used"]
    assert output_fields(answer, 3) == []


def test_paths_come_from_openapi() -> None:
    paths = {"/predict": {"post": {}}, "/items/{id}": {"post": {}}, "/health": {"get": {}}, "/odd": 7}
    assert post_paths(body({"paths": paths})) == ["/predict"]
    finding = check_status(Tried(1, 0.1, UpstreamResponse(404, b"")), WHERE, "/x", ["/predict"])
    assert finding.changes == (("upstream.endpoints", ("http://api:9/predict",)),)
    assert check_status(Tried(1, 0.1, UpstreamResponse(404, b"")), WHERE, "/x", ["/a", "/b"]).changes == ()


@pytest.mark.parametrize(
    ("status", "check"),
    [
        (404, "api path"),
        (405, "api path"),
        (307, "api path"),
        (401, "api credentials"),
        (403, "api credentials"),
        (503, "api answer"),
        (418, "api answer"),
    ],
)
def test_a_status_is_said_with_the_setting(status: int, check: str) -> None:
    finding = check_status(Tried(1, 0.1, UpstreamResponse(status, b"words")), WHERE, "/x", [])
    assert (finding.check, finding.level, finding.heard) == (check, "problem", "words")
    assert str(status) in finding.says
    assert check == "api answer" or "upstream." in finding.do


def test_the_protocols_own_path_is_named() -> None:
    tried = Tried(1, 0.1, UpstreamResponse(404, b""), path="/v1/embeddings")
    assert "without a path, Carpool calls /v1/embeddings" in check_status(tried, WHERE, "/x", []).do
    assert "without a path" not in check_status(tried, WHERE, "/v1/embeddings", []).do


def test_credentials_that_are_configured_are_named() -> None:
    where = Where(Settings(models={"m": {}}), "m", UpstreamSettings(token_file="t"))
    assert "models.m.token_file" in check_status(Tried(1, 0.1, UpstreamResponse(401, b"")), where, "/", []).do


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (fault("body", kind="list_type"), "another body than a JSON object"),
        (fault("body", "text", kind="string_type"), "something else than an array of inputs in `text`"),
        (fault("body", "text", 0, kind="float_type"), "takes its inputs in `text`, but none"),
        (fault("body", "lang", kind="missing"), "beside `text`, the API wants `lang`"),
    ],
)
def test_a_422_is_told_in_words(answer: bytes, says: str) -> None:
    tried = Tried(1, 0.1, UpstreamResponse(422, answer), "status 422", inputs_field="text")
    assert says in check_call(tried, WHERE).says


@pytest.mark.parametrize(
    ("seconds", "level"),
    [(0.1, "ok"), (1.4, "ok"), (1.6, "warning"), (2.9, "warning"), (3.0, "problem"), (29.0, "problem")],
)
def test_the_time_of_a_call_is_held_against_the_timeouts(seconds: float, level: str) -> None:
    tried = Tried(2, seconds)
    finding = check_time(tried, tried, WHERE)
    assert finding.level == level
    changes = dict(finding.changes)
    if level == "ok":
        assert not changes
    else:
        timeout_s, total_s = changes["upstream.timeout_s"], changes["broker.total_timeout_s"]
        assert isinstance(timeout_s, float) and isinstance(total_s, float)
        assert 2 * seconds <= timeout_s < total_s


def test_a_slow_first_call_alone_is_a_warning() -> None:
    assert check_time(Tried(2, 0.1), Tried(1, 5.0), WHERE).level == "warning"


def test_a_limit_that_the_api_states_is_a_warning_and_another_a_problem() -> None:
    stated = Tried(64, 0.1, UpstreamResponse(400, b""), "status 400", Refusal("split", "", 32))
    silent = Tried(64, 0.1, UpstreamResponse(400, b""), "status 400", Refusal("bisect"))
    assert check_limit(32, stated, WHERE, 64).level == "warning"
    assert check_limit(32, silent, WHERE, 64).level == "problem"
    assert check_limit(32, silent, WHERE, 64).changes == (("batching.max_batch", 32),)
    assert check_limit(64, None, WHERE, 64).level == check_limit(16, None, WHERE, 64).level == "ok"


def test_the_changes_are_toml_that_loads() -> None:
    changes = {
        "upstream.endpoints": ("http://api/x",),
        "batching.max_batch": 1,
        "upstream.inputs_field": 'a"b',
        "models.org/m.timeout_s": 5.0,
        "model": "m",
    }
    assert tomllib.loads(changes_toml(changes)) == {
        "model": "m",
        "upstream": {"endpoints": ["http://api/x"], "inputs_field": 'a"b'},
        "batching": {"max_batch": 1},
        "models": {"org/m": {"timeout_s": 5.0}},
    }


def test_a_server_that_tells_of_many_large_tensors_costs_no_more_than_one() -> None:
    tensors = [{"name": f"t{number}", "datatype": "FP32", "shape": [-1, 4096, 4096]} for number in range(1000)]
    [[value, _]] = own_inputs(UpstreamSettings(protocol="kserve_v2"), body({"inputs": tensors}))
    assert len(value) < 3 * ELEMENTS_MAX


@pytest.mark.parametrize(
    ("upstream", "metadata"),
    [
        (UpstreamSettings(protocol="kserve_v2"), b""),
        (UpstreamSettings(protocol="kserve_v2", tensor="x INT8 1,2,3"), b""),
        (UpstreamSettings(protocol="kserve_v2"), body({"inputs": "odd"})),
        (
            UpstreamSettings(protocol="kserve_v2"),
            body(
                {
                    "inputs": [
                        {"name": name, "datatype": datatype, "shape": [-1, -1, 2]}
                        for name, datatype in (("a", "FP16"), ("b", "BYTES"), ("c", "BOOL"), ("d", "INT64"))
                    ]
                }
            ),
        ),
        (UpstreamSettings(protocol="openai_embeddings"), b""),
        (UpstreamSettings(protocol="tei_embed"), b""),
        (UpstreamSettings(protocol="kserve_v1"), b""),
    ],
)
def test_the_doctors_inputs_are_such_as_the_protocol_takes(upstream: UpstreamSettings, metadata: bytes) -> None:
    codec = make_codec(upstream.protocol)
    for kind in own_inputs(upstream, metadata):
        lanes = {codec.prepare(value).lane for value in kind}
        assert len(lanes) == 1  # they may share a batch
    assert models_of(Settings(upstream=upstream))
