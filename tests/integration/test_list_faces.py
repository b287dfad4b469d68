"""OpenAI, TEI and KServe V1 over real sockets: what goes in and out, what is refused, and how."""

import base64
import http.client
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.client import Response
from support.embedder import Embedder, vector_of
from support.gateway import Peer, eventually, metric, request_bytes, serving
from support.processes import PATIENCE_S, GatewayProcess
from support.redis_servers import RedisServer

pytestmark = pytest.mark.xdist_group("list faces")

EMBEDDING = ["vectors", "ada", "bge", "tf"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    with Embedder().running() as running:
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    protocols = {
        "ada": "openai_embeddings",
        "bge": "tei_embed",
        "tf": "kserve_v1",
        "gpt": "openai_completions",
        "tensors": "kserve_v2",
    }
    models = [
        "[models.vectors]\nendpoints = ['sim:?latency_ms=1&slots=4&dimensions=3&poison=arsenic']",
        "[models.words]\nendpoints = ['sim:?latency_ms=1&slots=4']",
        f"[models.kept]\nendpoints = ['{embedder.url}/infer']\ncache = true",
        *(
            f"[models.{name}]\nendpoints = ['{embedder.url}']\nprotocol = '{protocol}'"
            for name, protocol in protocols.items()
        ),
    ]
    settings = "[broker]\nqueue_timeout_s = 60\ntotal_timeout_s = 60\n[upstream]\ntimeout_s = 60\n"
    (directory / "carpool.toml").write_text(settings + "\n".join(models))
    with serving(directory, "") as running:
        yield running
    assert running.log_messages("error") == []


def post(gateway: GatewayProcess, path: str, body: Any, **headers: str) -> Response:
    """One call, read whole, however it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    told = answer.getheaders()
    names = [name.lower() for name, _ in told]
    assert len(set(names)) == len(names)  # nothing is told twice
    response = Response(answer.status, {name.lower(): value for name, value in told}, answer.read())
    connection.close()
    return response


def get(gateway: GatewayProcess, path: str) -> Response:
    with Peer(gateway.port) as peer:
        return peer.ask("GET", path)


def floats(text: str) -> list[float]:
    return list(array("f", base64.b64decode(text)))


def first_numbers(answer: Response) -> list[float]:
    assert answer.status == 200, answer.body
    assert [each["index"] for each in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [each["embedding"][0] for each in answer.json["data"]]


class TestOpenAiEmbeddings:
    @pytest.mark.parametrize("model", EMBEDDING)
    @pytest.mark.parametrize("value", ["one text", ["a", "b", "ü"], [1, 2, 3], [[1, 2], [3]], ["a", [7]]])
    def test_whatever_the_upstream_speaks(self, gateway: GatewayProcess, model: str, value: Any) -> None:
        inputs = [value] if isinstance(value, str) or isinstance(value[0], int) else value
        body = {"model": model, "input": value}
        # The bytes of a client are passed on as they are, and this one writes them so.
        plain = post(gateway, "/v1/embeddings", body)
        expected = [vector_of(each)[0] for each in inputs]
        assert first_numbers(plain) == expected
        assert plain.json["object"] == "list" and plain.json["model"] == model
        packed = post(gateway, "/v1/embeddings", {**body, "encoding_format": "base64"})
        for numbers, text in zip(plain.json["data"], packed.json["data"], strict=True):
            assert floats(text["embedding"]) == pytest.approx(numbers["embedding"], rel=1e-6)
            assert floats(text["embedding"])[0] == numbers["embedding"][0]

    def test_what_the_upstream_sees(self, gateway: GatewayProcess, embedder: Embedder) -> None:
        """Neither `user` nor the encoding is in the lane, or everybody would ride alone."""
        embedder.bodies.clear()
        for user in ("a", "b"):
            body = {"model": "ada", "input": "x", "user": user, "encoding_format": "base64", "dimensions": 3}
            assert post(gateway, "/v1/embeddings", body).status == 200
        assert post(gateway, "/v1/embeddings", {"model": "ada", "input": "x", "dimensions": None}).status == 200
        # A call may be made twice: one whose answer is that of the call before is in doubt.
        seen = {json.dumps(body) for body in embedder.bodies}
        expected = ({"model": "ada", "input": ["x"], "dimensions": 3}, {"model": "ada", "input": ["x"]})
        assert seen == {json.dumps(body) for body in expected}

    def test_usage(self, gateway: GatewayProcess) -> None:
        def usage(model: str, value: Any) -> Any:
            return post(gateway, "/v1/embeddings", {"model": model, "input": value}).json["usage"]

        assert usage("ada", ["a", "b"]) == {"prompt_tokens": 6, "total_tokens": 6}  # as it says
        assert usage("bge", [[1, 2, 3], [4]]) == {"prompt_tokens": 4, "total_tokens": 4}
        assert usage("bge", "who knows") == {"prompt_tokens": 0, "total_tokens": 0}

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_a_long_list(self, gateway: GatewayProcess, encoding: str) -> None:
        texts = [f"text {number}" for number in range(2048)]
        body = {"model": "vectors", "input": texts, "encoding_format": encoding}
        answer = post(gateway, "/v1/embeddings", body)
        assert answer.headers["transfer-encoding"] == "chunked"
        data = answer.json["data"]
        numbers = [floats(each["embedding"]) if encoding == "base64" else each["embedding"] for each in data]
        assert [each[0] for each in numbers] == [vector_of(text)[0] for text in texts]
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)

    def test_an_input_that_is_refused_fails_the_call_by_name(self, gateway: GatewayProcess) -> None:
        post(gateway, "/v1/embeddings", {"model": "vectors", "input": "good"})
        texts = [f"text {number}" for number in range(100)]
        texts[42] = "arsenic"
        answer = post(gateway, "/v1/embeddings", {"model": "vectors", "input": texts})
        assert answer.status == 422
        error = answer.json["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "input_refused")
        assert error["message"].startswith("`input[42]`: ")
        assert answer.headers["x-should-retry"] == "false"
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)

    def test_who_hangs_up_frees_all_seats(self, gateway: GatewayProcess, embedder: Embedder) -> None:
        embedder.gate.clear()
        try:
            with Peer(gateway.port) as peer:
                body = json.dumps({"model": "ada", "input": [f"{number}" for number in range(1000)]}).encode()
                peer.send(request_bytes("POST", "/v1/embeddings", body))
                assert eventually(lambda: metric(gateway, "carpool_held_requests") == 1000)
            assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
        finally:
            embedder.gate.set()


class TestOpenAiCompletions:
    def test_a_prompt_and_a_list(self, gateway: GatewayProcess, embedder: Embedder) -> None:
        embedder.bodies.clear()
        body = {"model": "gpt", "prompt": "abc", "max_tokens": 7, "n": 1, "user": "u", "stream": False}
        one = post(gateway, "/v1/completions", body).json
        assert one["choices"] == [{"text": "cba", "index": 0, "finish_reason": "length", "logprobs": None}]
        assert one["object"] == "text_completion" and one["id"].startswith("cmpl-")
        assert one["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        assert all(each == {"model": "gpt", "prompt": ["abc"], "max_tokens": 7} for each in embedder.bodies)
        two = post(gateway, "/v1/completions", {"model": "gpt", "prompt": ["ab", "cd"]}).json
        assert [(each["index"], each["text"]) for each in two["choices"]] == [(0, "ba"), (1, "dc")]
        assert two["usage"]["total_tokens"] == 14

    def test_a_model_that_answers_texts(self, gateway: GatewayProcess) -> None:
        answer = post(gateway, "/v1/completions", {"model": "words", "prompt": "abc"}).json
        assert answer["choices"] == [{"text": "cba", "index": 0, "finish_reason": "stop", "logprobs": None}]

    @pytest.mark.parametrize("wants_usage", [False, True])
    def test_a_stream_is_one_event(self, gateway: GatewayProcess, wants_usage: bool) -> None:
        body = {"model": "gpt", "prompt": "abc", "stream": True, "stream_options": {"include_usage": wants_usage}}
        answer = post(gateway, "/v1/completions", body)
        assert answer.headers["content-type"] == "text/event-stream"
        *events, done, end = answer.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        told = [json.loads(event.removeprefix("data: ")) for event in events]
        assert [each["text"] for event in told for each in event["choices"]] == ["cba"]
        assert [event["usage"]["total_tokens"] for event in told if "usage" in event] == ([7] if wants_usage else [])

    @pytest.mark.parametrize("more", [{"n": 2}, {"best_of": 3}, {"stream": "yes"}, {"stream_options": 1}])
    def test_what_cannot_be_had(self, gateway: GatewayProcess, more: dict[str, Any]) -> None:
        answer = post(gateway, "/v1/completions", {"model": "gpt", "prompt": "abc", **more})
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")

    def test_chat_is_told_what_to_use(self, gateway: GatewayProcess) -> None:
        answer = post(gateway, "/v1/chat/completions", {"model": "gpt", "messages": []})
        assert answer.status == 404
        assert "/v1/completions" in answer.json["error"]["message"]


class TestTei:
    @pytest.mark.parametrize("value", ["one", ["a", "b"], [1, 2], [[1, 2], [3]]])
    def test_embed(self, gateway: GatewayProcess, value: Any) -> None:
        inputs = [value] if isinstance(value, str) or isinstance(value[0], int) else value
        answer = post(gateway, "/embed", {"inputs": value, "normalize": True})
        assert [each[0] for each in answer.json] == [vector_of(each)[0] for each in inputs]

    def test_errors(self, gateway: GatewayProcess) -> None:
        refused = post(gateway, "/embed", {"inputs": []})
        assert (refused.status, refused.json["error_type"]) == (400, "Validation")
        poisoned = post(gateway, "/embed", {"inputs": ["a", "arsenic"]})
        assert (poisoned.status, poisoned.json["error_type"]) == (422, "Validation")
        assert poisoned.json["error"].startswith("`inputs[1]`: ")


class TestKServeV1:
    @pytest.mark.parametrize("model", ["words", "tf"])
    def test_predict(self, gateway: GatewayProcess, model: str) -> None:
        answer = post(gateway, f"/v1/models/{model}:predict", {"instances": ["abc", "d"]})
        expected = ["cba", "d"] if model == "words" else [vector_of("abc"), vector_of("d")]
        assert answer.json == {"predictions": expected}

    def test_any_value_and_parameters(self, gateway: GatewayProcess, embedder: Embedder) -> None:
        embedder.bodies.clear()
        instances = [{"x": [1.5]}, None, 7, {"b64": "AA=="}]
        body = {"instances": instances, "signature_name": "s", "parameters": {"k": 1}}
        assert len(post(gateway, "/v1/models/tf:predict", body).json["predictions"]) == 4
        assert {(each["signature_name"], each["parameters"]["k"]) for each in embedder.bodies} == {("s", 1)}

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"inputs": {"x": [1]}}, "columnar"),
            ({"instances": []}, "empty"),
            ({"instances": {}}, "must be a list"),
            ({"instances": [1], "parameters": 3}, "must be an object"),
            ({"instances": [1], "other": 3}, "only"),
            (b'{"instances": [NaN]}', "not what this path takes"),
            (b'{"instances": [1e999]}', "too large"),
            (b'{"instances": ' + b"[" * 100 + b"1" + b"]" * 100 + b"}", "nested deeper"),
            ({"instances": [1] * 2049}, "maximum length 2048"),
        ],
    )
    def test_bodies_that_are_refused(self, gateway: GatewayProcess, body: Any, words: str) -> None:
        answer = post(gateway, "/v1/models/words:predict", body)
        assert answer.status == 400
        assert words in answer.json["error"]


class TestModels:
    def test_which_there_are(self, gateway: GatewayProcess) -> None:
        listed = get(gateway, "/v1/models").json
        assert listed["object"] == "list"
        assert [each["id"] for each in listed["data"]][:3] == ["vectors", "words", "kept"]
        assert all(each["object"] == "model" for each in listed["data"])

    def test_one_of_them_for_every_client(self, gateway: GatewayProcess) -> None:
        model = get(gateway, "/v1/models/words").json
        assert (model["id"], model["name"], model["ready"]) == ("words", "words", True)
        assert model["model_version_status"][0]["state"] == "AVAILABLE"
        assert get(gateway, "/").json == {"status": "alive"}
        unknown = get(gateway, "/v1/models/none")
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize(
        ("path", "body", "faces"),
        [
            ("/v1/embeddings", {"model": "gpt", "input": "x"}, "/v1/completions"),
            ("/v1/completions", {"model": "ada", "prompt": "x"}, "/v1/embeddings, /embed, /v1/models/NAME:predict"),
            ("/v1/models/tensors:predict", {"instances": [1]}, "/v1/inference, /v1/predict"),
            ("/v1/models/none:predict", {"instances": [1]}, "this gateway serves vectors"),
        ],
    )
    def test_a_model_without_this_face_names_those_it_has(
        self, gateway: GatewayProcess, path: str, body: Any, faces: str
    ) -> None:
        answer = post(gateway, path, body)
        assert answer.status == 404
        error = answer.json["error"]
        assert faces in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions", "/embed", "/v1/models/words:predict"])
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"input":"\xff"}', 400), (b"x" * (1024 * 1024 + 1), 413)],
)
def test_bodies_that_cannot_be_read(gateway: GatewayProcess, path: str, body: bytes, status: int) -> None:
    assert post(gateway, path, body).status == status


def test_other_media(gateway: GatewayProcess) -> None:
    answer = post(gateway, "/v1/embeddings", {"input": "x"}, **{"Content-Type": "text/plain"})
    assert (answer.status, answer.json["error"]["type"]) == (415, "invalid_request_error")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Owners may have 20 at once, and one comes back in three seconds; 300 KB of answers are held at a time."""
    settings = {"limits.anonymous": 20, "limits.burst": 20, "carpool.composition.faces.UNREAD_BYTES_MAX": 300_000}
    upstream = "sim:?latency_ms=1&slots=4&dimensions=1000"
    with serving(tmp_path_factory.mktemp("limited"), upstream, settings=settings) as running:
        yield running


class TestLimits:
    def owner(self, gateway: GatewayProcess, address: str, size: int, path: str = "/v1/embeddings") -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, PATIENCE_S, (address, 0))
        field = {"/v1/embeddings": "input", "/embed": "inputs"}.get(path, "instances")
        connection.request("POST", path, json.dumps({field: ["x"] * size}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        names = [name.lower() for name, _ in answer.getheaders()]
        assert len(set(names)) == len(names)  # one set of limits
        response = Response(answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read())
        connection.close()
        return response

    def test_a_list_costs_what_is_in_it(self, limited: GatewayProcess) -> None:
        answer = self.owner(limited, "127.0.0.2", 6)
        assert answer.status == 200
        assert answer.headers["ratelimit"].startswith('"default";r=14;t=')
        assert answer.headers["x-ratelimit-limit-requests"] == "20"
        assert answer.headers["x-ratelimit-remaining-requests"] == "14"
        refused = self.owner(limited, "127.0.0.2", 20)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 18
        assert refused.headers["ratelimit"].startswith('"default";r=0;t=')
        assert refused.headers["x-should-retry"] == "true"
        assert "counts as 20" in refused.json["error"]["message"]
        assert self.owner(limited, "127.0.0.2", 14).status == 200  # a refusal takes nothing


def test_over_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {
        "broker.url": redis_server.url,
        "broker.namespace": tmp_path.name,
        "broker.redis_timeout_ms": 20_000,
        "limits.anonymous": 6000,
        "limits.burst": 1000,
    }
    with serving(tmp_path, "sim:?latency_ms=1&slots=4&dimensions=3", settings=settings) as gateway:
        assert eventually(lambda: metric(gateway, "carpool_live_batchers") == 1)
        texts = [f"text {number}" for number in range(900)]
        assert first_numbers(post(gateway, "/v1/embeddings", {"input": texts})) == [
            vector_of(text)[0] for text in texts
        ]
        refused = post(gateway, "/v1/embeddings", {"input": texts})
        assert refused.status == 429 and "counts as 900" in refused.json["error"]["message"]
        assert post(gateway, "/v1/embeddings", {"input": texts[:50]}).status == 200
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
        assert gateway.log_messages("error") == []
