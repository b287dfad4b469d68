"""A real Envoy, configured as `deploy/envoy` says, in front of every face at one port, and while gateways leave."""

import asyncio
import json
import queue
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from support.client import Connection, ask_once, inference_body
from support.gateway import SIM, HeldGpu, Peer, ask, eventually, metric, request_bytes, serving
from support.grpc_client import GrpcClient, grpc_client, message
from support.interop import environment_python, free_ports, running_server, show
from support.processes import PATIENCE_S, GatewayProcess, running_role, until
from support.redis_servers import RedisServer

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "envoy" / "carpool.yaml"
HTTP2_CALLS = Path(__file__).parent / "clients" / "http2_calls.py"
# Requests wait as long as a test holds the GPU; clients of Envoy are not all one owner.
SETTINGS = {
    "broker.queue_timeout_s": 600,
    "broker.total_timeout_s": 600,
    "upstream.timeout_s": 600,
    "gateway.trusted_proxies": "127.0.0.1",
}
ROUNDS = 2
GRACE_S = 4.0


@contextmanager
def envoy(directory: Path, *gateways: tuple[int, int]) -> Iterator[int]:
    """Envoy in front of these, each with its ports for HTTP and gRPC; the port that it has for clients."""
    (port,) = free_ports(1)
    first, last = gateways[0], gateways[-1]
    ports = {"8080": port, "8000": first[0], "8002": first[1], "8010": last[0], "8012": last[1]}
    text = CONFIGURATION.read_text()
    assert set(re.findall(r"port_value: (\d+)", text)) == set(ports)
    configuration = directory / "envoy.yaml"
    configuration.write_text(re.sub(r"port_value: (\d+)", lambda found: f"port_value: {ports[found[1]]}", text))
    program = environment_python("envoy").parent / "envoy"
    # Tests beside this one may run an Envoy, too: without a shared memory region each is alone.
    command = [str(program), "-c", str(configuration), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    with running_server(command, {}, (port, "/v2/health/ready"), directory / "envoy.log"):
        yield port


@pytest.fixture(scope="module")
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        yield held


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, gpu: HeldGpu) -> Iterator[GatewayProcess]:
    settings = SETTINGS | {"limits.streams": 2}
    with serving(tmp_path_factory.mktemp("gateway"), gpu.url, "--grpc-port=0", settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, gateway: GatewayProcess) -> Iterator[int]:
    with envoy(tmp_path_factory.mktemp("envoy"), (gateway.port, gateway.grpc_port)) as running:
        program = environment_python("envoy").parent / "envoy"
        show(subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip())
        yield running


@pytest.fixture(autouse=True)
def released(gpu: HeldGpu) -> Iterator[None]:
    yield
    gpu.release()


