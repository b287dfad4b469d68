"""U8 of FAULTS.md: bytes that are no answer to a call never become one. Real sockets, both event loops."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from carpool.upstream import connections
from carpool.upstream.client import HttpEndpoint
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError, UpstreamCall
from carpool.upstream.tls import Credentials, UpstreamSecurity
from support.certificates import Certificates
from support.processes import PATIENCE_S, until
from support.raw_http import (
    HastyUpstream,
    RawCall,
    RawUpstream,
    Script,
    answer_to,
    call_with,
    chunked_answer_to,
    output_for,
    raw_upstream,
)

TIMEOUT_S = PATIENCE_S
CLIENTS = 40
BIG = 20 * 1024 * 1024

Run = Callable[[Coroutine[Any, Any, None]], None]
each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
# What a connection is made of is the event loop's matter: each is tried with the one that Carpool's processes have.
each_loop_and_way = pytest.mark.parametrize(
    ("run", "way"), [(asyncio.run, "tcp"), (uvloop.run, "tcp"), (uvloop.run, "tls"), (uvloop.run, "unix")]
)


@asynccontextmanager
async def endpoint_of(
    served: Script | RawUpstream, way: str = "tcp", certificates: Certificates | None = None
) -> AsyncIterator[tuple[HttpEndpoint, RawUpstream]]:
    tls, security, path = None, UpstreamSecurity(), None
    if way == "tls":
        assert certificates is not None
        tls, security = certificates.of_server(), UpstreamSecurity(ca=certificates.pem("ca"))
    elif way == "unix":
        assert certificates is not None
        path = certificates.folder / "upstream.sock"
    async with raw_upstream(served, tls, path) as upstream:
        endpoint = HttpEndpoint(upstream.url, 1, BIG + 1000, Credentials(security))
        try:
            yield endpoint, upstream
        finally:
            await endpoint.close()


async def ask(endpoint: HttpEndpoint, text: str) -> bytes:
    answer = await endpoint.post(call_with(text), TIMEOUT_S)
    assert answer.status == 200
    return answer.body


async def ask_for_own(endpoint: HttpEndpoint, *texts: str) -> None:
    for text in texts:
        assert await ask(endpoint, text) == output_for(text)


async def caught(endpoint: HttpEndpoint) -> None:
    """Wait until it has been."""
    await until(lambda: endpoint.stray_answers > 0, within_s=TIMEOUT_S)


async def good(call: RawCall) -> None:
    await call.send(answer_to(call.body))


# An upstream that repeats


async def at_once(call: RawCall) -> None:
    await call.send(answer_to(call.body) * 2)


async def in_chunks(call: RawCall) -> None:
    await call.send(chunked_answer_to(call.body) * 2)


async def behind_the_last_byte(call: RawCall) -> None:
    """The answer comes in two reads; the second has its last byte, and all of it again."""
    answer = answer_to(call.body)
    await call.send(answer[:-1], answer[-1:] + answer)


async def thrice(call: RawCall) -> None:
    await call.send(answer_to(call.body) * 3)


async def half_of_it(call: RawCall) -> None:
    answer = answer_to(call.body)
    await call.send(answer + answer[:20])


async def behind_nothing(call: RawCall) -> None:
    """An answer without a body has no place for an output: it must not take the next one's either."""
    await call.send(answer_to(call.body) + b"HTTP/1.1 204 No Content\r\n\r\n")


@each_loop_and_way
@pytest.mark.parametrize(
    "script", [at_once, in_chunks, behind_the_last_byte, thrice, half_of_it, behind_nothing], ids=lambda s: s.__name__
)
def test_an_answer_with_something_behind_it_is_good_and_the_last_of_its_connection(
    run: Run, way: str, script: Script, certificates: Certificates
) -> None:
    async def main() -> None:
        async with endpoint_of(script, way, certificates) as (endpoint, upstream):
            await ask_for_own(endpoint, *(f"text {number}" for number in range(5)))
            assert endpoint.stray_answers == upstream.connections == 5

    run(main())


