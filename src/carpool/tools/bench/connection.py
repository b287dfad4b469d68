"""One connection: sends a request, reads the answer, judges it. The rules are in `generator`."""

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from carpool.core.clock import monotonic
from carpool.tools.bench.payload import NOT_TOLD, Journey, Payload
from carpool.tools.bench.response import HEAD_BYTES_MAX, HEAD_END, BadResponse, read_head, retry_after_s
from carpool.tools.bench.tally import Tally

if TYPE_CHECKING:
    from carpool.tools.bench.generator import LoadGenerator

# After an answer of PENDING; a server that does not wait on a long poll must not be polled in a hot loop.
REPOLL_DELAY_S = 0.02
WAIT_MS_MAX = 10_000


class Target(NamedTuple):
    """Where the requests go, resolved once."""

    address: str
    port: int
    # As the Host header and the request path want them.
    host: str
    base_path: str


class Part(NamedTuple):
    """What requests of one kind carry, and where they are counted."""

    payload: Payload
    tally: Tally


class Due(NamedTuple):
    """A request that is to be sent."""

    number: int
    # When it was due first: its latency counts from then.
    intended: float
    # When it was due this time: later than that if it was refused before.
    asked: float
    part: Part
    # How often it was sent again.
    retries: int = 0


class Held(NamedTuple):
    """A request between two connections."""

    due: Due
    outgoing: bytes
    polling: bool


class Connection(asyncio.Protocol):
    """One transport's life; it sends a request, reads the answer, and asks the generator for the next."""

    def __init__(self, generator: "LoadGenerator", held: Held | None) -> None:
        self.generator = generator
        self.held = held
        # The request in flight; None while there is none.
        self.due: Due | None = None
        # Its number as it stands in the input.
        self.number = b""
        self.outgoing = b""
        # A task's id is known and its result is being asked for.
        self.polling = False
        # How many answers this connection brought: above 0 it is a reused one.
        self.answered = 0
        # The part of an answer that came, and how long the whole is (0 while that is not known).
        self.partial = bytearray()
        self.need = 0
        # None once lost.
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request that moved here, or be free."""
        self.transport = cast(asyncio.Transport, transport)
        self.generator.connections.add(self)
        if self.held is None:
            self.generator.release(self)
        else:
            self.due, self.outgoing, self.polling = self.held
            self.number = b"%08x" % self.due.number
            self.held = None
            self.transport.write(self.outgoing)

    def begin(self, due: Due) -> None:
        """Send this request."""
        self.due = due
        self.number = b"%08x" % due.number
        self.outgoing = due.part.payload.request(self.number)
        self.transport.write(self.outgoing)  # type: ignore[union-attr]  # only a live connection is asked

    def data_received(self, data: bytes) -> None:
        """Read on in the answer; act on it once it is whole."""
        if self.partial:
            self.partial += data
            if len(self.partial) < self.need:
                return
            data = bytes(self.partial)
        elif self.due is None:
            self.generator.tally.unasked += 1
            self.drop()
            return
        head_end = data.find(HEAD_END)
        if head_end < 0:
            if len(data) > HEAD_BYTES_MAX:
                self.fail("malformed")
            else:
                self.partial = bytearray(data)
            return
        try:
            status, length, stays = read_head(data[:head_end])
        except BadResponse as fault:
            self.fail(fault.kind)
            return
        start = head_end + 4
        whole = start + length
        if len(data) < whole:
            if not self.partial:
                self.partial = bytearray(data)
            self.need = whole
            return
        if len(data) > whole:
            # Bytes after the answer belong to no request: this connection cannot be trusted any more.
            self.fail("malformed")
            return
        if self.partial:
            self.partial = bytearray()
            self.need = 0
        self.answered += 1
        self.on_answer(status, data, start, stays)

    def on_answer(self, status: int, data: bytes, start: int, stays: bool) -> None:
        """Judge the answer to a synchronous request."""
        if status != 200:
            self.refused(status, data[:start])
        else:
            self.settle(self.in_flight.part.payload.verify(data, start, self.number))
        self.next_request(stays)

    @property
    def in_flight(self) -> Due:
        """The request in flight, where there is one: an answer is only read while one is due."""
        assert self.due is not None
        return self.due

    def settle(self, journey: Journey | None) -> None:
        """Count the answer that came just now."""
        due, now = self.in_flight, monotonic()
        if journey is None:
            due.part.tally.mismatched(now - due.intended, now)
        else:
            due.part.tally.right(now - due.intended, now, *journey)

    def refused(self, status: int, head: bytes) -> None:
        """Count the request as refused, unless it will be sent again."""
        generator, due, now = self.generator, self.in_flight, monotonic()
        if not generator.may_repeat(status) or not generator.try_again(due, retry_after_s(head), now):
            due.part.tally.failed(str(status), now - due.asked, now)

    def next_request(self, stays: bool) -> None:
        """Be free for another request, or leave if the server said so."""
        self.due = None
        if stays:
            self.generator.release(self)
        else:
            self.transport.close()  # type: ignore[union-attr]  # an answer just came through it

    def fail(self, kind: str) -> None:
        """Count the request in flight as failed and give up this connection."""
        due, now = self.in_flight, monotonic()
        due.part.tally.failed(kind, now - due.asked, now)
        self.drop()

    def drop(self) -> None:
        """Give up this connection without another word."""
        self.due = None
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make place for a new connection, and move or fail the request in flight."""
        self.transport = None
        held, due = None, self.due
        if due is not None:
            if self.answered and not self.partial:
                held = Held(due, self.outgoing, self.polling)
            else:
                now = monotonic()
                due.part.tally.failed("closed" if exc is None else "reset", now - due.asked, now)
            self.due = None
        self.generator.lost(self, held)


