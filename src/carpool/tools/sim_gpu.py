"""Simulated GPUs behind HTTP: a stand-in for the fixed API, one port for each GPU, all in one event loop.

| call | answer |
|---|---|
| `POST /infer` `{"inputs":[…]}` | `{"outputs":[…]}` |
| `POST /v1/models/{model}:predict` `{"instances":[…]}` | `{"predictions":[…]}` |
| `POST /v2/models/{model}/infer`, KServe V2, raw tensors too | the same tensors, texts reversed |
| `GET /v2/health/live`, `/v2/health/ready` | 200 |
| `GET /stats` | this GPU's counts, and under `total` those of all |
| `GET /health` | `{"status":"ok"}` |

But for V2, the field decides the format, not the path. Errors are `{"error": text}`.
"""

import asyncio
import re
import socket
import struct
from functools import partial
from random import Random, choice
from typing import Any

import msgspec

from carpool.core.clock import monotonic
from carpool.core.errors import CarpoolError
from carpool.core.finite import finite_float
from carpool.core.tensors import Data, RawTensor, is_packed, pack, pack_tensors, unpack, unpack_tensors
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.face.http.v2_wire import V2Call, parse_call, write_answer
from carpool.face.tensor_rows import join_rows, read_row
from carpool.upstream.endpoint import UpstreamResponse
from carpool.upstream.simulated import (
    CallRefusedError,
    GpuStats,
    SimulatedGpu,
    SimulationSettings,
    error_answer,
    read_call,
)

LIMITS = HttpLimits(
    body_bytes_max=64 * 1024 * 1024,
    receiving_bytes_max=1024 * 1024 * 1024,
    receive_timeout_s=60.0,
    # Longer than any client keeps its pooled connections: a close must not race with a call.
    idle_timeout_s=3600.0,
)

_TENSOR_PATH = re.compile(rb"/v2/models/([^/]+)(?:/versions/[^/]+)?/infer")
_PAGES = frozenset((b"/stats", b"/health", b"/v2/health/live", b"/v2/health/ready"))
_INFERENCE_PATH = re.compile(rb"/infer|/v1/models/.+:predict")
# Linger for zero seconds: closing then sends RST in place of FIN.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

_decode = msgspec.json.Decoder(float_hook=finite_float).decode


class CannotListenError(Exception):
    """An address cannot be listened on; the text names it."""


class GpuServer(ExchangeWorker):
    """One simulated GPU on one port."""

    def __init__(self, gpu: SimulatedGpu, fleet: "GpuFleet") -> None:
        self.gpu = gpu
        self.http = HttpServer(self.handle, LIMITS)
        self._fleet = fleet

    def handle(self, exchange: Exchange) -> None:
        """Answer one HTTP request, an inference later."""
        path = exchange.target.partition(b"?")[0]
        tensors = _TENSOR_PATH.fullmatch(path)
        if exchange.method == b"POST" and (tensors or _INFERENCE_PATH.fullmatch(path)):
            called = self._infer(exchange, tensors and tensors[1].decode("latin-1"))
            exchange.context, exchange.worker = asyncio.get_running_loop().create_task(called), self
        elif exchange.method in (b"GET", b"HEAD") and path in _PAGES:
            exchange.respond(200, self._stats_json() if path == b"/stats" else b'{"status":"ok"}')
        else:
            there = "POST /infer, /v1/models/{model}:predict, /v2/models/{model}/infer; GET /stats, /health"
            exchange.respond(404, error_answer(404, f"there are {there}").body)

    async def _infer(self, exchange: Exchange, tensor_model: str | None) -> None:
        read = read_call if tensor_model is None else partial(read_tensors, tensor_model, exchange.headers)
        called, exchange.body = self.gpu.infer(exchange.body, read), b""
        answer = await called
        exchange.worker = None
        if answer is None:
            _reset(exchange)
        elif isinstance(answer, TensorAnswer) and answer.header_length is not None:
            length = b"Inference-Header-Content-Length: %d\r\n" % answer.header_length
            exchange.respond(answer.status, answer.body, b"application/octet-stream", length)
        else:
            exchange.respond(answer.status, answer.body)

    def client_left(self, exchange: Exchange) -> None:
        """Free the place of its call."""
        exchange.context.cancel()

    def _stats_json(self) -> bytes:
        stats: dict[str, Any] = msgspec.structs.asdict(self.gpu.stats())
        return msgspec.json.encode({**stats, "total": self._fleet.total()})


def _reset(exchange: Exchange) -> None:
    assert isinstance(exchange.sink, Connection)
    transport = exchange.sink.transport
    if transport is not None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()


# How often a row of free ports is looked for, below the ports that the kernel gives to clients, among which a busy
# machine has no long free row.
ANY_PORTS_ATTEMPTS = 64
PORTS_OF_SERVERS = range(10_000, 32_000)


