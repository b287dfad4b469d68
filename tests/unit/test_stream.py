"""The rules of a stream (numbered at the top of `face/http/stream.py`), from bytes to bytes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from carpool.core.errors import BrokerDown, CarpoolError, InputRefused, RateLimited, Unauthorized
from carpool.core.outcome import Output
from carpool.core.ports import Caller, LimitVerdict, Peer, RateLimit
from carpool.core.request import Request
from carpool.core.timers import TURN_S
from carpool.core.trace import Trace
from carpool.face.http.places import Places
from carpool.face.http.state import HttpLimits
from carpool.face.http.stream import FRAGMENTS_MAX, MESSAGE_BYTES, PING_S, SILENT_S, STEPS_A_TURN, StreamLimits
from carpool.face.http.streams import LOOK_PARTS
from carpool.testing import make_output
from support.processes import until
from support.streams import StreamClient, StreamStand, upgrade_request


@pytest_asyncio.fixture
async def stand() -> AsyncIterator[StreamStand]:
    one = StreamStand(StreamLimits(requests_max=500, message_bytes_max=100_000, idle_timeout_s=1000.0))
    yield one
    await one.journal.close()


def call(own_id: str | int, value: Any = "x", **more: Any) -> dict[str, Any]:
    return {"id": own_id, "input": value, **more}


async def in_flight(stand: StreamStand, number: int) -> StreamClient:
    """A client with so many requests that have no answer."""
    client = stand.connect()
    client.send(*[call(n, f"input {n}") for n in range(number)])
    assert await client.messages() == []
    assert stand.broker.held == number
    return client


# Rule 1


async def test_a_message_with_many_answers_is_cut(stand: StreamStand) -> None:
    client = await in_flight(stand, 5)
    (lane,) = stand.broker.lanes("m")
    for request in stand.broker.take(lane, 5, stand.clock()):
        stand.broker.settle(request, make_output(b'"%b"' % (b"o" * (MESSAGE_BYTES // 2))))
    assert [len(message) for message in await client.messages()] == [1, 1, 1, 1, 1]


# Rule 2


async def test_one_that_is_wrong_harms_none_beside_it(stand: StreamStand) -> None:
    client = stand.connect()
    wrong: list[Any] = [
        {"id": "no input"},
        {"id": "unknown field", "input": 1, "inputs": 2},
        call("unknown model", model="other"),
        call("parameters", parameters=[1]),
        call("too long", "x" * 2000),
        call("timeout", timeout_ms=0),
    ]
    client.send(call("first"), *wrong, {"input": 1}, 7, call("last", parameters={"a": 1}, timeout_ms=5000))
    refused = await client.messages()
    told = [(answer["id"], answer["error"]["status"]) for message in refused for answer in message]
    others = {"unknown model": 404, "too long": 413}
    assert dict(told) == {each: others.get(each, 400) for each in [*(call["id"] for call in wrong), None]}
    assert len(told) == len(wrong) + 2
    stand.work()
    assert set(await client.answers()) == {"first", "last"}


async def test_an_id_that_is_in_flight_cannot_be_used_again(stand: StreamStand) -> None:
    client = await in_flight(stand, 1)
    for another in (call(0, "another"), {"id": 0}):  # the second is no request at all
        client.send(another)
        assert (await client.answers())[None]["error"]["status"] == 400
    stand.work()
    assert (await client.answers())[0]["output"] == "input 0"


async def test_what_is_wrong_and_has_an_id_in_flight_lets_nobody_have_more(stand: StreamStand) -> None:
    """Its error made the stream forget the other: so many could be in flight as one liked, and stayed there."""
    client = stand.connect()
    for number in range(600):
        client.send(call(number), {"id": number})
        await client.messages()
    assert stand.broker.held == 500
    client.leave()
    assert stand.is_clean


async def test_a_defect_while_an_answer_is_written_is_that_answer_s_alone(
    stand: StreamStand, caplog: pytest.LogCaptureFixture
) -> None:
    client = await in_flight(stand, 3)
    (lane,) = stand.broker.lanes("m")
    first, second, third = stand.broker.take(lane, 3, stand.clock())
    stand.broker.settle(first, make_output(b'"good"'))
    stand.broker.settle(second, Output(12.5, make_output(b"1").call))  # no bytes: nobody can write that
    stand.broker.settle(third, InputRefused("no"))
    answers = await client.answers()
    assert answers[0]["output"] == "good"
    assert (answers[1]["error"]["status"], answers[2]["error"]["status"]) == (500, 422)
    assert "an answer could not be written" in caplog.text


async def test_a_defect_at_the_door_is_that_request_s_alone(
    stand: StreamStand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = stand.connect()
    ask = stand.intake.ask

    def broken(caller: Caller, model: Any, parameters: bytes, value: bytes, *rest: Any) -> Request:
        if value == b'"bad"':
            raise ZeroDivisionError("a defect")
        return ask(caller, model, parameters, value, *rest)

    monkeypatch.setattr(stand.intake, "ask", broken)
    client.send(call(1, "bad"), call(2, "good"))
    assert (await client.answers())[1]["error"]["status"] == 500
    stand.work()
    assert set(await client.answers()) == {2}
    assert "a stream failed on a request" in caplog.text


# Rules 3 and 4


def revoked(headers: dict[bytes, bytes], peer: Peer) -> Caller:
    raise Unauthorized("no")


async def test_a_credential_that_is_revoked_ends_the_stream(stand: StreamStand) -> None:
    client = await in_flight(stand, 3)
    stand.intake.identify = revoked
    stand.pass_time(1.0)
    assert client.close_code() == 3000
    assert stand.is_clean


async def test_a_credential_counts_for_each_request(stand: StreamStand) -> None:
    client = await in_flight(stand, 1)
    stand.intake.identify = revoked
    client.send(call("late"))
    assert client.close_code() == 3000
    assert stand.is_clean


async def test_while_nobody_can_say_whether_a_credential_is_valid(stand: StreamStand) -> None:
    client = await in_flight(stand, 1)

    def unknown(headers: dict[bytes, bytes], peer: Peer) -> Caller:
        raise BrokerDown("not now", retry_after_s=1)

    stand.intake.identify = unknown
    client.send(call("late"))
    stand.pass_time(1.0)
    assert (await client.answers())["late"]["error"]["status"] == 503
    stand.work()
    assert set(await client.answers()) == {0}
    assert client.why_closed() is None


async def test_limits_count_requests(stand: StreamStand) -> None:
    limited = Caller("someone", 0, limit=RateLimit(60, 2))
    stand.intake.identify = lambda headers, peer: limited
    client = stand.connect()
    client.send(*[call(n) for n in range(4)])
    refused = await client.answers()
    assert {own_id: answer["error"]["status"] for own_id, answer in refused.items()} == {2: 429, 3: 429}
    assert all(answer["retry_after_s"] >= 1 for answer in refused.values())
    assert stand.broker.held == 2


def hold_at_the_door(stand: StreamStand) -> list[Callable[[LimitVerdict], None]]:
    """Nobody knows whether a request is within its limit, until the test says so."""
    waiting: list[Callable[[LimitVerdict], None]] = []

    def when_known(caller: Caller, known: Callable[[LimitVerdict], None], cost: int = 1) -> None:
        waiting.append(known)

    stand.intake.identify = lambda headers, peer: Caller("someone", 0, limit=RateLimit(60, 2))
    stand.intake.enter = lambda *_: None
    stand.intake.when_known = when_known
    return waiting


async def test_who_waits_at_the_door_counts_and_may_leave(stand: StreamStand) -> None:
    waiting = hold_at_the_door(stand)
    client = stand.connect()
    client.send(call(1), call(1), call(2), call(3))
    assert set(await client.answers()) == {None}
    assert len(waiting) == 3
    waiting[0](b"")
    assert stand.broker.held == 1
    client.leave()
    waiting[1](RateLimited("slowly", retry_after_s=7))
    waiting[2](b"")
    assert stand.is_clean
    assert stand.work() == []


async def test_a_refusal_that_comes_late_is_told(stand: StreamStand) -> None:
    waiting = hold_at_the_door(stand)
    client = stand.connect()
    client.send(call(1), call(2))
    await client.messages()
    waiting[0](RateLimited("slowly", retry_after_s=7))
    waiting[1](b"")
    assert (await client.answers())[1]["retry_after_s"] == 7
    assert len(stand.work()) == 1
    assert set(await client.answers()) == {2}


# Rule 5


# Rule 6


async def test_who_does_not_read_gets_no_work_done(stand: StreamStand) -> None:
    client = stand.connect()
    client.connection.pause_writing()
    client.protocol.send_ping(b"are you there?")
    client.feed(b"".join(client.protocol.data_to_send()))  # its answer finds that nobody reads
    client.send(*[call(n) for n in range(10)])
    await client.messages()
    assert stand.broker.held == 0
    assert not client.transport.reading
    client.connection.resume_writing()
    await client.messages()
    assert stand.broker.held == 10
    assert client.transport.reading


async def test_much_at_once_is_begun_bit_by_bit(stand: StreamStand) -> None:
    client = stand.connect()
    client.send(*[call(n) for n in range(400)])
    assert 0 < stand.broker.held <= STEPS_A_TURN
    assert not client.transport.reading
    await client.messages()
    assert stand.broker.held == 400
    assert client.transport.reading


async def test_all_streams_share_turns_and_who_waits_for_one_is_not_read_from(
    stand: StreamStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = stand.intake.ask

    def ask_slowly(*given: Any) -> Any:
        time.sleep(2 * TURN_S / STEPS_A_TURN)
        return ask(*given)

    monkeypatch.setattr(stand.intake, "ask", ask_slowly)
    clients = [stand.connect() for _ in range(10)]
    for client in clients:
        client.send(*[call(n) for n in range(100)])
    assert 0 < stand.broker.held <= 2 * STEPS_A_TURN
    assert not any(client.transport.reading for client in clients)
    await until(lambda: stand.broker.held == 1000)
    await until(lambda: all(client.transport.reading for client in clients))


async def test_who_reads_on_is_read_from_when_what_came_is_done(stand: StreamStand) -> None:
    client = await in_flight(stand, 1)
    client.protocol.send_ping(b"")
    client.feed(b"".join(client.protocol.data_to_send()) * 10_000)
    client.connection.pause_writing()
    stand.work()
    await asyncio.sleep(0)
    client.connection.resume_writing()
    assert not client.transport.reading
    await until(lambda: client.transport.reading)
    assert set(await client.answers()) == {0}


# Rule 7


async def test_only_so_many_in_flight(stand: StreamStand) -> None:
    client = await in_flight(stand, 500)
    client.send(call("more"))
    refused = (await client.answers())["more"]
    assert (refused["error"]["status"], refused["retry_after_s"]) == (429, 1)
    stand.work()
    await client.messages()
    client.send(call("more"))
    stand.work()
    assert "output" in (await client.answers())["more"]


def fragments(client: StreamClient, number: int, size: int) -> None:
    client.protocol.send_text(b"x" * size, fin=False)
    for _ in range(number - 1):
        client.protocol.send_continuation(b"x" * size, fin=False)
    client.feed(b"".join(client.protocol.data_to_send()))


async def test_fragments_are_put_together(stand: StreamStand) -> None:
    client = stand.connect()
    text = json.dumps(call("in parts", "é" * 100), ensure_ascii=False).encode()
    client.protocol.send_text(text[:1], fin=False)
    for byte in text[1:]:
        client.protocol.send_continuation(bytes((byte,)), fin=False)
    client.protocol.send_continuation(b"", fin=True)
    for byte in b"".join(client.protocol.data_to_send()):
        client.feed(bytes((byte,)))
    await client.messages()
    stand.work()
    assert (await client.answers())["in parts"]["output"] == "é" * 100
    assert stand.server.state.receiving_bytes == 0


@pytest.mark.parametrize(("number", "size", "code"), [(FRAGMENTS_MAX + 1, 0, 1008), (11, 10_000, 1009)])
async def test_too_many_or_too_long_fragments(stand: StreamStand, number: int, size: int, code: int) -> None:
    client = stand.connect()
    fragments(client, number, size)
    await client.messages()
    assert client.close_code() == code
    assert stand.is_clean


async def test_a_message_must_come_in_time_but_not_a_pong(stand: StreamStand) -> None:
    client, other = stand.connect(), stand.connect()
    other.protocol.send_pong(b"")
    other.feed(b"".join(other.protocol.data_to_send()))
    fragments(client, 3, 5)
    await client.messages()  # where the process stood still just before, frames are read in a later turn
    assert stand.server.state.receiving_bytes == 15
    stand.pass_time(HttpLimits().receive_timeout_s)
    assert client.close_code() == 3008
    assert other.why_closed() is None
    assert stand.server.state.receiving_bytes == 0


async def test_messages_that_are_not_whole_count_together() -> None:
    stand = StreamStand(http_limits=HttpLimits(receiving_bytes_max=50_000))
    first, second = stand.connect(), stand.connect()
    fragments(first, 3, 10_000)
    fragments(second, 3, 10_000)
    await second.messages()
    assert (first.close_code(), second.close_code()) == (None, 1013)
    assert stand.server.state.receiving_bytes == 30_000
    await stand.journal.close()


async def test_only_so_many_streams() -> None:
    stand = StreamStand(places=Places("streams", 2, 3))
    first, second, third = (stand.connect() for _ in range(3))
    assert [each.status for each in (first, second, third)] == [101, 101, 429]
    first.leave()
    assert stand.connect().status == 101
    stand.intake.identify = lambda headers, peer: Caller("another", 0)
    assert [stand.connect().status for _ in range(2)] == [101, 503]
    await stand.journal.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (bytes((0xC1, 0x80, 0, 0, 0, 0)), 1002),  # compressed, which was not agreed upon
        (bytes((0x81, 0x00)), 1002),  # not masked
        (bytes((0x83, 0x80, 0, 0, 0, 0)), 1002),  # an opcode that does not exist
        (bytes((0x80, 0x80, 0, 0, 0, 0)), 1002),  # goes on with nothing
        (bytes((0x09, 0x80, 0, 0, 0, 0)), 1002),  # a ping in parts
        (bytes((0x89, 0xFE, 0, 126, *range(130))), 1002),  # a ping too long
        (bytes((0x81, 0x81, 0, 0, 0, 0, 0xFF)), 1007),  # not UTF-8
        (bytes((0x81, 0xFF, 0x7F, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0)), 1009),
    ],
)
async def test_frames_as_they_must_not_be(stand: StreamStand, frame: bytes, code: int) -> None:
    client = await in_flight(stand, 2)
    client.feed(frame)
    await client.messages()
    assert client.close_code() == code
    assert client.transport.is_over
    assert stand.is_clean


# Rule 8


async def test_who_is_silent_is_asked_and_then_cut_off(stand: StreamStand) -> None:
    client, other = stand.connect(), stand.connect()
    stand.pass_time(PING_S)
    for each in (client, other):
        await each.messages()
    other.feed(b"".join(other.protocol.data_to_send()))  # its pong
    stand.pass_time(SILENT_S - PING_S)
    assert [each.transport.aborted for each in (client, other)] == [True, False]


async def test_all_are_looked_at_in_time_while_many_leave_and_some_at_a_time(stand: StreamStand) -> None:
    looked_at: list[bytes] = []

    def identify(headers: dict[bytes, bytes], peer: Peer) -> Caller:
        looked_at.append(headers[b"x-api-key"])
        return Caller("someone", 0)

    def look(times: int = 1) -> list[bytes]:
        looked_at.clear()
        for _ in range(times):
            before = len(looked_at)
            stand.streams.look()
            assert len(looked_at) - before <= len(clients) // LOOK_PARTS + 1
        return sorted(looked_at)

    def connect(name: str) -> StreamClient:
        return stand.connect(f"X-API-Key: {name}")

    stand.intake.identify = identify
    clients = {b"%d" % number: connect(str(number)) for number in range(95)}
    first = set(look(3))
    assert len(first) == 30
    stay = sorted(clients)[::6]
    for name in clients.keys() - set(stay):
        clients[name].leave()
    assert first | set(look(LOOK_PARTS - 3)) >= set(stay)  # all within LOOK_S
    clients = {name: clients[name] for name in stay}
    assert look(LOOK_PARTS // 2 + 3) == stay  # each once: a new round in smaller parts
    look()
    for client in clients.values():
        client.leave()
    # Who comes now does not wait until those who left have been looked at.
    clients = {b"new": connect("new")}
    assert look() == [b"new"]
    clients[b"new"].leave()
    assert look(2 * LOOK_PARTS) == []


async def test_who_asks_for_nothing_is_sent_away(stand: StreamStand) -> None:
    client = await in_flight(stand, 1)

    def wait(seconds: float) -> None:
        for _ in range(round(seconds / 10)):
            client.protocol.send_pong(b"")
            client.feed(b"".join(client.protocol.data_to_send()))
            stand.pass_time(10)

    wait(1000)
    assert client.why_closed() is None  # it waits for an answer
    stand.work()
    await client.messages()
    wait(990)
    assert client.why_closed() is None
    wait(10)
    assert client.close_code() == 3008


# Rule 9, and the upgrade itself


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 101),
        (("Origin: http://test",), 101),
        (("Origin: https://test",), 101),
        (("Origin: https://evil.example",), 403),
        (("Origin: null",), 403),
        (("Sec-WebSocket-Extensions: permessage-deflate",), 101),
        (("Content-Length: 0",), 426),
    ],
)
async def test_who_may_open_one(stand: StreamStand, headers: tuple[str, ...], status: int) -> None:
    client = stand.connect(*headers)
    assert client.status == status
    assert b"sec-websocket-extensions" not in client.transport.written.lower()
    assert len(stand.streams) == (status == 101)


async def test_a_ticket_opens_one_and_another_does_not(stand: StreamStand) -> None:
    shown: list[bytes | None] = []

    def identify(headers: dict[bytes, bytes], peer: Peer) -> Caller:
        shown.append(headers.get(b"authorization"))
        return Caller("someone", 0, is_anonymous=False)

    stand.intake.identify = identify
    asking = StreamClient(stand)
    asking.feed(b"POST /v1/stream/tickets HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer it\r\n\r\n")
    ticket = json.loads(asking.transport.written.partition(b"\r\n\r\n")[2])["ticket"]
    assert stand.connect(target=f"/v1/stream?ticket={ticket}").status == 101
    assert shown == [b"Bearer it"] * 2
    for wrong in ("x", ticket[:-4], ticket[::-1], "%00", "%C3%A9"):
        assert stand.connect(target=f"/v1/stream?ticket={wrong}").status == 401


async def test_an_upgrade_behind_another_request_is_ignored(stand: StreamStand) -> None:
    held: list[Any] = []
    stand.router.add(b"GET", b"/held", lambda exchange, _: held.append(exchange))
    client = StreamClient(stand)
    upgrade = b"GET /v1/stream HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    client.feed(b"GET /held HTTP/1.1\r\nHost: test\r\n\r\n" + upgrade)
    held[0].respond(200, b"{}")
    assert client.transport.written.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 426 " in client.transport.written
    assert len(stand.streams) == 0


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_frames_may_come_with_the_upgrade(stand: StreamStand, size: int) -> None:
    client = StreamClient(stand)
    client.protocol.send_text(json.dumps(call("at once")).encode())
    data = upgrade_request("Connection: keep-alive") + b"".join(client.protocol.data_to_send())
    for start in range(0, len(data), size):
        client.feed(data[start : start + size])
    await client.messages()
    stand.work()
    assert set(await client.answers()) == {"at once"}


# Rule 10


async def test_pings_do_not_hold_up_a_drain(stand: StreamStand) -> None:
    client = stand.connect()
    for _ in range(2 * STEPS_A_TURN):
        client.protocol.send_ping(b"")
    client.feed(b"".join(client.protocol.data_to_send()))
    client.feed(b"\x89")  # and a part of one
    stand.streams.drain()
    await client.messages()
    assert client.protocol.close_rcvd is not None and client.protocol.close_rcvd.code == 1012


async def test_at_a_drain_answers_come_first(stand: StreamStand) -> None:
    busy, idle = await in_flight(stand, 2), stand.connect()
    stand.streams.drain()
    assert idle.why_closed() == (1012, "retry_after_s=1")
    busy.send(call("late"))
    assert (await busy.answers())["late"]["error"]["type"] == "urn:carpool:error:draining"
    assert busy.why_closed() is None
    stand.work()
    assert set(await busy.answers()) == {0, 1}
    assert busy.why_closed() == (1012, "retry_after_s=1")
    stand.server.drain()
    assert stand.connect().status == 503
    assert stand.is_clean


class Traces:
    """Each request has a trace (core.ports.RequestTraces)."""

    def begin(self, headers: dict[bytes, bytes]) -> Trace:
        return Trace(bytes(16), bytes(8))

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str | None]] = []

    def refused(
        self,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes],
        error: CarpoolError,
        route: str | None = None,
    ) -> None:
        self.refusals.append((error.code, route))


async def test_requests_have_traces_of_their_own(stand: StreamStand) -> None:
    traces = stand.streams.traces = stand.server.state.traces = Traces()
    client = stand.connect()
    client.send(call(1), call(2, timeout_ms=5000), call(3, model="other"), call(4))
    assert set(await client.answers()) == {3}
    (lane,) = stand.broker.lanes("m")
    *done, failed = stand.broker.take(lane, 3, stand.clock())
    assert [request.trace is not None for request in done] == [True, True]
    assert [request.own_timeout_s for request in done] == [0.0, 5.0]
    stand.broker.settle(failed, InputRefused("no"))
    assert set(await client.answers()) == {4}
    # Who was refused has no request to be traced with; and a request of a stream is none of HTTP.
    assert traces.refusals == [("unknown-model", "")]
    client.leave()
