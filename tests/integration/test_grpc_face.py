"""gRPC: `carpool.v1.Inference`, health and reflection, with real clients against a real `carpool serve`."""

import asyncio
import json
import queue
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from support.certificates import Certificates
from support.gateway import MALFORMED, HeldGpu, eventually, metric, serving
from support.grpc_client import PROTOS, GrpcClient, Refusal, grpc_client, message, parts
from support.http2 import Http2Peer
from support.processes import PATIENCE_S, GatewayProcess, carpool, running_role, until
from support.redis_servers import RedisServer

pytestmark = pytest.mark.xdist_group("grpc face")

SIM = "sim:?latency_ms=5&slots=8"
KEY = "cp_" + "k" * 40
PATIENT = {"broker.queue_timeout_s": 600, "broker.total_timeout_s": 600, "upstream.timeout_s": 600}
STREAMS_MAX = 20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One that answers soon."""
    settings = {"input.body_bytes_max": 100_000}
    with serving(tmp_path_factory.mktemp("gateway"), SIM, "--grpc-port=0", settings=settings) as running:
        yield running
        assert running.log_messages("error") == []


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[GrpcClient]:
    with grpc_client(gateway.grpc_port) as client:
        yield client


@pytest.fixture(scope="module")
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        yield held


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, gpu: HeldGpu) -> Iterator[GatewayProcess]:
    """One whose only slot is held for as long as a test wants; it knows one key, with a limit of its own."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "carpool.toml").write_text(
        f"""
        [auth]
        mode = "keys"
        [keys.one]
        sha256 = "{sha256(KEY.encode()).hexdigest()}"
        [keys.limited]
        sha256 = "{sha256((KEY + "2").encode()).hexdigest()}"
        per_minute = 1
        burst = 2
        """
    )
    settings = PATIENT | {"carpool.face.http.places.STREAMS_MAX": STREAMS_MAX}
    with serving(folder, gpu.url, "--grpc-port=0", "--slots", "1", "--max-batch", "1", settings=settings) as running:
        yield running


@pytest.fixture
def held(slow: GatewayProcess, gpu: HeldGpu) -> Iterator[GrpcClient]:
    """A client of the slow gateway, in which nothing waits before and after."""
    gpu.hold()
    with grpc_client(slow.grpc_port) as client:
        yield client
    gpu.release()
    assert eventually(lambda: metric(slow, "carpool_held_requests") == 0)


BEARER = "authorization", f"Bearer {KEY}"
AUTH: dict[str, Any] = {"metadata": [BEARER]}


class Stream:
    """One PredictStream: what is put into it is sent; answers are kept by id."""

    def __init__(self, client: GrpcClient, **options: Any) -> None:
        self._sent: queue.Queue[Any] = queue.Queue()
        self.call = client.method("PredictStream")(iter(self._sent.get, None), timeout=PATIENCE_S, **options)
        self.answers: dict[str, Any] = {}

    def ask(self, *texts: str) -> None:
        """Each is a request, under the first part of its own text."""
        self._sent.put(
            message("PredictStreamRequest")(
                requests=[{"id": text[:20], "request": {"input_json": json.dumps(text)}} for text in texts]
            )
        )

    def send(self, **fields: Any) -> None:
        self._sent.put(message("PredictStreamRequest")(**fields))

    def close(self) -> None:
        """No more will be sent."""
        self._sent.put(None)

    def read(self, count: int) -> None:
        """Take answers until there are so many."""
        while len(self.answers) < count:
            for each in next(self.call).responses:
                assert each.id not in self.answers
                self.answers[each.id] = each

    def ended(self) -> Refusal | None:
        """Take the rest; how it ended."""
        try:
            for response in self.call:
                self.answers |= {each.id: each for each in response.responses}
        except grpc.RpcError as error:
            return Refusal(error)
        return None


