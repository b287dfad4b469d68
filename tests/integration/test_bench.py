"""The load generator against a small server whose every answer the test decides."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from carpool.cli.bench import bench
from carpool.tools.bench.run import BenchOptions, TierLoad, drive, resolve, segments_from
from carpool.tools.bench.tally import Report
from support.processes import PATIENCE_S, carpool, telling, until
from support.stream_server import stream_server


class Exchange:
    """One request as the server saw it."""

    def __init__(self, head: bytes, body: bytes, number: int, number_on_connection: int) -> None:
        self.line = head.partition(b"\r\n")[0].decode()
        self.head = head
        self.text: str = msgspec.json.decode(body)["input"] if body else ""
        # Counted from 1, over all connections and on this one.
        self.number = number
        self.number_on_connection = number_on_connection


# Returns the bytes to write; empty: close without a word; None: never answer.
Behaviour = Callable[[Exchange], Awaitable[bytes | None]]


class FakeGateway:
    """Serves HTTP as its behaviour says; a response that says `Connection: close` ends its connection."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = right
        self.connections = 0
        self.requests = 0
        self.url = ""
        self._running = AsyncExitStack()
        self.writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        server = await self._running.enter_async_context(stream_server(self._serve, backlog=200))
        self.url = f"http://127.0.0.1:{server.port}"

    async def stop(self) -> None:
        await self._running.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        number_here = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                self.requests += 1
                number_here += 1
                answer = await self.behaviour(Exchange(head, body, self.requests, number_here))
                if answer is None:
                    continue
                writer.write(answer)
                if not answer or b"Connection: close" in answer or b"CUT" in answer:
                    break
        finally:
            self.writers.discard(writer)


