"""Reads what is sent by OTLP, by the numbers of `trace.proto`, and a receiver on a socket."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from struct import unpack
from typing import Any, NamedTuple

from aiohttp import web
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


class SeenLink(NamedTuple):
    trace_id: str
    span_id: str
    state: str


class SeenSpan(NamedTuple):
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[SeenLink]
    is_error: bool
    flags: int
    state: str
    resource: dict[str, Any]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message, by protobuf's own reader of messages that it does not know."""
    for each in UnknownFieldSet(empty_pb2.Empty.FromString(data)):
        yield each.field_number, each.data


def value_of(data: bytes) -> Any:
    """A value of an attribute (`AnyValue`)."""
    [(number, value)] = fields(data)
    match number:
        case 1:
            return value.decode()
        case 2:
            return bool(value)
        case 3:
            return value - (1 << 64) if value >> 63 else value
        case 4:
            return unpack("<d", value.to_bytes(8, "little"))[0]
    raise AssertionError(f"a value of kind {number}")


def pair_of(data: bytes) -> tuple[str, Any]:
    """An attribute (`KeyValue`)."""
    found = dict(fields(data))
    return found[1].decode(), value_of(found[2])


def link_of(data: bytes) -> SeenLink:
    found = dict(fields(data))
    return SeenLink(found[1].hex(), found[2].hex(), found.get(3, b"").decode())


def span_of(data: bytes, resource: dict[str, Any]) -> SeenSpan:
    all_fields = list(fields(data))
    found = dict(all_fields)
    return SeenSpan(
        found[1].hex(),
        found[2].hex(),
        found.get(4, b"").hex(),
        found[5].decode(),
        KINDS[found[6]],
        found[7],
        found[8],
        dict(pair_of(value) for number, value in all_fields if number == 9),
        [link_of(value) for number, value in all_fields if number == 13],
        dict(fields(found.get(15, b""))).get(3) == 2,
        found.get(16, 0),
        found.get(3, b"").decode(),
        resource,
    )


def spans_in(body: bytes) -> list[SeenSpan]:
    spans = []
    for _, of_resource in fields(body):
        parts = list(fields(of_resource))
        resource = dict(pair_of(pair) for number, part in parts if number == 1 for _, pair in fields(part))
        for number, scope in parts:
            if number == 2:
                spans += [span_of(each, resource) for inner, each in fields(scope) if inner == 2]
    return spans


class Receiver:
    """Takes exports, or does whatever a test wants of it."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.headers: list[dict[str, str]] = []
        self.calls = 0
        # What it answers; and what it waits for before.
        self.status = 200
        self.answer = b""
        self.gate: asyncio.Event | None = None
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        """`POST /v1/traces`."""
        self.calls += 1
        body = await request.read()
        self.headers.append(dict(request.headers))
        if self.gate is not None:
            await self.gate.wait()
        if self.status == 200:
            self.spans += spans_in(body)
        return web.Response(status=self.status, body=self.answer)

    def named(self, name: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.name == name]


@asynccontextmanager
async def receiver(taking: Receiver | None = None) -> AsyncIterator[Receiver]:
    """A receiver on a port of its own."""
    taking = taking or Receiver()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", taking.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        taking.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield taking
    finally:
        await runner.cleanup()
