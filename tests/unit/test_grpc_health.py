"""grpc.health.v1 (face/grpc/health.py): what is told when, and how often the readiness is looked at."""

import asyncio
from collections.abc import Callable

from carpool.core.ports import Peer
from carpool.face.grpc.health import Health
from carpool.face.http.places import Places
from carpool.testing import FakeClock
from support.grpc_client import message

Tell = Callable[[str | None], None]
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class FakeCall:
    """Asks for one service, and keeps what it is told."""

    def __init__(self, service: str = "", *, is_reading: bool = True) -> None:
        self._asked: bytes = message("grpc.health.v1.HealthCheckRequest")(service=service).SerializeToString()
        self._is_reading = is_reading
        self.told: list[int] = []
        self.peer = Peer("192.0.2.1")

    async def read(self) -> bytes:
        return self._asked

    async def write(self, written: bytes) -> None:
        if not self._is_reading:
            await asyncio.Event().wait()
        self.told.append(message("grpc.health.v1.HealthCheckResponse").FromString(written).status)


class Ready:
    """The readiness of a process; with `is_slow` it tells when the test says so."""

    def __init__(self) -> None:
        self.why_not: str | None = None
        self.looks = 0
        self.is_slow = False
        self.waiting: list[Tell] = []

    def __call__(self, tell: Tell) -> None:
        self.looks += 1
        if self.is_slow:
            self.waiting.append(tell)
        else:
            tell(self.why_not)


def test_a_watcher_is_told_of_changes_alone() -> None:
    clock, ready = FakeClock(), Ready()
    health = Health(ready, ["a.B"], Places("streams", 9, 9), clock)

    async def main() -> None:
        known, unknown = FakeCall("a.B"), FakeCall("c.D")
        watching = [asyncio.ensure_future(health.watch(call)) for call in (known, unknown)]  # type: ignore[arg-type]
        await asyncio.sleep(3.5)
        ready.why_not = "the endpoints are down"
        await asyncio.sleep(2)
        ready.why_not = None
        await asyncio.sleep(2)
        assert known.told == [SERVING, NOT_SERVING, SERVING]
        health.leave()
        await asyncio.sleep(2)  # the endpoints are there, but this process leaves
        assert known.told[3:] == [NOT_SERVING] and not any(each.done() for each in watching)
        health.drain()
        await asyncio.gather(*watching)
        assert known.told[4:] == [] and unknown.told == [SERVICE_UNKNOWN]
        looks = ready.looks
        await asyncio.sleep(5)
        assert ready.looks == looks

    clock.run(main())


async def status(health: Health) -> int:
    answer: int = (await health.check(FakeCall())).status  # type: ignore[arg-type, union-attr]
    return answer


def test_a_watcher_that_does_not_read_holds_nobody_up() -> None:
    clock, ready = FakeClock(), Ready()
    health = Health(ready, ["a.B"], Places("streams", 9, 9), clock)

    async def main() -> None:
        stuck, other = FakeCall("a.B", is_reading=False), FakeCall("a.B")
        watching = [asyncio.ensure_future(health.watch(call)) for call in (stuck, other)]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert other.told == [SERVING]
        health.leave()
        await asyncio.sleep(0.1)
        assert other.told == [SERVING, NOT_SERVING] and await status(health) == NOT_SERVING
        health.drain()
        await watching[1]
        watching[0].cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    clock.run(main())


def test_a_flood_of_checks_is_one_look_a_second() -> None:
    clock, ready = FakeClock(), Ready()
    health = Health(ready, [], Places("streams", 9, 9), clock)

    async def main() -> None:
        ready.is_slow = True
        checks = [asyncio.ensure_future(status(health)) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert ready.looks == 1
        ready.waiting[0](None)
        assert set(await asyncio.gather(*checks)) == {SERVING}
        assert await status(health) == SERVING and ready.looks == 1
        await asyncio.sleep(1.1)
        ready.is_slow = False
        assert await status(health) == SERVING and ready.looks == 2

    clock.run(main())


def test_a_defect_in_the_readiness_is_not_waited_for() -> None:
    def fail(tell: Tell) -> None:
        raise RuntimeError

    clock = FakeClock()
    health = Health(fail, [], Places("streams", 9, 9), clock)

    async def main() -> None:
        assert await status(health) == NOT_SERVING
        await asyncio.sleep(2)
        assert await status(health) == NOT_SERVING

    clock.run(main())
