"""Refusals leave some to a turn, so that a flood of them holds up nothing else."""

import asyncio
from itertools import pairwise

from carpool.core.errors import Shed, UnknownModel
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.problem import respond_problem
from carpool.face.http.state import ERRORS_A_TURN, ErrorPace, HttpLimits, HttpState
from carpool.virtual_time import VirtualClock


def test_some_to_a_turn_in_their_order() -> None:
    async def main() -> None:
        pace, left = ErrorPace(), []
        for number in range(2 * ERRORS_A_TURN + 50):
            if pace.is_now(lambda number=number: left.append(number)):  # type: ignore[misc]
                left.append(number)
        counts = [len(left)]
        while len(pace):
            await asyncio.sleep(0)
            counts.append(len(left))
        assert counts == [ERRORS_A_TURN, 2 * ERRORS_A_TURN, 2 * ERRORS_A_TURN + 50]
        assert left == list(range(2 * ERRORS_A_TURN + 50))

    VirtualClock().run(main())


class BatchBuilder(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        """It has nothing more to read."""

    def resume_reading(self) -> None:
        """The same."""

    def is_closing(self) -> bool:
        return False

    def answers(self) -> int:
        return self.written.count(b"HTTP/1.1 404")


def test_whoever_sends_many_at_once_has_one_place() -> None:
    def refuse(exchange: Exchange) -> None:
        respond_problem(exchange, UnknownModel("no"))

    def sent(state: HttpState, requests: int) -> BatchBuilder:
        connection, transport = Connection(state), BatchBuilder()
        connection.connection_made(transport)
        connection.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * requests)
        return transport

    async def main() -> None:
        state = HttpState(refuse, HttpLimits())
        state.error_pace = ErrorPace()
        floods = [sent(state, 32) for _ in range(20)]
        one = sent(state, 1)
        assert sum(each.answers() for each in floods) == ERRORS_A_TURN and one.answers() == 0
        await asyncio.sleep(0)
        assert one.answers() == 1
        turns = 1
        while any(each.answers() < 32 for each in floods):
            await asyncio.sleep(0)
            turns += 1
            assert sum(each.answers() for each in floods) <= (turns + 1) * ERRORS_A_TURN
        assert turns <= 20 * 32 / ERRORS_A_TURN + 1

    VirtualClock().run(main())


def test_errors_that_many_are_told_keep_to_it_too() -> None:
    error = Shed("full", retry_after_s=1)
    request = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"

    async def main() -> None:
        state = HttpState(lambda exchange: exchange.sink.answer_error(exchange, error), HttpLimits())
        asking = [(Connection(state), BatchBuilder()) for _ in range(2 * ERRORS_A_TURN + 50)]
        for connection, transport in asking:
            connection.connection_made(transport)
            connection.data_received(request)  # its head is known from here on
        state.error_pace = ErrorPace()

        def left() -> int:
            return sum(transport.written.count(b"HTTP/1.1 503") for _, transport in asking) - len(asking)

        for connection, _ in asking:
            connection.data_received(request)
        for connection, _ in asking[-50:]:
            connection.data_received(request)  # behind one that waits
        counts = [left()]
        while len(state.error_pace):
            await asyncio.sleep(0)
            counts.append(left())
        assert counts[:2] == [ERRORS_A_TURN, 2 * ERRORS_A_TURN] and counts[-1] == len(asking) + 50
        assert max(later - now for now, later in pairwise(counts)) <= ERRORS_A_TURN

    VirtualClock().run(main())
