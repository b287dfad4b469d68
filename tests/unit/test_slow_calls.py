"""Calls whose message does not come (face/grpc/slow.py)."""

import asyncio

from carpool.face.grpc.slow import GIVEN_UP_A_TURN, SWEEP_S, SlowCalls
from carpool.testing import FakeClock


class Silent:
    """A call that notes what becomes of it."""

    def __init__(self, slow: SlowCalls) -> None:
        self._slow = slow
        self.given_up = 0
        slow.receiving[self] = slow.now

    def give_up_receiving(self) -> None:
        self.given_up += 1
        self._slow.receiving.pop(self, None)

    def give_up_writing(self) -> None:
        raise AssertionError("nothing is written to it")


async def test_many_at_once_are_given_up_some_in_a_turn_and_each_once() -> None:
    clock = FakeClock()
    slow = SlowCalls(3 * SWEEP_S, 1.0, 1000, clock)
    calls = [Silent(slow) for _ in range(10 * GIVEN_UP_A_TURN)]

    def given_up() -> int:
        return sum(call.given_up for call in calls)

    for expected in (0, 0, GIVEN_UP_A_TURN):
        clock.advance(SWEEP_S)
        slow.sweep()
        assert given_up() == expected
    await asyncio.sleep(0)
    assert given_up() == 2 * GIVEN_UP_A_TURN
    slow.sweep()  # while it goes on
    for _ in range(8):
        await asyncio.sleep(0)
    assert [call.given_up for call in calls] == [1] * len(calls)