def respond(body: bytes, status: int = 200, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def output(text: str, batch_size: int = 4) -> bytes:
    return (
        b'{"request_id":"r","output":"%b","metadata":{"latency_ms":3.0,"queue_ms":1.5,"upstream_ms":1,'
        b'"batch_size":%d,"model":"default","cached":false}}' % (text[::-1].encode(), batch_size)
    )


async def right(exchange: Exchange) -> bytes | None:
    return respond(output(exchange.text))


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    await gateway.start()
    yield gateway
    await gateway.stop()


async def load(
    gateway: FakeGateway, rate: float = 200, duration: str = "300ms", connections: int = 10, **more: Any
) -> Report:
    options = BenchOptions(
        url=gateway.url,
        segments=segments_from(rate, duration, None),
        connections=connections,
        **{"arrivals": "uniform", "payload_bytes": 200, **more},
    )
    async with asyncio.timeout(PATIENCE_S):
        report, interrupted = await drive(options, resolve(gateway.url))
    assert not interrupted
    assert report.unanswered == 0
    asked = report.sent + report.status.get("unasked", 0)
    assert report.ok + report.errors + report.wrong == asked
    return report


async def test_right_answers_are_counted_and_described(gateway: FakeGateway) -> None:
    report = await load(gateway)
    assert (report.sent, report.ok, report.status) == (60, 60, {"200": 60})
    assert gateway.requests == 60
    assert gateway.connections == 10
    assert report.batch_mean == 4
    assert report.queue_ms.p99 == pytest.approx(1.5, rel=0.01)
    assert 0 < report.rate <= 220  # on a busy machine they come later
    assert report.clean


async def test_each_tier_sends_its_key_and_has_its_figures(gateway: FakeGateway) -> None:
    async def shed_without_a_key(exchange: Exchange) -> bytes | None:
        if b"Authorization: Bearer cp_paid\r\n" in exchange.head:
            return await right(exchange)
        assert b"Authorization" not in exchange.head
        return respond(b"{}", 503)

    gateway.behaviour = shed_without_a_key
    report = await load(gateway, tiers=[TierLoad("paid", 30, "cp_paid"), TierLoad("free", 70, "")])
    paid, free = report.tiers["paid"], report.tiers["free"]
    assert paid.offered + free.offered == report.sent == 60
    assert paid.ok == paid.offered == report.ok > 0
    assert free.shed == free.offered == report.errors > paid.offered
    assert free.refusal_ms.p99 is not None and free.latency_ms.p50 is None
    assert paid.latency_ms.p95 is not None and paid.refusal_ms.p99 is None


async def test_a_refused_request_is_sent_again_when_it_was_told_to(gateway: FakeGateway) -> None:
    asked: dict[str, list[float]] = {}

    async def refuse_once(exchange: Exchange) -> bytes | None:
        times = asked.setdefault(exchange.text, [])
        times.append(asyncio.get_running_loop().time())
        return respond(b"{}", 503, "Retry-After: 1\r\n") if len(times) == 1 else await right(exchange)

    gateway.behaviour = refuse_once
    report = await load(gateway, rate=50, retries=3)
    assert (report.ok, report.errors, report.retries) == (15, 0, 15)
    assert all(len(times) == 2 and times[1] - times[0] > 0.95 for times in asked.values())
    # A client's time goes on while it waits for its turn; a refusal is told without that.
    assert report.latency_ms.p50 is not None and report.latency_ms.p50 > 950
    assert report.refusal_ms.p50 is not None and report.refusal_ms.p50 < report.latency_ms.p50


async def test_a_stall_shows_in_every_request_that_was_due_meanwhile(gateway: FakeGateway) -> None:
    async def stall_once(exchange: Exchange) -> bytes | None:
        if exchange.number == 1:
            await asyncio.sleep(0.5)
        return await right(exchange)

    gateway.behaviour = stall_once
    report = await load(gateway, rate=100, duration="1s", connections=1)
    latency = report.latency_ms
    assert report.ok == 100
    # A closed loop would see one slow request in a hundred. Here half of them were due during the stall.
    assert latency.max is not None and latency.max > 450
    assert latency.p90 is not None and latency.p90 > 350


async def test_a_request_lost_with_a_reused_connection_is_sent_again(gateway: FakeGateway) -> None:
    async def hang_up_on_reuse(exchange: Exchange) -> bytes | None:
        return b"" if exchange.number_on_connection > 1 else await right(exchange)

    gateway.behaviour = hang_up_on_reuse
    report = await load(gateway, connections=2)
    assert report.ok == report.sent == 60
    # Each of the others was sent twice.
    assert gateway.requests > 100


async def test_a_request_lost_with_a_fresh_connection_is_an_error(gateway: FakeGateway) -> None:
    async def hang_up(exchange: Exchange) -> bytes | None:
        return b""

    gateway.behaviour = hang_up
    report = await load(gateway, rate=50)
    assert report.errors == report.sent
    assert set(report.status) <= {"closed", "reset"}
    assert gateway.requests == report.sent


async def test_an_answer_that_comes_twice_is_an_error(gateway: FakeGateway) -> None:
    async def answer_twice(exchange: Exchange) -> bytes | None:
        answer = respond(output(exchange.text))
        (writer,) = gateway.writers
        asyncio.get_running_loop().call_later(0.02, writer.write, answer)
        return answer

    gateway.behaviour = answer_twice
    # Half a second between two requests: the copy comes while none is out, also on a busy machine.
    report = await load(gateway, rate=2, duration="2s", connections=1)
    assert report.ok == 4
    # The copy of the last answer may come after the run has ended.
    assert report.errors == report.status["unasked"] >= 3


async def test_no_answer_in_time_is_an_error_also_for_those_not_sent(gateway: FakeGateway) -> None:
    async def silence(exchange: Exchange) -> bytes | None:
        return None

    gateway.behaviour = silence
    report = await load(gateway, rate=50, connections=2, timeout_s=0.4)
    assert report.errors == report.sent == 15
    assert set(report.status) == {"timeout", "timeout-unsent"}
    assert report.latency_ms.p50 is None


class Tasks:
    """The task routes: a result is PENDING once, then what `finish` says."""

    def __init__(self, finish: str = "SUCCESS", more: str = "") -> None:
        self.finish = finish
        self.more = more
        self.texts: dict[str, str] = {}
        self.polled: set[str] = set()

    async def __call__(self, exchange: Exchange) -> bytes | None:
        method, path, _ = exchange.line.split(" ")
        if method == "POST":
            assert b"Prefer: respond-async" in exchange.head
            task_id = f"task{len(self.texts)}"
            self.texts[task_id] = exchange.text
            return respond(b'{"task_id":"%s","status":"PENDING"}' % task_id.encode(), 202, self.more)
        assert path.startswith("/v1/result/") and "?wait_ms=" in path
        task_id = path.removeprefix("/v1/result/").partition("?")[0]
        if task_id not in self.polled:
            self.polled.add(task_id)
            return respond(b'{"task_id":"%s","status":"PENDING"}' % task_id.encode(), 200, self.more)
        result = {"task_id": task_id, "status": self.finish, "output": self.texts[task_id][::-1]}
        return respond(msgspec.json.encode(result), 200, self.more)


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
async def test_tasks_are_followed_to_their_result(gateway: FakeGateway, more: str) -> None:
    gateway.behaviour = Tasks(more=more)
    report = await load(gateway, rate=100, mode="task")
    assert report.ok == report.sent == 30
    assert report.status == {"200": 30}
    assert gateway.requests == 90
    if not more:
        # From the intended start to the result: the second poll comes 20 ms after the first.
        assert report.latency_ms.p50 is not None and report.latency_ms.p50 > 19
    assert report.queue_ms.p50 is None and report.batch_mean is None


async def test_a_wrong_result_is_wrong_and_a_missing_one_an_error(gateway: FakeGateway) -> None:
    tasks = Tasks()

    async def confuse(exchange: Exchange) -> bytes | None:
        answer = await tasks(exchange)
        for task_id in tasks.texts:
            tasks.texts[task_id] = "swapped"
        return respond(b"{}", 404) if "task0?" in exchange.line else answer

    gateway.behaviour = confuse
    report = await load(gateway, rate=100, mode="task")
    assert report.status == {"200": 29, "404": 1}
    assert (report.ok, report.wrong, report.errors) == (0, 29, 1)


async def command(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(lambda: carpool("bench", *arguments, cwd=None, COLUMNS="100"))
    return done.returncode, done.stdout, done.stderr


SMALL = ("--rate", "100", "--duration", "300ms", "--connections", "5", "--payload-bytes", "100")


async def test_the_command_prints_a_table_and_writes_json(gateway: FakeGateway, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, out, _ = await command(gateway.url, *SMALL, "--arrivals", "uniform", "--json", str(file))
    assert status == 0
    assert "latency p99.9" in out
    written = msgspec.json.decode(file.read_bytes())
    assert (written["sent"], written["ok"], written["status"]) == (30, 30, {"200": 30})


async def test_wrong_answers_and_errors_exit_1(gateway: FakeGateway) -> None:
    gateway.behaviour = lambda exchange: asyncio.sleep(0, respond(output(exchange.text[::-1])))
    assert (await command(gateway.url, *SMALL))[0] == 1
    gateway.behaviour = lambda exchange: asyncio.sleep(0, respond(b"{}", 503))
    assert (await command(gateway.url, *SMALL))[0] == 1


async def test_nobody_there_exits_1_with_one_line() -> None:
    url = "http://127.0.0.1:1"  # a port that was free a moment ago may be another test's by now
    status, out, err = await command(url, *SMALL)
    assert (status, out) == (1, "")
    assert err.strip() == f"carpool bench: cannot connect to {url}: Connection refused"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ftp://127.0.0.1"], "URL 'ftp://127.0.0.1' must look like"),
        (["http://127.0.0.1:99999"], "URL 'http://127.0.0.1:99999': Port out of range"),
        (["http://127.0.0.1:1", "--rate", "-1"], "--rate and --duration: '-1.0' is a rate below 0"),
        (["http://127.0.0.1:1", "--duration", "soon"], "'soon' is not a time"),
        (["http://127.0.0.1:1", "--schedule", "wave:3"], "--schedule: 'wave' is not a rate"),
        (["http://127.0.0.1:1", "--connections", "0"], "--connections must be at least 1"),
        (["http://127.0.0.1:1", "--connections", "99999999999"], "open files"),
        (["http://127.0.0.1:1", "--payload-bytes", "3"], "--payload-bytes must be at least 22"),
        (["http://127.0.0.1:1", "--sizes", "lognormal:9,1"], "--sizes: 'lognormal:9,1': MEDIAN must be at least 22"),
        (["http://127.0.0.1:1", "--timeout", "0s"], "--timeout: '0s' is not a time above 0"),
        (["http://127.0.0.1:1", "--tiers", "free"], "--tiers: 'free' is not NAME=KEYFILE:SHARE"),
        (["http://127.0.0.1:1", "--answers", "/nowhere/a"], "--answers /nowhere/a cannot be written"),
        (["http://127.0.0.1:1", "--json", "/nowhere/report.json"], "--json /nowhere/report.json cannot be written"),
    ],
)
def test_bad_options_exit_2_with_one_line(arguments: list[str], complaint: str) -> None:
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


async def test_an_interrupt_prints_the_report_so_far(gateway: FakeGateway, tmp_path: Path) -> None:
    under_way = asyncio.Event()

    async def count(exchange: Exchange) -> bytes | None:
        if exchange.number == 100:
            under_way.set()
        return await right(exchange)

    gateway.behaviour = count
    file = tmp_path / "report.json"
    with telling("bench", gateway.url, "--rate", "100", "--duration", "1m", "--json", str(file)) as (process, told):
        await asyncio.wait_for(under_way.wait(), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        await until(lambda: process.poll() is not None)
        assert process.returncode == 130
        assert "latency p50" in told.read()
    written = msgspec.json.decode(file.read_bytes())
    assert 0 < written["ok"] <= written["sent"] < 6000
