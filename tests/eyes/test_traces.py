"""Traces at a real receiver of OpenTelemetry's protocol (rotel), from real processes over a real Redis: `make eyes`."""

import asyncio
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.core.trace import Trace, read_traceparent
from carpool.telemetry.spans import ERROR, REMOTE, SERVER, Envelope, Value, attributes, link, named, span, trace_state
from support.client import ask_once, inference_body
from support.processes import PATIENCE_S, GatewayProcess, running_role, until
from support.redis_servers import RedisServer
from support.upstreams import ScriptedUpstream, scripted_upstream

HERE = Path(__file__).parents[2] / ".venv-eyes"
CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = f"traceparent: 00-{CALLER_TRACE}-{CALLER_SPAN}-01\r\n"
REQUEST = "POST /v1/inference"
TRACING = "carpool.composition.tracing"
_LINE = re.compile(r"^ +(Trace ID|Parent ID|ID|Name|Kind) +: ?(.*)$", re.MULTILINE)
_LINK = re.compile(r"-> Trace ID: (\w+)\n +-> ID: (\w+)")
_SERVICE = re.compile(r"-> service\.name: Str\((.*)\)")


def packages() -> Path:
    """Where `make eyes` has put what these tests need."""
    found = next(iter(HERE.glob("lib/python*/site-packages")), None)
    assert found is not None, "rotel is not installed: run `make eyes`"
    return found


class Printed(NamedTuple):
    """A span as rotel prints it."""

    service: str
    trace_id: str
    parent_id: str
    span_id: str
    name: str
    kind: str
    links: set[tuple[str, str]]

    @property
    def itself(self) -> tuple[str, str]:
        """What a link to it says."""
        return self.trace_id, self.span_id


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Rotel:
    """The receiver as a process; it prints what it takes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port, self._grpc_port = free_port(), free_port()
        self._output = directory / "rotel.out"
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """For `tracing.otlp_endpoint`."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Once it listens. What an earlier one printed is forgotten."""
        self._spawn()
        await until(self._listens)

    def _spawn(self) -> None:
        command = [str(packages() / "rotel" / "rotel-agent"), "start", "--exporter", "blackhole"]
        command += ["--debug-log", "traces", "--debug-log-verbosity", "detailed", "--batch-timeout", "50ms"]
        command += ["--otlp-http-endpoint", f"127.0.0.1:{self._port}"]
        command += ["--otlp-grpc-endpoint", f"127.0.0.1:{self._grpc_port}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=self._directory)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self._output.read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def spans(self) -> list[Printed]:
        """All that it has printed so far."""
        found = []
        for of_resource in self._output.read_text().split("\nResourceSpans #")[1:]:
            service = _SERVICE.findall(of_resource)[0]
            for text in of_resource.split("\nSpan #")[1:]:
                told = dict(_LINE.findall(text))
                if len(told) == 5 and "End time" in text:
                    links = set(_LINK.findall(text.partition("\nLinks:")[2]))
                    ids = told["Trace ID"], told["Parent ID"].strip(), told["ID"]
                    found.append(Printed(service, *ids, told["Name"], told["Kind"], links))
        return found

    def named(self, name: str) -> list[Printed]:
        return [each for each in self.spans() if each.name == name]


@pytest.fixture
async def rotel(tmp_path: Path) -> AsyncIterator[Rotel]:
    running = Rotel(tmp_path)
    await running.start()
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGCONT)
        running.kill()


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    upstream = ScriptedUpstream()
    async with scripted_upstream(upstream):
        yield upstream


def called(service: str) -> dict[str, object]:
    return {"OTEL_SERVICE_NAME": service}


