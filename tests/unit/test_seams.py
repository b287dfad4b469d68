"""What may be added without touching the house: a face, a broker's halves, a subscriber; each in under 60 lines."""

import asyncio
from collections import deque
from pathlib import Path

import pytest

from carpool.admission.gate import Gate
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.errors import InputRefused
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.face.intake import Intake, IntakeSettings, ServedModel
from carpool.testing import FakeClock, FakeUpstream, Witness, make_output, make_request
from carpool.upstream.pool import Pool
from support.processes import PATIENCE_S, until
from support.tasks import open_journal
from support.toys.broker import ToyFeed, ToyQueue, Wire
from support.toys.face import LineFace
from support.toys.subscriber import Diary
from support.virtual_gateway import Stand

TOYS = sorted((Path(__file__).parents[1] / "support" / "toys").glob("[a-z]*.py"))


@pytest.mark.parametrize("toy", TOYS, ids=lambda path: path.stem)
def test_a_toy_is_small_and_uses_what_is_public(toy: Path) -> None:
    text = toy.read_text()
    assert len(text.splitlines()) < 60
    assert "._" not in text.replace("self._", "")


def taken(broker: MemoryBroker) -> list[Request]:
    now = asyncio.get_running_loop().time()
    return [request for lane in broker.lanes("m") for request in broker.take(lane, 64, now)]


async def test_a_face() -> None:
    loop = asyncio.get_running_loop()
    broker = MemoryBroker(waiting_max=9, bytes_max=1000, lanes_max=9, tiers=1, clock=loop.time)
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
    server = await loop.create_server(lambda: LineFace(intake), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b'"a"\n"b"\n')
    await until(lambda: broker.depth == 2)
    first, second = taken(broker)
    assert first.owner == "127.0.0.1"
    broker.settle(second, make_output(b'"B"'))
    broker.settle(first, InputRefused("no"))
    said = await asyncio.wait_for(reader.readexactly(len(b'2 "B"\n1 input-refused\n')), PATIENCE_S)
    assert said == b'2 "B"\n1 input-refused\n'
    writer.write(b'"c"\n')
    await until(lambda: broker.depth == 1)
    writer.close()
    await writer.wait_closed()
    await until(lambda: broker.held == 0)  # whoever leaves takes its place with it
    server.close()
    await journal.close()


async def test_halves_of_a_broker() -> None:
    clock, wire = FakeClock(), Wire()
    gateway = ToyQueue(wire, clock)
    local = MemoryBroker(waiting_max=9, bytes_max=1000, lanes_max=9, tiers=1, clock=clock)
    local.when_work_arrives("m", lambda lane: None)
    feed = ToyFeed(wire, local, gateway, clock)
    witness = Witness()
    requests = [make_request(name, witness, now=clock(), value=name.encode()) for name in ("a", "b", "c")]
    for request in requests:
        assert gateway.submit(request) is None
    gateway.cancel(requests[2])
    feed.take()
    (lane,) = local.lanes("m")
    batch = local.take(lane, 64, clock())
    local.settle_batch(batch[:1], [make_output(b"A")])
    for request in batch[1:]:
        local.settle(request, InputRefused("no"))
    told = [witness.outcome(request) for request in requests]
    assert isinstance(told[0], Output) and told[0].value == b"A"
    assert isinstance(told[1], InputRefused)
    assert gateway.pending.held == 0 and gateway.pending.late_outcomes == 1  # the third had left
    assert wire == deque()


def test_a_subscriber() -> None:
    stand, diary = Stand(FakeUpstream("gpu")), Diary()
    stand.events.subscribe(diary)

    async def main() -> None:
        await stand.answer(b"x", "somebody")

    stand.run(main)
    (words,) = diary.written.values()
    assert words == ["admitted", "taken", "sent to gpu, attempt 1", "settled: ok"]
