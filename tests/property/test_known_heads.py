"""A head that is known must make no difference: the same bytes with and without, and everything that comes out."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.known_heads import KEPT_MAX, NO_HEAD, WHOLE_MAX, KnownHeads
from carpool.face.http.state import HttpLimits, HttpState


class NeverKnown(KnownHeads):
    """Forgets everything: every head is parsed."""

    __slots__ = ()

    def keep(self, data: bytes, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        pass


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        # Each refusal has an id of its own, and dates pass.
        self.log.append(re.sub(rb'Date: [^\r]+|Content-Length: \d+|"request_id":"[^"]+"', b"", bytes(data)))

    def close(self) -> None:
        self.log.append("close")

    def abort(self) -> None:
        self.log.append("abort")

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.log.append("eof")

    def pause_reading(self) -> None:
        self.log.append("pause")

    def resume_reading(self) -> None:
        self.log.append("resume")


def run(reads: list[bytes], known_heads: KnownHeads, body_bytes_max: int) -> list[Any]:
    """Everything that a connection does with these reads."""
    transport = RecordingTransport()

    def handler(exchange: Exchange) -> None:
        headers = {name: value for name, value in exchange.headers.items() if name != b"content-length"}
        transport.log.append((exchange.method, exchange.target, headers, exchange.body, exchange.keep_alive))
        exchange.respond(200, b"{}")

    server = HttpState(handler, HttpLimits(body_bytes_max=body_bytes_max))
    server.known_heads = known_heads
    connection = Connection(server)
    connection.connection_made(transport)
    for read in reads:
        connection.data_received(read)
    return transport.log


LENGTH_NAMES = st.sampled_from(
    [b"Content-Length", b"content-length", b"CONTENT-LENGTH", b"X-Length", b"Content-length"]
)
OTHER_LINES = st.sampled_from(
    [
        b"Host: a",
        b"Host: b",
        b"Accept: */*",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Upgrade: h2c",
        b"traceparent: 00-1-2-01",
        b"X-Odd: Content-Length: 3",
        b"X-Fold: a\r\n Content-Length: 2",
        b"",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Mostly well-formed requests, with lengths that are right, wrong, odd or repeated."""
    body = draw(st.binary(max_size=6))
    lengths = st.one_of(
        st.just(b"%d" % len(body)),
        st.sampled_from([b"0", b"1", b"5", b"+1", b" 2", b"2 ", b"007", b"99999999", b"", b"2, 2", b"0x2"]),
    )
    lines = [
        draw(st.sampled_from([b"POST /a HTTP/1.1", b"GET /b HTTP/1.1", b"POST /a HTTP/1.0", b"\r\nPOST /a HTTP/1.1"]))
    ]
    lines += draw(st.lists(OTHER_LINES, max_size=3))
    lines.append(b"Host: h")
    for _ in range(draw(st.integers(0, 2))):
        lines.append(draw(LENGTH_NAMES) + b":" + draw(st.sampled_from([b" ", b"", b"  "])) + draw(lengths))
    ending = draw(st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"]))
    return ending.join(lines) + ending + ending + body


@settings(max_examples=6 * settings().max_examples)
@given(first=st.lists(requests(), min_size=1, max_size=4), times=st.integers(1, 3), data=st.data())
def test_known_heads_change_nothing(first: list[bytes], times: int, data: st.DataObject) -> None:
    reads = [data.draw(st.sampled_from(first)) for _ in range(times)] + first
    if data.draw(st.booleans()):
        reads.append(b"".join(first))
    limit = data.draw(st.sampled_from([3, 1000]))
    known_heads = KnownHeads(limit)
    for read in first:  # fill it from connections of their own, as a server with many clients does
        run([read, read], known_heads, limit)
    assert run(reads, known_heads, limit) == run(reads, NeverKnown(limit), limit)


NOTHING = (NO_HEAD, b"")
PLAIN = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"


def test_a_plain_head_is_known_for_any_length() -> None:
    known_heads = KnownHeads(1000)
    run([PLAIN % 2 + b"{}"], known_heads, 1000)
    assert len(known_heads) == 1
    known, head = known_heads.match(PLAIN % 12 + b"x" * 12)
    assert (known.method, known.target, known.headers, known.is_plain) == (b"POST", b"/a", {b"host": b"h"}, True)
    assert head == PLAIN % 12
    # From now on that is enough.
    assert known.whole[len(head) + 12] == head


def test_a_body_that_is_too_long_is_left_to_the_parser() -> None:
    known_heads = KnownHeads(11)
    run([PLAIN % 2 + b"{}"], known_heads, 11)
    assert known_heads.match(PLAIN % 11 + b"x" * 11)[1]
    assert known_heads.match(PLAIN % 12 + b"x" * 12) == NOTHING


@pytest.mark.parametrize(
    "line", [b"Connection: keep-alive", b"Prefer: wait=1", b"X-Request-Id: a", b"Content-Type: a/b"]
)
def test_a_head_that_asks_for_something_special_is_not_plain(line: bytes) -> None:
    known_heads = KnownHeads(1000)
    read = b"POST /a HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n" % line
    run([read], known_heads, 1000)
    known, head = known_heads.match(read)
    assert head == read
    assert not known.is_plain


def test_what_is_not_exactly_one_request_is_not_matched() -> None:
    known_heads = KnownHeads(1000)
    run([PLAIN % 2 + b"{}"], known_heads, 1000)
    for read in (PLAIN % 3 + b"{}", PLAIN % 1 + b"{}", PLAIN % 2 + b"{}" + PLAIN % 2, PLAIN[:-4] % 2):
        assert known_heads.match(read) == NOTHING


def test_clients_behind_one_connection_take_turns() -> None:
    """What is remembered of each is its own; and of a head that is known whole, only for the size of its request."""
    known_heads = KnownHeads(1000)
    reads = [b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nX-Key: %d\r\n\r\n{}" % (n % 2, n) for n in range(6)]
    for read in reads:
        run([read], known_heads, 1000)
    likely = NO_HEAD
    for number, read in enumerate(reads * 3):
        likely, head = known_heads.match(read, likely)
        assert (likely.target, likely.headers[b"x-key"]) == (b"/%d" % (number % 2), b"%d" % (number % 6))
        assert head + b"{}" == read
        for other in (read + b"x", read[:-1], read + read):
            assert known_heads.match(other, likely) == (likely, b"")


def test_the_memory_is_bounded() -> None:
    known_heads = KnownHeads(1000)
    for number in range(KEPT_MAX + 10):
        read = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number
        known_heads.keep(read, b"GET", b"/%d" % number, {b"host": b"h"})
    assert 0 < len(known_heads) <= KEPT_MAX
    known_heads = KnownHeads(1000)
    long = b"GET /%b HTTP/1.1\r\nHost: h\r\n\r\n" % (b"x" * 5000)
    known_heads.keep(long, b"GET", b"/", {b"host": b"h"})
    assert len(known_heads) == 0


def test_the_heads_that_are_remembered_whole_are_bounded_over_all_sizes() -> None:
    known_heads = KnownHeads(1_000_000)
    reads = [b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: %%d\r\n\r\n" % number for number in range(3)]
    heads = []
    for read in reads:
        run([read % 0], known_heads, 1000)
        heads.append(known_heads.match(read % 0)[0])
    for number in range(KEPT_MAX):  # until these heads are known to their connections alone
        known_heads.keep(b"GET /x%d HTTP/1.1\r\nHost: h\r\n\r\n" % number, b"GET", b"/", {b"host": b"h"})
    for size in range(WHOLE_MAX):
        for read, head in zip(reads, heads, strict=True):
            assert known_heads.match(read % size + b"x" * size, head)[1] == read % size
        assert 0 < sum(len(head.whole) for head in heads) <= WHOLE_MAX


def test_a_head_that_is_remembered_whole_is_found_from_any_other() -> None:
    known_heads = KnownHeads(1000)
    mine, others = (
        b"POST /a HTTP/1.1\r\nHost: h\r\nX: %b\r\nContent-Length: 2\r\n\r\n" % name for name in (b"1", b"2")
    )
    run([mine + b"{}", others + b"{}"], known_heads, 1000)
    likely = known_heads.match(mine + b"{}")[0]
    first, again = (known_heads.match(others + b"{}", likely) for _ in range(2))
    assert first == again
    assert again[0].headers[b"x"] == b"2"
    assert known_heads.match(others + b"{}x", likely) == (likely, b"")


def test_heads_of_which_the_parser_made_another_one_are_bounded_too() -> None:
    known_heads = KnownHeads(1_000_000)
    run([PLAIN % 0], known_heads, 1000)
    old = known_heads.match(PLAIN % 0)[0]
    for number in range(KEPT_MAX):
        known_heads.keep(b"GET /x%d HTTP/1.1\r\nHost: h\r\n\r\n" % number, b"GET", b"/", {b"host": b"h"})
    run([PLAIN % 1 + b"x"], known_heads, 1000)
    new = known_heads.match(PLAIN % 1 + b"x")[0]
    assert old is not new
    for size in range(WHOLE_MAX):
        for head in (old, new):
            assert known_heads.match(PLAIN % size + b"x" * size, head)[1] == PLAIN % size
        assert len(old.whole) + len(new.whole) <= WHOLE_MAX


def test_heads_that_will_not_come_again_push_out_none_that_do() -> None:
    known_heads = KnownHeads(1000)
    usual = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    run([usual], known_heads, 1000)
    for number in range(KEPT_MAX + 1):
        value = b"00-%032x-%016x-01" % (number + 1, number + 1)
        read = b"POST /a HTTP/1.1\r\nHost: h\r\nTraceparent: %b\r\nContent-Length: 2\r\n\r\n{}" % value
        headers = {b"host": b"h", b"traceparent": value, b"content-length": b"2"}
        known_heads.keep(read, b"POST", b"/a", headers)
        assert known_heads.match(read) == (NO_HEAD, b"")
    assert len(known_heads) == 1
    assert known_heads.match(usual)[0].target == b"/a"
