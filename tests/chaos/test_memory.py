"""M1: 6,000 answers of a megabyte on each face, all read, by one client. One line for each face.

Also what others may make a process keep: parameters that never come again, and answers that are not read.

The garbage collector runs rarely (app.py): what is part of a reference cycle stays for as long as nobody looks.
"""

import asyncio
import http.client
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from support.gateway import request_bytes, serving
from support.grpc_client import GrpcClient, grpc_client, message
from support.processes import PATIENCE_S, GatewayProcess
from support.stream_server import stream_server
from support.threads import in_a_thread

MB = 1_000_000
ANSWERS = 6_000
GROWN_MAX = 100 * MB
LOOK_EVERY = 50
UNREAD_MAX, UNREAD_CLIENTS = 20 * MB, 100

CONFIGURATION = """
model = "vector"
[gateway]
grpc_port = 0
[batching]
max_wait_ms = 0
max_batch = {max_batch}
[models.text]
endpoints = ["http://127.0.0.1:{port}/infer"]
[models.vector]
endpoints = ["http://127.0.0.1:{port}/vectors"]
[models.tensor]
protocol = "kserve_v2"
endpoints = ["http://127.0.0.1:{port}"]
[models.image]
protocol = "kserve_v2"
endpoints = ["http://127.0.0.1:{port}"]
tensor = "IMAGE BYTES 1,1"
"""


class LongAnswers:
    """An endpoint with answers of so many bytes. No two are the same: an answer that comes twice is not believed."""

    def __init__(self) -> None:
        self.size = MB
        self.port = 0
        self._numbers = count()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: calls one after the other."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            more, answer = self._answer(head.split(b" ")[1], body) if head.startswith(b"POST") else ("", b"{}")
            writer.write(f"HTTP/1.1 200 OK\r\n{more}Content-Length: {len(answer)}\r\n\r\n".encode() + answer)
            await writer.drain()

    def _answer(self, path: bytes, body: bytes) -> tuple[str, bytes]:
        """Further lines of the head, and the body."""
        number = f"{next(self._numbers):08d}"
        if path == b"/infer":
            inputs = len(json.loads(body)["inputs"])
            each = f'"{number}{"x" * (self.size // inputs)}"'
            return "", f'{{"outputs":[{",".join([each] * inputs)}]}}'.encode()
        if path == b"/vectors":
            inputs = len(json.loads(body)["inputs"])
            each = f"[0.{number}{',0.1234567' * (self.size // 10 // inputs)}]"
            return "", f'{{"outputs":[{",".join([each] * inputs)}]}}'.encode()
        tensor: dict[str, Any] = {"name": "Y", "datatype": "BYTES", "shape": [1, 1]}
        if b"/tensor/" in path:
            return "", json.dumps({"outputs": [tensor | {"data": [number + "x" * self.size]}]}).encode()
        tail = (self.size + 8).to_bytes(4, "little") + number.encode() + b"\xff" * self.size  # no text, so it stays raw
        tensor["parameters"] = {"binary_data_size": len(tail)}
        text = json.dumps({"outputs": [tensor]}).encode()
        return f"Inference-Header-Content-Length: {len(text)}\r\n", text + tail

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["LongAnswers"]:
        async with stream_server(self.serve, limit=1 << 20) as server:
            self.port = server.port
            yield self


@pytest.fixture
def upstream() -> Iterator[LongAnswers]:
    with in_a_thread(LongAnswers().listening()) as (running, _):
        yield running


@pytest.fixture
def gateway(tmp_path: Path, upstream: LongAnswers) -> Iterator[GatewayProcess]:
    with serving_long_answers(tmp_path, upstream) as running:
        yield running


@contextmanager
def serving_long_answers(directory: Path, upstream: LongAnswers, max_batch: int = 64) -> Iterator[GatewayProcess]:
    (directory / "carpool.toml").write_text(CONFIGURATION.format(port=upstream.port, max_batch=max_batch))
    with serving(directory, "", settings={"carpool.composition.faces.UNREAD_BYTES_MAX": UNREAD_MAX}) as running:
        yield running


