"""Time that jumps: the wall clock is set by an hour, or the whole process stands still for half a minute (C4).

Only the monotonic clock decides what is sent and what is over. A process that stood still finds every timer due at
once, before it has read what came meanwhile: what is late then is nobody else's fault.
"""

import ast
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool.core.errors import UnknownTask
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.core.timers import Every
from carpool.testing import FakeUpstream, make_output
from support.tasks import Office, open_office
from support.virtual_gateway import Stand

ROOT = Path(carpool.__file__).parent
STOP_S = 30.0
HOUR_S = 3600.0
SLOTS, MAX_BATCH = 8, 4
# The modules that may read the wall clock: for what people read, to compare it with that of Redis, and because a
# credential says until when it is valid.
WALL_CLOCK = {
    "broker/webhooks/deliverer.py",
    "admission/credentials.py",
    "broker/dead_letters.py",
    "broker/journal.py",
    "broker/redis/fleet/servers.py",
    "broker/tasks.py",
    "face/http/openai.py",
    "face/http/state.py",
    "face/http/streams.py",
    "upstream/fleet.py",
}


class StoppedGateway(Stand):
    """A gateway with its look at the deadlines, which can be stopped and goes on."""

    def run_with_deadlines(self, main: Callable[[], Any]) -> None:
        async def with_deadlines() -> None:
            every = Every(0.01, lambda: self.broker.expire(self.clock()))
            every.start()
            try:
                await main()
            finally:
                every.stop()

        self.run(with_deadlines)

    async def stop(self) -> None:
        """SIGSTOP, and SIGCONT after a while: between two turns of the event loop."""
        self.clock.advance(STOP_S)
        await asyncio.sleep(0)

    def codes(self, requests: list[Request]) -> set[str]:
        """How these ended; fails for one that was told twice, or not at all."""
        return {"none" if self.witness.outcome(request) is None else request.result_code for request in requests}

    @property
    def breakers(self) -> list[str]:
        return [member.breaker.state for member in self.pool.members]


@pytest.mark.parametrize("endpoints", [1, 4])
def test_a_stop_blames_no_endpoint_and_ends_only_what_is_over(endpoints: int) -> None:
    gpus = [FakeUpstream(f"gpu-{number}", slots=SLOTS // endpoints) for number in range(endpoints)]
    stand = StoppedGateway(*gpus, max_batch=MAX_BATCH)

    async def main() -> None:
        for gpu in gpus:
            gpu.hold()
        tasks = [stand.send(b"task", "a", is_task=True) for _ in range(SLOTS // 2 * MAX_BATCH)]
        running = [stand.send(b"runs", "a") for _ in range(SLOTS // 2 * MAX_BATCH)]
        await asyncio.sleep(0.1)
        assert sum(gpu.in_flight for gpu in gpus) == SLOTS
        waiting = [stand.send(b"waits", "a") for _ in range(100)]
        patient = [stand.send(b"waits", "a", is_task=True) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert stand.codes(waiting + patient + tasks + running) == {"none"}
        await stand.stop()
        for gpu in gpus:
            gpu.release()
        await asyncio.sleep(0.01)
        # As many calls as are enough for a breaker ended late, through no fault of the endpoints: the door is open.
        assert set(stand.breakers) == {"closed"}
        assert isinstance(await stand.answer(b"new", "a"), Output)
        await asyncio.sleep(2.0)
        # Their clients waited for longer than they wanted to; nobody was told twice.
        assert stand.codes(running) == {"deadline-exceeded"}
        assert stand.codes(waiting) <= {"deadline-exceeded", "queue-timeout"}
        # The others are not over, and the stop cost them an attempt at most.
        assert stand.codes(tasks + patient) == {"ok"}

    stand.run_with_deadlines(main)


def test_an_endpoint_that_hangs_is_still_blamed() -> None:
    """The other side of it: a call that ends when its time is over, and not long after, is the endpoint's fault."""
    gpu = FakeUpstream(slots=SLOTS)
    stand = StoppedGateway(gpu, max_batch=1)

    async def main() -> None:
        gpu.hold()
        for _ in range(SLOTS):
            stand.send(b"runs", "a", is_task=True)
        await asyncio.sleep(3.1)
        assert stand.breakers == ["open"]
        gpu.release()

    stand.run_with_deadlines(main)


class WallClock:
    """`time.time`, which somebody sets."""

    def __init__(self) -> None:
        self._read = time.time
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._read() + self.ahead_s


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    wall = WallClock()
    monkeypatch.setattr(time, "time", wall)
    return wall


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    async with open_office() as office:
        yield office


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_results_are_kept_for_their_time_whatever_the_wall_clock_says(
    office: Office, wall: WallClock, step_s: float
) -> None:
    request = await office.submit()
    wall.ahead_s += step_s
    await office.finish(request, make_output(b'"out"'))
    wall.ahead_s += step_s
    office.clock.advance(590.0)
    assert (await office.look()).status == "SUCCESS"
    assert (await office.state()).latency_ms >= 0.0
    office.clock.advance(11.0)
    assert isinstance(await office.look(), UnknownTask)


def reads_wall_clock(path: Path) -> bool:
    """Whether a module has `time.time`, `datetime.now` or `formatdate`, which is the wall clock as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                return True
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "utcnow"):
                return True
            case ast.Name(id="formatdate"):
                return True
            case ast.ImportFrom(module="time", names=names) if any(n.name in ("time", "time_ns") for n in names):
                return True
    return False


def test_the_wall_clock_is_read_for_people_only() -> None:
    stages = ("admission", "batching", "broker", "core", "face", "upstream")
    found = {str(path.relative_to(ROOT)) for stage in stages for path in (ROOT / stage).rglob("*.py")}
    assert {name for name in found if reads_wall_clock(ROOT / name)} == WALL_CLOCK
