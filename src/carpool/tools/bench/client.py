"""The connections and the pace of a run.

Rules:
1. Open loop: a request is due when the schedule says so, whatever became of those before it. Its latency counts
   from then. If no connection is free it waits in `LoadGenerator.waiting`, and that wait counts.
2. A connection carries one request at a time. It is one transport's life: when lost it is replaced by a new object,
   so that a late event of an old transport can never touch a newer request.
3. Every request that came due ends exactly once, in `Tally.right`, `mismatched` or `failed`.
4. A server may close a reused connection just as a request leaves. That request, if nothing of an answer came,
   moves to a fresh connection; lost again there, it has failed (a fresh connection is not a reused one).
5. Nothing is made per request but its bytes: no task, no future, no timer. One timer paces, one sweep finds those
   out of time.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import count
from math import inf
from typing import Any, NamedTuple, cast

import msgspec

from carpool.core.clock import monotonic
from carpool.tools.bench.payload import Payload
from carpool.tools.bench.response import HEAD_BYTES_MAX, HEAD_END, BadResponse, read_head
from carpool.tools.bench.tally import Tally

# uvloop's timers have steps of 1 ms: a shorter tick would only spin.
TICK_S = 0.001
# The longest the pacing timer sleeps, so that a schedule with pauses still sees an early stop.
TICK_S_MAX = 0.05
SWEEP_S_MAX = 0.25
# So many handshakes at once stay below the listen backlog of common servers.
OPENING_MAX = 100
REOPEN_DELAY_S = 0.1
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


class Held(NamedTuple):
    """A request between two connections."""

    intended: float
    number: bytes
    outgoing: bytes
    polling: bool


class Connection(asyncio.Protocol):
    """One transport's life; it sends a request, reads the answer, and asks the generator for the next."""

    __slots__ = (
        "answered",
        "generator",
        "held",
        "intended",
        "need",
        "number",
        "outgoing",
        "partial",
        "payload",
        "polling",
        "tally",
        "transport",
    )

    def __init__(self, generator: "LoadGenerator", held: Held | None) -> None:
        self.generator = generator
        self.payload = generator.payload
        self.tally = generator.tally
        self.held = held
        # When the request in flight was due; None while there is none.
        self.intended: float | None = None
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
            self.intended, self.number, self.outgoing, self.polling = self.held
            self.held = None
            self.transport.write(self.outgoing)

    def begin(self, intended: float, number: bytes) -> None:
        """Send request `number`, which was due at `intended`."""
        self.intended = intended
        self.number = number
        self.outgoing = outgoing = self.payload.request(number)
        self.transport.write(outgoing)  # type: ignore[union-attr]  # only a live connection is asked

    def data_received(self, data: bytes) -> None:
        """Read on in the answer; act on it once it is whole."""
        if self.partial:
            self.partial += data
            if len(self.partial) < self.need:
                return
            data = bytes(self.partial)
        elif self.intended is None:
            self.tally.unasked += 1
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
            status, length, stays = read_head(data, head_end)
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
            # Bytes after the answer belong to nobody: this stream cannot be trusted any more.
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
            self.tally.failed(str(status))
        else:
            self.settle(self.payload.verify(data, start, self.number))
        self.next_request(stays)

    def settle(self, journey: tuple[float, int] | None) -> None:
        """Count the answer that came just now."""
        now = monotonic()
        latency_s = now - self.intended  # type: ignore[operator]  # an answer is only read while one is due
        if journey is None:
            self.tally.mismatched(latency_s, now)
        else:
            self.tally.right(latency_s, now, *journey)

    def next_request(self, stays: bool) -> None:
        """Be free for another request, or leave if the server said so."""
        self.intended = None
        if stays:
            self.generator.release(self)
        else:
            self.transport.close()  # type: ignore[union-attr]  # an answer just came through it

    def fail(self, kind: str) -> None:
        """Count the request in flight as failed and give up this connection."""
        self.tally.failed(kind)
        self.drop()

    def drop(self) -> None:
        """Give up this connection without another word."""
        self.intended = None
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make place for a new connection, and move or fail the request in flight."""
        self.transport = None
        held = None
        if self.intended is not None:
            if self.answered and not self.partial:
                held = Held(self.intended, self.number, self.outgoing, self.polling)
            else:
                self.tally.failed("closed" if exc is None else "reset")
            self.intended = None
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

    __slots__ = ()

    def begin(self, intended: float, number: bytes) -> None:
        """Submit task `number`, which was due at `intended`."""
        self.polling = False
        super().begin(intended, number)

    def on_answer(self, status: int, data: bytes, start: int, stays: bool) -> None:
        """Go on from acceptance to result."""
        if status != (200 if self.polling else 202):
            self.tally.failed(str(status))
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
            f"Host: {target.host}\r\n\r\n"
        ).encode()
        self.poll(self.number, stays)

    def poll(self, number: bytes, stays: bool) -> None:
        """Ask for the result of `number`, unless that has ended meanwhile."""
        if self.intended is None or self.number != number or self.transport is None:
            return
        if stays:
            self.transport.write(self.outgoing)
        else:
            # Once lost, the question moves to a fresh connection like any other request.
            self.transport.close()

    def on_result(self, result: _Result, stays: bool) -> None:
        """Judge a result, or ask again while there is none."""
        if result.status == "PENDING":
            loop = self.generator.loop
            if stays:
                loop.call_later(REPOLL_DELAY_S, self.poll, self.number, True)
            else:
                self.poll(self.number, stays=False)
            return
        if result.status != "SUCCESS":
            self.tally.failed("task-failed")
        else:
            self.settle((-1.0, 0) if self.payload.is_expected(result.output, self.number) else None)
        self.next_request(stays)


class LoadGenerator:
    """Sends each request when it is due, over connections that it keeps open."""

    def __init__(
        self,
        *,
        target: Target,
        payload: Payload,
        arrivals: Iterator[float],
        connections: int,
        timeout_s: float,
        tasks: bool,
    ) -> None:
        self.target = target
        self.payload = payload
        self.timeout_s = timeout_s
        self.tally = Tally()
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        # First in, first out, so that every connection gets its turn; may hold lost ones, which are skipped.
        self.idle: deque[Connection] = deque()
        # Due times of requests that found no free connection; at most rate * timeout of them.
        self.waiting: deque[float] = deque()
        # None before the first and after the last request is due.
        self.sending_since: float | None = None
        self.sending_s = 0.0
        self._protocol = TaskConnection if tasks else Connection
        self._arrivals = arrivals
        self._connection_count = connections
        self._numbers = count(1)
        self._due = inf
        self._opening: set[asyncio.Task[None]] = set()
        self._opening_limit = asyncio.Semaphore(OPENING_MAX)
        self._last_fault = ""
        self._stopped = asyncio.Event()
        self._closing = False

    async def open(self) -> None:
        """Open every connection; raises ConnectionError if none could be."""
        for _ in range(self._connection_count):
            self._open_later(None, 0.0)
        # A second round would be due after the delay: the first alone decides.
        await asyncio.wait(set(self._opening))
        if not self.connections:
            raise ConnectionError(self._last_fault or "every connection was closed at once")

    async def run(self) -> None:
        """Send until the arrivals end, then until every request has ended; `stop` ends it sooner."""
        start = self.sending_since = monotonic()
        self._arrivals = (start + offset_s for offset_s in self._arrivals)
        self._due = next(self._arrivals, inf)
        self._tick()
        self._sweep()
        await self._stopped.wait()

    def stop(self) -> None:
        """Send nothing more and wait for nothing more."""
        self._end_sending()
        self._stopped.set()

    async def close(self) -> None:
        """Close every connection and wait until they are gone."""
        self._closing = True
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self.connections:
            connection.drop()
        while self.connections:
            await asyncio.sleep(0.001)

    def release(self, connection: Connection) -> None:
        """Give a free connection the request that waits longest, or let it rest."""
        if self.waiting:
            connection.begin(self.waiting.popleft(), b"%08x" % next(self._numbers))
        else:
            self.idle.append(connection)

    def lost(self, connection: Connection, held: Held | None) -> None:
        """Replace a lost connection."""
        self.connections.discard(connection)
        self._open_later(held, 0.0)

    def _tick(self) -> None:
        if self._stopped.is_set():
            return
        now = monotonic()
        due, idle = self._due, self.idle
        sent = 0
        while due <= now:
            sent += 1
            while idle:
                connection = idle.popleft()
                transport = connection.transport
                if transport is not None and not transport.is_closing():
                    connection.begin(due, b"%08x" % next(self._numbers))
                    break
            else:
                self.waiting.append(due)
            due = next(self._arrivals, inf)
        self._due = due
        self.tally.sent += sent
        if due == inf:
            self._end_sending()
        else:
            self.loop.call_later(min(max(due - now, TICK_S), TICK_S_MAX), self._tick)

    def _end_sending(self) -> None:
        if self.sending_since is not None:
            self.sending_s = monotonic() - self.sending_since
            self.sending_since = None

    def _sweep(self) -> None:
        if self._stopped.is_set():
            return
        oldest_allowed = monotonic() - self.timeout_s
        waiting = self.waiting
        while waiting and waiting[0] < oldest_allowed:
            waiting.popleft()
            self.tally.failed("timeout-unsent")
        for connection in self.connections:
            if connection.intended is not None and connection.intended < oldest_allowed:
                connection.fail("timeout")
        if self.sending_since is None and not self.tally.in_flight:
            self._stopped.set()
            return
        self.loop.call_later(min(SWEEP_S_MAX, self.timeout_s / 4), self._sweep)

    def _open_later(self, held: Held | None, delay_s: float) -> None:
        if self._closing:
            return
        task = self.loop.create_task(self._open(held, delay_s))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, held: Held | None, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        try:
            async with self._opening_limit, asyncio.timeout(self.timeout_s):
                await self.loop.create_connection(
                    lambda: self._protocol(self, held), self.target.address, self.target.port
                )
        except OSError as fault:  # TimeoutError is one
            self._last_fault = fault.strerror or "no answer in time"
            # The attempt stands for one request: with a dead server they fail as they come due, not all at the end.
            if held is not None:
                self.tally.failed("connect")
            elif self.waiting:
                self.waiting.popleft()
                self.tally.failed("connect")
            self._open_later(None, REOPEN_DELAY_S)
