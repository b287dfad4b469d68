"""Traces through whole processes: who is whose parent, what links to what, what is kept; and receivers that fail.

The receiver is a real server that decodes what comes (tests/support/otlp.py).
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from carpool.composition.process import Process
from carpool.core.names import Role
from carpool.core.protobuf import field
from carpool.core.trace import read_traceparent
from carpool.embedded import EmbeddedProcess
from support.client import Response, ask_once, inference_body
from support.inside import process_of
from support.otlp import Receiver, SeenSpan, receiver
from support.processes import until
from support.redis_servers import RedisServer
from support.upstreams import ScriptedUpstream, scripted_upstream

CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = f"traceparent: 00-{CALLER_TRACE}-{CALLER_SPAN}-01\r\ntracestate: vendor=1\r\n"
NOT_ASKED = ASKED.replace("-01\r", "-00\r")
REQUEST = "POST /v1/inference"


def named(service: str) -> dict[str, Any]:
    return {"OTEL_SERVICE_NAME": service}


@asynccontextmanager
async def running(
    role: Role, upstream: ScriptedUpstream, taking: Receiver | None, **more: Any
) -> AsyncIterator[Process]:
    """A process as a command starts it; its settings by their names with `__` for the dot."""
    settings: dict[str, Any] = {
        "upstream__endpoints": [f"{upstream.url}?key=canary-of-the-url"],
        "carpool.service.BACKOFF_S": 0.0,
    }
    if taking is not None:
        settings["tracing__otlp_endpoint"] = taking.url
    async with process_of(role, **settings | more) as process:
        yield process


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    upstream = ScriptedUpstream()
    async with scripted_upstream(upstream):
        yield upstream


@pytest.fixture
async def taking() -> AsyncIterator[Receiver]:
    async with receiver() as taking:
        yield taking


async def ask(process: Process, text: str = "in", headers: str = "") -> Response:
    return await ask_once(process.port, "POST", "/v1/inference", inference_body(text), headers)


def one(spans: list[SeenSpan]) -> SeenSpan:
    [only] = spans
    return only


def links_of(span: SeenSpan) -> set[tuple[str, str]]:
    return {(link.trace_id, link.span_id) for link in span.links}


def itself(span: SeenSpan) -> tuple[str, str]:
    return span.trace_id, span.span_id


def metric(process: Process, name: str) -> Any:
    return next(getattr(numbers, name) for numbers in process.snapshot().numbers if hasattr(numbers, name))


async def test_a_callers_trace_goes_on_and_the_upstream_gets_the_batchs(
    upstream: ScriptedUpstream, taking: Receiver
) -> None:
    async with running("serve", upstream, taking, tracing__sample_ratio=0, **named("mine")) as process:
        answer = await ask(process, headers=ASKED)
    request, queue = one(taking.named(REQUEST)), one(taking.named("queue"))
    batch, attempt = one(taking.named("batch")), one(taking.named("attempt"))
    assert len(taking.spans) == 4
    assert (request.trace_id, request.parent_id, request.state) == (CALLER_TRACE, CALLER_SPAN, "vendor=1")
    assert (request.kind, queue.kind, batch.kind, attempt.kind) == ("server", "internal", "internal", "client")
    assert (queue.trace_id, queue.parent_id) == itself(request)
    assert batch.parent_id == "" and batch.trace_id != CALLER_TRACE
    assert (attempt.trace_id, attempt.parent_id) == itself(batch)
    assert links_of(request) == {itself(batch)}
    assert links_of(batch) == {itself(request)}
    [header] = upstream.traceparents
    given = read_traceparent(header)
    assert given is not None
    assert (given.trace_id.hex(), given.span_id.hex(), given.is_sampled) == (*itself(attempt), True)
    # Times: one inside the other, and of today.
    assert request.start_ns == queue.start_ns <= queue.end_ns == batch.start_ns <= attempt.start_ns
    assert attempt.start_ns <= attempt.end_ns <= request.end_ns <= batch.end_ns
    told = request.attributes
    assert told["carpool.request.id"] == answer.json["request_id"]
    assert told["http.response.status_code"] == 200
    assert told["http.route"] == "/v1/inference"
    assert told["carpool.batch.id"] == batch.attributes["carpool.batch.id"]
    assert told["carpool.kept"] == "asked"
    assert attempt.attributes["server.address"] == "127.0.0.1"
    assert attempt.attributes["server.port"] == upstream.server.port
    assert request.resource["service.name"] == "mine"


async def test_a_caller_who_is_refused_at_the_door_is_traced_on_every_face(
    upstream: ScriptedUpstream, taking: Receiver
) -> None:
    metadata = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"),)
    settings = {"tracing__sample_ratio": 0, "broker__waiting_max": 1, "shedding__mode": "off", "gateway__grpc_port": 0}
    upstream.gate.clear()
    async with running("serve", upstream, taking, **settings) as process:
        held = asyncio.create_task(ask(process))
        await until(lambda: upstream.in_flight == 1)
        assert (await ask(process, headers=ASKED)).status == 503
        for inputs in ("one", ["a", "few"], ["many"] * 300):
            body = json.dumps({"input": inputs}).encode()
            assert (await ask_once(process.port, "POST", "/v1/embeddings", body, ASKED)).status == 503
        assert isinstance(process, EmbeddedProcess) and process.faces.grpc is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{process.faces.grpc.port}") as channel:
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary("/carpool.v1.Inference/Predict")(field(3, b'"in"'), metadata=metadata)
            streamed = field(1, field(1, b"own id") + field(2, field(3, b'"in"')))
            stream = channel.stream_stream("/carpool.v1.Inference/PredictStream")(iter([streamed]), metadata=metadata)
            assert len([answer async for answer in stream]) == 1
        upstream.gate.set()
        assert (await held).status == 200
    assert Counter(span.name for span in taking.spans) == Counter(
        {
            "POST /v1/inference": 1,
            "POST /v1/embeddings": 3,
            "carpool.v1.Inference/Predict": 1,
            "carpool.v1.Inference/PredictStream": 1,
        }
    )
    for span in taking.spans:
        assert (span.trace_id, span.parent_id) == (CALLER_TRACE, CALLER_SPAN)
        assert (span.attributes["error.type"], span.attributes["carpool.kept"]) == ("queue-full", "asked")


async def test_over_redis_the_gateway_writes_the_request_and_the_batcher_the_batch(
    upstream: ScriptedUpstream, taking: Receiver, redis_server: RedisServer
) -> None:
    broker = {"broker__url": redis_server.url, "broker__namespace": f"traces-{secrets.token_hex(4)}"}
    both = {**broker, "tracing__sample_ratio": 0}
    async with (
        running("batcher", upstream, taking, **both, **named("batcher")),
        running("gateway", upstream, taking, **both, **named("gateway")) as gateway,
    ):
        await ask(gateway, headers=ASKED)
        await ask(gateway, headers=NOT_ASKED)
        await ask(gateway)
        task = await ask(gateway, "a task", ASKED + "Prefer: respond-async\r\n")
        assert task.status == 202
        await until(lambda: "a task" in upstream.seen)
    request, of_task = one(taking.named(REQUEST)), one(taking.named("task"))
    assert request.resource["service.name"] == "gateway"
    assert of_task.resource["service.name"] == "batcher"
    assert {span.resource["service.name"] for span in taking.named("batch") + taking.named("attempt")} == {"batcher"}
    for span in (request, of_task):
        assert (span.trace_id, span.parent_id, span.state) == (CALLER_TRACE, CALLER_SPAN, "vendor=1")
        batch = one([each for each in taking.named("batch") if itself(each) in links_of(span)])
        assert itself(span) in links_of(batch)
        attempt = one([each for each in taking.named("attempt") if each.parent_id == batch.span_id])
        assert attempt.trace_id == batch.trace_id
    assert of_task.attributes["carpool.request.id"] == task.json["task_id"]
    assert len(taking.named("batch")) == 2
    # Those that nobody asked for were not kept, and the upstream was told so.
    flags = [read_traceparent(header) for header in upstream.traceparents]
    assert [each is not None and each.is_sampled for each in flags] == [True, False, False, True]


async def test_a_request_that_fails_is_told_with_its_batch_and_every_attempt(
    upstream: ScriptedUpstream, taking: Receiver
) -> None:
    upstream.behaviour = "status 503"
    settings = {"tracing__sample_ratio": 0, "upstream__attempts": 3}
    async with running("serve", upstream, taking, **settings) as process:
        answer = await ask(process, headers=ASKED)
        await until(lambda: metric(process, "traces_kept")["asked"] == 1)
    assert answer.status == 502
    request, batch = one(taking.named(REQUEST)), one(taking.named("batch"))
    attempts = taking.named("attempt")
    assert len(attempts) == len(upstream.traceparents) == 3
    assert [span.attributes["carpool.attempt"] for span in attempts] == [1, 2, 3]
    assert {span.attributes["error.type"] for span in attempts} == {"503"}
    assert all(span.is_error and span.parent_id == batch.span_id for span in (*attempts,))
    assert request.is_error and batch.is_error
    assert request.attributes["error.type"] == batch.attributes["error.type"] == "upstream-failed"
    assert request.attributes["http.response.status_code"] == 502
    assert links_of(request) == {itself(batch)}
    assert links_of(batch) == {itself(request)}


async def test_the_steps_of_a_search_belong_to_the_batch_that_was_refused(
    upstream: ScriptedUpstream, taking: Receiver
) -> None:
    upstream.poison = "POISON"
    settings = {"batching__policy": "fixed", "batching__max_wait_ms": 100, "batching__max_batch": 4}
    async with running("serve", upstream, taking, tracing__sample_ratio=1, **settings) as process:
        await ask(process, "fine before")
        upstream.gate.clear()
        first = asyncio.create_task(ask(process, "first"))
        await until(lambda: upstream.in_flight == 1)
        others = [asyncio.create_task(ask(process, text)) for text in ("a", "POISON", "b", "c")]
        await until(lambda: process.snapshot().health.queue_depth == 4)
        upstream.gate.set()
        await asyncio.gather(first, *others)
    refused = one([span for span in taking.named("batch") if span.is_error])
    steps = taking.named("search step")
    assert steps
    assert all((step.trace_id, step.parent_id) == itself(refused) for step in steps)
    assert {step.is_error for step in steps} == {True, False}
    poisoned = one([span for span in taking.named(REQUEST) if "error.type" in span.attributes])
    assert poisoned.attributes["error.type"] == "input-refused"
    assert not poisoned.is_error  # 422: the client's own fault
    assert itself(refused) in links_of(poisoned)


async def test_neither_payloads_nor_credentials_are_in_spans(upstream: ScriptedUpstream) -> None:
    bodies: list[bytes] = []

    class Keeping(Receiver):
        async def take(self, request: Any) -> Any:
            bodies.append(await request.read())
            return await super().take(request)

    upstream.poison = "canary-of-poison"
    async with receiver(Keeping()) as taking:
        settings = {
            "tracing__sample_ratio": 1,
            "OTEL_EXPORTER_OTLP_HEADERS": "X-Api-Key=canary-of-the-header",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        async with running("serve", upstream, taking, **settings) as process:
            key = "Authorization: Bearer canary-of-the-key\r\nX-Own: canary-of-a-header\r\n"
            for text in ("canary-of-an-input", "canary-of-poison", "fine", "canary-of-poison"):
                await ask(process, text, key)
            await ask_once(process.port, "POST", "/v1/inference?q=canary-of-the-query", b"canary-of-a-body", key)
    assert taking.spans
    assert b"canary" not in b"".join(bodies)
    assert {headers["X-Api-Key"] for headers in taking.headers} == {"canary-of-the-header"}
    assert {span.resource["deployment.environment.name"] for span in taking.spans} == {"test"}


@pytest.mark.parametrize("trouble", ["gone", "500", "503", "hangs"])
async def test_a_receiver_that_fails_harms_no_request(
    upstream: ScriptedUpstream, taking: Receiver, trouble: str
) -> None:
    """And what it does not take is bounded, and counted."""
    if trouble == "gone":
        taking.url = "http://127.0.0.1:9"
    elif trouble == "hangs":
        taking.gate = asyncio.Event()
    else:
        taking.status = int(trouble)
    settings = {"tracing__sample_ratio": 1, "carpool.composition.tracing.BUFFER_BYTES_MAX": 20_000}
    async with running("serve", upstream, taking, **settings) as process:
        answers: list[Response] = []

        async def asked_until_spans_were_dropped() -> None:
            while not metric(process, "trace_spans")["dropped"]:
                answers.append(await ask(process))

        await asyncio.wait_for(asked_until_spans_were_dropped(), 50)
        tracing = process.runtime.tracing
        assert tracing is not None
        assert tracing.exporter.held_bytes <= 20_000
        assert metric(process, "trace_spans")["sent"] == 0
        if taking.gate is not None:
            taking.gate.set()
    assert {answer.status for answer in answers} == {200}
    assert len(upstream.seen) == len(answers)


async def test_a_receiver_that_comes_back_gets_what_comes_then(upstream: ScriptedUpstream, taking: Receiver) -> None:
    taking.status = 503
    async with running("serve", upstream, taking, tracing__sample_ratio=1) as process:
        await ask(process)
        await until(lambda: taking.calls >= 1)
        taking.status = 200
        await until(lambda: len(taking.spans) >= 4)
        assert metric(process, "trace_spans") == {"sent": 4, "dropped": 0, "rejected": 0}
        assert metric(process, "trace_export_failures") >= 1


async def test_where_it_is_off_nobody_listens_and_nothing_is_sent(upstream: ScriptedUpstream) -> None:
    async with running("serve", upstream, None) as process:
        await ask(process, headers=ASKED)
        assert process.events.subscribers == ()
        assert not any("trace" in type(numbers).__name__.lower() for numbers in process.snapshot().numbers)
    assert upstream.traceparents == [""]
