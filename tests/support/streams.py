"""Streams without a socket: the real connection, way in and broker; a transport that takes notes, and a client."""

import asyncio
import json
from typing import Any

from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from carpool.admission.gate import Gate
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.errors import CarpoolError
from carpool.core.request import Request
from carpool.core.timers import SharedTurns
from carpool.face.http.connection import Connection
from carpool.face.http.places import Places
from carpool.face.http.router import Router
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.face.http.stream import StreamLimits
from carpool.face.http.streams import LOOK_PARTS, PATH, Tickets, WebSocketStreams
from carpool.face.intake import Intake, IntakeSettings, ServedModel
from carpool.testing import FakeClock, FakeUpstream, make_output
from carpool.upstream.pool import Pool
from support.tasks import open_journal

UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


def upgrade_request(*headers: str, target: str = "/v1/stream") -> bytes:
    """What a client sends first."""
    return "\r\n".join((f"GET {target} HTTP/1.1", "Host: test", *UPGRADE, *headers)).encode() + b"\r\n\r\n"


class NotingTransport(asyncio.Transport):
    """Takes notes; reads as much as the test says."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.7", 1)})
        self.written = b""
        self.is_over = self.aborted = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_over, "written after the end"
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.is_over = True

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over or self.aborted

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.aborted = True


class StreamStand:
    """A gateway with streams and without a GPU: `work` is that."""

    def __init__(
        self,
        limits: StreamLimits | None = None,
        http_limits: HttpLimits | None = None,
        places: Places | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.broker = MemoryBroker(waiting_max=10_000, bytes_max=10**8, lanes_max=9, tiers=1, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.journal = open_journal()
        tasks = Tasks(self.broker, self.journal)
        self.intake = Intake(
            Gate(self.broker, tasks, {"m": Pool([FakeUpstream()], self.clock)}, lowest_tier=0),
            self.broker,
            tasks,
            {"m": ServedModel("m", 1000, lambda data: data)},
            IntakeSettings("m", (0.5,), 60.0, 60.0, 600.0),
            self.clock,
        )
        self.router = Router()
        self.server = HttpServer(self.router.serve, http_limits or HttpLimits(), self.clock)
        self.places = places or Places("streams", 100, 100)
        self.streams = WebSocketStreams(
            self.intake, self.server.state, Tickets(), self.places, limits or StreamLimits(), clock=self.clock
        )
        self.server.state.upgrades[PATH, b"websocket"] = self.streams.open
        self.router.add(b"GET", PATH, self.streams.no_upgrade)
        self.router.add(b"POST", PATH + b"/tickets", self.streams.ticket)

    def connect(self, *headers: str, target: str = "/v1/stream") -> "StreamClient":
        """A stream, or what comes in place of one."""
        client = StreamClient(self)
        client.feed(upgrade_request(*headers, target=target))
        return client

    def work(self, outcome: CarpoolError | None = None) -> list[Request]:
        """Take whatever waits, and answer it: with what was asked, or with this."""
        done = [each for lane in self.broker.lanes("m") for each in self.broker.take(lane, 10_000, self.clock())]
        for request in done:
            self.broker.settle(request, make_output(request.input) if outcome is None else outcome)
        return done

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and the streams be looked at."""
        self.clock.advance(seconds)
        for _ in range(LOOK_PARTS + 1):  # the part that was due, and all
            self.streams.look()

    @property
    def is_clean(self) -> bool:
        """Nothing is left of anybody."""
        held = self.broker.held, self.server.state.receiving_bytes, len(self.streams), self.places.taken
        return not any(held)


async def nothing_waits(turns: SharedTurns, number: int = 200) -> None:
    """Let so many turns of the event loop pass, and then others while somebody waits for one."""
    left = number
    for _ in range(1_000_000):
        await asyncio.sleep(0)
        left = number if turns else left - 1
        if not left:
            return


class StreamClient:
    """One client, with a WebSocket library that is not told of the handshake."""

    def __init__(self, stand: StreamStand) -> None:
        self._turns = stand.intake.turns
        self.transport = NotingTransport()
        self.connection = Connection(stand.server.state)
        self.connection.connection_made(self.transport)
        self.protocol = Protocol(CLIENT, state=OPEN, max_size=None)
        self._read = 0

    @property
    def status(self) -> int:
        """Of the answer to the upgrade."""
        return int(self.transport.written.split(b" ", 2)[1])

    def feed(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.connection.data_received(data)

    def send(self, *values: Any, as_bytes: bytes = b"") -> None:
        """Send a message with these requests, or with these bytes."""
        self.protocol.send_text(as_bytes or json.dumps(values[0] if len(values) == 1 else values).encode())
        self.feed(b"".join(self.protocol.data_to_send()))

    def leave(self) -> None:
        """Hang up."""
        self.connection.connection_lost(None)

    async def messages(self) -> list[Any]:
        """What came since the last look, after all that there was to do in the event loop."""
        await nothing_waits(self._turns)
        return self._parse()

    async def answers(self) -> dict[Any, Any]:
        """The answers in these, by id."""
        return {answer["id"]: answer for message in await self.messages() for answer in message}

    def _parse(self) -> list[Any]:
        written = self.transport.written
        if not self._read:
            self._read = written.index(b"\r\n\r\n") + 4
        self.protocol.receive_data(written[self._read :])
        self._read = len(written)
        frames = [frame for frame in self.protocol.events_received() if isinstance(frame, Frame)]
        return [json.loads(bytes(frame.data)) for frame in frames if frame.opcode is Opcode.TEXT]

    def why_closed(self) -> tuple[int, str] | None:
        """Why the stream was ended; None if it was not."""
        self._parse()
        end = self.protocol.close_rcvd
        return None if end is None else (end.code, end.reason)

    def close_code(self) -> int | None:
        """The same in a number."""
        why = self.why_closed()
        return None if why is None else why[0]
