"""How calls of several inputs are read, and how their answers are put together (`face/http/lists.py`)."""

import asyncio
import json
from array import array
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from carpool.core import timers
from carpool.core.errors import CarpoolError, ClientLeft, InputRefused, Malformed, UpstreamProtocolFault
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Peer
from carpool.core.tensors import Data
from carpool.face.http import list_bodies
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Body, Exchange
from carpool.face.http.list_bodies import fields_of, texts_of, values_of, vector
from carpool.face.http.lists import Answers, ListCall, ListFace, Singles, Work
from carpool.face.http.openai import CompletionsFace, as_base64, openai_limit_lines
from carpool.face.intake import ServedModel
from carpool.testing import make_output, make_request
from support.processes import until


@pytest.fixture(autouse=True)
def has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the event loop is long enough for all that is done in it, however busy the machine is."""
    monkeypatch.setattr(timers, "TURN_S", 60.0)


class NoteTaker:
    """A connection that takes notes; it has room for as many parts as it is told."""

    def __init__(self, room: int = 10**6) -> None:
        self.peer = Peer()
        self.status = 0
        self.written = b""
        self.parts = 0
        self.room = room
        self.is_ended = self.is_broken = False

    def respond(self, exchange: Exchange, status: int, body: Body, content_type: bytes, headers: bytes) -> None:
        assert not self.status
        assert isinstance(body, bytes)
        self.status, self.written, self.is_ended = status, body, True
        exchange.response = b""

    def answer(self, exchange: Exchange, pieces: tuple[bytes, Data, bytes], headers: bytes) -> None:
        assert not self.status
        self.status, self.written, self.is_ended = 200, b"".join(pieces), True
        exchange.response = b""

    def begin(self, exchange: Exchange, status: int, content_type: bytes, headers: bytes) -> None:
        assert not self.status
        self.status, exchange.is_unfinished = status, True

    def write(self, exchange: Exchange, part: bytes) -> bool:
        assert not self.is_ended
        self.written += part
        self.parts += 1
        self.room -= 1
        return self.room > 0

    def end(self, exchange: Exchange) -> None:
        self.is_ended, exchange.is_unfinished = True, False

    def break_off(self) -> None:
        self.is_broken = True

    def is_gone(self) -> bool:
        return self.is_broken

    def note_problem(self, exchange: Exchange, error: CarpoolError) -> None:
        pass


class Plain(ListFace):
    """Pieces are the outputs; some are bad."""

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        if output.value == b"bad":
            raise UpstreamProtocolFault("bad")
        return bytes(output.value)

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        if call.how == "defect":
            raise ZeroDivisionError
        return b"application/json", b"[", b"]"

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        return msgspec.json.encode({"error": detail})


class Desk:
    """One call, and what is written for it."""

    def __init__(self, size: int, *, room: int = 10**6, bytes_max: int = 10**9, how: str = "") -> None:
        self.answers = Answers(bytes_max)
        face = self.face = object.__new__(Plain)  # nothing comes in here
        face.answers = self.answers
        self.sink = NoteTaker(room)
        self.exchange = Exchange(cast(Connection, self.sink), b"POST", b"/", {}, b"", True)
        model = ServedModel("m", 1000, lambda data: data)
        self.call = ListCall(model, b"", [b""] * size, how)
        self.work = Work(face, self.exchange, self.call, "id")

    def come(self, values: Sequence[bytes]) -> None:
        for number, value in enumerate(values):
            self.work.came(number, make_output(value))
        self.work.answer([None] * len(values), None)

    async def turns(self, number: int = 50) -> None:
        for _ in range(number):
            await asyncio.sleep(0)


def numbers(count: int, size: int) -> list[bytes]:
    return [b"%0*d" % (size, 10**size // 2 + number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 50])
async def test_a_short_answer_is_whole(count: int) -> None:
    desk = Desk(count)
    desk.come(numbers(count, 100))
    assert desk.sink.parts == 0 and desk.sink.status == 200
    assert len(json.loads(desk.sink.written)) == count
    assert desk.answers.held == 0


async def test_a_long_answer_leaves_in_parts_as_it_is_read() -> None:
    values = numbers(5000, 1000)
    desk = Desk(len(values), room=3)
    desk.come(values)
    await until(lambda: desk.sink.parts == 3)
    await desk.turns()
    assert desk.sink.parts == 3 and not desk.sink.is_ended  # nobody reads on
    held = desk.answers.held
    assert 0 < held < 5_000_000
    assert desk.exchange.worker is not None
    desk.sink.room = 10**6
    desk.exchange.worker.writable(desk.exchange)
    was_ended = desk.sink.is_ended
    await until(lambda: desk.sink.is_ended)
    assert (was_ended, desk.sink.is_ended, desk.answers.held) == (False, True, 0)  # a turn writes so much
    assert [b"%d" % number for number in json.loads(desk.sink.written)] == values


async def test_pieces_are_made_over_some_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "TURN_S", 0.0)
    values = numbers(40, 100)
    desk = Desk(len(values))
    desk.come(values)
    assert not desk.sink.status
    await desk.turns()
    assert [b"%d" % number for number in json.loads(desk.sink.written)] == values
    assert desk.answers.held == 0


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_piece_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, is_later: bool) -> None:
    desk, values = Desk(5), [b"1", b"2", b"3", b"bad", b"5"]
    if is_later:
        monkeypatch.setattr(timers, "TURN_S", 0.0)
        desk.come(values)
        await desk.turns()
    else:
        with pytest.raises(ClientLeft):  # its group cancels the others
            desk.come(values)
    assert json.loads(desk.sink.written) == {"error": "`inputs[3]`: bad"}
    assert (desk.sink.status, desk.answers.held) == (502, 0)


async def test_a_defect_ends_the_call_with_an_error() -> None:
    desk = Desk(2, how="defect")
    desk.come([b"1", b"2"])
    assert desk.sink.status == 500
    assert desk.answers.held == 0


async def test_a_defect_in_the_middle_of_an_answer_breaks_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(500, room=2)
    desk.come(numbers(500, 1000))
    assert desk.sink.parts == 2
    monkeypatch.setattr(desk.sink, "write", lambda *_: 1 / 0)
    assert desk.exchange.worker is not None
    desk.exchange.worker.writable(desk.exchange)
    assert desk.sink.is_broken and not desk.sink.is_ended
    assert desk.answers.held == 0


@pytest.mark.parametrize("when", ["coming", "making", "writing"])
async def test_who_leaves_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    if when != "writing":
        monkeypatch.setattr(timers, "TURN_S", 0.0)
    desk, values = Desk(500, room=2), numbers(500, 1000)
    if when == "coming":
        for number, value in enumerate(values[:100]):
            desk.work.came(number, make_output(value))
    else:
        desk.come(values)
        await desk.turns(100 if when == "writing" else 3)
    assert desk.answers.held > 0
    assert desk.exchange.worker is not None
    desk.exchange.worker.client_left(desk.exchange)
    assert desk.answers.held == 0
    written = desk.sink.written
    await desk.turns(100)
    assert desk.sink.written == written and desk.answers.held == 0


async def test_answers_of_all_calls_are_bounded() -> None:
    desk = Desk(20, bytes_max=1500)
    with pytest.raises(CarpoolError, match="large answers"):
        desk.come(numbers(20, 100))


# Calls of one input


@pytest.mark.parametrize(
    ("outcome", "how", "status", "written"),
    [
        (make_output(b"1"), "", 200, [1]),
        (make_output(b"bad"), "", 502, {"error": "bad"}),
        (make_output(b"1"), "defect", 500, {"error": "the gateway failed on this request"}),
        (InputRefused("no"), "", 422, {"error": "no"}),
    ],
)
def test_the_short_way_of_a_call_with_one_input(outcome: Outcome, how: str, status: int, written: Any) -> None:
    desk = Desk(1, how=how)
    singles = Singles(desk.face)
    request = make_request("r", singles, now=0.0)
    request.ticket = (desk.exchange, desk.call)
    request.settle(outcome, 1.0)
    assert (desk.sink.status, json.loads(desk.sink.written)) == (status, written)


def test_whoever_left_a_call_of_one_input_is_told_nothing() -> None:
    desk = Desk(1)
    request = make_request("r", Singles(desk.face), now=0.0)
    request.ticket = (desk.exchange, desk.call)
    request.settle(ClientLeft("left"), 1.0)
    assert desk.sink.status == 0


def test_a_completion_has_the_number_of_its_prompt() -> None:
    """Whatever its model says of that: it was asked for one."""
    call = ListCall(ServedModel("m", 100, bytes), b"", [b'"a"', b'"b"'])
    face = CompletionsFace.__new__(CompletionsFace)
    piece = json.loads(face.piece(call, 1, make_output(b'{"text":"b","index":0,"finish_reason":"length"}')))
    assert piece == {"text": "b", "index": 1, "finish_reason": "length", "logprobs": None}


# Bodies


@given(st.lists(st.text(), min_size=1, max_size=50))
def test_texts_stay_the_bytes_they_were(texts: list[str]) -> None:
    body = msgspec.json.encode({"input": texts})
    values = texts_of(fields_of(body)["input"], "input")
    assert [json.loads(value) for value in values] == texts


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=3),
    )
)
def test_any_value_is_inputs_or_refused(value: Any) -> None:
    def is_text(each: Any) -> bool:
        if isinstance(each, str):
            return True
        return isinstance(each, list) and bool(each) and all(is_token(token) for token in each)

    def is_token(each: Any) -> bool:
        is_number = isinstance(each, int | float) and not isinstance(each, bool)
        return is_number and each == int(each) and 0 <= each <= list_bodies.TOKEN_ID_MAX

    expected = is_text(value) or (isinstance(value, list) and bool(value) and all(map(is_text, value)))
    try:
        values = texts_of(Raw(msgspec.json.encode(value)), "input")
    except Malformed:
        assert not expected
    else:
        assert expected
        assert len(values) == (1 if is_text(value) else len(value))


def test_a_list_may_have_so_many() -> None:
    assert len(values_of(Raw(b"[" + b"1," * 2047 + b"1]"), "instances")) == 2048
    with pytest.raises(Malformed, match="maximum length 2048, but got an array with length 2049"):
        values_of(Raw(b"[" + b"1," * 2048 + b"1]"), "instances")


# Vectors


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_numbers_and_base64_are_the_same_vector(values: list[float]) -> None:
    output = msgspec.json.encode(values)
    assert vector(output) == output
    packed = array("f")
    packed.frombytes(b64decode(json.loads(as_base64(output))))
    assert list(packed) == values


@pytest.mark.parametrize("output", [b'"text"', b"{}", b"[[1]]", b"[null]", b"[true]", b'["1"]', b"1", b"[1", b"[NaN]"])
def test_what_is_no_vector(output: bytes) -> None:
    for make in (as_base64, vector):
        with pytest.raises(UpstreamProtocolFault):
            make(output)


def test_limits_in_the_words_of_openai() -> None:
    lines = b'RateLimit-Policy: "default";q=20;w=60\r\nRateLimit: "default";r=1;t=3\r\n'
    assert openai_limit_lines(lines) == lines + (
        b"X-RateLimit-Limit-Requests: 20\r\nX-RateLimit-Remaining-Requests: 1\r\nX-RateLimit-Reset-Requests: 3s\r\n"
    )
