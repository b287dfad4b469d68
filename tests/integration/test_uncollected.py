"""Nothing that holds a body or an answer is part of a reference cycle.

The garbage collector runs rarely (app.py), and does not know that an object holds megabytes. Here it never runs: each
face is used in each way that a call can end, and then nothing of it may be in memory, and nothing may be left for the
collector. A process whose calls end well holds no more after the ten-thousandth than after the first.
"""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
from websockets.sync.client import connect

from carpool.tools.sim_gpu import GpuFleet
from support.client import Response
from support.gateway import Peer, ask, eventually, metric, request_bytes
from support.grpc_client import GrpcClient, grpc_client, message
from support.redis_servers import RedisServer
from support.tensor_gpu import tensor_gpu
from support.uncollected import UncollectedProcess, uncollected

pytestmark = pytest.mark.xdist_group("uncollected")

POISON, REFUSED = "arsenic", "unwanted"
TEXT = "x" * 300_000
JSON = "Content-Type: application/json"
OCTETS = ("Content-Type: application/octet-stream", "Accept: application/octet-stream")
NO_TASK = "0" * 32
TIMES = 2
# What grpcio and websockets themselves leave for the collector has no body in it.
FOREIGN_BYTES_MAX = 16 * 1024
ANY_LENGTH = [("grpc.max_receive_message_length", -1)]

CONFIGURATION = """
model = "words"
[gateway]
port = 0
admin_port = 0
grpc_port = 0
[input]
body_bytes_max = 4194304
[log]
format = "json"
[limits]
anonymous = 1000000
[shedding]
mode = "off"
[broker]
queue_timeout_s = 60
total_timeout_s = 90
[tasks]
data_dir = "."
[webhooks]
hosts = ["127.0.0.1:9"]
allow_http = true
allow_private = true
secrets = ["whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"]
[upstream]
attempts = 2
[models.words]
endpoints = ["http://127.0.0.1:{words}/infer"]
[models.slow]
endpoints = ["http://127.0.0.1:{slow}/infer"]
[models.vectors]
endpoints = ["http://127.0.0.1:{vectors}/infer"]
[models.kept]
endpoints = ["http://127.0.0.1:{words}/infer"]
cache = true
[models.tf]
protocol = "kserve_v1"
endpoints = ["http://127.0.0.1:{words}"]
[models.mirror]
protocol = "kserve_v2"
endpoints = ["http://127.0.0.1:{words}"]
[models.image]
protocol = "kserve_v2"
endpoints = ["http://127.0.0.1:{words}"]
tensor = "IMAGE BYTES 1,1"
[models.slow_mirror]
protocol = "kserve_v2"
endpoints = ["http://127.0.0.1:{slow}"]
[models.by_grpc]
{by_grpc}
[models.gone_by_grpc]
protocol = "kserve_v2_grpc"
endpoints = ["grpc://127.0.0.1:9"]
[models.gone]
endpoints = ["http://127.0.0.1:9/infer"]
[models.failing]
endpoints = ["http://127.0.0.1:{failing}/infer"]
[models.resetting]
endpoints = ["http://127.0.0.1:{resetting}/infer"]
[models.mumbling]
endpoints = ["http://127.0.0.1:{mumbling}/infer"]
"""
GPUS: dict[str, dict[str, Any]] = {
    "words": {"latency_ms": 1, "slots": 4, "poison": POISON, "refuse": REFUSED},
    "vectors": {"latency_ms": 1, "slots": 4, "dimensions": 20_000},
    "slow": {"latency_ms": 200, "slots": 4},
    "failing": {"latency_ms": 1, "error_rate": 1.0},
    "resetting": {"latency_ms": 1, "reset_rate": 1.0},
    "mumbling": {"latency_ms": 1, "garbage_rate": 1.0},
}


class Stand(NamedTuple):
    """A gateway, with the batcher if that is another process, and what is behind it."""

    gateway: UncollectedProcess
    processes: list[UncollectedProcess]
    slow: GpuFleet


