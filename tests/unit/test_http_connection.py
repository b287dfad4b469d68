"""Connection's rules (numbered at the top of `face/http/connection.py`), with a transport that only takes notes.

What arrives is fed in three ways: whole, byte by byte, and with the start of a further request behind it. The answer
may not depend on which.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from carpool.core.errors import CarpoolError, Malformed, MethodNotAllowed, RateLimited, Shed, Unauthorized
from carpool.core.timers import TURN_S
from carpool.face.http import connection, state
from carpool.face.http.connection import BACKLOG_ENTRY_BYTES, TOLD_MAX, Connection
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.problem import respond_problem
from carpool.face.http.server import SWEEP_PARTS, TICK_S, HttpServer
from carpool.face.http.state import LONG_BODY_BYTES, HttpLimits
from carpool.testing import FakeClock

LIMITS = HttpLimits(
    header_bytes_max=1024,
    header_count_max=10,
    body_bytes_max=2000,
    receiving_bytes_max=5000,
    pipeline_max=4,
    connections_max=5,
)


class FakeTransport(asyncio.Transport):
    """Takes notes. Like uvloop's, it refuses to write after the end of its side was sent."""

    def __init__(self, peername: object = None) -> None:
        super().__init__({"peername": peername})
        self.written = b""
        self.reading = True
        self.eof = self.closed = self.aborted = False
        self.waiting = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.eof and not self.closed, "written after the last response"
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.eof = True

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading and not self.closed
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Answer:
    """One response as it was written."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def is_last(self) -> bool:
        return self.headers.get("connection") == "close"


def answers(written: bytes, heads_only: bool = False) -> list[Answer]:
    """The responses in these bytes; fails if anything is left over."""
    found = []
    while written:
        head, separator, written = written.partition(b"\r\n\r\n")
        assert separator, f"an unfinished response: {head!r}"
        line, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in rest)}
        length = 0 if heads_only else int(headers.get("content-length", 0))
        found.append(Answer(int(line.split()[1]), headers, written[:length]))
        written = written[length:]
    return found


class Face(ExchangeWorker):
    """A server whose routes only collect, and one connection to it."""

    def __init__(self, limits: HttpLimits = LIMITS, answer_at_once: bool = False) -> None:
        self.clock = FakeClock()
        self.seen: list[Exchange] = []
        self.left: list[Exchange] = []
        self.told_to_write: list[Exchange] = []
        self.answer_at_once = answer_at_once
        self.server = HttpServer(self.route, limits, self.clock)
        self.connect()

    def connect(self) -> None:
        self.transport = FakeTransport()
        self.connection = Connection(self.server.state)
        self.connection.connection_made(self.transport)

    def route(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        exchange.worker = self
        if exchange.target == b"/defect":
            raise ZeroDivisionError("a defect of a route")
        if self.answer_at_once:
            self.answer(exchange)

    def client_left(self, exchange: Exchange) -> None:
        self.left.append(exchange)

    def writable(self, exchange: Exchange) -> None:
        self.told_to_write.append(exchange)

    def answer(self, exchange: Exchange) -> None:
        """Answer with the target, so that the order shows."""
        exchange.respond(200, exchange.target)

    def answer_all(self) -> None:
        """Answer all there is, also what comes from the backlog meanwhile."""
        done = 0
        while done < len(self.seen):
            if self.seen[done].response is None:
                self.answer(self.seen[done])
            done += 1

    def feed(self, *reads: bytes) -> None:
        for read in reads:
            self.connection.data_received(read)

    def sweep(self, seconds: float = 0.0) -> None:
        """Let time pass and the sweep look at the connection."""
        self.clock.advance(seconds)
        self.server.state.coarse_now = self.clock()
        self.server.sweep(self.connection)

    def pass_time(self, seconds: float) -> None:
        """Let time pass as a server does: the sweep looks at whom it thinks that it must."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.server.tick()

    @property
    def answers(self) -> list[Answer]:
        return answers(self.transport.written)

    @property
    def statuses(self) -> list[int]:
        return [answer.status for answer in self.answers]