@asynccontextmanager
async def fleet(
    directory: Path, rotel: Rotel, upstream: ScriptedUpstream, redis: RedisServer, **more: object
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess]]:
    """A gateway and a batcher, both of which are traced."""
    settings: dict[str, object] = {
        "broker.url": redis.url,
        "broker.namespace": f"eyes-{secrets.token_hex(4)}",
        "tracing.otlp_endpoint": rotel.url,
        "gateway.drain_grace_s": 0,
    }
    settings |= {name if "." in name else f"tracing.{name}": value for name, value in more.items()}
    at = ("--upstream", upstream.url)
    async with (
        running_role(directory, "batcher", *at, settings=settings | called("batcher")) as batcher,
        running_role(directory, "gateway", settings=settings | called("gateway")) as gateway,
    ):

        async def is_ready() -> bool:
            return (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 200

        await until(is_ready)
        yield gateway, batcher


async def ask(gateway: GatewayProcess, headers: str = "") -> int:
    return (await ask_once(gateway.port, "POST", "/v1/inference", inference_body("in"), headers)).status


def one(spans: list[Printed]) -> Printed:
    [only] = spans
    return only


async def test_a_trace_through_gateway_redis_batcher_and_upstream(
    tmp_path: Path, rotel: Rotel, upstream: ScriptedUpstream, redis_server: RedisServer
) -> None:
    async with fleet(tmp_path, rotel, upstream, redis_server, sample_ratio=0) as (gateway, _):
        assert await ask(gateway, ASKED) == 200
        await until(lambda: len(rotel.spans()) >= 4)
    request, queue = one(rotel.named(REQUEST)), one(rotel.named("queue"))
    batch, attempt = one(rotel.named("batch")), one(rotel.named("attempt"))
    assert (request.trace_id, request.parent_id) == (CALLER_TRACE, CALLER_SPAN)
    assert (queue.trace_id, queue.parent_id) == request.itself
    assert batch.trace_id != CALLER_TRACE and batch.parent_id == ""
    assert (attempt.trace_id, attempt.parent_id) == batch.itself
    assert request.links == {batch.itself}
    assert batch.links == {request.itself}
    assert [each.service for each in (request, queue, batch, attempt)] == ["gateway"] * 2 + ["batcher"] * 2
    kinds = [each.kind.removeprefix("SPAN_KIND_") for each in (request, queue, batch, attempt)]
    assert kinds == ["SERVER", "INTERNAL", "INTERNAL", "CLIENT"]
    given = read_traceparent(upstream.traceparents[0])
    assert given is not None
    assert (given.trace_id.hex(), given.span_id.hex(), given.is_sampled) == (*attempt.itself, True)


async def test_requests_under_load_have_traces_of_their_own(
    tmp_path: Path, rotel: Rotel, upstream: ScriptedUpstream, redis_server: RedisServer
) -> None:
    async with fleet(tmp_path, rotel, upstream, redis_server, sample_ratio=1) as (gateway, _):
        assert set(await asyncio.gather(*(ask(gateway) for _ in range(200)))) == {200}
        await until(lambda: len(rotel.named(REQUEST)) >= 200)
        await until(lambda: sum(len(batch.links) for batch in rotel.named("batch")) >= 200)
    requests, batches = rotel.named(REQUEST), {batch.itself: batch for batch in rotel.named("batch")}
    assert len({request.trace_id for request in requests}) == len(requests) == 200
    for request in requests:
        [link] = request.links
        assert request.itself in batches[link].links


@pytest.mark.parametrize("trouble", ["killed", "stopped"])
async def test_a_receiver_that_is_gone_or_slow_harms_no_request(
    tmp_path: Path, rotel: Rotel, upstream: ScriptedUpstream, redis_server: RedisServer, trouble: str
) -> None:
    settings = {"sample_ratio": 1, f"{TRACING}.BUFFER_BYTES_MAX": 50_000, f"{TRACING}.TIMEOUT_S": 1.0}
    async with fleet(tmp_path, rotel, upstream, redis_server, **settings) as (gateway, batcher):
        assert await ask(gateway) == 200
        await until(lambda: len(rotel.spans()) >= 4)
        if trouble == "killed":
            rotel.kill()
        else:
            rotel.process.send_signal(signal.SIGSTOP)
        answers = []

        async def are_some_dropped() -> bool:
            answers.extend(await asyncio.gather(*(ask(gateway) for _ in range(20))))
            dropped = [await process.metric("carpool_trace_export_failures_total") for process in (gateway, batcher)]
            return min(dropped) > 0 and len(answers) >= 400

        await until(are_some_dropped)
        assert set(answers) == {200}
        if trouble == "killed":
            await rotel.start()
        else:
            rotel.process.send_signal(signal.SIGCONT)
        before = len(rotel.named(REQUEST))

        async def come_again() -> bool:
            assert await ask(gateway) == 200
            return len(rotel.named(REQUEST)) > before

        await until(come_again)


@contextmanager
def real_schema() -> Iterator[None]:
    """Opentelemetry's own classes, for a moment."""
    sys.path.append(str(packages()))
    try:
        yield
    finally:
        sys.path.remove(str(packages()))


def test_what_is_packed_by_hand_is_what_the_real_schema_reads() -> None:
    trace_id, span_id, parent_id = secrets.token_bytes(16), secrets.token_bytes(8), secrets.token_bytes(8)
    told: dict[str, Value] = {"text": "ä" * 100, "number": -5, "share": 0.25, "is": True, "large": 2**40}
    rest = named("a name", SERVER) + trace_state("a=b") + attributes(told.items())
    rest += link(Trace(trace_id, parent_id, state="c=d"))
    packed = span(trace_id, span_id, parent_id, 1, 2**60, rest + ERROR, REMOTE)
    body = Envelope([("service.name", "x")], "carpool", "1").wrap([packed, packed])
    with real_schema():
        schema = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    export = schema.ExportTraceServiceRequest.FromString(body)
    [of_resource] = export.resource_spans
    [of_scope] = of_resource.scope_spans
    first, second = of_scope.spans
    assert first == second
    assert (first.trace_id, first.span_id, first.parent_span_id) == (trace_id, span_id, parent_id)
    assert (first.name, first.kind, first.trace_state, first.flags) == ("a name", SERVER, "a=b", 0x301)
    assert (first.start_time_unix_nano, first.end_time_unix_nano, first.status.code) == (1, 2**60, 2)
    read = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in first.attributes}
    assert read == told
    [seen] = first.links
    assert (seen.trace_id, seen.span_id, seen.trace_state, seen.flags) == (trace_id, parent_id, "c=d", 0x301)
    assert of_resource.resource.attributes[0].value.string_value == "x"
    # Nothing was skipped: written again, it is as long.
    assert export.ByteSize() == len(body)