@pytest.fixture(scope="module", params=["embedded", "redis"])
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Stand]:
    directory = tmp_path_factory.mktemp("uncollected")
    with ExitStack() as opened:
        gpus = {name: opened.enter_context(tensor_gpu(**settings)) for name, settings in GPUS.items()}
        ports = {name: gpu.ports[0] for name, gpu in gpus.items()}
        # Behind the one that is looked at there is another, which speaks gRPC.
        by_grpc = 'protocol = "kserve_v2"\nendpoints = ["http://127.0.0.1:{words}"]'.format(**ports)
        configuration = CONFIGURATION.format(by_grpc=by_grpc, **ports)
        behind = opened.enter_context(uncollected(directory / "behind", "serve", configuration))
        by_grpc = f'protocol = "kserve_v2_grpc"\nendpoints = ["grpc://127.0.0.1:{behind.grpc_port}"]'
        configuration = CONFIGURATION.format(by_grpc=by_grpc, **ports)
        roles = ["serve"]
        if request.param == "redis":
            where = f'url = "{redis_server.url}"\nnamespace = "{directory.name}"\nredis_timeout_ms = 20000\n'
            configuration = configuration.replace("[broker]\n", "[broker]\n" + where)
            roles = ["gateway", "batcher"]
        processes = [opened.enter_context(uncollected(directory / role, role, configuration)) for role in roles]
        stand = Stand(processes[0], processes, gpus["slow"])
        admin = stand.gateway.admin_port
        assert eventually(lambda: ask(admin, "GET", "/internal/ready").status == 200)
        for warm_up in (single("words"), task, stream, unary):
            warm_up(stand)
        for process in processes:
            process.report()
        yield stand


# Ways to call, each to its end.

Way = Callable[[Stand], object]


def read(peer: Peer) -> Response:
    """An answer, whole or in parts."""
    while b"\r\n\r\n" not in peer.unread:
        peer.unread += peer.socket.recv(1 << 20)
    head = peer.unread.partition(b"\r\n\r\n")[0]
    if b"Transfer-Encoding: chunked" not in head:
        return peer.read()
    while not peer.unread.endswith(b"\r\n0\r\n\r\n"):
        peer.unread += peer.socket.recv(1 << 20)
    return Response(int(head.split(b" ")[1]), {}, peer.unread)


def call(stand: Stand, path: str, body: Any, *headers: str) -> Response:
    with Peer(stand.gateway.port) as peer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        peer.send(request_bytes("POST", path, data, *(headers or (JSON,))))
        return read(peer)


def leave(stand: Stand, path: str, body: Any) -> None:
    """Hang up while the model works on it."""
    before = stand.slow.total().calls
    with Peer(stand.gateway.port) as peer:
        peer.send(request_bytes("POST", path, json.dumps(body).encode(), JSON))
        assert eventually(lambda: stand.slow.total().calls > before)


def post(path: str, body: Any, *headers: str, status: int = 200) -> Way:
    def way(stand: Stand) -> None:
        assert (answer := call(stand, path, body, *headers)).status == status, answer.body[:500]

    return way


def left(path: str, body: Any) -> Way:
    return partial(leave, path=path, body=body)


def single(model: str, text: str = TEXT, status: int = 200, *headers: str) -> Way:
    return post("/v1/inference", {"model": model, "input": text}, JSON, *headers, status=status)


def submit(stand: Stand, model: str = "words", text: str = TEXT) -> str:
    body = {"model": model, "input": text, "mode": "async"}
    task_id: str = call(stand, "/v1/inference", body).json["task_id"]
    return task_id


def get(path: str, status: int = 200) -> Way:
    def way(stand: Stand) -> None:
        assert ask(stand.gateway.port, "GET", path).status == status

    return way


def admin(path: str) -> Way:
    return lambda stand: ask(stand.gateway.admin_port, "GET", path)