@each_loop_and_way
@pytest.mark.parametrize("later_s", [0.005, 0.05])
def test_an_answer_repeated_while_the_connection_rests_goes_to_nobody(
    run: Run, way: str, later_s: float, certificates: Certificates
) -> None:
    async def repeat(call: RawCall) -> None:
        await call.send(answer_to(call.body), answer_to(call.body), pause_s=later_s)

    async def main() -> None:
        async with endpoint_of(repeat, way, certificates) as (endpoint, upstream):
            await ask_for_own(endpoint, "first")
            assert endpoint.stray_answers == 0
            await caught(endpoint)
            # From now on each call has a connection of its own: what is repeated comes to a closed door.
            await ask_for_own(endpoint, *(f"text {number}" for number in range(CLIENTS)))
            assert endpoint.stray_answers == 1
            assert upstream.connections == 1 + CLIENTS

    run(main())


def test_an_endpoint_that_was_caught_is_trusted_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = True

    async def script(call: RawCall) -> None:
        await call.send(answer_to(call.body) * (2 if repeats else 1))

    async def main() -> None:
        nonlocal repeats
        async with endpoint_of(script) as (endpoint, upstream):
            await ask_for_own(endpoint, "a")
            repeats = False
            await ask_for_own(endpoint, "b", "c")
            assert upstream.connections == 3
            loop = asyncio.get_running_loop()
            now = loop.time
            monkeypatch.setattr(loop, "time", lambda: now() + connections.CAUGHT_S)
            await ask_for_own(endpoint, "d", "e", "f")
            monkeypatch.undo()
            assert (upstream.connections, endpoint.stray_answers) == (4, 1)

    asyncio.run(main())


async def test_a_page_is_no_answer_to_a_call_and_a_call_is_no_page() -> None:
    async def repeat(call: RawCall) -> None:
        await call.send(answer_to(call.body), answer_to(call.body), pause_s=0.01)

    async with endpoint_of(repeat) as (endpoint, upstream):
        await ask_for_own(endpoint, "a")
        await caught(endpoint)
        assert (await endpoint.get("/health", TIMEOUT_S)).body == b'{"outputs": []}'
        await ask_for_own(endpoint, "b")
        assert upstream.connections == 3


# While the next call is under way


def own_behind_repeated(repeated: bytes, own: bytes) -> bytes:
    return repeated + own


def own_begins_behind_repeated(repeated: bytes, own: bytes) -> bytes:
    return repeated + own[:20]


@each_loop_and_way
@pytest.mark.parametrize("mix", [own_behind_repeated, own_begins_behind_repeated], ids=["whole", "begun"])
@pytest.mark.parametrize("chunks", [False, True], ids=["length", "chunks"])
def test_of_two_answers_in_one_read_the_first_may_be_that_of_the_call_before(
    run: Run, way: str, chunks: bool, mix: Callable[[bytes, bytes], bytes], certificates: Certificates
) -> None:
    """They come so where the gateway was stopped for a moment."""
    answers: list[bytes] = []

    async def repeat(call: RawCall) -> None:
        answers.append(chunked_answer_to(call.body) if chunks else answer_to(call.body))
        call.write_if_open(mix(answers[-2], answers[-1]) if call.number > 1 else answers[-1])

    async def main() -> None:
        async with endpoint_of(repeat, way, certificates) as (endpoint, upstream):
            await ask_for_own(endpoint, "text 0")
            with pytest.raises(AttemptFailedError, match="the call before"):
                await ask(endpoint, "text 1")
            await ask_for_own(endpoint, *(f"text {number}" for number in range(1, 5)))
            assert (upstream.connections, endpoint.stray_answers) == (5, 1)

    run(main())


LONG = "x" * 64