def get(target: str = "/x", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"GET {target} HTTP/{version}", "Host: test", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(body: bytes, *headers: str, target: str = "/x") -> bytes:
    lines = [f"POST {target} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes, trailers: bytes = b"", extension: bytes = b"", target: str = "/x") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    parts = [b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return head + b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def whole(data: bytes) -> list[bytes]:
    return [data]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [bytes((byte,)) for byte in data]


def with_more_behind(data: bytes) -> list[bytes]:
    return [data + b"GET /behind HTTP/1.1\r\nHo"]


three_ways = pytest.mark.parametrize("split", [whole, byte_by_byte, with_more_behind])
Split = Callable[[bytes], list[bytes]]


# What is taken


@three_ways
@pytest.mark.parametrize(
    "data",
    [get("/x", "Connection: close"), get(version="1.0"), b"GET /x HTTP/1.0\r\n\r\n"],
    ids=["connection: close", "1.0", "1.0 without host"],
)
@pytest.mark.parametrize("answer_at_once", [True, False])
def test_the_last_request_of_a_connection(data: bytes, split: Split, answer_at_once: bool) -> None:
    face = Face(answer_at_once=answer_at_once)
    face.feed(*split(data))
    [exchange] = face.seen
    face.feed(get("/late"))
    if not answer_at_once:
        face.answer(exchange)
    assert not face.server.state.problems
    assert [(answer.status, answer.is_last) for answer in face.answers] == [(200, True)]
    assert face.transport.closed or face.transport.eof
    face.feed(get("/later"))
    assert len(face.seen) == 1


def test_a_1_0_client_that_asks_to_stay_is_told_so() -> None:
    face = Face(answer_at_once=True)
    face.feed(get("/x", "Connection: keep-alive", version="1.0"), get("/x"))
    assert [answer.headers.get("connection") for answer in face.answers] == ["keep-alive", None]


# What is refused


REFUSED: dict[str, tuple[bytes, int]] = {
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no host": (b"GET /x HTTP/1.1\r\nA: b\r\n\r\n", 400),
    "two hosts": (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "two credentials": (get("/x", "Authorization: a", "authorization: b"), 400),
    "two lengths": (post(b"hello", "Content-Length: 5"), 400),
    "two different lengths": (post(b"hello", "Content-Length: 4"), 400),
    "a list of lengths": (get("/x", "Content-Length: 5, 5") + b"hello", 400),
    "a negative length": (get("/x", "Content-Length: -5") + b"hello", 400),
    "a signed length": (get("/x", "Content-Length: +5") + b"hello", 400),
    "a length in words": (get("/x", "Content-Length: five") + b"hello", 400),
    "a length beyond 64 bits": (get("/x", "Content-Length: 99999999999999999999") + b"hello", 400),
    "length and chunks": (chunked(b"hello").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n", 1), 400),
    "chunks and length": (post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
    "another transfer encoding": (get("/x", "Transfer-Encoding: gzip") + b"hello", 400),
    "two transfer encodings": (get("/x", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", 400),
    "repeated chunked": (get("/x", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
    "almost chunked": (get("/x", "Transfer-Encoding: xchunked") + b"0\r\n\r\n", 400),
    "chunks in 1.0": (get("/x", "Transfer-Encoding: chunked", version="1.0") + b"0\r\n\r\n", 400),
    "a bad chunk size": (chunked(b"hello").replace(b"5\r\n", b"zz\r\n"), 400),
    "a signed chunk size": (chunked(b"hello").replace(b"5\r\n", b"+5\r\n"), 400),
    "a chunk longer than it says": (chunked(b"hello").replace(b"5\r\n", b"4\r\n"), 400),
    "a folded header": (get("/x", "A: b", " c"), 400),
    "a space before the colon": (get("/x", "Content-Length : 5") + b"hello", 400),
    "a header without a name": (get("/x", ": b"), 400),
    "bare line feeds": (b"GET /x HTTP/1.1\nHost: x\n\n", 400),
    "a bare carriage return": (get("/x", "A: b\rC: d"), 400),
    "nul in a value": (get("/x", "A: b\x00c"), 400),
    "nul in a name": (get("/x", "A\x00: b"), 400),
    "nul in the target": (get("/x\x00"), 400),
    "a space in the target": (get("/x y"), 400),
    "an unknown method": (b"BREW /x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a method in lower case": (b"get /x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect": (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 400),
    "another expectation": (post(b"hello", "Expect: the-unexpected"), 417),
    "HTTP/2.0": (get(version="2.0"), 505),
    "HTTP/2.0 kept alive": (get("/x", "Connection: keep-alive", version="2.0"), 505),
    "HTTP/1.2": (get(version="1.2"), 505),
    "HTTP/2 without an upgrade": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505),
    "too many headers": (get("/x", *(f"H{i}: x" for i in range(10))), 431),
    "too long headers": (get("/x", "A: " + "a" * 600, "B: " + "b" * 600), 431),
    "one too long header": (get("/x", "A: " + "a" * 1100), 431),
    "a too long name": (get("/x", "a" * 1100 + ": b"), 431),
    "a too long target": (get("/" + "x" * 1100), 431),
    "too many trailers": (chunked(b"x", trailers=b"".join(b"T%d: x\r\n" % i for i in range(10))), 431),
    "a body too long by its length": (post(b"x" * 2001), 413),
    "a body too long by its chunks": (chunked(*[b"x" * 500] * 5), 413),
}


@three_ways
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, split: Split) -> None:
    data, status = REFUSED[name]
    face = Face(answer_at_once=True)
    face.feed(get("/before"), *split(data), get("/after"))
    assert [exchange.target for exchange in face.seen] == [b"/before"]
    assert face.statuses == [200, status]
    last = face.answers[-1]
    assert last.is_last
    assert last.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = json.loads(last.body)
    assert set(problem) == {"type", "title", "status", "detail", "request_id"}
    assert problem["status"] == status
    assert sum(face.server.state.problems.values()) == 1
    assert face.server.state.receiving_bytes == 0
    assert face.transport.eof and not face.transport.closed and face.transport.is_reading()

    # Rule 4: what still comes is thrown away for a moment, then the connection ends.
    face.feed(b"x" * 100_000)
    face.sweep(0.5)
    assert not face.transport.aborted
    face.sweep(0.5)
    assert face.transport.aborted


def test_a_refusal_waits_for_the_backlog_too() -> None:
    face = Face()
    face.feed(b"".join(get(f"/{i}") for i in range(10)) + b"nonsense\r\n\r\n")
    assert len(face.seen) == 4
    face.answer_all()
    assert face.statuses == [200] * 10 + [400]
    assert face.transport.eof


def test_a_body_of_exactly_the_limit_is_taken() -> None:
    face = Face(answer_at_once=True)
    face.feed(post(b"x" * 2000), chunked(*[b"x" * 500] * 4))
    assert [len(exchange.body) for exchange in face.seen] == [2000, 2000]


def test_too_long_is_said_before_the_body_has_come() -> None:
    face = Face()
    face.feed(post(b"x" * 2001)[:-2001])
    assert face.statuses == [413]
    face.connect()
    face.feed(chunked(*[b"x" * 500] * 5)[:-480])
    assert face.statuses == [413]


def test_headers_of_two_short_reads_are_measured_together() -> None:
    face = Face()
    long = get("/x", "A: " + "a" * 1200)
    face.feed(long[:700], long[700:])
    assert face.statuses == [431]


def test_endless_trailers_and_chunk_extensions_are_refused() -> None:
    start = chunked(b"x")[:-2]
    for endless in (start + b"T: ", start[:-3] + b"1;"):
        face = Face()
        face.feed(endless, *[b"a" * 300] * 3)
        assert face.statuses == []
        face.feed(b"a" * 600)
        assert face.statuses == [431]


def test_headers_cut_by_a_read_full_of_other_requests_are_not_long() -> None:
    face = Face(answer_at_once=True)
    others = get("/a") * 100
    cut = get("/cut")
    face.feed(b"GET /first HTTP/1.1\r\n", b"Host: x\r\n\r\n" + others + cut[:10], cut[10:12], cut[12:13], cut[13:])
    assert face.statuses == [200] * 102
    assert [face.seen[0].target, face.seen[-1].target] == [b"/first", b"/cut"]


# Order and pipelining


# Expect: 100-continue

EXPECTING = post(b"hello", "Expect: 100-continue")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("split", [whole, byte_by_byte])
@pytest.mark.parametrize("extra", [(), ("Connection: Upgrade", "Upgrade: h2c")])
def test_permission_to_send_the_body(split: Split, extra: tuple[str, ...]) -> None:
    face = Face()
    expecting = post(b"hello", "Expect: 100-Continue", *extra)
    face.feed(*split(expecting[:-5]))
    assert face.transport.written == CONTINUE
    face.feed(b"hello")
    face.answer_all()
    assert face.transport.written.count(CONTINUE) == 1
    assert answers(face.transport.written.removeprefix(CONTINUE))[0].status == 200


@pytest.mark.parametrize("before", [1, 4, 6])
def test_permission_does_not_overtake_an_answer(before: int) -> None:
    face = Face()
    face.feed(get("/a") * before + EXPECTING[:-5])
    assert face.transport.written == b""
    face.sweep(100.0)  # rule 3: it is we who keep the client waiting
    face.answer_at_once = before == 6
    face.answer_all()
    assert face.transport.written.endswith(CONTINUE)
    assert [a.status for a in answers(face.transport.written.removesuffix(CONTINUE))] == [200] * before
    face.sweep(9.0)
    assert face.connection.receiving_since
    face.feed(b"hello")
    assert face.seen[-1].body == b"hello"


def test_permission_does_not_overtake_the_backlog() -> None:
    face = Face()
    face.feed(get("/a"))
    face.connection.pause_writing()
    face.feed(get("/b") + EXPECTING[:-5])
    face.answer(face.seen[0])
    assert CONTINUE not in face.transport.written
    face.connection.resume_writing()
    face.answer(face.seen[1])
    assert [a.status for a in answers(face.transport.written.removesuffix(CONTINUE))] == [200, 200]
    assert face.transport.written.endswith(CONTINUE)


# Back-pressure and memory


def test_a_write_that_stalls_while_the_connection_closes_ends_it() -> None:
    face = Face()
    face.transport.waiting = 1000
    face.transport.close()  # as the event loop does when a client ends its side
    face.sweep()
    face.sweep(LIMITS.write_timeout_s - 0.1)
    assert not face.transport.aborted
    face.sweep(0.1)
    assert face.transport.aborted


def test_bodies_that_are_partly_received_are_counted_over_all_connections() -> None:
    face = Face()
    first = face.transport
    face.feed(post(b"x" * 2000)[:-500])
    assert face.server.state.receiving_bytes == 1500
    connection = face.connection
    face.connect()
    face.feed(chunked(*[b"x" * 500] * 4)[:-20])
    face.connect()
    face.feed(post(b"x" * 2000)[:-100])
    assert face.statuses == [503]
    assert face.answers[0].headers["retry-after"] == "1"
    assert face.server.state.receiving_bytes == 1500 + 1987  # of the 20 bytes cut off, 7 are framing

    # The others go on, and their bytes are given back.
    connection.data_received(b"x" * 500)
    assert len(face.seen[-1].body) == 2000
    assert first.written == b""
    face.connection.connection_lost(None)


def test_a_lost_connection_gives_its_bytes_back() -> None:
    face = Face()
    face.feed(get("/a") * 4, post(b"x" * 1000), post(b"x" * 1000)[:-1])
    assert face.server.state.receiving_bytes == 1999 + BACKLOG_ENTRY_BYTES
    face.connection.connection_lost(None)
    assert face.server.state.receiving_bytes == 0
    assert not face.server.connections


# Long bodies (rule 11)

LONG = b"x" * (LONG_BODY_BYTES + 1)
LONG_LIMITS = msgspec.structs.replace(LIMITS, body_bytes_max=len(LONG), receiving_bytes_max=5_000_000)


class BusyFace(Face):
    """A server whose routes need a whole turn of the event loop for each request."""

    def route(self, exchange: Exchange) -> None:
        time.sleep(1.1 * TURN_S)
        super().route(exchange)


def busy_face(clients: int, limits: HttpLimits = LONG_LIMITS) -> tuple[BusyFace, list[Connection], list[FakeTransport]]:
    """Some clients whose long bodies end in one turn: one of them is read at once."""
    face = BusyFace(limits, answer_at_once=True)
    connections, transports = [face.connection], [face.transport]
    for _ in range(clients - 1):
        face.connect()
        connections.append(face.connection)
        transports.append(face.transport)
    for each in connections:
        each.data_received(post(LONG))
    assert len(face.seen) == 1 and face.server.state.receiving_bytes == (clients - 1) * len(LONG)
    return face, connections, transports


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let turns of the event loop pass until this is so."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never was")


async def test_a_client_that_leaves_before_its_turn_costs_no_more() -> None:
    face, connections, _ = busy_face(3)
    connections[1].connection_lost(None)
    connections[2].eof_received()
    await turns_until(lambda: not face.server.state.receiving_bytes)
    assert len(face.seen) == 1


async def test_a_client_that_leaves_before_its_turn_gives_its_bytes_back_at_once() -> None:
    face, connections, _ = busy_face(3)
    connections[1].connection_lost(None)
    assert face.server.state.receiving_bytes == len(LONG)
    connections[2].connection_lost(None)
    assert face.server.state.receiving_bytes == 0


async def test_long_bodies_that_wait_for_a_turn_are_bounded() -> None:
    limits = msgspec.structs.replace(LONG_LIMITS, receiving_bytes_max=3 * len(LONG))
    face, _, transports = busy_face(4, limits)
    face.connect()
    face.connection.data_received(post(LONG))
    assert answers(bytes(face.transport.written))[0].status == 503
    await turns_until(lambda: all(each.written for each in transports))
    assert {answers(bytes(each.written))[0].status for each in transports} == {200}


async def test_long_bodies_that_came_before_a_drain_are_answered() -> None:
    face, _, transports = busy_face(3)
    face.server.drain()
    await turns_until(lambda: all(each.written for each in transports))
    assert [answers(bytes(each.written))[0].is_last for each in transports] == [False, True, True]


async def test_a_long_body_whose_turn_comes_too_late_is_refused() -> None:
    face, _, transports = busy_face(2)
    face.clock.advance(LONG_LIMITS.receive_timeout_s + 1)
    await turns_until(lambda: bool(transports[1].written))
    assert answers(bytes(transports[1].written))[0].status == 503 and len(face.seen) == 1


# Time


def test_a_request_that_does_not_arrive_in_time() -> None:
    for start in (b"G", get()[:-2], post(b"hello")[:-1], chunked(b"x")[:-3]):
        face = Face()
        face.feed(start)
        face.sweep(9.0)
        assert face.statuses == []
        face.feed(b"")  # nothing new
        face.sweep(1.0)
        assert face.statuses == [408]
        assert face.transport.eof


def test_an_idle_connection_is_closed_and_a_waiting_one_is_not() -> None:
    face = Face()
    face.sweep(LIMITS.idle_timeout_s - 1)
    assert not face.transport.is_closing()
    face.feed(get())
    face.sweep(1000.0)
    assert not face.transport.is_closing()
    face.answer_all()
    face.sweep(LIMITS.idle_timeout_s - 1)
    assert not face.transport.is_closing()
    face.sweep(1.0)
    assert face.transport.closed
    assert face.statuses == [200]


def test_whoever_waits_or_was_just_answered_is_not_looked_at_but_in_time() -> None:
    face = Face()
    face.feed(get("/a") + post(b"hello")[:-1])  # one waits for us, and its next request trickles in
    face.pass_time(LIMITS.receive_timeout_s + 1.0)
    face.answer_all()
    assert face.statuses == [200, 408]

    face.connect()
    face.feed(get("/b"))
    face.connection.pause_writing()  # one waits for us, and does not read what it has got
    face.transport.waiting = 100_000
    face.pass_time(LIMITS.write_timeout_s + 1.0)
    assert face.transport.aborted

    face.connect()
    for _ in range(100):  # lively: it is answered again and again
        face.feed(get("/c"))
        face.pass_time(LIMITS.idle_timeout_s / 10)
        face.answer_all()
    face.transport.waiting = 1000
    face.pass_time(LIMITS.write_timeout_s + 1.0)  # and then it does not read the last answer
    assert face.transport.aborted
    assert face.statuses == [200] * 100

    face.connect()
    face.feed(get("/d"))
    face.answer_all()
    face.pass_time(LIMITS.idle_timeout_s + 1.0)
    assert face.transport.closed


def test_after_a_stop_of_the_process_what_came_meanwhile_is_read_first() -> None:
    face = Face()
    face.server.tick()
    face.feed(post(b"hello")[:-1])
    face.clock.advance(30.0)
    face.server.tick()  # timers come before sockets
    face.feed(b"o")
    for _ in range(SWEEP_PARTS):
        face.server.tick()
    face.answer_all()
    assert face.statuses == [200]


# Responses in parts (rule 10)


def chunks(written: bytes) -> list[bytes]:
    """The chunks of one chunked response; fails if anything is left over."""
    head, _, rest = written.partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head and b"Content-Length" not in head
    found: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        part, end, rest = rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert rest == b""
            return found
        found.append(part)


def writing(requests: bytes) -> tuple[Face, Exchange]:
    """A face, and the last of these requests, whose response is written in parts."""
    face = Face()
    face.feed(requests)
    face.seen[-1].begin(200, b"text/plain")
    return face, face.seen[-1]


def test_parts_leave_as_they_come() -> None:
    face, exchange = writing(get("/a"))
    assert face.transport.written.endswith(b"\r\n\r\n")
    assert exchange.write(b"one")
    assert face.transport.written.endswith(b"3\r\none\r\n")
    assert exchange.write(b"")  # no end
    exchange.write(b"two")
    exchange.end()
    assert chunks(face.transport.written) == [b"one", b"two"]
    face.feed(get("/b"))
    face.answer(face.seen[1])
    assert face.transport.written.endswith(b"/b")


def test_parts_wait_for_the_responses_before_them() -> None:
    face, second = writing(get("/a") + get("/b"))
    second.write(b"x")
    second.end()
    assert face.transport.written == b""
    face.answer(face.seen[0])
    whole, _, streamed = face.transport.written.partition(b"/aHTTP")
    assert whole and chunks(b"HTTP" + streamed) == [b"x"]


def test_whoever_writes_in_parts_is_told_that_the_client_left() -> None:
    face, exchange = writing(get("/a"))
    face.connection.connection_lost(None)
    assert face.left == [exchange]
    assert exchange.sink.is_gone()
    assert not exchange.write(b"into nothing")
    exchange.end()
    assert exchange.response == b""  # nothing is kept for whoever left


def test_a_writer_that_was_told_to_wait_is_called_when_its_turn_comes() -> None:
    face, third = writing(get("/z") + get("/a") + get("/b"))
    face.answer(face.seen[0])
    face.connection.pause_writing()
    assert not third.write(b"x")
    face.connection.resume_writing()
    assert face.told_to_write == []  # others are before it
    face.answer(face.seen[1])
    assert face.told_to_write == [third]


@pytest.mark.parametrize("failure", [ValueError("a defect"), Malformed("too late")])
def test_a_response_that_breaks_in_the_middle_ends_its_connection(failure: Exception) -> None:
    def route(exchange: Exchange) -> None:
        exchange.begin(200, b"text/plain")
        exchange.write(b"one")
        if isinstance(failure, CarpoolError):
            respond_problem(exchange, failure)
        else:
            raise failure

    face = Face()
    face.server.state.handler = route
    face.feed(get("/a"))
    assert face.transport.aborted
    assert face.transport.written.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_follows_what_only_the_end_of_a_connection_ends(at_once: bool) -> None:
    face = Face()

    def route(exchange: Exchange) -> None:
        face.route(exchange)
        exchange.begin(200, b"text/plain")
        if at_once:
            exchange.end()

    face.server.state.handler = route
    face.feed(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 3 + b"GET /b HTT")
    first, *behind = face.seen
    if not at_once:
        first.end()
    assert face.left == behind  # those who work for them are told, and may answer all the same
    for exchange in behind:
        exchange.end()
    face.sweep(LIMITS.receive_timeout_s)
    assert face.transport.written.count(b"HTTP/1.1") == 1 and face.transport.eof


def test_a_head_request_gets_no_parts() -> None:
    face, exchange = writing(b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n")
    exchange.write(b"one")
    exchange.end()
    assert face.transport.written.endswith(b"\r\n\r\n") and b"one" not in face.transport.written


# The end


def test_end_of_file_tells_whoever_works_for_the_client() -> None:
    face = Face()
    face.feed(get("/a") * 6)
    face.answer(face.seen[1])
    assert face.connection.eof_received() is False
    face.connection.connection_lost(None)
    assert face.left == [face.seen[0], *face.seen[2:]]
    for exchange in face.seen:
        if exchange.response is None:
            face.answer(exchange)
    assert face.transport.written == b""
    assert len(face.seen) == 4  # the backlog never runs


def test_no_place_for_another_connection() -> None:
    face = Face()
    connections = [face.connection]
    for _ in range(LIMITS.connections_max - 1):
        face.connect()
        connections.append(face.connection)
        assert face.statuses == []
    face.connect()
    assert face.statuses == [503]
    assert face.transport.eof
    face.feed(get())
    assert face.seen == []
    face.connection.connection_lost(None)
    connections[0].connection_lost(None)
    face.connect()
    assert face.statuses == []


def test_far_beyond_its_places_a_server_tells_nobody_why() -> None:
    face = Face()
    for _ in range(LIMITS.connections_max - 1):
        face.connect()
    for _ in range(TOLD_MAX):
        face.connect()
        assert (face.statuses, face.transport.aborted) == ([503], False)
    face.connect()
    assert (face.statuses, face.transport.aborted) == ([], True)


def test_many_requests_in_the_backlog_are_refused_beyond_what_the_server_may_hold() -> None:
    face = Face()
    face.feed(get("/a") * 50)
    face.answer_all()
    assert face.statuses[-1] == 503
    assert face.server.state.receiving_bytes == 0


def test_a_client_far_behind_is_cut_off_when_too_much_is_unread() -> None:
    face = Face(msgspec.structs.replace(LIMITS, unread_bytes_max=1_000_000))
    face.feed(get("/a") * 4)
    face.connection.pause_writing()
    face.transport.waiting = 2_000_000
    for exchange in face.seen[:2]:
        exchange.respond(200, b"x" * 600_000)
    assert face.transport.aborted


def test_an_answer_of_which_a_little_is_unread_counts_whole() -> None:
    """The transport keeps all of it until its last byte has left."""
    forever = {"idle_timeout_s": 3600.0, "write_timeout_s": 3600.0}
    face = Face(msgspec.structs.replace(LIMITS, unread_bytes_max=1_000_000, **forever))
    first, state = face.transport, face.server.state
    for left in (10_000, 10_000):  # less than what pauses a writer
        face.connect()
        face.feed(get("/a"))
        face.transport.waiting = left
        face.seen[-1].respond(200, b"x" * 400_000)
        assert not face.transport.aborted
    face.pass_time(2.0)
    assert 800_000 <= state.unread_bytes <= 850_000
    # One who has read all of it does not count, nor does a short answer.
    face.transport.waiting = 0
    face.pass_time(2.0)
    assert 400_000 <= state.unread_bytes <= 450_000
    face.feed(get("/a"))
    face.transport.waiting = 10_000
    face.seen[-1].respond(200, b"x" * 100_000)
    face.pass_time(2.0)
    assert 400_000 <= state.unread_bytes <= 450_000
    # Beyond the bound whoever keeps much is cut off.
    face.connect()
    face.feed(get("/a"))
    face.transport.waiting = 10_000
    face.seen[-1].respond(200, b"x" * 700_000)
    assert face.transport.aborted and not first.aborted


# Draining (rule 7)


def last_flags(face: Face) -> list[bool]:
    return [answer.is_last for answer in face.answers]


def test_draining_begins_while_requests_wait() -> None:
    face = Face()
    face.feed(get("/a") + get("/b") + get("/c"))
    face.server.state.draining = True
    for which in (1, 2, 0):
        face.answer(face.seen[which])
    assert last_flags(face) == [False, False, True]


def test_a_request_that_is_on_its_way_is_still_answered() -> None:
    face = Face()
    face.feed(get("/a") + get("/b")[:7])
    face.server.state.draining = True
    face.answer(face.seen[0])
    face.feed(get("/b")[7:])
    face.answer(face.seen[1])
    assert last_flags(face) == [False, True]


def test_an_error_of_the_tree_keeps_its_headers() -> None:
    class Slow(CarpoolError):
        code, status, title = "slow", 503, "Slow"

    def refuse(exchange: Exchange) -> None:
        from carpool.face.http.problem import respond_problem

        respond_problem(exchange, Slow("later", retry_after_s=7))

    face = Face()
    face.server.state.handler = refuse
    face.feed(get("/x", "X-Request-Id: mine"))
    [answer] = face.answers
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["x-request-id"] == "mine"
    assert json.loads(answer.body)["request_id"] == "mine"


REFUSALS = [
    Shed('100 % "full" \\ "request_id":"', retry_after_s=3, predicted_wait_ms=2500),
    Shed("nobody knows how long", retry_after_s=30),
    RateLimited("too often", retry_after_s=60, header_lines=b'RateLimit: "default";r=0;t=60\r\n'),
    MethodNotAllowed("no", allow="GET"),
    Unauthorized("who?"),
]


def refusing(error: CarpoolError, limit_lines: bytes = b"") -> Face:
    """A server that tells everybody the same."""

    def refuse(exchange: Exchange) -> None:
        exchange.limit_lines = limit_lines
        exchange.sink.answer_error(exchange, error)

    face = Face()
    face.server.state.handler = refuse
    return face


def told(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """All but what is each answer's own."""
    headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
    return answer.status, headers, re.sub(rb'"request_id":"[^"]+"', b"", answer.body)


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
@pytest.mark.parametrize("lines", [b"", b'RateLimit-Policy: "default";q=60;w=60\r\nRateLimit: "default";r=1;t=2\r\n'])
def test_an_error_that_many_are_told_is_the_same_for_all(
    error: CarpoolError, lines: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "formatdate", lambda usegmt: "now")
    plain, face = Face(), refusing(error, lines)

    def respond(exchange: Exchange) -> None:
        exchange.limit_lines = lines
        respond_problem(exchange, error)

    plain.server.state.handler = respond
    plain.feed(post(b"one"))
    for body in (b"one", b"two", b"three", b"seven"):  # all but the first have a head that is known
        face.feed(post(body))
    [expected] = plain.answers
    assert [told(answer) for answer in face.answers] == [told(expected)] * 4
    assert len({json.loads(answer.body)["request_id"] for answer in face.answers}) == 4
    assert face.server.state.problems == {error.code: 4}


def test_an_error_that_many_are_told_tells_each_what_it_asked_for() -> None:
    face = refusing(REFUSALS[0])
    for _ in range(2):
        face.feed(post(b"one", "X-Request-Id: mine"), post(b"one", "Connection: keep-alive"), post(b"one"))
    face.server.state.draining = True
    face.feed(post(b"one"))
    assert [json.loads(answer.body)["request_id"] == "mine" for answer in face.answers] == [True, False, False] * 2 + [
        False
    ]
    assert [answer.headers.get("x-request-id") for answer in face.answers] == ["mine", None, None] * 2 + [None]
    assert [answer.headers.get("connection") for answer in face.answers] == [None, "keep-alive", None] * 2 + ["close"]


def test_an_error_that_many_are_told_has_the_date_of_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(9))
    monkeypatch.setattr(state, "formatdate", lambda usegmt: f"second {next(seconds)}")
    face = refusing(REFUSALS[0])
    for _ in range(3):
        face.feed(post(b"one"), post(b"two"))
        face.pass_time(1.5)
    dates = [answer.headers["date"] for answer in face.answers]
    assert len(set(dates)) == 3 and dates[::2] == dates[1::2]


def test_an_error_that_many_are_told_has_room_for_any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["req_9", "req_9", "req_10", "req_1000", "req_11"]
    given = iter(ids)
    face = refusing(REFUSALS[0])
    face.feed(post(b"one"))
    monkeypatch.setattr(connection, "new_request_id", lambda: next(given))
    for _ in ids:
        face.feed(post(b"one"))
    assert [json.loads(answer.body)["request_id"] for answer in face.answers[1:]] == ids


def test_answers_that_are_kept_ready_are_bounded() -> None:
    face = Face()
    face.feed(post(b"one"))
    face.answer_all()
    face.server.state.handler = lambda exchange: exchange.sink.answer_error(exchange, Shed("full"))
    for _ in range(state.READY_MAX + 10):
        face.feed(post(b"one"))
        assert len(face.server.state.ready_problems) <= state.READY_MAX
    assert face.statuses[-1] == 503