def task(stand: Stand, model: str = "words", text: str = TEXT, status: str = "SUCCESS") -> None:
    """A long poll, and then two that find the result there."""
    path = f"/v1/result/{submit(stand, model, text)}"
    assert ask(stand.gateway.port, "GET", path + "?wait_ms=30000").json["status"] == status
    for _ in range(2):
        assert ask(stand.gateway.port, "GET", path).json["status"] == status


def impatient_poll(stand: Stand) -> None:
    """Polls of a task that is not over, one of which waits a little."""
    path = f"/v1/result/{submit(stand, 'slow')}"
    assert ask(stand.gateway.port, "GET", path).status == 200
    assert ask(stand.gateway.port, "GET", path + "?wait_ms=10").status == 200


def left_poll(stand: Stand, path: str = "?wait_ms=30000") -> None:
    task_id = submit(stand, "slow")
    with Peer(stand.gateway.port) as peer:
        peer.send(request_bytes("GET", f"/v1/result/{task_id}{path}"))
        assert ask(stand.gateway.port, "GET", f"/v1/result/{task_id}").status == 200  # the other is there by then


def deleted(stand: Stand) -> None:
    task_id = submit(stand, "slow")
    assert ask(stand.gateway.port, "DELETE", f"/v1/result/{task_id}").status == 204


def lost_webhook(stand: Stand) -> None:
    before = metric(stand.gateway, "carpool_webhook_attempts_total")
    body = {"input": TEXT, "mode": "async", "callback_url": "http://127.0.0.1:9/hook"}
    assert call(stand, "/v1/inference", body).status == 202
    assert eventually(lambda: metric(stand.gateway, "carpool_webhook_attempts_total") > before)


def events(stand: Stand, model: str = "slow") -> None:
    task_id = submit(stand, model)
    with Peer(stand.gateway.port) as peer:
        peer.send(request_bytes("GET", f"/v1/result/{task_id}/events"))
        assert TEXT.encode() in read(peer).body


def tensor_call(rows: int = 1, text: str = TEXT) -> dict[str, Any]:
    return {"inputs": [{"name": "T", "datatype": "BYTES", "shape": [rows, 1], "data": [text] * rows}]}


