"""A client that leaves, at every phase of its request: it is never sent if it has not been, nobody else notices,
and nothing is left behind.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import Fixed
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.errors import CarpoolError, ClientLeft, InputRefused, QueueFull, UnknownTask
from carpool.core.outcome import Output
from carpool.core.request import ADMITTED, DONE, QUEUED, RUNNING, Request
from carpool.testing import (
    ANYBODY,
    FakeClock,
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    echo,
    inputs_of,
    make_request,
)
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool
from support.processes import PATIENCE_S, until
from support.tasks import open_journal, told

# Longer than a test waits: what comes, comes for another reason.
NEVER_S = 600.0

MAX_BATCH = 4


class Stand:
    """Everything behind the face, around a scripted upstream."""

    def __init__(self, clock: FakeClock, gpu: FakeUpstream) -> None:
        self.clock = clock
        self.gpu = gpu
        self.witness = Witness()
        self.broker = MemoryBroker(waiting_max=100, bytes_max=10_000, lanes_max=9, tiers=1, clock=clock)
        self.pool = Pool([gpu], clock)
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            JsonCodec(),
            self.broker,
            timeout_s=3.0,
            attempts=3,
            backoff_s=0.0,
            others_waiting=partial(self.broker.most_waiting, "m"),
            all_waiting=partial(self.broker.all_waiting, "m"),
            clock=clock,
        )
        slots = self.dispatcher.scheduler
        self.loop = BatchLoop(
            "m", self.broker, slots, self.dispatcher, Fixed(), max_batch=MAX_BATCH, max_wait_s=0.05, clock=clock
        )

    def request(self, name: str, **options: Any) -> Request:
        return make_request(name, self.witness, now=self.clock(), value=f'"{name}"'.encode(), **options)

    def arrive(self, *names: str) -> list[Request]:
        requests = [self.request(name) for name in names]
        for request in requests:
            assert self.broker.submit(request) is None
        return requests

    def sent(self) -> list[str]:
        """Everything the upstream ever saw."""
        return [value.decode().strip('"') for call in self.gpu.calls for value in call.inputs]

    def check_left(self, *left: Request) -> None:
        for request in left:
            assert isinstance(self.witness.outcome(request), ClientLeft)
            assert (request.phase, request.input, request.ticket) == (DONE, b"", None)

    def check_answered(self, *answered: Request) -> None:
        for request in answered:
            outcome = self.witness.outcome(request)
            assert isinstance(outcome, Output)
            assert bytes(outcome.value) == f'"{request.id}"'.encode()

    def check_nothing_left_behind(self) -> None:
        assert repr(self.broker) == "<MemoryBroker held=0 bytes=0 waiting=0>"
        assert self.pool.free() == self.pool.total()
        assert self.dispatcher.running == 0


def play(
    scene: Callable[[Stand], Awaitable[None]], *, slots: int = 1, delay_s: float = 0.2, gpu: FakeUpstream | None = None
) -> Stand:
    """Run a scene in virtual time, wait for everything to end, and look for remains. `gpu` is one with a script."""
    clock = FakeClock()
    gpu = gpu or FakeUpstream(slots=slots).then(echo, delay_s=delay_s, times=1000)
    stands: list[Stand] = []

    async def main() -> None:
        stands.append(Stand(clock, gpu))
        await scene(stands[0])
        await asyncio.sleep(20.0)
        stands[0].broker.expire(clock())

    clock.run(main())
    stands[0].check_nothing_left_behind()
    return stands[0]


# A synchronous request.


def test_left_before_it_was_queued() -> None:
    async def scene(stand: Stand) -> None:
        request = stand.request("a")
        assert stand.broker.reserve(request) is None
        assert request.phase == ADMITTED
        stand.broker.cancel(request)
        stand.check_left(request)

    assert play(scene).sent() == []


def test_left_while_queued() -> None:
    async def scene(stand: Stand) -> None:
        a, b, c = stand.arrive("a", "b", "c")
        await asyncio.sleep(0.01)
        assert b.phase == QUEUED
        stand.broker.cancel(b)
        await asyncio.sleep(1.0)
        stand.check_left(b)
        stand.check_answered(a, c)

    assert play(scene).sent() == ["a", "c"]


def test_all_left_while_queued() -> None:
    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c")
        await asyncio.sleep(0.01)
        for request in requests:
            stand.broker.cancel(request)
        stand.check_left(*requests)

    assert play(scene).sent() == []


def test_left_in_the_turn_in_which_the_batch_was_formed() -> None:
    """Taken, but the call has not begun."""

    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c", "d")  # a full batch is taken at once
        assert requests[1].phase == RUNNING
        stand.broker.cancel(requests[1])
        await asyncio.sleep(1.0)
        stand.check_left(requests[1])
        stand.check_answered(requests[0], *requests[2:])

    assert play(scene).sent() == ["a", "c", "d"]


def test_left_while_running() -> None:
    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c", "d")
        await asyncio.sleep(0.1)
        stand.broker.cancel(requests[0])
        stand.broker.cancel(requests[3])
        await asyncio.sleep(1.0)
        stand.check_left(requests[0], requests[3])
        stand.check_answered(*requests[1:3])

    assert len(play(scene).gpu.calls) == 1


def test_all_left_while_running_and_the_slot_serves_the_next() -> None:
    async def scene(stand: Stand) -> None:
        first = stand.arrive("a", "b", "c", "d")
        await asyncio.sleep(0.1)
        for request in first:
            stand.broker.cancel(request)
        second = stand.arrive("e", "f")
        await asyncio.sleep(1.0)
        stand.check_left(*first)
        stand.check_answered(*second)

    assert play(scene).sent() == ["a", "b", "c", "d", "e", "f"]


def test_left_between_two_attempts() -> None:
    async def scene(stand: Stand) -> None:
        def fail(call: UpstreamCall) -> UpstreamResponse:
            stand.broker.cancel(requests[2])
            return UpstreamResponse(503, b"")

        stand.gpu.then(fail)
        requests = stand.arrive("a", "b", "c", "d")
        await asyncio.sleep(1.0)
        stand.check_left(requests[2])
        stand.check_answered(*requests[:2], requests[3])

    assert play(scene, gpu=FakeUpstream()).sent() == ["a", "b", "c", "d", "a", "b", "d"]


def test_left_during_a_bisection() -> None:
    """The poison, an innocent, or all of them: they are not sent again, and everybody else gets his output."""

    def refuse_c(call: UpstreamCall) -> UpstreamResponse:
        return UpstreamResponse(422, b"{}") if b'"c"' in inputs_of(call) else echo(call)

    for leaving in (["c"], ["a"], ["c", "d"], ["a", "b", "c", "d"]):

        async def scene(stand: Stand, leaving: list[str] = leaving) -> None:
            requests = {request.id: request for request in stand.arrive("a", "b", "c", "d")}
            await asyncio.sleep(0.1)  # the whole batch is under way
            for name in leaving:
                stand.broker.cancel(requests[name])
            await asyncio.sleep(2.0)
            stand.check_left(*(requests[name] for name in leaving))
            stand.check_answered(*(requests[name] for name in {"a", "b", "d"} - set(leaving)))
            if "c" not in leaving:
                assert isinstance(stand.witness.outcome(requests["c"]), InputRefused)

        sent = play(scene, gpu=FakeUpstream().then(refuse_c, delay_s=0.2, times=20)).sent()
        assert all(sent.count(name) == 1 for name in leaving)


def test_left_while_waiting_for_the_slot_of_a_bisection_s_step() -> None:
    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c", "d")
        await asyncio.sleep(0.1)  # one slot: the second half waits for that of the first
        stand.broker.cancel(requests[2])
        stand.broker.cancel(requests[3])
        await asyncio.sleep(1.0)
        stand.check_left(*requests[2:])
        stand.check_answered(*requests[:2])

    gpu = FakeUpstream().then(UpstreamResponse(500, b"")).then(echo, delay_s=0.2, times=20)
    assert play(scene, gpu=gpu).sent() == ["a", "b", "c", "d", "a", "b"]


def test_left_after_the_answer() -> None:
    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c", "d")
        await asyncio.sleep(1.0)
        for request in requests:
            stand.broker.cancel(request)
        stand.check_answered(*requests)

    play(scene)


def test_left_while_a_neighbour_is_being_told() -> None:
    async def scene(stand: Stand) -> None:
        requests = stand.arrive("a", "b", "c", "d")
        neighbour = requests[1]

        class Closing:
            """The connection fails as it is written to, and with it goes another request on it."""

            def settled(self, request: Request, outcome: Output | CarpoolError) -> None:
                stand.broker.cancel(neighbour)

        requests[0].waiter = Closing()
        await asyncio.sleep(1.0)
        stand.check_left(neighbour)
        stand.check_answered(*requests[2:])

    play(scene)


def test_leaving_makes_room() -> None:
    async def scene(stand: Stand) -> None:
        stand.arrive(*(f"r{number}" for number in range(100)))
        waiting = stand.broker.waiting_requests()
        assert isinstance(stand.broker.submit(stand.request("one more")), QueueFull)
        stand.broker.cancel(waiting[-1])
        assert stand.broker.submit(stand.request("one more")) is None
        await asyncio.sleep(0)

    play(scene, slots=4)


@pytest.mark.parametrize("seed", range(20))
def test_half_of_all_clients_leave_at_random_moments(seed: int) -> None:
    random = Random(seed)
    leaving: list[Request] = []
    staying: list[Request] = []

    async def scene(stand: Stand) -> None:
        async def leave(request: Request, after_s: float) -> None:
            await asyncio.sleep(after_s)
            stand.broker.cancel(request)

        async with asyncio.TaskGroup() as clients:
            for number in range(90):
                (request,) = stand.arrive(f"r{number}")
                if random.random() < 0.5:
                    leaving.append(request)
                    clients.create_task(leave(request, random.random() * 0.5))
                else:
                    staying.append(request)
                await asyncio.sleep(random.random() * 0.02)

    stand = play(scene, slots=3)
    stand.check_answered(*staying)
    for request in leaving:
        outcome = stand.witness.outcome(request)
        assert isinstance(outcome, ClientLeft | Output)
        if isinstance(outcome, Output):
            stand.check_answered(request)
    assert len(set(stand.sent())) == len(stand.sent())
    assert {request.id for request in staying} <= set(stand.sent())


# A task that is deleted. The journal has a thread, so these run in real time.


class TaskStand(Stand):
    def __init__(self, gpu: FakeUpstream) -> None:
        super().__init__(FakeClock(), gpu)
        self.journal = open_journal(clock=self.clock)
        self.tasks = Tasks(self.broker, self.journal, clock=self.clock)

    async def submit(self, name: str) -> Request:
        request = self.request(name, is_task=True, total_timeout_s=600.0)
        assert await told(partial(self.tasks.submit, request)) is None
        return request

    async def delete(self, name: str) -> Any:
        return await told(partial(self.tasks.delete, ANYBODY, name))

    async def status(self, name: str, wait_s: float = 0.0) -> str:
        found = await told(partial(self.tasks.look, ANYBODY, name, wait_s, False))
        return "unknown" if isinstance(found, UnknownTask) else found.status

    def send_now(self) -> None:
        """Let the longest wait be over."""
        self.clock.advance(1.0)
        self.loop.notify()


@pytest.fixture
async def stand() -> AsyncIterator[TaskStand]:
    stand = TaskStand(FakeUpstream())
    yield stand
    stand.gpu.release()
    await stand.dispatcher.finish(PATIENCE_S)
    await stand.journal.close()
    stand.check_nothing_left_behind()


async def test_deleted_while_queued(stand: TaskStand) -> None:
    await stand.submit("stays")
    leaves = await stand.submit("leaves")
    assert await stand.delete("leaves") is None
    assert leaves.phase == DONE
    stand.send_now()
    assert await stand.status("stays", wait_s=NEVER_S) == "SUCCESS"
    assert await stand.status("leaves") == "unknown"
    assert stand.sent() == ["stays"]


async def test_deleted_while_running(stand: TaskStand) -> None:
    stand.gpu.hold()
    await stand.submit("stays")
    leaves = await stand.submit("leaves")
    stand.send_now()
    await until(lambda: leaves.phase == RUNNING)
    assert await stand.delete("leaves") is None
    stand.gpu.release()
    assert await stand.status("stays", wait_s=NEVER_S) == "SUCCESS"
    assert await stand.status("leaves") == "unknown"
    assert stand.journal.counts.results == 1


async def test_deleted_after_the_answer(stand: TaskStand) -> None:
    await stand.submit("t")
    stand.send_now()
    assert await stand.status("t", wait_s=NEVER_S) == "SUCCESS"
    assert await stand.delete("t") is None
    assert await stand.status("t") == "unknown"
    assert stand.journal.counts.results == 0


async def test_the_client_of_a_task_leaves_before_it_is_accepted(stand: TaskStand) -> None:
    """Nobody hears the 202, but what was handed over is kept: it may have been."""
    request = stand.request("t", is_task=True, total_timeout_s=600.0)
    stand.tasks.submit(request, lambda error: None)
    assert request.phase == ADMITTED
    stand.send_now()
    await until(lambda: request.phase != ADMITTED)  # nobody is told, that is the point
    stand.send_now()
    assert await stand.status("t", wait_s=NEVER_S) == "SUCCESS"
