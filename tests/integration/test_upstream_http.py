"""HTTP/1.1 towards endpoints on real sockets: how answers end, what is too long, and what becomes of a connection."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from carpool.testing import FakeClock
from carpool.upstream import connections
from carpool.upstream.client import HttpEndpoint
from carpool.upstream.connections import FRAMING_BYTES_MAX
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError, UpstreamCall
from carpool.upstream.tls import LOOK_EVERY_S, Credentials, UpstreamSecurity
from support.certificates import Certificates
from support.processes import PATIENCE_S, until
from support.raw_http import RawCall, RawUpstream, Script, answer_to, call_with, output_for, raw_upstream

TIMEOUT_S = PATIENCE_S
BYTES_MAX = 10_000
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def endpoint_of(script: Script) -> AsyncIterator[tuple[HttpEndpoint, RawUpstream]]:
    async with raw_upstream(script) as upstream:
        endpoint = HttpEndpoint(upstream.url, 1, BYTES_MAX)
        yield endpoint, upstream
        await endpoint.close()


@pytest.mark.parametrize(
    ("answer", "body", "is_used_again"),
    [
        pytest.param(OK + b"Content-Length: 2\r\n\r\nok", b"ok", True, id="a length"),
        pytest.param(OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nok", b"ok", False, id="said to be the last"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False, id="HTTP/1.0"),
        pytest.param(OK + b"\r\nok", b"ok", False, id="its end is that of the connection"),
        pytest.param(OK + b"\r\n", b"", False, id="nothing but the end of the connection"),
        pytest.param(
            b"HTTP/1.1 103 Early\r\nContent-Length: 9\r\n\r\n" + OK + b"\r\nok", b"ok", False, id="a length before it"
        ),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", True, id="no body"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"ok", True, id="chunks"),
        pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", b"ok", True, id="lines without CR"),
        pytest.param(OK + b"Content-Length: 2\r\nContent-Encoding: Identity\r\n\r\nok", b"ok", True, id="identity"),
    ],
)
async def test_how_an_answer_may_end(answer: bytes, body: bytes, is_used_again: bool) -> None:
    async def script(call: RawCall) -> None:
        await call.send(answer)
        if not is_used_again:
            await asyncio.sleep(0.02)
            await call.close()

    async with endpoint_of(script) as (endpoint, upstream):
        for _ in range(2):
            assert (await endpoint.post(call_with("a"), TIMEOUT_S)).body == body
        assert upstream.connections == (1 if is_used_again else 2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(OK + b"Content-Length: %d\r\n\r\n" % (BYTES_MAX + 1), "longer than 10000 bytes", id="by its head"),
        pytest.param(OK + b"\r\n" + b"x" * (BYTES_MAX + 1), "longer than 10000 bytes", id="by its body"),
        pytest.param(OK + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\nok", "compressed", id="compressed"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "no valid HTTP", id="another protocol"),
        pytest.param(OK + b"X: " + b"x" * FRAMING_BYTES_MAX, "the head of the answer", id="an endless header"),
        pytest.param(OK + b"X: y\r\n" * FRAMING_BYTES_MAX, "the head of the answer", id="endless headers"),
        pytest.param(b"HTTP/1.1 102 Go on\r\n\r\n" * 4096, "the head of the answer", id="endless interim answers"),
        pytest.param(
            OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * FRAMING_BYTES_MAX, "the head", id="a trailer"
        ),
    ],
)
async def test_what_is_not_read_to_its_end(answer: bytes, says: str) -> None:
    """The connection stays open on the other side: what cuts it off is the limit."""

    async def script(call: RawCall) -> None:
        await call.send(answer[:30], answer[30:])

    async with endpoint_of(script) as (endpoint, upstream):
        for _ in range(2):
            with pytest.raises(AttemptFailedError, match=says):
                await endpoint.post(call_with("a"), TIMEOUT_S)
        assert upstream.connections == 2


async def test_many_small_chunks_take_little_memory() -> None:
    """Each was an object: an answer took 66 times its size."""
    chunks = OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"2\r\nok\r\n" * 250_000 + b"0\r\n\r\n"

    async def script(call: RawCall) -> None:
        await call.send(chunks)

    async with raw_upstream(script) as upstream:
        endpoint = HttpEndpoint(upstream.url, 1, 1_000_000)
        tracemalloc.start()
        try:
            body = (await endpoint.post(call_with("a"), TIMEOUT_S)).body
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            await endpoint.close()
    assert body == b"ok" * 250_000 and peak < 8_000_000


async def test_an_answer_that_a_reset_cuts_off_has_no_end() -> None:
    async def script(call: RawCall) -> None:
        await call.send(OK + b"\r\nok")
        await asyncio.sleep(0.02)
        call.reset()

    async with endpoint_of(script) as (endpoint, _):
        with pytest.raises(AttemptFailedError, match="broke off"):
            await endpoint.post(call_with("a"), TIMEOUT_S)


async def test_a_call_that_is_given_up_takes_its_connection_with_it() -> None:
    is_slow = True

    async def script(call: RawCall) -> None:
        if is_slow:
            await asyncio.sleep(0.1)
        call.write_if_open(answer_to(call.body))

    async with endpoint_of(script) as (endpoint, upstream):
        with pytest.raises(AttemptFailedError, match="no answer within"):
            await endpoint.post(call_with("a"), 0.02)
        given_up = asyncio.create_task(endpoint.post(call_with("b"), TIMEOUT_S))
        await until(lambda: len(upstream.bodies) == 2)
        given_up.cancel()
        await asyncio.wait([given_up])
        is_slow = False
        assert (await endpoint.post(call_with("c"), TIMEOUT_S)).body == output_for("c")
        assert (upstream.connections, endpoint.stray_answers) == (3, 0)


async def test_what_rests_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_S", 0.1)
    ended: list[str] = []

    class Upstream(RawUpstream):
        async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await super().converse(reader, writer)
            except asyncio.IncompleteReadError:
                ended.append("")

    async def script(call: RawCall) -> None:
        await call.send(answer_to(call.body))

    async with raw_upstream(Upstream(script)) as upstream:
        endpoint = HttpEndpoint(upstream.url, 9, BYTES_MAX)
        await asyncio.gather(*(endpoint.post(call_with("a"), TIMEOUT_S) for _ in range(3)))
        await asyncio.sleep(0.05)
        await endpoint.post(call_with("b"), TIMEOUT_S)
        assert (upstream.connections, ended) == (3, [])
        await until(lambda: len(ended) == 2)
        await until(lambda: len(ended) == 3)
        await endpoint.close()


async def test_after_close_no_connection_rests() -> None:
    async def script(call: RawCall) -> None:
        await asyncio.sleep(0.02)
        await call.send(answer_to(call.body))

    async with endpoint_of(script) as (endpoint, upstream):
        under_way = asyncio.create_task(endpoint.post(call_with("a"), TIMEOUT_S))
        await until(lambda: bool(upstream.bodies))
        await endpoint.close()
        assert (await under_way).body == output_for("a")
        await endpoint.post(call_with("b"), TIMEOUT_S)
        assert upstream.connections == 2


async def test_new_certificates_are_for_new_connections(certificates: Certificates, tmp_path: Path) -> None:
    async def script(call: RawCall) -> None:
        await call.send(answer_to(call.body))

    clock = FakeClock()
    ca = tmp_path / "ca.pem"
    ca.write_bytes((certificates.folder / "ca.pem").read_bytes())
    async with raw_upstream(script, certificates.of_server()) as upstream:
        endpoint = HttpEndpoint(upstream.url, 1, BYTES_MAX, Credentials(UpstreamSecurity(ca=str(ca)), clock))
        for _ in range(2):
            await endpoint.post(call_with("a"), TIMEOUT_S)
        assert upstream.connections == 1
        ca.write_bytes(ca.read_bytes() + b"\n")
        clock.advance(LOOK_EVERY_S)
        for _ in range(2):
            await endpoint.post(call_with("a"), TIMEOUT_S)
        assert upstream.connections == 2
        await endpoint.close()


async def test_a_page_whose_connection_was_dead_is_asked_for_again() -> None:
    async def script(call: RawCall) -> None:
        if call.number == 1:
            await call.send(answer_to(call.body))
        else:
            await call.close()

    async with endpoint_of(script) as (endpoint, upstream):
        for _ in range(3):
            assert (await endpoint.get("/health", TIMEOUT_S)).status == 200
        with pytest.raises(ConnectionWasDeadError):
            await endpoint.post(call_with("a"), TIMEOUT_S)
        assert upstream.connections == 3


async def test_a_header_has_one_line() -> None:
    async def script(call: RawCall) -> None:
        await call.send(answer_to(call.body))

    async with endpoint_of(script) as (endpoint, upstream):
        for value in ("a\r\nX-Other: b", "a\nb", "a\rb"):
            with pytest.raises(ValueError, match="X-Own"):
                await endpoint.post(UpstreamCall(b"{}", headers=(("X-Own", value),)), TIMEOUT_S)
        assert upstream.connections == 0


async def test_a_name_is_asked_for_once_and_an_address_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call asked: names that did not resolve took all threads, and no endpoint got a new connection."""
    loop, asked = asyncio.get_running_loop(), 0
    real = loop.getaddrinfo

    async def slow(*given: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return await real(*given, **options)

    monkeypatch.setattr(loop, "getaddrinfo", slow)

    async def script(call: RawCall) -> None:
        await call.send(OK + b"Content-Length: 2\r\n\r\nok")

    async with raw_upstream(script) as upstream:
        for host, questions in (("127.0.0.1", 0), ("localhost", 1)):
            endpoint = HttpEndpoint(upstream.url.replace("127.0.0.1", host), 8, BYTES_MAX)
            with pytest.raises(AttemptFailedError) if questions else nullcontext():
                await endpoint.post(call_with("a"), 0.02)  # who leaves takes no answer from the others
            answers = await asyncio.gather(*(endpoint.post(call_with("a"), TIMEOUT_S) for _ in range(8)))
            assert ([answer.body for answer in answers], asked) == ([b"ok"] * 8, questions)
            await endpoint.close()
    gone = HttpEndpoint(upstream.url.replace("127.0.0.1", "localhost"), 1, BYTES_MAX)
    for _ in range(2):  # who cannot be reached may have moved
        with pytest.raises(AttemptFailedError, match="no connection"):
            await gone.post(call_with("a"), TIMEOUT_S)
    assert asked == 3
    await gone.close()
