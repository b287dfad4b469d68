"""The Python client, against a real gateway and against one that misbehaves on command; every example of its page."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from carpool.client import AsyncClient, Client, Unreachable, asynchronous
from carpool.client.wire import LostAnswer
from carpool.core.errors import (
    BrokerDown,
    CarpoolError,
    DeadlineExceeded,
    InternalError,
    JournalFailed,
    Malformed,
    OverloadError,
    RateLimited,
    Shed,
    TooLarge,
    UnknownModel,
    UnknownTask,
    UpstreamError,
    UpstreamFailed,
)
from carpool.core.problem import problem_json
from support.gateway import HeldGpu, eventually, serving
from support.processes import PATIENCE_S, GatewayProcess, until
from support.stream_server import StreamServer, stream_server
from support.upstreams import answer_bytes

GOOD = answer_bytes(b'{"request_id":"r","output":"ok","metadata":{"batch_size":1}}')

pytestmark = pytest.mark.xdist_group("client")


@pytest.fixture(scope="module")
def gpu() -> Iterator[HeldGpu]:
    with HeldGpu().running() as held:
        yield held


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving(tmp_path_factory.mktemp("client")) as served:
        yield served


@pytest.fixture(scope="module")
def held_gateway(tmp_path_factory: pytest.TempPathFactory, gpu: HeldGpu) -> Iterator[GatewayProcess]:
    with serving(tmp_path_factory.mktemp("held"), gpu.url, settings={"upstream.slots": 8}) as served:
        yield served


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{gateway.port}") as made:
        yield made


class OddGateway:
    """Answers each call with the next of its answers, the last for ever; b"" hangs up, None never answers."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.heads: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.server: StreamServer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            head = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(head.get("content-length", 0)))
            self.heads.append(head)
            self.bodies.append(json.loads(body or b"null"))
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if answer is None:
                await reader.read()  # until its client leaves
                return
            if not answer:
                return
            writer.write(answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def odd(*answers: bytes | None) -> AsyncIterator[OddGateway]:
    made = OddGateway(*answers)
    async with stream_server(made.serve) as made.server:
        yield made


def problem(error: CarpoolError, headers: str = "") -> bytes:
    return answer_bytes(problem_json(error, "r"), error.status, headers)


class TestWithAGateway:
    def test_predicts(self, client: Client) -> None:
        answer = client.predict("abc", request_id="my-id", client_id="me", timeout_s=20)
        assert (answer.output, answer.request_id) == ("cba", "my-id")
        assert answer.metadata["batch_size"] >= 1 and answer.metadata["model"] == "default"

    def test_submits_and_waits_for_the_result(self, client: Client) -> None:
        task = client.submit("abc", task_timeout_s=50)
        assert client.result(task, timeout_s=50).output == "cba"
        client.cancel(task)
        with pytest.raises(UnknownTask):
            client.cancel(task)
        with pytest.raises(UnknownTask):
            client.result(task)

    def test_maps_in_order(self, client: Client) -> None:
        texts = [f"text {n}" for n in range(300)]
        assert client.map(iter(texts), concurrency=32) == [text[::-1] for text in texts]
        assert client.map([]) == []

    def test_the_bar_counts(self, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
        assert client.map(["a", "b"], progress=True) == ["a", "b"]
        assert "2/2" in capfd.readouterr().err

    def test_an_error_ends_a_map_or_stands_in_its_place(self, client: Client) -> None:
        with pytest.raises(UnknownModel):
            client.map(["a", "b"], model="none")
        found = client.map(["a", "b"], model="none", on_error="return")
        assert [type(each) for each in found] == [UnknownModel, UnknownModel]

    def test_the_gateways_own_errors(self, client: Client) -> None:
        with pytest.raises(UnknownModel) as caught:
            client.predict("x", model="none", request_id="mine")
        assert caught.value.__notes__ == ["request mine"]
        with pytest.raises(Malformed):
            client.predict("x", client_id="x" * 1000)
        (answer,) = client.stream(["x"], model="none")
        assert isinstance(answer.error, UnknownModel)
        with pytest.raises(UnknownModel):
            _ = answer.output

    def test_inputs_that_fail_end_a_stream(self, client: Client) -> None:
        def inputs() -> Iterator[str]:
            yield "a"
            raise LookupError("no more")

        with pytest.raises(LookupError, match="no more"):
            list(client.stream(inputs()))
        with pytest.raises(TypeError):
            list(client.stream([object()]))

    def test_an_input_may_be_asked_for_with_the_client_itself(self, client: Client) -> None:
        assert client.map(client.predict(text).output for text in ("ab", "cd")) == ["ab", "cd"]

    def test_a_sequence_may_take_its_time(self, client: Client) -> None:
        class Lazy(Sequence[str]):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, place: Any) -> Any:
                if place > 1:
                    raise IndexError
                return client.predict("abc"[place:], timeout_s=PATIENCE_S).output

        assert client.map(Lazy()) == ["abc", "bc"]

    def test_a_gateway_that_makes_tasks_of_what_says_nothing_else(self, tmp_path: Path) -> None:
        with (
            serving(tmp_path, settings={"input.default_mode": "async"}) as running,
            Client(f"http://127.0.0.1:{running.port}") as client,
        ):
            assert client.predict("abc").output == "cba"

    def test_a_closed_client_says_so(self, gateway: GatewayProcess) -> None:
        with Client(f"http://127.0.0.1:{gateway.port}") as closed:
            assert closed.predict("a").output == "a"
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            closed.predict("a")


class TestWhoLeaves:
    async def test_a_stream_reads_no_more_than_it_may_and_cancels_the_rest(
        self, held_gateway: GatewayProcess, gpu: HeldGpu
    ) -> None:
        read = 0

        def inputs() -> Iterator[str]:
            nonlocal read
            while True:
                read += 1
                yield f"input {read}"

        async def held() -> float:
            return await held_gateway.metric("carpool_held_requests")

        gpu.hold()
        async with AsyncClient(f"http://127.0.0.1:{held_gateway.port}") as client:
            async with aclosing(client.stream(inputs(), concurrency=5)) as answers:
                first = asyncio.ensure_future(anext(answers))

                async def are_all_there() -> bool:
                    return await held() == 5

                await until(are_all_there)
                assert read == 5
                first.cancel()
                with suppress(asyncio.CancelledError):
                    await first

            async def is_nobody_there() -> bool:
                return await held() == 0

            await until(is_nobody_there)
        gpu.release()

    def test_an_interrupt_ends_a_stream_as_itself(
        self, held_gateway: GatewayProcess, gpu: HeldGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wait, calls = Future.result, gpu.calls

        def interrupted(future: Future[Any]) -> None:
            monkeypatch.setattr(Future, "result", wait)
            assert eventually(lambda: gpu.calls > calls)
            raise KeyboardInterrupt

        gpu.hold()
        monkeypatch.setattr(Future, "result", interrupted)
        with Client(f"http://127.0.0.1:{held_gateway.port}") as client, pytest.raises(KeyboardInterrupt):
            list(client.stream(["x"]))
        gpu.release()

    def test_a_stream_that_the_collector_finds_holds_up_nobody(self, gateway: GatewayProcess) -> None:
        class Collecting(float):
            """A timeout; whoever adds it to the time, which is the client's own thread, collects."""

            def __radd__(self, other: Any) -> Any:
                gc.collect()
                return other + float(self)

        def leave_a_stream(client: Client) -> None:
            answers = client.stream(["a"] * 100)
            assert next(answers).output == "a"
            itself: list[Any] = [answers]
            itself.append(itself)

        client, asked = Client(f"http://127.0.0.1:{gateway.port}"), Future[Any]()

        def ask() -> None:
            asked.set_result(client.predict("x", timeout_s=Collecting(PATIENCE_S)).output)

        gc.disable()
        try:
            leave_a_stream(client)
            threading.Thread(target=ask, daemon=True).start()
            assert asked.result(PATIENCE_S) == "x"
        finally:
            gc.enable()
        client.close()

    def test_a_client_that_closes_ends_what_is_under_way(self, held_gateway: GatewayProcess, gpu: HeldGpu) -> None:
        gpu.hold()
        calls = gpu.calls
        failures: list[BaseException] = []
        client = Client(f"http://127.0.0.1:{held_gateway.port}")

        def ask() -> None:
            try:
                client.predict("x")
            except BaseException as failure:
                failures.append(failure)

        asking = threading.Thread(target=ask)
        asking.start()
        assert eventually(lambda: gpu.calls > calls)
        client.close()
        asking.join(60)
        assert len(failures) == 1
        gpu.release()


class TestDeadlines:
    async def test_nobody_waits_longer_whatever_the_gateway_does(self) -> None:
        for answer in (None, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"):
            async with odd(answer) as gateway, AsyncClient(gateway.url) as client:
                with pytest.raises(DeadlineExceeded, match="200 ms"):
                    await client.predict("x", timeout_s=0.2)
                assert 1 <= int(gateway.heads[0]["x-request-timeout-ms"]) <= 200

    async def test_a_wait_for_a_place_counts(self) -> None:
        async with odd(None) as gateway, AsyncClient(gateway.url, concurrency=1) as client:
            first = asyncio.create_task(client.predict("x"))
            await until(lambda: len(gateway.heads) == 1)
            with pytest.raises(DeadlineExceeded):
                await client.predict("x", timeout_s=0.1)
            assert len(gateway.heads) == 1
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def test_a_result_that_does_not_come(self) -> None:
        pending = answer_bytes(b'{"task_id":"t","status":"PENDING","timestamp":"2026-01-01T00:00:00Z"}')
        async with odd(pending) as gateway, AsyncClient(gateway.url) as client:
            with pytest.raises(DeadlineExceeded, match="500 ms"):
                await client.result("t", timeout_s=0.5)
            assert 1 < len(gateway.heads) <= 4  # it did not ask again at once

    async def test_a_look_that_is_not_answered_is_not_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = answer_bytes(b'{"task_id":"t","status":"SUCCESS","output":1,"timestamp":"2026-01-01T00:00:00Z"}')
        async with odd(None, done) as gateway, AsyncClient(gateway.url) as client:
            monkeypatch.setattr(asynchronous, "POLL_S", 0.1)
            monkeypatch.setattr(asynchronous, "CONNECT_S_MAX", 0.1)
            assert (await client.result("t", timeout_s=PATIENCE_S)).output == 1

    async def test_places_are_free_again_after_cancelled_calls(self) -> None:
        async with odd(None) as gateway, AsyncClient(gateway.url, concurrency=4) as client:
            for round_number in range(20):
                calls = [asyncio.create_task(client.predict("x")) for _ in range(4)]
                for _ in range(round_number):
                    await asyncio.sleep(0)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            before = len(gateway.heads)
            calls = [asyncio.create_task(client.predict("x")) for _ in range(4)]
            await until(lambda: len(gateway.heads) >= before + 4)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


class TestRetries:
    async def test_what_may_succeed_later_is_sent_again_with_the_same_id(self) -> None:
        answers = (problem(Shed("too much"), "Retry-After: 0\r\n"), b"", problem(UpstreamFailed("it failed")), GOOD)
        async with odd(*answers) as gateway, AsyncClient(gateway.url, api_key="cp_secret") as client:
            assert (await client.predict("x")).output == "ok"
            assert len(gateway.heads) == 4
            assert len({head["x-request-id"] for head in gateway.heads}) == 1
            assert {head["authorization"] for head in gateway.heads} == {"Bearer cp_secret"}

    async def test_what_cannot_is_not(self) -> None:
        async with odd(problem(Malformed("no"))) as gateway, AsyncClient(gateway.url) as client:
            with pytest.raises(Malformed, match="no"):
                await client.predict("x")
            assert len(gateway.heads) == 1

    async def test_nor_where_the_pause_ends_after_the_deadline(self) -> None:
        late = problem(RateLimited("too many"), "Retry-After: 30\r\n")
        async with odd(late) as gateway, AsyncClient(gateway.url) as client:
            with pytest.raises(RateLimited) as caught:
                await client.predict("x", timeout_s=20)
            assert caught.value.retry_after_s == 30
            assert len(gateway.heads) == 1

    async def test_all_calls_share_a_budget(self) -> None:
        refusal = problem(Shed("too much"), "Retry-After: 0\r\n")
        async with odd(refusal) as gateway, AsyncClient(gateway.url, retry_share=0.1, retries=3) as client:
            found = await client.map(["x"] * 60, on_error="return")
            assert all(isinstance(each, Shed) for each in found)
            assert 60 < len(gateway.heads) <= 60 + 10 + 6

    async def test_a_task_is_not_submitted_twice_when_nobody_knows(self) -> None:
        accepted = answer_bytes(b'{"task_id":"t","status":"PENDING"}', 202)
        async with odd(b"", accepted) as gateway, AsyncClient(gateway.url) as client:
            with pytest.raises(LostAnswer):
                await client.submit("x")
            assert len(gateway.heads) == 1
        # Redis was lost while the task was written: the gateway does not know either.
        for doubt in (BrokerDown("it may or may not have been accepted"), JournalFailed("the disk failed")):
            async with odd(problem(doubt), accepted) as gateway, AsyncClient(gateway.url) as client:
                with pytest.raises(type(doubt)):
                    await client.submit("x")
                assert len(gateway.heads) == 1
        # An answer that is not the gateway's own: a proxy's.
        async with (
            odd(answer_bytes(b"<h1>Bad gateway</h1>", 502), accepted) as gateway,
            AsyncClient(gateway.url) as client,
        ):
            with pytest.raises(UpstreamError, match="502"):
                await client.submit("x")
        async with (
            odd(problem(Shed("later"), "Retry-After: 0\r\n"), accepted) as gateway,
            AsyncClient(gateway.url) as client,
        ):
            assert await client.submit("x", callback_url="https://example.org/h", parameters={"n": 1}) == "t"
            assert gateway.bodies[1] == {
                "input": "x",
                "parameters": {"n": 1},
                "mode": "async",
                "callback_url": "https://example.org/h",
            }

    async def test_a_gateway_that_is_not_there(self) -> None:
        async with AsyncClient("http://127.0.0.1:1", retries=1) as client:
            with pytest.raises(Unreachable):
                await client.submit("x")


class TestOddAnswers:
    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (answer_bytes(b"<html>"), InternalError),
            (answer_bytes(b"[" * 900), InternalError),
            (answer_bytes(b'{"output": "\xff", "request_id": "r"}'), InternalError),
            (answer_bytes(b"x" * 2000), TooLarge),
            (answer_bytes(b"<html>", 503, "Retry-After: soon\r\n"), OverloadError),
            (answer_bytes(b"<html>", 503, "Retry-After: \xb2\r\n"), OverloadError),
            (answer_bytes(b"<html>", 503, f"Retry-After: {'9' * 5000}\r\n"), OverloadError),
            (answer_bytes(b'{"type":"urn:carpool:error:of-the-future","detail":"d"}', 503), OverloadError),
        ],
    )
    async def test_is_an_error_of_the_tree(self, answer: bytes, kind: type[CarpoolError]) -> None:
        async with odd(answer) as gateway, AsyncClient(gateway.url, retries=0, answer_bytes_max=1000) as client:
            with pytest.raises(kind) as caught:
                await client.predict("x")
            assert caught.type is kind