class TestPredict:
    def test_an_answer(self, client: GrpcClient) -> None:
        answer, call = client.method("Predict").with_call(
            message("PredictRequest")(input_json='"abc"', parameters='{"a": 1}', client_id="me"), timeout=PATIENCE_S
        )
        assert answer.output == b'"cba"' and answer.request_id.startswith("req_")
        assert answer.latency_ms >= answer.metadata.upstream_ms > 0
        assert (answer.metadata.model, answer.metadata.batch_size, answer.metadata.cached) == ("default", 1, False)
        assert call.code() is grpc.StatusCode.OK

    def test_bytes(self, client: GrpcClient) -> None:
        answer = client.method("Predict")(message("PredictRequest")(input_data=b"\x00abc"), timeout=PATIENCE_S)
        assert answer.output == b'"==wYiFGA"'

    def test_what_a_client_calls_its_request(self, client: GrpcClient) -> None:
        assert client.predict(metadata=[("x-request-id", "mine")]).request_id == "mine"

    def test_many_at_once_share_batches(self, client: GrpcClient) -> None:
        texts = [f"text {number}" for number in range(200)]
        calls = {
            text: client.method("Predict").future(message("PredictRequest")(input_json=json.dumps(text)))
            for text in texts
        }
        answers = {text: call.result(PATIENCE_S) for text, call in calls.items()}
        assert {text: json.loads(answer.output) for text, answer in answers.items()} == {t: t[::-1] for t in texts}
        assert max(answer.metadata.batch_size for answer in answers.values()) > 1

    @pytest.mark.parametrize(
        ("fields", "code", "reason"),
        [
            ({"input_json": '"x"', "model_id": "other"}, "NOT_FOUND", "UNKNOWN_MODEL"),
            ({"input_json": '"x'}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "NaN"}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "[" * 70 + "]" * 70}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": ""}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_data": b""}, "INVALID_ARGUMENT", "MALFORMED"),
            ({}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "1", "parameters": "[]"}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "1", "parameters": "{"}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "1", "client_id": "x" * 257}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": "1", "timeout_ms": -1}, "INVALID_ARGUMENT", "MALFORMED"),
            ({"input_json": f'"{"x" * 100_000}"'}, "RESOURCE_EXHAUSTED", "TOO_LARGE"),
        ],
    )
    def test_bad_input(self, client: GrpcClient, fields: dict[str, Any], code: str, reason: str) -> None:
        refusal = client.refused("Predict", message("PredictRequest")(**fields))
        assert (refusal.code, refusal.reason) == (code, reason)
        assert parts(refusal.details["ErrorInfo"])[2] == [b"carpool"]

    def test_problems_are_counted(self, gateway: GatewayProcess, client: GrpcClient) -> None:
        before = metric(gateway, 'carpool_problems_total{code="unknown-model"}')
        client.refused("Predict", message("PredictRequest")(input_json="1", model_id="x"))
        assert metric(gateway, 'carpool_problems_total{code="unknown-model"}') == before + 1

    @pytest.mark.parametrize(
        ("path", "piece"),
        [
            ("carpool.v1.Inference/PredictStream", "0a00"),
            ("inference.GRPCInferenceService/ModelInfer", "2a00"),
            ("inference.GRPCInferenceService/ModelInfer", "2200"),
        ],
    )
    def test_a_message_that_is_nothing_but_fields(self, client: GrpcClient, path: str, piece: str) -> None:
        """Parsed it would be 20 to 40 times as large; it is refused before."""
        call = client.channel.stream_stream("/" + path)(iter([bytes.fromhex(piece) * 40_000]), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "fields" in refused.value.details()

    def test_a_message_over_the_limit(self, client: GrpcClient) -> None:
        refusal = client.refused("Predict", message("PredictRequest")(input_data=b"x" * 1_000_000))
        assert refusal.code == "RESOURCE_EXHAUSTED"
        assert client.predict().output == b'"cba"'

    def test_what_is_not_there(self, client: GrpcClient) -> None:
        for path in ("/carpool.v1.Inference/Nothing", "/x/y"):
            with pytest.raises(grpc.RpcError) as refused:
                client.channel.unary_unary(path)(b"", timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    def test_compression_is_refused(self, client: GrpcClient) -> None:
        refusal = client.refused(
            "Predict", message("PredictRequest")(input_json='"x"'), compression=grpc.Compression.Gzip
        )
        assert refusal.code == "UNIMPLEMENTED"

    def test_a_deadline_is_the_requests_own(self, slow: GatewayProcess, held: GrpcClient, gpu: HeldGpu) -> None:
        calls = gpu.calls
        first = held.method("Predict").future(message("PredictRequest")(input_json='"1"'), **AUTH)
        assert eventually(lambda: gpu.calls == calls + 1)
        by_call = held.refused("Predict", message("PredictRequest")(input_json='"2"'), timeout=0.2, **AUTH)
        by_field = held.refused("Predict", message("PredictRequest")(input_json='"3"', timeout_ms=200), **AUTH)
        assert (by_call.code, by_field.code) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        assert by_field.reason == "DEADLINE_EXCEEDED"
        told = by_field.request_id
        with urllib.request.urlopen(f"http://127.0.0.1:{slow.admin_port}/internal/requests/{told}") as found:
            assert json.load(found)["status"] == "failed"
        assert eventually(lambda: metric(slow, "carpool_held_requests") == 1)
        gpu.release()
        assert first.result(PATIENCE_S).output
        assert gpu.calls == calls + 1  # neither was sent

    def test_whoever_cancels_takes_its_place_with_it(
        self, slow: GatewayProcess, held: GrpcClient, gpu: HeldGpu
    ) -> None:
        calls = gpu.calls
        sent = [held.method("Predict").future(message("PredictRequest")(input_json=f'"{n}"'), **AUTH) for n in range(3)]
        assert eventually(lambda: metric(slow, "carpool_held_requests") == 3)
        for call in sent:
            call.cancel()
        assert eventually(lambda: metric(slow, "carpool_held_requests") == 0)
        assert gpu.calls <= calls + 1


class TestStream:
    def test_many_in_flight_by_their_ids(self, client: GrpcClient) -> None:
        stream = Stream(client)
        texts = [f"text {number}" for number in range(2000)]
        for start in range(0, 2000, 400):
            stream.ask(*texts[start : start + 400])
        stream.read(2000)
        assert {own_id: json.loads(each.response.output) for own_id, each in stream.answers.items()} == {
            text: text[::-1] for text in texts
        }
        stream.ask("one more")
        stream.read(2001)
        stream.close()
        assert stream.ended() is None

    def test_a_half_closed_stream_is_answered(self, held: GrpcClient, slow: GatewayProcess, gpu: HeldGpu) -> None:
        stream = Stream(held, **AUTH)
        stream.ask("a", "b", "c")
        stream.close()
        assert eventually(lambda: metric(slow, "carpool_held_requests") == 3)
        gpu.release()
        assert stream.ended() is None
        assert {own_id: each.response.output for own_id, each in stream.answers.items()} == {
            "a": b'"a"', "b": b'"b"', "c": b'"c"',
        }  # fmt: skip

    def test_one_is_taken_back(self, held: GrpcClient, slow: GatewayProcess, gpu: HeldGpu) -> None:
        stream = Stream(held, **AUTH)
        stream.ask("a", "b")
        assert eventually(lambda: metric(slow, "carpool_held_requests") == 2)
        stream.send(cancel=["b", "nobody"])
        stream.read(1)
        assert stream.answers["b"].error.code == "client-left"
        gpu.release()
        stream.close()
        assert stream.ended() is None and stream.answers["a"].response.output == b'"a"'

    def test_what_is_wrong_with_one_is_told_to_it(self, client: GrpcClient) -> None:
        stream = Stream(client)
        stream.send(
            requests=[
                {"id": "good", "request": {"input_json": '"x"'}},
                {"id": "model", "request": {"input_json": '"x"', "model_id": "other"}},
                {"id": "json", "request": {"input_json": "{"}},
                {"id": "nothing"},
            ]
        )
        stream.read(4)
        stream.close()
        assert stream.ended() is None
        codes = {own_id: each.error.code for own_id, each in stream.answers.items()}
        assert codes == {"good": "", "model": "unknown-model", "json": "malformed", "nothing": "malformed"}

    def test_an_id_twice_ends_the_stream(self, held: GrpcClient) -> None:
        stream = Stream(held, **AUTH)
        stream.ask("a", "a")
        ended = stream.ended()
        assert ended is not None and (ended.code, ended.reason) == ("INVALID_ARGUMENT", "MALFORMED")

    def test_who_leaves_with_answers_unread_is_no_error(self, gateway: GatewayProcess) -> None:
        for _ in range(3):
            with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
                stream = Stream(GrpcClient(channel))
                for start in range(0, 400, 5):
                    stream.ask(*(f"{number:<20}{'x' * 20_000}" for number in range(start, start + 5)))
                stream.read(1)
                assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
                stream.call.cancel()
        assert eventually(lambda: metric(gateway, "carpool_grpc_calls") == 0)
        assert gateway.log_messages("error") == []

    def test_who_stays_takes_no_owner_s_place(self, held: GrpcClient, slow: GatewayProcess) -> None:
        """For reflection no credential is needed, and such a stream may rest for ever."""
        assert eventually(lambda: metric(slow, "carpool_grpc_calls") == 0)
        with ExitStack() as stack:
            for _ in range(STREAMS_MAX):
                peer = stack.enter_context(Http2Peer(slow.grpc_port))
                peer.call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            assert eventually(lambda: metric(slow, "carpool_grpc_calls") == STREAMS_MAX)
            one_more = stack.enter_context(Http2Peer(slow.grpc_port))
            one_more.call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            assert one_more.status() == "8"  # RESOURCE_EXHAUSTED
            stack.enter_context(Http2Peer(slow.grpc_port)).call("/carpool.v1.Inference/PredictStream", BEARER)
            assert eventually(lambda: metric(slow, "carpool_grpc_calls") == STREAMS_MAX + 1)
        assert eventually(lambda: metric(slow, "carpool_grpc_calls") == 0)


class TestTasks:
    def test_a_task(self, client: GrpcClient) -> None:
        submitted = client.method("Submit")(
            message("SubmitRequest")(request={"input_json": '"abc"'}), timeout=PATIENCE_S
        )
        assert submitted.status == 1
        asked = message("GetResultRequest")(task_id=submitted.task_id, wait_ms=30_000)
        found = client.method("GetResult")(asked, timeout=PATIENCE_S)
        assert (found.status, found.output, found.task_id) == (2, b'"cba"', submitted.task_id)
        forgotten = message("CancelRequest")(task_id=submitted.task_id)
        client.method("Cancel")(forgotten, timeout=PATIENCE_S)
        for name, request in (("GetResult", asked), ("Cancel", forgotten)):
            refusal = client.refused(name, request)
            assert (refusal.code, refusal.reason) == ("NOT_FOUND", "UNKNOWN_TASK")

    def test_bad_questions(self, client: GrpcClient) -> None:
        unknown = client.refused("GetResult", message("GetResultRequest")(task_id="no id"))
        assert unknown.code == "NOT_FOUND"
        for wait_ms in (-1, 30_001):
            asked = message("GetResultRequest")(task_id="0" * 32, wait_ms=wait_ms)
            assert client.refused("GetResult", asked).code == "INVALID_ARGUMENT"
        assert client.refused("Submit", message("SubmitRequest")()).code == "INVALID_ARGUMENT"

    def test_one_that_waits(self, held: GrpcClient, slow: GatewayProcess) -> None:
        submit, look = held.method("Submit"), held.method("GetResult")
        ids = [
            submit(message("SubmitRequest")(request={"input_json": text}), timeout=PATIENCE_S, **AUTH).task_id
            for text in ('"1"', '"2"')
        ]
        found = look(message("GetResultRequest")(task_id=ids[1]), timeout=PATIENCE_S, **AUTH)
        assert found.status == 1 and not found.output
        # Whoever leaves a long poll is not waited for.
        polls = [look.future(message("GetResultRequest")(task_id=ids[1], wait_ms=30_000), **AUTH) for _ in range(3)]
        for poll in polls:
            poll.cancel()
        # To somebody else it is not there.
        other = {"metadata": [("x-api-key", KEY + "2")]}
        assert held.refused("GetResult", message("GetResultRequest")(task_id=ids[1]), **other).code == "NOT_FOUND"
        for task_id in ids:
            held.method("Cancel")(message("CancelRequest")(task_id=task_id), timeout=PATIENCE_S, **AUTH)
        assert held.refused("GetResult", message("GetResultRequest")(task_id=ids[1]), **AUTH).code == "NOT_FOUND"


class TestWhoComesIn:
    def test_credentials(self, held: GrpcClient, gpu: HeldGpu) -> None:
        gpu.release()
        asked = message("PredictRequest")(input_json='"x"')
        for metadata in ([], [("authorization", "Bearer cp_wrong")], [("x-api-key", "x"), ("authorization", "x")]):
            refusal = held.refused("Predict", asked, metadata=metadata)
            assert (refusal.code, refusal.reason) == ("UNAUTHENTICATED", "UNAUTHORIZED")
        stream = Stream(held)
        ended = stream.ended()
        stream.close()
        assert ended is not None and ended.code == "UNAUTHENTICATED"
        assert held.predict('"x"', **AUTH).output == b'"x"'
        assert held.predict('"x"', metadata=[("x-api-key", KEY)]).output == b'"x"'

    def test_a_limit(self, held: GrpcClient, gpu: HeldGpu) -> None:
        gpu.release()
        options = {"metadata": [("x-api-key", KEY + "2")], "timeout": PATIENCE_S}
        asked = message("PredictRequest")(input_json='"x"')
        _, call = held.method("Predict").with_call(asked, **options)
        told = dict(call.trailing_metadata())
        assert told["ratelimit-policy"] == '"default";q=1;w=60' and told["ratelimit"].startswith('"default";r=1;')
        held.method("Predict")(asked, **options)
        refusal = held.refused("Predict", asked, **options)
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        assert {"RetryInfo", "QuotaFailure"} <= set(refusal.details)
        assert refusal.metadata["ratelimit"].startswith('"default";r=0;')
        stream = Stream(held, metadata=options["metadata"])
        stream.ask("a")
        stream.read(1)
        stream.close()
        assert stream.answers["a"].error.code == "rate-limited" and stream.answers["a"].error.retry_after_ms > 0
        assert stream.ended() is None


class TestTools:
    def test_health(self, client: GrpcClient) -> None:
        asked, check = message("grpc.health.v1.HealthCheckRequest"), client.method("grpc.health.v1.Health/Check")
        for name in ("", "carpool.v1.Inference"):
            assert check(asked(service=name), timeout=PATIENCE_S).status == 1
        assert client.refused("grpc.health.v1.Health/Check", asked(service="other")).code == "NOT_FOUND"
        watching = client.method("grpc.health.v1.Health/Watch")(asked(service="other"), timeout=PATIENCE_S)
        assert next(watching).status == 3
        watching.cancel()

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    def test_reflection(self, client: GrpcClient, version: str) -> None:
        package = f"grpc.reflection.{version}"
        asked = message(f"{package}.ServerReflectionRequest")
        questions = [
            asked(list_services=""),
            asked(file_containing_symbol="carpool.v1.Inference.Predict"),
            asked(file_containing_symbol="grpc.health.v1.HealthCheckResponse.ServingStatus"),
            asked(file_by_filename=f"grpc/reflection/{version}/reflection.proto"),
            asked(file_containing_symbol="nobody.Nothing"),
            asked(all_extension_numbers_of_type="carpool.v1.Error"),
            asked(file_containing_extension={"containing_type": "carpool.v1.Error", "extension_number": 1}),
            asked(),
        ]
        answers = list(
            client.method(f"{package}.ServerReflection/ServerReflectionInfo")(iter(questions), timeout=PATIENCE_S)
        )
        assert [each.original_request for each in answers] == questions
        names = [each.name for each in answers[0].list_services_response.service]
        assert {"carpool.v1.Inference", "grpc.health.v1.Health", f"{package}.ServerReflection"} <= set(names)
        compiled = FileDescriptorSet.FromString(PROTOS.joinpath("descriptors.binpb").read_bytes())
        for each in answers[1:4]:
            (descriptor,) = each.file_descriptor_response.file_descriptor_proto
            assert FileDescriptorProto.FromString(descriptor) in compiled.file
        assert [each.error_response.error_code for each in answers[4:]] == [5, 0, 5, 3]

    def test_what_is_compiled_is_what_is_written(self, tmp_path: Path) -> None:
        folder = Path(str(PROTOS))
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I",
            str(folder),
            "--include_imports",
            f"--descriptor_set_out={tmp_path / 'x'}",
        ]
        subprocess.run([*command, *names], check=True, timeout=PATIENCE_S)
        written = (tmp_path / "x").read_bytes()
        assert written == (folder / "descriptors.binpb").read_bytes(), "run `make protos`"


class TestDrain:
    def test_what_came_is_answered(self, tmp_path: Path, gpu: HeldGpu) -> None:
        gpu.hold()
        with serving(tmp_path, gpu.url, "--grpc-port=0", "--slots", "4", settings=PATIENT) as gateway:
            with grpc_client(gateway.grpc_port) as client:
                asked = message("grpc.health.v1.HealthCheckRequest")()
                watching = client.method("grpc.health.v1.Health/Watch")(asked, timeout=PATIENCE_S)
                assert next(watching).status == 1
                stream, idle = Stream(client), Stream(client)
                stream.ask("in a stream")
                reflection = client.method("grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
                questions: queue.Queue[Any] = queue.Queue()
                open_tool = reflection(iter(questions.get, None), timeout=PATIENCE_S)
                questions.put(message("grpc.reflection.v1.ServerReflectionRequest")(list_services=""))
                assert next(open_tool).list_services_response.service
                alone = client.method("Predict").future(message("PredictRequest")(input_json='"alone"'))
                assert eventually(lambda: metric(gateway, "carpool_held_requests") == 2)
                gateway.terminate()
                assert next(watching).status == 2
                with pytest.raises(StopIteration):
                    next(watching)
                gpu.release()
                assert alone.result(PATIENCE_S).output == b'"enola"'
                for each in (stream, idle):
                    ended = each.ended()
                    assert ended is not None and (ended.code, ended.reason) == ("UNAVAILABLE", "DRAINING")
                    each.close()
                assert stream.answers["in a stream"].response.output == b'"maerts a ni"'
                assert not idle.answers
                questions.put(None)
            assert gateway.process.wait(PATIENCE_S) == 0
            assert gateway.log_messages("error") == []


def test_tls_and_another_certificate(tmp_path: Path, certificates: Certificates) -> None:
    certificates.make("of-a-stranger", "stranger", "subjectAltName=DNS:localhost")
    cert, key = tmp_path / "shown.pem", tmp_path / "shown.key"

    def show(name: str) -> None:
        cert.write_bytes(Path(certificates.pem(name)).read_bytes())
        key.write_bytes(Path(certificates.key(name)).read_bytes())

    def comes_in(port: int, signer: str) -> bool:
        trusted = grpc.ssl_channel_credentials(Path(certificates.pem(signer)).read_bytes())
        try:
            with grpc_client(port, trusted) as client:
                return bool(client.method("Predict")(message("PredictRequest")(input_json='"x"'), timeout=5).output)
        except grpc.RpcError:
            return False

    show("server")
    with serving(tmp_path / "g", SIM, "--grpc-port=0", "--tls-cert", str(cert), "--tls-key", str(key)) as gateway:
        trusted = grpc.ssl_channel_credentials(Path(certificates.pem("ca")).read_bytes())
        with grpc_client(gateway.grpc_port, trusted) as client:
            assert client.predict().output == b'"cba"'
            assert not comes_in(gateway.grpc_port, "stranger")
            show("of-a-stranger")
            gateway.reload()
            assert eventually(lambda: comes_in(gateway.grpc_port, "stranger"))
            assert not comes_in(gateway.grpc_port, "ca")
            assert client.predict().output == b'"cba"'  # a connection that is open goes on


async def test_over_redis_processes_share_a_port_and_a_budget(tmp_path: Path, redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (tmp_path / "carpool.toml").write_text(
        f"""
        [auth]
        mode = "keys"
        [keys.one]
        sha256 = "{sha256(KEY.encode()).hexdigest()}"
        per_minute = 1
        burst = 40
        """
    )
    settings = {"broker.url": redis_server.url, "broker.namespace": secrets.token_hex(6)}
    flags = ("--upstream", SIM, "--processes", "2", "--grpc-port", str(port))
    seen: set[str] = set()
    codes: list[str] = []

    def ask() -> bool:
        """On a connection of its own, which the kernel gives to one of them."""
        with grpc_client(port) as client:
            try:
                answer = client.predict(wait_for_ready=True, **AUTH)
                seen.add(answer.request_id.partition("-")[0])
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
        return codes[-1] == "RESOURCE_EXHAUSTED"

    def ask_on_a_stream() -> str:
        with grpc_client(port) as client:
            stream = Stream(client, **AUTH)
            stream.ask("a")
            stream.read(1)
            stream.close()
            code: str = stream.answers["a"].error.code
            return code

    async with running_role(tmp_path, "serve", *flags, settings=settings) as parent:
        await until(lambda: parent.log.read_text().count("gRPC on") == 2)
        while not await asyncio.to_thread(ask):
            assert len(codes) < 60
        assert len(seen) == 2 and set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert await asyncio.to_thread(ask_on_a_stream) == "rate-limited"
        parent.terminate()
        assert await parent.exit_code() == 0


class TestFuzz:
    def test_malformed_messages(self, gateway: GatewayProcess, client: GrpcClient) -> None:
        random = Random(7)
        good = message("PredictStreamRequest")(
            requests=[{"id": "x", "request": {"input_json": '"x"', "parameters": "{}"}}], cancel=["y"]
        ).SerializeToString()
        methods = [
            *("carpool.v1.Inference/Predict", "carpool.v1.Inference/Submit", "carpool.v1.Inference/GetResult"),
            *("carpool.v1.Inference/Cancel", "carpool.v1.Inference/PredictStream", "grpc.health.v1.Health/Check"),
            "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ]

        def malformed() -> bytes:
            data = bytearray(good if random.random() < 0.7 else random.randbytes(random.randrange(40)))
            for _ in range(random.randrange(1, 4)):
                if data:
                    data[random.randrange(len(data))] = random.randrange(256)
            return bytes(data[: random.randrange(len(data) + 1)])

        jobs = [(random.choice(methods), malformed()) for _ in range(MALFORMED)]

        def send(job: tuple[str, bytes]) -> str:
            path, data = job
            call = client.channel.stream_stream("/" + path)(iter([data]), timeout=PATIENCE_S)
            try:
                list(call)
            except grpc.RpcError as error:
                code: str = error.code().name
                return code
            return "OK"

        with ThreadPoolExecutor(8) as pool:
            codes = set(pool.map(send, jobs))
        assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}, codes
        self.is_whole(gateway, client)

    def test_malformed_frames(self, gateway: GatewayProcess, client: GrpcClient) -> None:
        random = Random(7)
        for _ in range(MALFORMED // 10):
            with Http2Peer(gateway.grpc_port) as peer:
                if random.random() < 0.5:
                    peer.call("/carpool.v1.Inference/" + random.choice(["Predict", "PredictStream"]))
                for _ in range(10):
                    size = random.randrange(30)
                    peer.frame(
                        random.randrange(12), random.randrange(256), random.choice([0, 1, 3]), random.randbytes(size)
                    )
        self.is_whole(gateway, client)

    @staticmethod
    def is_whole(gateway: GatewayProcess, client: GrpcClient) -> None:
        """It serves, and nothing is left behind."""
        assert client.predict().output == b'"cba"'
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
        assert eventually(lambda: metric(gateway, "carpool_grpc_calls") == 0)
        assert gateway.log_messages("error") == []


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = carpool("serve", "--upstream", SIM, "--port", "0", "--no-journal", "--grpc-port", str(port))
        assert done.returncode == 2 and str(port) in done.stderr, done