class Client:
    """One client of all faces, with a connection for each kind. Each method returns the bytes of an answer."""

    def __init__(self, gateway: GatewayProcess, stream: ClientConnection, grpc: GrpcClient) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._grpc = grpc
        self._numbers = count()
        self._task = ""

    def close(self) -> None:
        self._http.close()

    def _call(self, path: str, body: Any = None, **headers: str) -> int:
        if body is None:
            self._http.request("GET", path)
        else:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self._http.request("POST", path, data, {"Content-Type": "application/json"} | headers)
        answer = self._http.getresponse()
        told = answer.read()
        assert answer.status == 200, told[:500]
        return len(told)

    def _text(self) -> str:
        return f"text {next(self._numbers)}"

    def _task_id(self) -> str:
        if not self._task:
            body = json.dumps({"model": "text", "input": self._text(), "mode": "async"})
            self._http.request("POST", "/v1/inference", body, {"Content-Type": "application/json"})
            self._task = json.loads(self._http.getresponse().read())["task_id"]
            self._call(f"/v1/result/{self._task}?wait_ms=30000")
        return self._task

    def inference(self) -> int:
        return self._call("/v1/inference", {"model": "text", "input": self._text()})

    def predict(self) -> int:
        return self._call("/v1/predict", {"model_id": "text", "input_data": self._text()})

    def octets(self) -> int:
        octets = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
        return self._call("/v1/predict?model_id=image", self._text().encode(), **octets)

    def poll(self) -> int:
        return self._call(f"/v1/result/{self._task_id()}")

    def long_poll(self) -> int:
        return self._call(f"/v1/result/{self._task_id()}?wait_ms=30000")

    def events(self) -> int:
        return self._call(f"/v1/result/{self._task_id()}/events")

    def openai(self) -> int:
        return self._call("/v1/embeddings", {"model": "vector", "input": [self._text(), "b"]})

    def tei(self) -> int:
        return self._call("/embed", {"inputs": self._text()})

    def kserve_v1(self) -> int:
        return self._call("/v1/models/text:predict", {"instances": [self._text(), "b", "c", "d"]})

    def kserve_v2(self, model: str = "tensor", **more: Any) -> int:
        tensor = {"name": "T", "datatype": "BYTES", "shape": [1, 1], "data": [self._text()]}
        return self._call(f"/v2/models/{model}/infer", {"inputs": [tensor], **more})

    def kserve_v2_binary(self) -> int:
        return self.kserve_v2("image", parameters={"binary_data_output": True})

    def stream(self) -> int:
        self._stream.send(json.dumps({"id": 1, "model": "text", "input": self._text()}))
        return len(self._stream.recv())

    def grpc(self) -> int:
        asked = message("PredictRequest")(model_id="text", input_json=json.dumps(self._text()))
        size: int = self._grpc.method("Predict")(asked, timeout=PATIENCE_S).ByteSize()
        return size

    def grpc_poll(self) -> int:
        asked = message("GetResultRequest")(task_id=self._task_id())
        size: int = self._grpc.method("GetResult")(asked, timeout=PATIENCE_S).ByteSize()
        return size

    def grpc_stream(self) -> int:
        asked = message("PredictStreamRequest")()
        one = asked.requests.add()
        one.id, one.request.model_id, one.request.input_json = "a", "text", json.dumps(self._text())
        size: int = next(self._grpc.method("PredictStream")(iter([asked]), timeout=PATIENCE_S)).ByteSize()
        return size

    def grpc_v2(self) -> int:
        asked = message("inference.ModelInferRequest")(model_name="image")
        tensor = asked.inputs.add()
        tensor.name, tensor.datatype = "T", "BYTES"
        tensor.shape.extend([1, 1])
        tensor.contents.bytes_contents.append(self._text().encode())
        method = self._grpc.method("inference.GRPCInferenceService/ModelInfer")
        size: int = method(asked, timeout=PATIENCE_S).ByteSize()
        return size


FACES: list[Callable[[Client], int]] = [
    Client.inference,
    Client.predict,
    Client.octets,
    Client.poll,
    Client.long_poll,
    Client.events,
    Client.openai,
    Client.tei,
    Client.kserve_v1,
    Client.kserve_v2,
    Client.kserve_v2_binary,
    Client.stream,
    Client.grpc,
    Client.grpc_poll,
    Client.grpc_stream,
    Client.grpc_v2,
]


