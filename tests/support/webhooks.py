"""A receiver of webhooks: a real HTTP server on raw streams, in the test's event loop. It checks every signature."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from support.client import Response, ask_once
from support.stream_server import StreamServer, stream_server
from support.upstreams import answer_bytes

SECRET = "whsec_" + base64.b64encode(b"a secret of the tests, 32 bytes.").decode()
OTHER_SECRET = "whsec_" + base64.b64encode(b"the one that comes after it, 33 b").decode()
JSON = "Content-Type: application/json\r\n"


class Webhook(NamedTuple):
    """One that came."""

    webhook_id: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.webhook_id.rpartition("-")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, secret: str) -> bool:
        """Whether one of its signatures is made with this secret."""
        signed = f"{self.webhook_id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        digest = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
        return f"v1,{base64.b64encode(digest).decode()}" in self.headers["webhook-signature"].split(" ")


class Receiver:
    """Takes webhooks. `answer` says what is answered to one; None: nothing, for ever."""

    def __init__(self) -> None:
        self.came: list[Webhook] = []
        self._bodies: dict[str, bytes] = {}
        self.connections = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.answer: Callable[[Webhook], bytes | None] = lambda webhook: answer_bytes(b"", 204)
        # Webhooks wait here before they are answered; cleared, they hang.
        self.gate = asyncio.Event()
        self.gate.set()
        self.server: StreamServer

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks?token=canary-in-the-url"

    @property
    def ids(self) -> Counter[str]:
        return Counter(webhook.id for webhook in self.came)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            assert line == "POST /hooks?token=canary-in-the-url HTTP/1.1", line
            headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            webhook = Webhook(headers["webhook-id"], headers, body)
            assert webhook.is_signed_with(SECRET) or webhook.is_signed_with(OTHER_SECRET)
            assert webhook.json["task_id"] == webhook.id
            assert self._bodies.setdefault(webhook.webhook_id, body) == body, "another body with the same id"
            self.came.append(webhook)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self.gate.wait()
                answer = self.answer(webhook)
                if answer is None:
                    await reader.read()
                    return
                writer.write(answer)
            finally:
                self.in_flight -= 1


@asynccontextmanager
async def receiver(port: int = 0) -> AsyncIterator[Receiver]:
    made = Receiver()
    async with stream_server(made.serve, port=port) as made.server:
        yield made


def allowing(
    *receivers: Receiver, timeout_s: float = 10.0, backoff_s: float = 0.05, **settings: object
) -> dict[str, object]:
    """The settings of a gateway that may send to these."""
    return {
        "webhooks.hosts": ",".join(f"127.0.0.1:{each.port}" for each in receivers),
        "webhooks.secrets": SECRET,
        "webhooks.allow_http": "true",
        "webhooks.allow_private": "true",
        "carpool.composition.webhooks.TIMEOUT_S": timeout_s,
        "carpool.composition.webhooks.BACKOFF_S": backoff_s,
    } | {f"webhooks.{name}": value for name, value in settings.items()}


async def submit(port: int, url: str, text: str = "abc") -> Response:
    """A task whose outcome is to be sent to this URL."""
    body = {"input": text, "mode": "async", "callback_url": url}
    return await ask_once(port, "POST", "/v1/inference", json.dumps(body).encode(), JSON)


async def submit_many(port: int, url: str, count: int, at_once: int = 16) -> dict[str, str]:
    """So many tasks, by id, with their inputs."""
    texts = [f"text {number}" for number in range(count)]
    tasks: dict[str, str] = {}

    async def submit_some() -> None:
        while texts:
            text = texts.pop()
            answer = await submit(port, url, text)
            assert answer.status == 202, answer
            tasks[answer.json["task_id"]] = text

    await asyncio.gather(*(submit_some() for _ in range(at_once)))
    return tasks


def condition(ask: Callable[[], Awaitable[Any]], wanted: Any) -> Callable[[], Awaitable[bool]]:
    """For `until`: whether what is asked for is this."""

    async def is_it() -> bool:
        await asyncio.sleep(0.03)  # to ask without pause would cost more than what is asked about
        return bool(await ask() == wanted)

    return is_it