class GpuFleet:
    """All simulated GPUs of this process."""

    def __init__(self, settings: SimulationSettings, workers: int) -> None:
        # Each has faults of its own, the same ones for the same seed.
        seeds = [None if settings.seed is None else f"{settings.seed}/{n}" for n in range(workers)]
        self.servers = [GpuServer(SimulatedGpu(settings, Random(seed)), self) for seed in seeds]
        self.ports: list[int] = []
        # Bound sockets that keep the ports of killed GPUs; none of them listens.
        self._kept_ports: dict[int, socket.socket] = {}

    async def start(self, host: str, port: int) -> None:
        """Listen on consecutive ports, any that are free if `port` is 0; raises CannotListenError, and then listens on
        none.
        """
        for attempts_left in reversed(range(1 if port else ANY_PORTS_ATTEMPTS)):
            try:
                await self._start(host, port or choice(PORTS_OF_SERVERS))
                return
            except CannotListenError:
                if not attempts_left:
                    raise

    async def _start(self, host: str, port: int) -> None:
        for server in self.servers:
            wanted = port + len(self.ports)
            try:
                if wanted > 65535:
                    raise OSError("there is no such port")
                bound = await server.http.start(host, wanted)
            except OSError as failure:
                await self.close()
                reason = (failure.strerror or str(failure)).rpartition(": ")[2].lower()
                raise CannotListenError(f"cannot listen on {host}:{wanted}: {reason}") from None
            self.ports.append(bound)

    def kill(self, host: str, number: int) -> None:
        """Kill one GPU, as if its machine were gone: its calls are cut off, and its port refuses connections."""
        server = self.servers[number].http
        server.stop_listening()
        if number not in self._kept_ports:
            kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                kept.bind((host, self.ports[number]))
            except OSError:
                kept.close()  # another program took the port; it may be free again at `revive`
            else:
                self._kept_ports[number] = kept
        for connection in list(server.connections):
            connection.break_off()

    async def revive(self, host: str, number: int) -> None:
        """Start a killed GPU again, at its port."""
        server = self.servers[number]
        await server.http.finish(0.0)
        server.http = HttpServer(server.handle, LIMITS)
        if (kept := self._kept_ports.pop(number, None)) is not None:
            kept.close()
        await server.http.start(host, self.ports[number])

    def total(self) -> GpuStats:
        """Sums over all GPUs; of the largest and the most, the largest of any one GPU."""
        every = [server.gpu.stats() for server in self.servers]
        largest = ("largest_batch", "most_in_flight")
        return GpuStats(
            **{
                name: round((max if name in largest else sum)(getattr(each, name) for each in every), 3)
                for name in GpuStats.__struct_fields__
            }
        )

    async def close(self) -> None:
        """Stop at once: running calls are cut off."""
        listening = self.servers[: len(self.ports)]
        self.ports = []
        for kept in self._kept_ports.values():
            kept.close()
        for server in listening:
            server.http.stop_listening()
        for server in listening:
            await server.http.finish(monotonic())


async def serve_gpus(settings: SimulationSettings, host: str, port: int, workers: int) -> GpuFleet:
    """Start GPUs on `workers` consecutive ports; port 0 picks a free range. Raises CannotListenError."""
    fleet = GpuFleet(settings, workers)
    await fleet.start(host, port)
    return fleet


# KServe V2: every tensor of a call comes back as an output of its name, texts reversed.


class TensorAnswer(UpstreamResponse, frozen=True, gc=False):
    """An answer with raw tensors behind its JSON."""

    header_length: int | None = None


class TensorBatch:
    """The rows of a call."""

    def __init__(self, model: str, call: V2Call) -> None:
        self._model = model
        self._call = call
        self.inputs: list[bytes] = call.rows

    def answer(self, count: int) -> UpstreamResponse:
        """The answer to the first `count` rows."""
        if not count:
            return UpstreamResponse(200, b'{"outputs":[]}')
        outputs = join_rows([read_row(mirrored(row)) for row in self.inputs[:count]])
        steps = write_answer(self._model, "1", self._call.id, outputs, self._call.wanted)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return TensorAnswer(200, b"".join(end.value.body), header_length=end.value.header_length)


def read_tensors(model: str, headers: dict[bytes, bytes], body: bytes) -> TensorBatch:
    """The batch of a call; raises CallRefusedError."""
    try:
        return TensorBatch(model, parse_call(headers, body))
    except CarpoolError as error:
        raise CallRefusedError(error.detail) from None


def mirrored(row: bytes) -> Data:
    """What comes back for one row."""
    if is_packed(row):
        return pack_tensors([_mirrored_raw(tensor) for tensor in unpack_tensors(row)])
    given: dict[str, Any] = _decode(row)
    tensors = [given] if "data" in given and isinstance(given["data"], list) else list(given.values())
    for tensor in tensors:
        if tensor["datatype"] == "BYTES":
            tensor["data"] = [text[::-1] for text in tensor["data"]]
    return msgspec.json.encode(tensors)


def _mirrored_raw(tensor: RawTensor) -> RawTensor:
    if tensor.datatype != "BYTES":
        return tensor
    try:
        return tensor._replace(data=pack([text[::-1] for text in unpack(tensor.data, "BYTES")], "BYTES"))
    except UnicodeDecodeError:
        return tensor  # no text
