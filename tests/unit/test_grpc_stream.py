"""One PredictStream (face/grpc/stream.py) with a client that does what the test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from carpool.admission.gate import Gate
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.errors import CarpoolError, Malformed, RateLimited
from carpool.core.ports import Peer
from carpool.core.request import Request
from carpool.face.grpc import call as calls
from carpool.face.grpc import stream as module
from carpool.face.grpc.call import GrpcCall, Problems
from carpool.face.grpc.inference import Inference, InferenceSettings
from carpool.face.grpc.stream import OPEN_MAX, UNREAD_BYTES_MAX, GrpcStreams
from carpool.face.http.places import Places
from carpool.face.intake import Intake, IntakeSettings, ServedModel
from carpool.testing import FakeUpstream, make_output
from carpool.upstream.pool import Pool
from support.grpc_client import message
from support.processes import until
from support.streams import nothing_waits
from support.tasks import open_journal


class FakeCall:
    """Its client sends what is in `sent`, and reads while `is_reading` is set."""

    path = "/carpool.v1.Inference/PredictStream"

    def __init__(self) -> None:
        self.peer, self.headers, self.came_in = Peer("127.0.0.1"), dict[bytes, bytes](), False
        itself: Any = self
        self.caller, self.options = partial(GrpcCall.caller, itself), partial(GrpcCall.options, itself)
        self.sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.taken = 0
        self.is_reading = asyncio.Event()
        self.answers: list[Any] = []
        self.when_unread: Callable[[], None] | None = None

    async def next(self) -> bytes | None:
        self.taken += 1
        return await self.sent.get()

    async def write(self, written: bytes, when_unread: Callable[[], None] | None = None) -> None:
        self.when_unread = when_unread
        await self.is_reading.wait()
        self.answers += message("PredictStreamResponse").FromString(written).responses

    def ask(self, *ids: str) -> None:
        requests = [{"id": own_id, "request": {"input_json": '"x"'}} for own_id in ids]
        self.sent.put_nowait(message("PredictStreamRequest")(requests=requests).SerializeToString())


class Stand:
    """The service over a broker whose requests the test answers."""

    def __init__(self, broker: MemoryBroker, intake: Intake, unread_bytes_max: int) -> None:
        self.broker = broker
        self.problems: list[str] = []
        self.places = Places("streams", 1, 2)
        settings, problems = InferenceSettings(1000, False), Problems(self.problems.append)
        self.service = Inference(intake, settings, problems, self.places)
        self.streams = GrpcStreams(self.service, self.places, unread_bytes_max)
        self.call = FakeCall()

    def start(self) -> "asyncio.Task[CarpoolError | None]":
        return asyncio.get_running_loop().create_task(self.streams.serve(self.call))  # type: ignore[arg-type]

    def waiting(self) -> list[Request]:
        now = asyncio.get_running_loop().time()
        return [request for lane in self.broker.lanes("m") for request in self.broker.take(lane, 10**6, now)]

    def answer_all(self, output: bytes = b'"y"') -> None:
        for request in self.waiting():
            self.broker.settle(request, make_output(output))


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    loop = asyncio.get_running_loop()
    broker = MemoryBroker(waiting_max=10**6, bytes_max=10**9, lanes_max=9, tiers=1, clock=loop.time)
    broker.when_work_arrives("m", lambda lane: None)
    journal = open_journal()
    tasks = Tasks(broker, journal)
    intake = Intake(
        Gate(broker, tasks, {"m": Pool([FakeUpstream()], loop.time)}, lowest_tier=0),
        broker,
        tasks,
        {"m": ServedModel("m", 1000, lambda data: data)},
        IntakeSettings("m", (0.5,), 60.0, 60.0, 600.0),
        loop.time,
    )
    yield Stand(broker, intake, 2 * UNREAD_BYTES_MAX)
    await journal.close()


async def settle_down(stand: Stand) -> None:
    await nothing_waits(stand.streams.turns, 50)


async def some_came_in(stand: Stand) -> None:
    for _ in range(1000):
        await asyncio.sleep(0)
        if stand.broker.held:
            return


async def test_while_nobody_reads_little_is_taken(stand: Stand) -> None:
    call, running = stand.call, stand.start()
    for start in range(0, 4 * OPEN_MAX, 100):
        call.ask(*map(str, range(start, start + 100)))
    call.sent.put_nowait(None)
    await settle_down(stand)
    assert OPEN_MAX <= stand.broker.held < OPEN_MAX + 100
    taken = call.taken
    stand.answer_all()
    await settle_down(stand)
    assert (call.taken, stand.broker.held) == (taken, 0)  # answered, but not read: no more is taken
    call.is_reading.set()
    while not running.done():
        await asyncio.sleep(0)
        stand.answer_all()
    assert sorted(int(each.id) for each in call.answers) == list(range(len(call.answers)))
    assert len(call.answers) >= 4 * OPEN_MAX and await running is None
    assert stand.streams.unread_bytes == 0


async def test_long_answers_that_nobody_reads(stand: Stand) -> None:
    call, running = stand.call, stand.start()
    call.ask("a", "b", "c")
    await settle_down(stand)
    stand.answer_all(b'"%b"' % (b"y" * (UNREAD_BYTES_MAX // 2)))
    await settle_down(stand)
    taken = call.taken
    call.ask("d")
    call.ask("e")
    await settle_down(stand)
    assert call.taken == taken  # one message was on the way already
    assert stand.broker.held <= 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert stand.broker.held == 0 and stand.streams.unread_bytes == 0


async def test_too_much_unread_is_dropped(stand: Stand) -> None:
    call, running = stand.call, stand.start()
    call.ask(*"abcdefgh")
    await settle_down(stand)
    for request in stand.waiting():
        stand.broker.settle(request, make_output(b'"%b"' % (b"y" * (UNREAD_BYTES_MAX // 2))))
        assert stand.streams.unread_bytes <= 2 * UNREAD_BYTES_MAX
    assert stand.streams.unread_bytes == 0
    stand.call.is_reading.set()  # it reads after all, and must not take what it got for everything
    ended = await running
    assert ended is not None and ended.code == "queue-full"


async def test_one_that_is_given_up_takes_all_back_and_is_told_so_if_it_reads_on(stand: Stand) -> None:
    call, running = stand.call, stand.start()
    call.ask("a", "b", "c")
    await settle_down(stand)
    first, *_ = stand.waiting()
    stand.broker.settle(first, make_output(b'"y"'))
    await settle_down(stand)
    assert call.when_unread is not None
    for _ in range(2):
        call.when_unread()
    call.ask("d")
    await settle_down(stand)
    assert stand.broker.held == 0 and not running.done() and stand.places.taken == 1
    call.is_reading.set()
    ended = await running
    assert ended is not None and ended.code == "queue-full"
    assert [each.id for each in call.answers] == ["a"]


async def test_a_defect_with_one_request_is_its_own(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = stand.service.ask

    def fail(caller: Any, call: Any, asked: Any, *more: Any) -> Request:
        if len(asked.given) > 3:
            raise RuntimeError
        return ask(caller, call, asked, *more)

    monkeypatch.setattr(stand.service, "ask", fail)
    call, running = stand.call, stand.start()
    call.is_reading.set()
    call.ask("a")
    requests = [{"id": "b", "request": {"input_json": '"too long"'}}, {"id": "c", "request": {"input_json": '"x"'}}]
    call.sent.put_nowait(message("PredictStreamRequest")(requests=requests).SerializeToString())
    call.sent.put_nowait(None)
    await settle_down(stand)
    stand.answer_all()
    assert await running is None
    assert {each.id: each.error.code for each in call.answers} == {"a": "", "b": "internal", "c": ""}


async def test_a_defect_in_an_answer_is_told_to_its_client(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    call, running = stand.call, stand.start()
    call.is_reading.set()
    call.ask("a", "b")
    call.sent.put_nowait(None)
    await settle_down(stand)
    first, second = stand.waiting()
    stand.broker.settle(first, make_output(object()))
    stand.broker.settle(second, make_output(b'"y"'))
    assert await running is None
    assert {each.id: each.error.code for each in call.answers} == {"a": "internal", "b": ""}
    assert stand.problems == ["internal"]


async def test_a_defect_in_reading_ends_the_stream(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise RuntimeError

    monkeypatch.setattr(module, "parse_stream", fail)
    running = stand.start()
    stand.call.ask("a")
    ended = await running
    assert ended is not None and ended.code == "internal"


async def test_a_bad_message_takes_all_with_it(stand: Stand) -> None:
    running = stand.start()
    stand.call.ask("a", "b")
    await settle_down(stand)
    assert stand.broker.held == 2
    stand.call.sent.put_nowait(b"\x0a\xff")
    assert isinstance(await running, Malformed)
    await until(lambda: stand.broker.held == 0)


async def test_an_owner_has_so_many_streams_at_once(stand: Stand) -> None:
    first = stand.start()
    await settle_down(stand)
    with pytest.raises(RateLimited):
        await stand.start()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert stand.places.taken == 0


async def test_at_a_drain_what_came_is_answered(stand: Stand) -> None:
    running = stand.start()
    stand.call.is_reading.set()
    stand.call.ask("a")
    await settle_down(stand)
    stand.streams.drain()
    await settle_down(stand)
    assert not running.done()
    stand.call.ask("too late")
    stand.answer_all()
    ended = await running
    assert ended is not None and ended.code == "draining"
    assert [each.id for each in stand.call.answers] == ["a"]
    late = await stand.start()
    assert late is not None and late.code == "draining"


async def test_who_leaves_while_a_message_is_taken_leaves_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "TURN_S", 0.0)
    running = stand.start()
    stand.call.ask(*map(str, range(100)))
    await some_came_in(stand)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await settle_down(stand)
    assert stand.broker.held == 0


async def test_a_defect_at_the_door_during_a_drain_leaves_nobody_waiting(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "TURN_S", 0.0)
    running = stand.start()
    stand.call.ask(*map(str, range(100)))
    await some_came_in(stand)
    stand.streams.drain()
    monkeypatch.setattr(module.GrpcStream, "_ask", None)
    ended = await running
    assert ended is not None and ended.code == "internal"
    assert stand.broker.held == 0