def report(what: str, *, passed: bool) -> None:
    """Print the one line that a chaos test owes its reader."""
    print(f"\nM1: {what}: {'pass' if passed else 'FAIL'}", flush=True)  # noqa: T201


@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.__name__))
def test_answers_that_were_read_are_not_kept(gateway: GatewayProcess, face: Callable[[Client], int]) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    with (
        ExitStack() as opened,
        connect(f"ws://127.0.0.1:{gateway.port}/v1/stream", max_size=None) as stream,
        grpc_client(gateway.grpc_port, options=options) as grpc,
    ):
        client = opened.enter_context(closing(Client(gateway, stream, grpc)))
        start = gateway.resident_bytes()
        most = read = answers = 0
        while answers < ANSWERS and most - start < 10 * GROWN_MAX:
            read += face(client)
            answers += 1
            if answers % LOOK_EVERY == 0:
                most = max(most, gateway.resident_bytes())
    passed = most - start <= GROWN_MAX and read >= answers * MB and answers == ANSWERS
    what = f"{answers} answers of {read // answers / MB:.1f} MB, {face.__name__}, all read by one client"
    report(f"{what}: resident memory {start / MB:.0f} → {most / MB:.0f} MB at most", passed=passed)
    assert passed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("numbers", "status"), [(["0.12345678901234"] * 900, 200), (["1e15"] * 3000, 400)])
def test_parameters_that_never_come_again_are_not_kept(
    gateway: GatewayProcess, upstream: LongAnswers, numbers: list[str], status: int
) -> None:
    """15 KB each. `1e15` is kept, and sent on, as 1000000000000000.0: so many of these are refused."""
    upstream.size = 10
    start, requests, long = gateway.resident_bytes(), 8960, ",".join(numbers)
    statuses: Counter[int] = Counter()
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)) as client:
        for number in range(requests):
            body = f'{{"model":"text","input":"x","parameters":{{"n":{number},"a":[{long}]}}}}'
            client.request("POST", "/v1/inference", body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            answer.read()
            statuses[answer.status] += 1
    end = gateway.resident_bytes()
    passed = end - start <= GROWN_MAX and statuses == {status: requests}
    what = f"{requests} requests with 15 KB of parameters each ({numbers[0]}, …), no two the same: {dict(statuses)}"
    report(f"{what}: resident memory {start / MB:.0f} → {end / MB:.0f} MB", passed=passed)
    assert passed


def kernel_takes() -> int:
    """What a sender gets rid of though nobody reads: the rest stays in its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener, deaf_client(listener.getsockname()[1]):
        sender, taken, part = listener.accept()[0], 0, bytes(MB)
        with sender:
            sender.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    taken += sender.send(part)
        return taken


def deaf_client(port: int) -> socket.socket:
    """One that has room for little, and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.connect(("127.0.0.1", port))
    return client


@pytest.mark.timeout(300)
@pytest.mark.parametrize("left", [40_000, 400_000])
def test_answers_that_are_not_read_are_bounded(tmp_path: Path, upstream: LongAnswers, left: int) -> None:
    """Of each answer so much is left in the process; but the whole of it stays in memory."""
    upstream.size = kernel_takes() + left
    with ExitStack() as opened:
        gateway = opened.enter_context(serving_long_answers(tmp_path, upstream, max_batch=1))
        start = most = gateway.resident_bytes()
        for number in range(UNREAD_CLIENTS):
            client = opened.enter_context(deaf_client(gateway.port))
            body = json.dumps({"model": "text", "input": f"text {number}"}).encode()
            client.sendall(request_bytes("POST", "/v1/inference", body, "Content-Type: application/json"))
        # Soon all have their answers; WRITE_TIMEOUT_S is twice as long.
        for _ in range(100):
            time.sleep(0.05)
            most = max(most, gateway.resident_bytes())
    passed = most - start <= GROWN_MAX
    what = f"{UNREAD_CLIENTS} clients that do not read {upstream.size / MB:.1f} MB each, bound {UNREAD_MAX // MB} MB"
    report(f"{what}: resident memory {start / MB:.0f} → {most / MB:.0f} MB at most", passed=passed)
    assert passed