class TestEveryFaceAtOnePort:
    def test_http_1(self, port: int) -> None:
        answer = ask(port, "POST", "/v1/inference", {"input": "hello"}, "X-Request-Id: mine")
        assert (answer.json["output"], answer.headers["x-request-id"]) == ("olleh", "mine")
        with Peer(port) as peer:
            body = inference_body("in pieces")
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
            peer.send(request_bytes("POST", "/v1/inference", b"", "Transfer-Encoding: chunked") + chunks)
            assert peer.read().json["output"] == "seceip ni"
            refused = peer.ask("POST", "/v1/inference", b"{")
            assert (refused.status, refused.headers["content-type"]) == (400, "application/problem+json")
            peer.send_until_refused(request_bytes("POST", "/v1/inference", b"1" * 3_000_000))
            assert peer.read().status == 413

    def test_http_2(self, port: int) -> None:
        command = [str(environment_python("envoy")), str(HTTP2_CALLS), f"http://127.0.0.1:{port}"]
        done = subprocess.run(command, check=False, timeout=PATIENCE_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"right": 51, "errors": 2}

    def test_grpc(self, port: int) -> None:
        with grpc_client(port) as client:
            assert client.predict('"hello"').output == b'"olleh"'
            refused = client.refused("Predict", message("PredictRequest")(input_json="{"))
            assert refused.code == "INVALID_ARGUMENT" and "ErrorInfo" in refused.details
            health = client.method("grpc.health.v1.Health/Check")
            assert health(message("grpc.health.v1.HealthCheckRequest")(), timeout=PATIENCE_S).status == 1
            texts = [f"text {number}" for number in range(100)]
            asked = [{"id": text, "request": {"input_json": json.dumps(text)}} for text in texts]
            messages = (message("PredictStreamRequest")(requests=asked[at : at + 10]) for at in range(0, 100, 10))
            answers = client.method("PredictStream")(messages, timeout=PATIENCE_S)
            outputs = {each.id: json.loads(each.response.output) for many in answers for each in many.responses}
            assert outputs == {text: text[::-1] for text in texts}

    def test_events_of_a_task_come_one_by_one(self, port: int, gpu: HeldGpu) -> None:
        gpu.hold()
        task = ask(port, "POST", "/v1/inference", {"input": "a task"}, "Prefer: respond-async").json["task_id"]
        with Peer(port) as peer:
            peer.send(request_bytes("GET", f"/v1/result/{task}/events"))
            received = b""
            while b"event: processing" not in received:
                received += peer.socket.recv(65536)
            assert b"text/event-stream" in received and b"event: done" not in received
            gpu.release()
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += peer.socket.recv(65536)
            assert b"event: done" in received and b'"output":"ksat a"' in received

    def test_web_socket(self, port: int) -> None:
        with connect(f"ws://127.0.0.1:{port}/v1/stream") as client:
            client.send(json.dumps([{"id": number, "input": f"text {number}"} for number in range(100)]))
            outputs: dict[int, str] = {}
            while len(outputs) < 100:
                outputs |= {answer["id"]: answer["output"] for answer in json.loads(client.recv(PATIENCE_S))}
        assert outputs == {number: f"text {number}"[::-1] for number in range(100)}

    def test_whoever_hangs_up_frees_the_seat(self, port: int, gateway: GatewayProcess, gpu: HeldGpu) -> None:
        gpu.hold()
        with grpc_client(port) as client, Peer(port) as peer:
            call = client.method("Predict").future(message("PredictRequest")(input_json='"x"'))
            peer.send(request_bytes("POST", "/v1/inference", inference_body("x")))
            assert eventually(lambda: metric(gateway, "carpool_held_requests") == 2)
            call.cancel()
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)

    def test_owners_are_told_apart(self, port: int) -> None:
        def opens(address: str, **headers: str) -> int:
            """The status of a further stream from there."""
            try:
                opened.enter_context(connect(url, source_address=(address, 0), additional_headers=headers))
            except InvalidStatus as refused:
                return refused.response.status_code
            return 101

        url = f"ws://127.0.0.1:{port}/v1/stream"
        with ExitStack() as opened:
            assert [opens("127.0.0.2") for _ in range(3)] == [101, 101, 429]
            # Nor does it help to say who one would like to be.
            claim = {"X-Forwarded-For": "127.0.0.9"}
            assert [opens("127.0.0.3", **claim) for _ in range(3)] == [101, 101, 429]


