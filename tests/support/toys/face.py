"""A toy face: a line of JSON in, a line of JSON out, in any order, each with the number of its line."""

import asyncio
from itertools import count

from carpool.core.errors import CarpoolError
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Peer
from carpool.core.request import Request
from carpool.face.intake import Intake, new_request_id


class LineFace(asyncio.Protocol):
    """One connection."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.numbers = count(1)
        self.asked: dict[int, Request] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer = Peer(transport.get_extra_info("peername")[0])

    def data_received(self, data: bytes) -> None:
        for line in data.splitlines():  # a toy: lines come whole
            number = next(self.numbers)
            try:
                self.asked[number] = self.intake.ask(
                    caller=self.intake.identify({}, self.peer),
                    model=self.intake.default_model,
                    parameters=b"",
                    value=line,
                    request_id=new_request_id(),
                    waiter=self,
                    ticket=number,
                )
            except CarpoolError as error:
                self.transport.write(b"%d refused: %b\n" % (number, error.detail.encode()))

    def settled(self, request: Request, outcome: Outcome) -> None:
        self.asked.pop(request.ticket, None)
        answer = outcome.value if isinstance(outcome, Output) else outcome.code.encode()
        if not self.transport.is_closing():
            self.transport.write(b"%d %b\n" % (request.ticket, answer))

    def connection_lost(self, exc: Exception | None) -> None:
        for request in list(self.asked.values()):
            self.intake.cancel(request)