def repeats_the_last(answer: Callable[[bytes], bytes] = answer_to) -> Script:
    """On each connection the next call is under way when the answer comes again."""
    answers: list[bytes] = []

    async def repeat(call: RawCall) -> None:
        if call.number > 1:
            await call.send(answers[-1])
            await asyncio.sleep(0.02)
        answers.append(answer(call.body))
        call.write_if_open(answers[-1])

    return repeat


@each_loop_and_way
@pytest.mark.parametrize("chunks", [False, True], ids=["length", "chunks"])
def test_an_answer_repeated_while_the_next_call_is_under_way_is_given_to_nobody(
    run: Run, way: str, chunks: bool, certificates: Certificates
) -> None:
    """Nothing tells it from an answer to that call but its text. All later calls had the answers of those before."""
    repeat = repeats_the_last(chunked_answer_to if chunks else answer_to)

    async def main() -> None:
        async with endpoint_of(repeat, way, certificates) as (endpoint, upstream):
            await ask_for_own(endpoint, f"{LONG} 0")
            with pytest.raises(ConnectionWasDeadError, match="the one to the call before"):
                await ask(endpoint, f"{LONG} 1")
            # From now on each call has a connection of its own.
            await ask_for_own(endpoint, *(f"{LONG} {number}" for number in range(1, 10)))
            assert upstream.connections == 10

    run(main())


@pytest.mark.parametrize("long", ["x" * 5000, "x" * connections.PLAIN_BYTES_MAX], ids=["plain", "in pieces"])
async def test_calls_that_differ_in_the_middle_alone_are_two(long: str) -> None:
    async with endpoint_of(repeats_the_last()) as (endpoint, upstream):
        await ask_for_own(endpoint, f"{long} 0 {long}")
        with pytest.raises(ConnectionWasDeadError, match="the one to the call before"):
            await ask(endpoint, f"{long} 1 {long}")
        await ask_for_own(endpoint, *(f"{long} {number} {long}" for number in range(1, 4)))
        assert upstream.connections == 4


async def test_the_call_before_says_nothing_for_an_upstream_that_repeats_when_it_is_made_again() -> None:
    """It has the same outputs again, as it should: that the other call had them too is as doubtful as it was."""
    async with endpoint_of(repeats_the_last()) as (endpoint, upstream):
        await ask_for_own(endpoint, f"{LONG} 0")
        with pytest.raises(ConnectionWasDeadError, match="the one to the call before"):
            await ask(endpoint, f"{LONG} 1")
        await ask_for_own(endpoint, *(f"{LONG} {number}" for number in (0, 1, 0, 2, 3)))
        assert upstream.connections == 6


@each_loop
def test_an_upstream_that_answers_all_calls_alike_is_believed_after_a_second_look(run: Run) -> None:
    async def stub(call: RawCall) -> None:
        await call.send(answer_to(b'{"inputs":["%b"]}' % LONG.encode()))

    async def main() -> None:
        async with endpoint_of(stub) as (endpoint, upstream):
            for _ in range(2):
                await ask(endpoint, "a")  # the same call may have the same answer
            with pytest.raises(ConnectionWasDeadError, match="the one to the call before"):
                await ask(endpoint, "b")
            for text in "bcdef":
                assert await ask(endpoint, text) == output_for(LONG)
            assert (endpoint.stray_answers, upstream.connections) == (0, 2)

    run(main())


async def test_a_long_call_that_is_refused_early_has_its_error() -> None:
    """The server closes with much of the call unread, which is a reset."""

    async def script(call: RawCall) -> None:
        await call.send(b"HTTP/1.1 413 Too Large\r\n\r\nno")
        await asyncio.sleep(0.02)
        call.reset()

    async with endpoint_of(script) as (endpoint, _):
        answer = await endpoint.post(call_with("x" * 1000), 5.0)
        assert (answer.status, answer.body) == (413, b"no")


