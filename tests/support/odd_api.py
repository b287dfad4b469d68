"""An inference API of somebody's own, as FastAPI would make it: other names, its 422, limits. A real HTTP server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from support.stream_server import StreamServer, stream_server
from support.upstreams import answer_bytes


def missing(*fields: str) -> dict[str, Any]:
    """FastAPI's body of a 422 for fields that are not there."""
    return {"detail": [{"loc": ["body", field], "msg": "Field required", "type": "missing"} for field in fields]}


class OddApi:
    """`POST path` with `{inputs_field: […]}` → `{outputs_field: […]}`; the outputs are the inputs' own text."""

    def __init__(self, **other: Any) -> None:
        self.path = "/predict"
        self.inputs_field = "sentences"
        self.outputs_field = "vectors"
        # Further fields that the API wants, and that it answers with.
        self.wants: tuple[str, ...] = ()
        self.adds: dict[str, Any] = {}
        # The type of one input.
        self.input_type: type = str
        self.batch_max = 1000
        # What it says when a batch is too large.
        self.limit_status, self.limit_words = 400, "too much"
        self.token = ""
        # What is answered in place of anything else.
        self.status: int | None = None
        self.latency_s = 0.0
        # The outputs for these inputs.
        self.compute: Callable[[list[Any]], object] = lambda inputs: [json.dumps(each) for each in inputs]
        # Without these, a wrong name is a 500, as it is where nobody checks.
        self.is_checked = True
        self.has_openapi = True
        self.calls: list[dict[str, Any]] = []
        self.server: StreamServer
        for name, value in other.items():
            assert name in vars(self), name
            setattr(self, name, value)

    @property
    def root(self) -> str:
        """Its address without a path."""
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def url(self) -> str:
        """The address for `--upstream`."""
        return self.root + self.path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: calls one after the other."""
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target = head.split(" ")[:2]
            path = target.partition("?")[0]
            fields = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])
            }
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            status, said = await self.answer(method, path, fields.get("authorization", ""), body)
            writer.write(answer_bytes(said if isinstance(said, bytes) else json.dumps(said).encode(), status))
            await writer.drain()

    async def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, Any]:
        """The status and the body of the answer to one request."""
        if path == "/openapi.json" and self.has_openapi:
            return 200, {"paths": {self.path: {"post": {}}, "/health": {"get": {}}}}
        if path != self.path:
            return 404, {"detail": "Not Found"}
        if method != "POST":
            return 405, {"detail": "Method Not Allowed"}
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"detail": "Not authenticated"}
        await asyncio.sleep(self.latency_s)
        if self.status is not None:
            return self.status, {"error": "it is what it is"}
        call = json.loads(body)
        self.calls.append(call)
        lacking = [field for field in (self.inputs_field, *self.wants) if field not in call]
        if lacking:
            return (422, missing(*lacking)) if self.is_checked else (500, b"Internal Server Error")
        inputs = call[self.inputs_field]
        for number, each in enumerate(inputs):
            if not isinstance(each, self.input_type):
                fault = {"loc": ["body", self.inputs_field, number], "msg": "wrong type", "type": "wrong_type"}
                return (422, {"detail": [fault]}) if self.is_checked else (500, b"Internal Server Error")
        if len(inputs) > self.batch_max:
            return self.limit_status, {"error": self.limit_words.format(size=len(inputs), max=self.batch_max)}
        return 200, {self.outputs_field: self.compute(inputs), **self.adds}


@asynccontextmanager
async def odd_api(api: OddApi | None = None, **options: Any) -> AsyncIterator[OddApi]:
    """One on a free port, or with `ssl`."""
    api = api or OddApi()
    async with stream_server(api.serve, **options) as api.server:
        yield api
