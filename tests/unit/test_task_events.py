"""The rules of events of tasks (at the top of `face/http/task_events.py`), on virtual time."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from carpool.core.errors import BrokerDown, CarpoolError, Unauthorized, UnknownTask
from carpool.core.ports import Caller, Peer
from carpool.core.task import TAKEN, QueuePlace, StoredTask
from carpool.face.http.connection import Connection
from carpool.face.http.places import Places
from carpool.face.http.router import Router
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.face.http.task_events import HEARTBEAT_S, LOOK_S, TaskEvents
from carpool.face.intake import Intake
from carpool.testing import FakeClock
from support.streams import NotingTransport

TASK = "a" * 32
Told = StoredTask | CarpoolError


def pending(place: int | None) -> StoredTask:
    queue = None if place is None else TAKEN if place == 0 else QueuePlace(place, 100)
    return StoredTask(TASK, "owner", "PENDING", None, None, 0.0, queue=queue)


def done(output: Any = b"1") -> StoredTask:
    return StoredTask(TASK, "owner", "SUCCESS", output, None, 0.0)


class Board:
    """Takes the part of the way in: `state` is how the task is; who waits is told when time is over, or by `tell`."""

    def __init__(self, state: Told) -> None:
        self.state = state
        self.looks = 0
        self.waiting: dict[object, Callable[[Told], Any]] = {}
        self.is_away = False

    def identify(self, headers: dict[bytes, bytes], peer: Peer) -> Caller:
        return Caller("owner", 0)

    def look(
        self, *, caller: Caller, task_id: str, wait_s: float, forget: bool, answer: Callable[[Told], Any]
    ) -> object:
        self.looks += 1
        ticket = object()
        if self.is_away:
            answer(BrokerDown("away"))
        elif not wait_s or isinstance(self.state, CarpoolError) or self.state.status != "PENDING":
            answer(self.state)
        else:
            self.waiting[ticket] = answer
            asyncio.get_running_loop().call_later(wait_s, self._time_is_over, ticket)
        return ticket

    def leave(self, ticket: object) -> None:
        self.waiting.pop(ticket, None)

    def tell(self, state: Told) -> None:
        self.state = state
        for ticket in list(self.waiting):
            self.waiting.pop(ticket)(state)

    def _time_is_over(self, ticket: object) -> None:
        if ticket in self.waiting:
            self.waiting.pop(ticket)(self.state)


class Listening:
    """One client of a gateway with such a board."""

    def __init__(self, state: Told, places: Places | None = None, *headers: str) -> None:
        self.board = Board(state)
        self.places = places or Places("event streams", 2, 2)
        self.events = TaskEvents(cast(Intake, self.board), self.places, forget_after_read=False)
        router = Router()
        router.add(b"GET", b"/v1/result/*/events", self.events.listen)
        self.server = HttpServer(router.serve, HttpLimits())
        self.transport, self.connection = self.connect(*headers)

    def connect(self, *headers: str) -> tuple[NotingTransport, Connection]:
        transport, connection = NotingTransport(), Connection(self.server.state)
        connection.connection_made(transport)
        lines = [f"GET /v1/result/{TASK}/events HTTP/1.0", *headers]  # without chunks
        connection.data_received("\r\n".join(lines).encode() + b"\r\n\r\n")
        return transport, connection

    @property
    def status(self) -> int:
        return int(self.transport.written.split(b" ", 2)[1])

    @property
    def blocks(self) -> list[str]:
        """Events, hints and comments, so far."""
        return self.transport.written.partition(b"\r\n\r\n")[2].decode().split("\n\n")[:-1]

    @property
    def told(self) -> list[tuple[str, str]]:
        """The names and ids of the events, so far."""
        events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in self.blocks if "event: " in each]
        return [(event["event"], event["id"]) for event in events]

    @property
    def is_forgotten(self) -> bool:
        return not (self.places.taken or len(self.events) or self.board.waiting)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    FakeClock().run(main())


def test_places_are_told_when_they_change_and_the_outcome_at_once() -> None:
    async def main() -> None:
        client = Listening(pending(None))
        await asyncio.sleep(3 * LOOK_S)
        client.board.state = pending(5)
        await asyncio.sleep(3 * LOOK_S)
        client.board.state = pending(0)
        await asyncio.sleep(LOOK_S + 1)
        client.board.tell(done())
        assert client.told == [("queued", "q"), ("queued", "q5"), ("processing", "p"), ("done", "end")]
        assert json.loads(client.blocks[1].partition("data: ")[2])["queue"] == {"place": 5, "estimated_wait_ms": 100}
        assert client.transport.is_over
        assert client.is_forgotten

    run(main)


def test_a_client_that_hears_nothing_for_long_gets_a_comment() -> None:
    async def main() -> None:
        client = Listening(pending(1))
        await asyncio.sleep(HEARTBEAT_S - 1)
        assert len(client.blocks) == 1
        await asyncio.sleep(1 + LOOK_S)
        assert client.blocks[1:] == [":"]

    run(main)


def test_a_failure_is_told_by_its_name() -> None:
    async def main() -> None:
        client = Listening(StoredTask(TASK, "owner", "FAILED", None, b'{"status":504}', 0.0))
        assert client.told == [("failed", "end")]

    run(main)


@pytest.mark.parametrize("text", [b'{\n"a": 1}', b'{\r\n"a": 1}', b'{\r"a": 1}'])
def test_an_output_of_several_lines_is_one_event(text: bytes) -> None:
    async def main() -> None:
        (block,) = Listening(done(text)).blocks
        data = "\n".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
        assert json.loads(data)["output"] == {"a": 1}

    run(main)


def test_what_was_heard_is_not_told_again() -> None:
    async def main() -> None:
        client = Listening(pending(5), None, "Last-Event-ID: q5")
        await asyncio.sleep(2 * LOOK_S + 1)
        assert (client.status, client.told) == (200, [])
        client.board.tell(pending(4))
        assert client.told == [("queued", "q4")]
        assert Listening(done(), None, "Last-Event-ID: end").status == 204
        assert Listening(done(), None, "Last-Event-ID: q1").told == [("done", "end")]

    run(main)


def test_a_credential_that_is_revoked_hears_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client = Listening(pending(1))
        await asyncio.sleep(LOOK_S)

        def nobody_knows(headers: dict[bytes, bytes], peer: Peer) -> Caller:
            raise BrokerDown("away")

        monkeypatch.setattr(client.board, "identify", nobody_knows)
        await asyncio.sleep(2 * LOOK_S)
        assert len(client.events) == 1

        def revoked(headers: dict[bytes, bytes], peer: Peer) -> Caller:
            raise Unauthorized("no")

        monkeypatch.setattr(client.board, "identify", revoked)
        await asyncio.sleep(LOOK_S + 1)
        client.board.tell(done())
        assert client.told == [("queued", "q1")]
        assert client.transport.is_over and client.is_forgotten

    run(main)


def test_while_the_broker_is_away_nobody_asks_without_a_pause() -> None:
    async def main() -> None:
        client = Listening(pending(1))
        await asyncio.sleep(LOOK_S)
        client.board.is_away = True
        looks = client.board.looks
        await asyncio.sleep(10 * LOOK_S)
        assert client.board.looks - looks <= 11
        client.board.is_away = False
        client.board.state = done()
        await asyncio.sleep(2 * LOOK_S)
        assert client.told[-1] == ("done", "end")

    run(main)


def test_a_task_that_is_not_there_or_goes() -> None:
    async def main() -> None:
        assert Listening(UnknownTask("no")).status == 404
        client = Listening(pending(1))
        await asyncio.sleep(1)
        client.board.tell(UnknownTask("deleted"))
        assert client.transport.is_over
        assert client.is_forgotten

    run(main)


def test_a_defect_is_that_client_s_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        at_once = Listening(done(output=1.5))  # nobody can write that
        assert at_once.transport.aborted  # the head of another answer is out
        assert at_once.is_forgotten
        later = Listening(pending(1))
        await asyncio.sleep(1)
        later.board.tell(done(output=1.5))
        assert later.transport.aborted and later.is_forgotten

    run(main)
    assert caplog.text.count("a listener could not be told how its task is") == 2


def test_who_leaves_is_forgotten() -> None:
    async def main() -> None:
        client = Listening(pending(1))
        await asyncio.sleep(3 * LOOK_S)
        looks = client.board.looks
        client.connection.connection_lost(None)
        assert client.is_forgotten
        await asyncio.sleep(10 * LOOK_S)
        assert client.board.looks == looks

    run(main)


def test_who_does_not_read_misses_places_but_not_the_outcome() -> None:
    async def main() -> None:
        client = Listening(pending(9))
        await asyncio.sleep(1)
        client.connection.pause_writing()
        for place in (8, 7, 6):
            client.board.state = pending(place)
            await asyncio.sleep(LOOK_S)
        client.board.tell(done())
        assert client.told == [("queued", "q9"), ("queued", "q8"), ("done", "end")]

    run(main)


def test_at_a_drain_everybody_is_told_when_to_come_back() -> None:
    async def main() -> None:
        client = Listening(pending(1))
        await asyncio.sleep(1)
        client.events.drain()
        assert client.blocks[-1] == "retry: 1000"
        assert client.transport.is_over and client.is_forgotten
        late, _ = client.connect()
        assert late.written.endswith(b"retry: 1000\n\n") and late.is_over

    run(main)


def test_only_so_many_listen() -> None:
    async def main() -> None:
        client = Listening(pending(1))
        (second, connection), (third, _) = client.connect(), client.connect()
        assert [each.written.split(b" ", 2)[1] for each in (second, third)] == [b"200", b"429"]
        connection.connection_lost(None)
        assert client.connect()[0].written.startswith(b"HTTP/1.1 200")

    run(main)