async def test_an_answer_behind_the_repeated_one_tells_of_it_when_the_connection_rests() -> None:
    """What HTTP/1.1 leaves open for short answers, once: the next call is under way when the answer comes again."""
    async with endpoint_of(repeats_the_last()) as (endpoint, upstream):
        await ask_for_own(endpoint, "text 0")
        assert await ask(endpoint, "text 1") == output_for("text 0")
        await caught(endpoint)
        await ask_for_own(endpoint, *(f"text {number}" for number in range(2, 10)))
        assert (upstream.connections, endpoint.stray_answers) == (9, 1)


# Just before a request is written


def answer_one_call(listener: socket.socket) -> socket.socket:
    """The other side in a thread of its own: what it does next, it does while the event loop stands still."""
    connection, _ = listener.accept()
    head = connection.recv(65536)
    while b"}" not in head:
        head += connection.recv(65536)
    connection.sendall(answer_to(head.partition(b"\r\n\r\n")[2]))
    return connection


Upset = Callable[[socket.socket], None]


@each_loop
@pytest.mark.parametrize(
    ("upset", "stray"),
    [
        pytest.param(lambda other: other.sendall(answer_to(b"")), 1, id="an answer"),
        pytest.param(lambda other: other.sendall(b"HTTP/1.1 100 Continue\r\n\r\n"), 1, id="an interim answer"),
        pytest.param(lambda other: other.close(), 0, id="closed"),
        pytest.param(lambda other: other.shutdown(socket.SHUT_WR), 0, id="half closed"),
        pytest.param(
            lambda other: (
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"),
                other.close(),
            ),
            0,
            id="reset",
        ),
    ],
)
def test_what_lies_in_the_socket_is_seen_before_a_request_is_written(run: Run, upset: Upset, stray: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = HttpEndpoint(f"http://127.0.0.1:{listener.getsockname()[1]}/infer", 1, 1000)
            served = loop.run_in_executor(None, answer_one_call, listener)
            await ask_for_own(endpoint, "a")
            with await served as other:
                served = loop.run_in_executor(None, answer_one_call, listener)
                upset(other)  # and the loop gets no turn before the next call
                await ask_for_own(endpoint, "b")  # on another connection
                with await served:
                    await until(lambda: endpoint.stray_answers == stray)
            await endpoint.close()

    run(main())


@each_loop
def test_a_server_that_speaks_first_answers_nobody(run: Run) -> None:
    async def main() -> None:
        async with endpoint_of(HastyUpstream(answer_to(b""), reads_head=False)) as (endpoint, _):
            with pytest.raises(AttemptFailedError) as caught:
                await ask(endpoint, "a")
            assert not isinstance(caught.value, ConnectionWasDeadError)  # the connection was new
            assert endpoint.stray_answers == 1

    run(main())


@each_loop
@pytest.mark.parametrize("status", ["200 OK", "413 Content Too Large"])
def test_before_the_inputs_were_sent_there_may_be_an_error_but_no_output(run: Run, status: str) -> None:
    async def main() -> None:
        async with endpoint_of(HastyUpstream(answer_to(b"", status), reads_head=True)) as (endpoint, _):
            call = UpstreamCall(b'{"inputs":["%b"]}' % (b"x" * BIG))
            if status.startswith("413"):
                assert (await endpoint.post(call, TIMEOUT_S)).status == 413
            else:
                with pytest.raises(AttemptFailedError, match="before the call was sent"):
                    await endpoint.post(call, TIMEOUT_S)
            assert endpoint.stray_answers == (status == "200 OK")

    run(main())


# What is not stray


async def after_interim_answers(call: RawCall) -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    await call.send(b"HTTP/1.1 100 Continue\r\n\r\n", interim, interim + answer_to(call.body))


async def in_single_bytes(call: RawCall) -> None:
    await call.send(*(bytes([byte]) for byte in answer_to(call.body)), pause_s=0.0)


async def with_an_empty_line_behind(call: RawCall) -> None:
    await call.send(answer_to(call.body) + b"\r\n", b"\r\n\n")


async def with_trailers(call: RawCall) -> None:
    await call.send(chunked_answer_to(call.body)[:-2] + b"Server-Timing: gpu;dur=7\r\n\r\n")


async def chunked(call: RawCall) -> None:
    await call.send(chunked_answer_to(call.body))


@each_loop_and_way
@pytest.mark.parametrize(
    "script",
    [good, chunked, after_interim_answers, in_single_bytes, with_an_empty_line_behind, with_trailers],
    ids=lambda s: s.__name__,
)
def test_a_server_that_keeps_to_the_protocol_keeps_its_connection(
    run: Run, way: str, script: Script, certificates: Certificates
) -> None:
    async def main() -> None:
        async with endpoint_of(script, way, certificates) as (endpoint, upstream):
            for number in range(4):
                await ask_for_own(endpoint, f"text {number}")
                await asyncio.sleep(0.02)
                for _ in range(5):  # a connection with an unread empty line would not be used, but is not closed
                    await asyncio.sleep(0)
            assert (await endpoint.get("/health", TIMEOUT_S)).status == 200
            assert (upstream.connections, endpoint.stray_answers) == (1, 0)

    run(main())


@each_loop_and_way
def test_long_calls_and_long_answers_keep_their_connection(run: Run, way: str, certificates: Certificates) -> None:
    """Longer than every buffer: aiohttp stops reading in the middle, and the parser keeps what it has."""

    async def main() -> None:
        async with endpoint_of(good, way, certificates) as (endpoint, upstream):
            for letter in "abc":
                await ask_for_own(endpoint, letter * (BIG // 4))
            assert (upstream.connections, endpoint.stray_answers) == (1, 0)

    run(main())


# What stays an error

BODY = b'{"outputs": ["a"]}'


@each_loop
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            b"Content-Length: 18\r\nTransfer-Encoding: chunked\r\n\r\n12\r\n%b\r\n0\r\n\r\n", id="both lengths"
        ),
        pytest.param(
            b"Transfer-Encoding: chunked\r\nContent-Length: 18\r\n\r\n12\r\n%b\r\n0\r\n\r\n", id="and reversed"
        ),
        pytest.param(b"Content-Length: 18\r\nContent-Length: 17\r\n\r\n%b", id="two lengths"),
        pytest.param(b"Content-Length: -18\r\n\r\n%b", id="a negative length"),
        pytest.param(b"Content-Length: 1_8\r\n\r\n%b", id="no number"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n%b\r\n0\r\n\r\n", id="no size of a chunk"),
        pytest.param(b"Content-Length: 1000\r\n\r\n%b", id="too short"),
    ],
)
def test_an_answer_whose_end_is_not_clear_is_none(run: Run, answer: bytes) -> None:
    async def unclear(call: RawCall) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n" + answer % BODY)
        await call.close()

    async def main() -> None:
        async with endpoint_of(unclear) as (endpoint, upstream):
            for _ in range(2):
                with pytest.raises(AttemptFailedError) as caught:
                    await endpoint.post(call_with("a"), TIMEOUT_S)
                assert not isinstance(caught.value, ConnectionWasDeadError)
            assert upstream.connections == 2

    run(main())


@each_loop
def test_a_change_of_protocol_is_no_answer(run: Run) -> None:
    async def upgrade(call: RawCall) -> None:
        head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
        await call.send(head + answer_to(call.body))

    async def main() -> None:
        async with endpoint_of(upgrade) as (endpoint, upstream):
            for _ in range(2):
                with pytest.raises(AttemptFailedError, match="no valid HTTP"):
                    await endpoint.post(call_with("a"), TIMEOUT_S)
            assert upstream.connections == 2

    run(main())