class Load:
    """Clients of every face that never repeat a request; how each call ended, by face."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_over = False
        self.ended: Counter[tuple[str, str]] = Counter()
        self._number = 0

    def _text(self) -> str:
        self._number += 1
        return f"text {self._number}"

    def _judge(self, face: str, text: str, output: object) -> None:
        self.ended[face, "right" if output == text[::-1] else "wrong"] += 1

    async def http(self) -> None:
        connection = await Connection.open(self._port)
        while not self.is_over:
            text = self._text()
            answer = await connection.ask("POST", "/v1/inference", inference_body(text))
            if answer.status == 200:
                self._judge("HTTP", text, answer.json["output"])
            else:
                self.ended["HTTP", f"{answer.status} {answer.body.decode()}"] += 1
        await connection.close()

    async def predict(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            predict = GrpcClient(channel).method("Predict")
            while not self.is_over:
                text = self._text()
                try:
                    answer = await predict(message("PredictRequest")(input_json=json.dumps(text)), timeout=PATIENCE_S)
                except grpc.aio.AioRpcError as error:
                    self.ended["gRPC", f"{error.code().name} {error.details()}"] += 1
                else:
                    self._judge("gRPC", text, json.loads(answer.output))

    def predict_stream(self) -> None:
        """In a thread: of a stream that ends while something is written, grpcio's asyncio client says INTERNAL."""
        with grpc_client(self._port) as client:
            while not self.is_over:
                sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
                answers = client.method("PredictStream")(iter(sent.get, None), timeout=PATIENCE_S)
                try:
                    while not self.is_over:
                        text = self._text()
                        asked = {"id": "1", "request": {"input_json": json.dumps(text)}}
                        sent.put(message("PredictStreamRequest")(requests=[asked]))
                        self._judge("gRPC stream", text, json.loads(next(answers).responses[0].response.output))
                except grpc.RpcError as error:
                    self.ended["gRPC stream", f"{error.code().name} {error.details()}"] += 1
                sent.put(None)

    async def tasks(self) -> None:
        """Tasks with their events, the next one as soon as one is done."""
        while not self.is_over:
            text = self._text()
            prefer = "Prefer: respond-async\r\n"
            accepted = await ask_once(self._port, "POST", "/v1/inference", inference_body(text), prefer)
            assert accepted.status == 202, accepted
            while (events := await self._events(accepted.json["task_id"])) is None:
                self.ended["task", "told to listen again"] += 1
            self._judge("task", text, events["output"])

    async def _events(self, task_id: str) -> Any:
        """What the last event of a task says; None if the listener was sent away before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request_bytes("GET", f"/v1/result/{task_id}/events"))
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            received = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        found = re.search(rb"event: done\n(?:id: .*\n)?data: (.*)\n", received)
        if found is None:
            assert b"retry: " in received, received
            return None
        return json.loads(found[1])

    async def web_socket(self) -> None:
        while not self.is_over:
            async with connect_async(f"ws://127.0.0.1:{self._port}/v1/stream") as client:
                try:
                    while not self.is_over:
                        text = self._text()
                        await client.send(json.dumps({"id": 1, "input": text}))
                        answer = json.loads(await client.recv())[0]
                        self._judge("WebSocket", text, answer.get("output"))
                except ConnectionClosed as end:
                    self.ended["WebSocket", str(end.rcvd)] += 1


@pytest.mark.timeout(300)
async def test_gateways_that_leave_one_after_the_other(tmp_path: Path, redis_server: RedisServer) -> None:
    shared = SETTINGS | {"broker.url": redis_server.url, "broker.namespace": tmp_path.name}
    # Longer than Envoy may take to look at a gateway's health on a machine that is very busy.
    settings = shared | {"gateway.drain_grace_s": GRACE_S}
    ports = free_ports(6)
    places = [ports[:3], ports[3:]]

    def start(number: int) -> Any:
        http, admin, grpc_port = map(str, places[number])
        flags = ("--port", http, "--admin-port", admin, "--grpc-port", grpc_port)
        return running_role(tmp_path / str(number), "gateway", *flags, settings=settings)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            running_role(tmp_path / "batcher", "batcher", "--upstream", SIM, settings=shared)
        )
        gateways = [await stack.enter_async_context(start(number)) for number in (0, 1)]
        opened = envoy(tmp_path, *((place[0], place[2]) for place in places))
        port = await asyncio.to_thread(opened.__enter__)
        stack.callback(opened.__exit__, None, None, None)
        load = Load(port)
        clients = [*(load.http() for _ in range(16)), *(load.predict() for _ in range(8)), load.web_socket()]
        tasks = [load.tasks() for _ in range(4)]
        running = [asyncio.create_task(client) for client in [*clients, *tasks, asyncio.to_thread(load.predict_stream)]]
        for number in (0, 1) * ROUNDS:
            # Both are asked before one leaves.
            for each in gateways:
                await until(lambda each=each: is_asked(each))
            gateways[number].terminate()
            assert await gateways[number].exit_code() == 0
            gateways[number] = await stack.enter_async_context(start(number))
        load.is_over = True
        await asyncio.gather(*running)
        assert [message for each in gateways for message in each.log_messages("error")] == []
    show(f"{2 * ROUNDS} gateways left behind Envoy, which repeats nothing: {dict(load.ended)}")
    assert load.ended.keys() - {("task", "told to listen again")} == {
        *((face, "right") for face in ("HTTP", "gRPC", "gRPC stream", "WebSocket", "task")),
        ("gRPC stream", "UNAVAILABLE this gateway is shutting down; connect again to reach another one"),
        ("WebSocket", "1012 (service restart) retry_after_s=1"),
    }


async def is_asked(gateway: GatewayProcess) -> bool:
    return await gateway.metric("carpool_requests_total") > 50