def binary_tensor(stand: Stand) -> None:
    tail = struct.pack("<I", len(TEXT)) + TEXT.encode()
    tensor = {"name": "T", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    assert tail in call(stand, "/v2/models/mirror/infer", head + tail, length).body


def stream(stand: Stand, body: Any = None, is_last: bool = True) -> None:
    """A WebSocket: one answer, or none because it is left before."""
    before = stand.slow.total().calls
    with connect(f"ws://127.0.0.1:{stand.gateway.port}/v1/stream", max_size=None) as socket:
        socket.send(json.dumps(body or {"id": 1, "input": TEXT}))
        if is_last:
            assert socket.recv()
        else:
            assert eventually(lambda: stand.slow.total().calls > before)
            socket.socket.close()


def half_a_message(stand: Stand) -> None:
    """A WebSocket that is left in the middle of a message."""
    with connect(f"ws://127.0.0.1:{stand.gateway.port}/v1/stream") as socket:
        frame = struct.pack(">BBQ4x", 0x81, 0xFF, 2 * len(TEXT)) + TEXT.encode()
        socket.socket.sendall(frame)
        socket.socket.close()


def grpc_call(stand: Stand, work: Callable[[GrpcClient], Any]) -> str:
    with grpc_client(stand.gateway.grpc_port, options=ANY_LENGTH) as client:
        try:
            work(client)
        except grpc.RpcError as error:
            code: str = error.code().name
            return code
    return "OK"


def predict(status: str = "OK", timeout: float = 60, **fields: Any) -> Way:
    def way(stand: Stand) -> None:
        asked = message("PredictRequest")(**{"input_json": json.dumps(TEXT)} | fields)
        ended = grpc_call(stand, lambda client: client.method("Predict")(asked, timeout=timeout))
        assert ended == status

    return way


unary = predict()


def grpc_task(stand: Stand) -> None:
    def work(client: GrpcClient) -> None:
        asked = message("SubmitRequest")()
        asked.request.input_json = json.dumps(TEXT)
        task_id = client.method("Submit")(asked, timeout=60).task_id
        asked = message("GetResultRequest")(task_id=task_id, wait_ms=30000)
        assert client.method("GetResult")(asked, timeout=60).ByteSize() > len(TEXT)

    assert grpc_call(stand, work) == "OK"


def grpc_stream(stand: Stand, model: str = "words", is_last: bool = True) -> None:
    before = stand.slow.total().calls

    def work(client: GrpcClient) -> None:
        asked = message("PredictStreamRequest")()
        one = asked.requests.add()
        one.id, one.request.input_json, one.request.model_id = "a", json.dumps(TEXT), model
        answers = client.method("PredictStream")(iter([asked]), timeout=60)
        if is_last:
            assert next(answers).ByteSize() > len(TEXT)
        else:
            assert eventually(lambda: stand.slow.total().calls > before)
            answers.cancel()

    assert grpc_call(stand, work) == "OK"


def grpc_tensors(model: str = "mirror", rows: int = 1, status: str = "OK", timeout: float = 60) -> Way:
    def way(stand: Stand) -> None:
        asked = message("inference.ModelInferRequest")(model_name=model)
        tensor = asked.inputs.add()
        tensor.name, tensor.datatype = "T", "BYTES"
        tensor.shape.extend([rows, 1])
        tensor.contents.bytes_contents.extend([TEXT.encode()] * rows)
        method = "inference.GRPCInferenceService/ModelInfer"
        assert grpc_call(stand, lambda client: client.method(method)(asked, timeout=timeout)) == status

    return way


def hard_error(path: str, body: Any) -> Way:
    """An error of the model: which one depends on what it did before, and on the broker."""

    def way(stand: Stand) -> None:
        assert (answer := call(stand, path, body)).status in (422, 502, 503), answer.body[:500]

    return way


def failed(model: str, text: str = TEXT) -> Way:
    return hard_error("/v1/inference", {"model": model, "input": text})


WAYS: dict[str, Way] = {
    # /v1/inference and /v1/predict
    "an answer": single("words"),
    "an answer from the cache": single("kept"),
    "no JSON": post("/v1/inference", b'{"input": "' + TEXT.encode(), status=400),
    "not JSON as it should be": post("/v1/inference", b'{"input": [NaN, "' + TEXT.encode() + b'"]}', status=400),
    "another media type": post("/v1/inference", {"input": TEXT}, "Content-Type: text/plain", status=415),
    "no such model": single("none", status=404),
    "too long": single("words", "x" * 5_000_000, 413),
    "a refused input": single("words", REFUSED + TEXT, 422),
    "a poisoned input": failed("words", POISON + TEXT),
    "an endpoint that is gone": failed("gone"),
    "an endpoint that fails": failed("failing"),
    "an endpoint that resets": failed("resetting"),
    "an endpoint that answers no JSON": failed("mumbling"),
    "a deadline": single("slow", TEXT, 504, "X-Request-Timeout-Ms: 50"),
    "a client that left": left("/v1/inference", {"model": "slow", "input": TEXT}),
    "predict": post("/v1/predict", {"model_id": "words", "input_data": TEXT}),
    "octets": post("/v1/predict?model_id=image", TEXT.encode(), *OCTETS),
    # Tasks
    "polls": task,
    "a long poll": partial(task, model="slow"),
    "polls of a task that failed": partial(task, text=POISON + TEXT, status="FAILED"),
    "polls of a task that is not over": impatient_poll,
    "a long poll that was left": left_poll,
    "a poll of no task": get(f"/v1/result/{NO_TASK}", 404),
    "a deleted task": deleted,
    "events": events,
    "events that were left": partial(left_poll, path="/events"),
    "events of no task": get(f"/v1/result/{NO_TASK}/events", 404),
    "a webhook to nobody": lost_webhook,
    # Lists
    "embeddings": post("/v1/embeddings", {"model": "vectors", "input": ["a", "b", "c"]}),
    "one embedding": post("/v1/embeddings", {"model": "vectors", "input": TEXT}),
    "embeddings, no JSON": post("/v1/embeddings", b'{"model": "vectors", "input": ["' + TEXT.encode(), status=400),
    "embeddings of no such model": post("/v1/embeddings", {"model": "none", "input": [TEXT]}, status=404),
    "embeddings that are none": post("/v1/embeddings", {"model": "words", "input": [TEXT, "b"]}, status=502),
    "embeddings that were left": left("/v1/embeddings", {"model": "slow", "input": [TEXT, "b"]}),
    "TEI": post("/embed", {"inputs": ["a", TEXT]}, status=502),
    "instances": post("/v1/models/tf:predict", {"instances": [TEXT, "b", "c"]}),
    "a refused instance": post("/v1/models/words:predict", {"instances": [TEXT, REFUSED, "c"]}, status=422),
    "instances from the cache": post("/v1/models/kept:predict", {"instances": [TEXT, TEXT + "y"]}),
    "instances that were left": left("/v1/models/slow:predict", {"instances": [TEXT, "b"]}),
    # KServe V2
    "a tensor": post("/v2/models/mirror/infer", tensor_call()),
    "rows": post("/v2/models/mirror/infer", tensor_call(4)),
    "a binary tensor": binary_tensor,
    "no tensor": post("/v2/models/mirror/infer", b'{"inputs": [{"name": "' + TEXT.encode(), status=400),
    "a refused row": post("/v2/models/mirror/infer", tensor_call(2, REFUSED + TEXT), status=422),
    "rows by gRPC": post("/v2/models/by_grpc/infer", tensor_call(2)),
    "a refused row by gRPC": hard_error("/v2/models/by_grpc/infer", tensor_call(2, REFUSED + TEXT)),
    "rows to nobody by gRPC": hard_error("/v2/models/gone_by_grpc/infer", tensor_call(2)),
    "rows that were left": left("/v2/models/slow_mirror/infer", tensor_call(2)),
    # Streams
    "a stream": stream,
    "a stream with a refused input": partial(stream, body={"id": 1, "input": REFUSED + TEXT}),
    "a stream that was left": partial(stream, body={"id": 1, "input": TEXT, "model": "slow"}, is_last=False),
    "a stream that was left in a message": half_a_message,
    # gRPC
    "gRPC": unary,
    "gRPC with bytes": predict(input_data=TEXT.encode()),
    "gRPC, no JSON": predict("INVALID_ARGUMENT", input_json='{"x' + TEXT),
    "gRPC with a refused input": predict("INVALID_ARGUMENT", input_json=json.dumps(REFUSED + TEXT)),
    "gRPC with a deadline": predict("DEADLINE_EXCEEDED", 0.1, model_id="slow"),
    "a gRPC task": grpc_task,
    "a gRPC stream": grpc_stream,
    "a gRPC stream that was left": partial(grpc_stream, model="slow", is_last=False),
    "gRPC tensors": grpc_tensors(rows=3),
    "gRPC tensors with a deadline": grpc_tensors("slow_mirror", 2, "DEADLINE_EXCEEDED", 0.1),
    # For operators, and for nobody
    "metrics": admin("/metrics"),
    "dead letters": admin("/internal/dead-letters"),
    "no such request": admin("/internal/requests/none"),
    "no such path": get("/nothing", 404),
}


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_left_for_the_collector(stand: Stand, name: str) -> None:
    for _ in range(TIMES):
        WAYS[name](stand)
    for process in stand.processes:

        def is_over(process: UncollectedProcess = process) -> bool:
            report = process.report()
            assert report.garbage == {}
            assert report.garbage_bytes < FOREIGN_BYTES_MAX
            return not report.exchanges and not report.requests

        assert eventually(is_over), process.report()