class _Accepted(msgspec.Struct):
    task_id: str


class _Result(msgspec.Struct):
    status: str
    output: Any = None


_decode_accepted = msgspec.json.Decoder(_Accepted).decode
_decode_result = msgspec.json.Decoder(_Result).decode


class TaskConnection(Connection):
    """Submits a task, then asks for its result by long poll on the same connection."""

    def begin(self, due: Due) -> None:
        """Submit this task."""
        self.polling = False
        super().begin(due)

    def on_answer(self, status: int, data: bytes, start: int, stays: bool) -> None:
        """Go on from acceptance to result."""
        if status != (200 if self.polling else 202):
            self.refused(status, data[:start])
            self.next_request(stays)
            return
        try:
            if self.polling:
                self.on_result(_decode_result(data[start:]), stays)
            else:
                self.on_accepted(_decode_accepted(data[start:]), stays)
        except msgspec.DecodeError:
            self.fail("malformed")

    def on_accepted(self, accepted: _Accepted, stays: bool) -> None:
        """Ask for the result of the task that now exists."""
        self.polling = True
        wait_ms = max(1, min(WAIT_MS_MAX, int(self.generator.timeout_s * 1000)))
        target = self.generator.target
        self.outgoing = (
            f"GET {target.base_path}/v1/result/{accepted.task_id}?wait_ms={wait_ms} HTTP/1.1\r\n"
            f"Host: {target.host}\r\n{self.in_flight.part.payload.credential}\r\n"
        ).encode()
        self.poll(self.number, stays)

    def poll(self, number: bytes, stays: bool) -> None:
        """Ask for the result of `number`, unless that has ended meanwhile."""
        if self.due is None or self.number != number or self.transport is None:
            return
        if not stays:
            # Once lost, the question moves to a fresh connection like any other request.
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write(self.outgoing)

    def on_result(self, result: _Result, stays: bool) -> None:
        """Judge a result, or ask again while there is none."""
        if result.status == "PENDING":
            self.generator.loop.call_later(REPOLL_DELAY_S, self.poll, self.number, stays)
            return
        if result.status != "SUCCESS":
            due, now = self.in_flight, monotonic()
            due.part.tally.failed("task-failed", now - due.asked, now)
        else:
            is_right = result.output == self.in_flight.part.payload.expected_output(self.number)
            self.settle(NOT_TOLD if is_right else None)
        self.next_request(stays)
