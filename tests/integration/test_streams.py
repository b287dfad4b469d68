"""Streams, events of tasks and CORS on real processes, with a WebSocket client as people have it."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

import pytest
from websockets.asyncio.client import connect as connect_async
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import OPEN
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from carpool.core.problem import Problem
from carpool.face.http.answers import StreamTicket, TaskAccepted
from support.client import ask_once
from support.gateway import MALFORMED, HeldGpu, Peer, ask, eventually, metric, serving
from support.processes import PATIENCE_S, GatewayProcess, carpool, running_gateway, running_role, until
from support.redis_servers import RedisServer

pytestmark = pytest.mark.xdist_group("streams")

PAGE = "https://app.example.com"
WRITE_TIMEOUT_S = "carpool.composition.faces.WRITE_TIMEOUT_S"
# Requests wait as long as a test holds the GPU.
PATIENT = {"broker.queue_timeout_s": 600, "broker.total_timeout_s": 600, "upstream.timeout_s": 600}


@pytest.fixture(scope="module")
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        yield held


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, gpu: HeldGpu) -> Iterator[GatewayProcess]:
    settings = {**PATIENT, "gateway.cors_origins": PAGE, "limits.streams": 8, WRITE_TIMEOUT_S: 0.5}
    with serving(tmp_path_factory.mktemp("gateway"), gpu.url, settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def released(gpu: HeldGpu) -> Iterator[None]:
    yield
    gpu.release()


@contextmanager
def stream(gateway: GatewayProcess, **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{gateway.port}/v1/stream", **options) as client:
        yield client


def read(client: ClientConnection, number: int) -> dict[Any, Any]:
    answers: dict[Any, Any] = {}
    while len(answers) < number:
        answers |= {answer["id"]: answer for answer in json.loads(client.recv(PATIENCE_S))}
    return answers


class TestStreams:
    def test_many_in_flight_each_with_its_own_answer(self, gateway: GatewayProcess) -> None:
        with stream(gateway) as client:
            assert client.protocol.extensions == []  # compression was offered
            for start in range(0, 200, 20):
                client.send(json.dumps([{"id": n, "input": f"text {n}"} for n in range(start, start + 20)]))
            answers = read(client, 200)
            assert {n: answer["output"] for n, answer in answers.items()} == {n: f"text {n}"[::-1] for n in range(200)}
            assert max(answer["metadata"]["batch_size"] for answer in answers.values()) > 1
            assert metric(gateway, "carpool_streams") == 1
        assert eventually(lambda: metric(gateway, "carpool_streams") == 0)

    def test_who_does_not_read_is_cut_off(self, gateway: GatewayProcess) -> None:
        with Peer(gateway.port) as peer:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
            answer = peer.ask("GET", "/v1/stream", b"", *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
            assert answer.status == 101
            text = json.dumps([{"id": n, "input": "x" * 1000} for n in range(50)]).encode()
            mask = bytes(4)
            frame = b"\x81\xfe" + len(text).to_bytes(2, "big") + mask + text
            # It is read from no more while it does not read; then it is reset.
            assert peer.send_until_refused(frame * 2000) < 2000 * len(frame)
        assert eventually(lambda: metric(gateway, "carpool_streams") == 0)
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
        assert gateway.log_messages("error") == []

    def test_plain_http_is_told_what_to_do(self, gateway: GatewayProcess) -> None:
        answer = ask(gateway.port, "GET", "/v1/stream")
        assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
        assert answer.read_as(Problem).type == "urn:carpool:error:upgrade-required"


class TestFuzz:
    """Frames of random bytes, and good ones of which some bytes are wrong, cut off or missing."""

    @staticmethod
    def malformed(random: Random) -> bytes:
        if random.random() < 0.2:
            return random.randbytes(random.randrange(1, 40))
        text = bytearray(json.dumps([{"id": random.randrange(4), "input": "x" * random.randrange(200)}]).encode())
        for _ in range(random.randrange(4)):
            text[random.randrange(len(text))] = random.randrange(256)
        size = bytes((0x80 | len(text),)) if len(text) < 126 else bytes((0xFE, *len(text).to_bytes(2, "big")))
        frame = bytearray(
            bytes((random.choice([0x01, 0x02, 0x80, 0x81, 0x81, 0x82, 0x89, 0x8A]),)) + size + bytes(4) + text
        )
        if random.random() < 0.5:
            frame[random.randrange(8)] = random.randrange(256)
        return bytes(frame[: random.randrange(1, len(frame) + 1)] if random.random() < 0.1 else frame)

    def test_malformed_frames(self, gateway: GatewayProcess) -> None:
        random, closed = Random(7), Counter[int]()
        opening = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        opening.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        with stream(gateway) as bystander:
            sent = 0
            while sent < MALFORMED:
                with Peer(gateway.port) as peer:
                    assert peer.ask("GET", "/v1/stream", b"", *opening).status == 101
                    frames = [self.malformed(random) for _ in range(random.randrange(1, 20))]
                    sent += len(frames)
                    for frame in frames:
                        peer.send_until_refused(frame)
                    if random.random() < 0.5:  # else it leaves without a word
                        closed[self.close_code(peer)] += 1
                bystander.send(json.dumps({"id": sent, "input": f"text {sent}"}))
                assert read(bystander, 1)[sent]["output"] == f"text {sent}"[::-1]
        # Frames that go on in the next, and too long ones, are told from broken ones. 0: it waits for more.
        assert set(closed) <= {0, 1000, 1002, 1007, 1008, 1009} and closed[1002], closed
        assert eventually(lambda: metric(gateway, "carpool_held_requests") == 0)
        assert eventually(lambda: metric(gateway, "carpool_streams") == 0)
        assert gateway.log_messages("error") == []

    @staticmethod
    def close_code(peer: Peer) -> int:
        """Why the gateway ended it; 0 where it did not."""
        client = ClientProtocol(parse_uri("ws://localhost/"), state=OPEN)
        peer.socket.settimeout(0.05)
        with suppress(OSError):
            while data := peer.socket.recv(65536):
                client.receive_data(data)
        return client.close_rcvd.code if client.close_rcvd else 0


class Events:
    """A client that listens to a task."""

    def __init__(self, port: int, task_id: str, **headers: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.request("GET", f"/v1/result/{task_id}/events", headers=headers)
        self.response: HTTPResponse = self._connection.getresponse()

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.response.close()

    def block(self) -> dict[str, str]:
        """The next event, or hint, line by line; empty at the end."""
        found: dict[str, str] = {}
        while (line := self.response.readline().decode()).strip():
            name, _, value = line.rstrip("\n").partition(": ")
            if name and not line.startswith(":"):
                found[name] = found[name] + "\n" + value if name in found else value
        return found if found or not line else self.block()

    def until(self, name: str) -> tuple[list[str], dict[str, str]]:
        """The names of the events up to this one, and it."""
        names: list[str] = []
        while True:
            event = self.block()
            assert event, f"ended after {names}"
            names.append(event["event"])
            if names[-1] == name:
                return names, event


def submit(port: int, text: str = "a task", *headers: str) -> str:
    answer = ask(port, "POST", "/v1/inference", {"input": text}, "Prefer: respond-async", *headers)
    assert answer.status == 202
    return answer.read_as(TaskAccepted).task_id


class TestEvents:
    def test_from_the_queue_to_the_end(self, gateway: GatewayProcess, gpu: HeldGpu) -> None:
        gpu.hold()
        calls = gpu.calls
        first = submit(gateway.port)
        assert eventually(lambda: gpu.calls > calls)
        second = submit(gateway.port, "another")
        with Events(gateway.port, second) as listener:
            assert listener.response.headers["content-type"] == "text/event-stream"
            assert eventually(lambda: metric(gateway, "carpool_event_listeners") == 1)
            _, event = listener.until("queued")
            assert json.loads(event["data"])["queue"]["place"] == 1
            with Events(gateway.port, first) as other:
                assert other.until("processing")[0] == ["processing"]
            with Events(gateway.port, second, **{"Last-Event-ID": event["id"]}) as again:
                gpu.answer_held()
                names, _ = again.until("processing")
                assert names == ["processing"]  # the place that it knew was not told again
            listener.until("processing")
            gpu.release()
            _, event = listener.until("done")
            assert json.loads(event["data"])["output"] == "another"[::-1]
            assert listener.block() == {}
        with Events(gateway.port, second, **{"Last-Event-ID": event["id"]}) as over:
            assert over.response.status == 204
        assert eventually(lambda: metric(gateway, "carpool_event_listeners") == 0)


class TestCors:
    def test_a_preflight(self, gateway: GatewayProcess) -> None:
        wanted = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, x-other")
        answer = ask(gateway.port, "OPTIONS", "/v1/inference", b"", f"Origin: {PAGE}", *wanted)
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, x-other"
        assert "access-control-allow-credentials" not in answer.headers
        foreign = ask(gateway.port, "OPTIONS", "/v1/inference", b"", "Origin: https://evil.example", *wanted)
        assert not [name for name in foreign.headers if name.startswith("access-control")]

    @pytest.mark.parametrize(
        ("method", "target", "body", "status"),
        [
            ("POST", "/v1/inference", {"input": "abc"}, 200),
            ("POST", "/v1/inference", {}, 400),
            ("POST", "/v1/inference", {"input": "x" * 1024 * 1024}, 413),
            ("GET", "/v1/result/x", b"", 404),
            ("GET", "/v1/result/x/events", b"", 404),
            ("GET", "/nothing", b"", 404),
            ("GET", "/openapi.json", b"", 200),
        ],
    )
    def test_every_answer_says_so(
        self, gateway: GatewayProcess, method: str, target: str, body: Any, status: int
    ) -> None:
        json = "Content-Type: application/json"
        answer = ask(gateway.port, method, target, body, f"Origin: {PAGE}", json)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        foreign = ask(gateway.port, method, target, body, "Origin: https://evil.example", json)
        assert foreign.status == status
        assert "access-control-allow-origin" not in foreign.headers
        assert "vary" not in ask(gateway.port, method, target, body).headers

    def test_events_and_known_heads_say_so_too(self, gateway: GatewayProcess) -> None:
        with Events(gateway.port, submit(gateway.port), Origin=PAGE) as listener:
            assert listener.response.headers["access-control-allow-origin"] == PAGE
            listener.until("done")
        with Peer(gateway.port) as peer:
            for _ in range(3):
                answer = peer.ask("POST", "/v1/inference", b'{"input":"a"}', f"Origin: {PAGE}")
                assert answer.headers["access-control-allow-origin"] == PAGE


async def test_at_a_drain_streams_end_with_a_hint(tmp_path: Path, gpu: HeldGpu) -> None:
    gpu.hold()
    async with running_gateway(tmp_path, gpu.url, settings={**PATIENT, "gateway.drain_grace_s": 0}) as gateway:
        async with connect_async(f"ws://127.0.0.1:{gateway.port}/v1/stream") as client:
            await client.send(json.dumps([{"id": 1, "input": "abc"}, {"id": 2, "input": "def"}]))

            async def is_asked() -> bool:
                return await gateway.metric("carpool_held_requests") == 2

            await until(is_asked)
            task_id = await asyncio.to_thread(submit, gateway.port)
            listener = await asyncio.to_thread(Events, gateway.port, task_id)
            gateway.terminate()
            # It ends first: nobody knows when the task is done, but the requests are waited for.
            hints = await asyncio.to_thread(lambda: list(iter(listener.block, {})))
            assert (hints[0]["event"], hints[-1]) == ("queued", {"retry": "1000"})
            listener.__exit__()
            gpu.release()
            answers: dict[int, Any] = {}
            while len(answers) < 2:
                answers |= {each["id"]: each["output"] for each in json.loads(await client.recv())}
            assert answers == {1: "cba", 2: "fed"}
            with pytest.raises(ConnectionClosed) as ended:
                await client.recv()
            assert ended.value.rcvd is not None
            assert (ended.value.rcvd.code, ended.value.rcvd.reason) == (1012, "retry_after_s=1")
        assert await gateway.exit_code() == 0


# With credentials, over Redis


async def test_tickets_owners_and_revoked_keys_over_a_fleet(tmp_path: Path, redis_server: RedisServer) -> None:
    shared = {
        "broker.url": redis_server.url,
        "broker.namespace": tmp_path.name,
        "auth.mode": "keys",
        "limits.per_minute": 0,
        "service.token": "the-token-of-this-fleet",
    }
    where = {"CARPOOL_BROKER_URL": redis_server.url, "CARPOOL_BROKER_NAMESPACE": tmp_path.name}

    def keys(*arguments: str) -> str:
        done = carpool("keys", *arguments, cwd=None, **where)
        assert done.returncode == 0, done
        return done.stdout.strip()

    alice, bob = [await asyncio.to_thread(keys, "create", name) for name in ("alice", "bob")]
    async with (
        running_role(tmp_path / "b", "batcher", "--upstream", "sim:?latency_ms=1&slots=9", settings=shared),
        running_role(tmp_path / "1", "gateway", settings=shared) as one,
        running_role(tmp_path / "2", "gateway", settings=shared) as other,
    ):
        token = "Authorization: Bearer the-token-of-this-fleet\r\n"
        for each in (one, other):

            async def is_ready(each: GatewayProcess = each) -> bool:
                return (await ask_once(each.admin_port, "GET", "/internal/ready", b"", token)).status == 200

            await until(is_ready)
        is_alice = f"Authorization: Bearer {alice}\r\n"
        assert (await ask_once(one.port, "POST", "/v1/stream/tickets")).status == 401
        given = await ask_once(one.port, "POST", "/v1/stream/tickets", b"", is_alice)
        ticket = given.read_as(StreamTicket).ticket
        assert alice not in given.body.decode()

        at_the_other = f"ws://127.0.0.1:{other.port}/v1/stream"
        with pytest.raises(InvalidStatus) as refused:
            await connect_async(at_the_other)
        assert refused.value.response.status_code == 401
        async with connect_async(f"{at_the_other}?ticket={ticket}") as client:
            await client.send(json.dumps({"id": "a", "input": "abc"}))
            assert json.loads(await client.recv())[0]["output"] == "cba"

            task_id = await asyncio.to_thread(submit, one.port, "x", is_alice.strip())
            path = f"/v1/result/{task_id}/events"
            assert (await ask_once(other.port, "GET", path, b"", f"Authorization: Bearer {bob}\r\n")).status == 404

            def listen() -> tuple[list[str], dict[str, str]]:
                with Events(other.port, task_id, Authorization=f"Bearer {alice}") as listener:
                    return listener.until("done")

            _, done = await asyncio.to_thread(listen)
            assert json.loads(done["data"])["output"] == "x"

            await asyncio.to_thread(keys, "revoke", "alice")
            with pytest.raises(ConnectionClosed) as ended:
                async with asyncio.timeout(PATIENCE_S):
                    await client.recv()
            assert ended.value.rcvd is not None and ended.value.rcvd.code == 3000
        with pytest.raises(InvalidStatus):
            await connect_async(f"{at_the_other}?ticket={ticket}")
        assert ticket not in other.log.read_text() and alice not in other.log.read_text()
