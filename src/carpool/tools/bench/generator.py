"""The connections and the pace of a run.

Rules:
1. Open loop: a request is due when the schedule says so, whatever became of those before it. Its latency
   counts from then. If no connection is free it waits in `LoadGenerator.waiting`, and that wait counts.
2. A connection carries one request at a time. It is one transport's life: when lost it is replaced by a new
   object, so that a late event of an old transport can never touch a newer request.
3. Every request that came due ends exactly once, in `Tally.right`, `mismatched` or `failed`.
4. A server may close a reused connection just as a request leaves. That request, if nothing of an answer
   came, is sent again on another connection. Lost with a fresh one, it has failed.
5. Nothing is made per request but its bytes and a struct: no task, no future, no timer. One timer paces, one sweep
   finds those out of time. Only a request that is sent again has a timer of its own.
6. A refused request (429, 503) is sent again after its Retry-After, if asked for: at most `retries` times, and not
   later than the timeout after it was due first. Each try has the timeout; the latency counts from the first.
7. The generator's own delay is known: `Tally.behind` has by how much it sent late.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any, NamedTuple, cast

import msgspec

from carpool.core.clock import monotonic
from carpool.tools.bench.payload import NOT_TOLD, Journey, Payload
from carpool.tools.bench.tally import Tally

# uvloop's timers have steps of 1 ms: a shorter tick would only spin.
TICK_S = 0.001
# The longest the pacing timer sleeps, so that a schedule with pauses still sees an early stop.
TICK_S_MAX = 0.05
SWEEP_S = 0.25
# Once all is sent the sweep also finds the end of the run, which should not wait.
DRAIN_SWEEP_S = 0.02
# So many handshakes at once stay below the listen backlog of common servers.
OPENING_MAX = 100
REOPEN_DELAY_S = 0.1
RETRIABLE = (429, 503)
# After an answer of PENDING; a server that does not wait on a long poll must not be polled in a hot loop.
REPOLL_DELAY_S = 0.02
WAIT_MS_MAX = 10_000
HEAD_BYTES_MAX = 65_536
HEAD_END = b"\r\n\r\n"
# What a refused client waits where the answer has no Retry-After.
RETRY_AFTER_S = 1.0


class BadResponse(Exception):
    """The bytes are not a response this reader takes; `kind` is what it is counted under."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


# Most heads of a run are the same but for a few lengths; reading each anew took an eighth of the time.
@lru_cache(maxsize=512)
def read_head(head: bytes) -> tuple[int, int, bool]:
    """Status, body length and whether the connection stays, from a head without its blank line."""
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
        raise BadResponse("malformed")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    if b"transfer-encoding" in headers:
        raise BadResponse("chunked")
    status = int(rest[:3])
    # Without a length a body would last until the connection closes; no gateway of ours answers so.
    length = headers.get(b"content-length", b"0" if status in (204, 304) else b"")
    if status < 200 or not length.isdigit():
        raise BadResponse("malformed")
    options = headers.get(b"connection", b"")
    stays = b"keep-alive" in options if version == b"HTTP/1.0" else b"close" not in options
    return status, int(length), stays


@lru_cache(maxsize=512)
def retry_after_s(head: bytes) -> float:
    """Seconds after which a refused client should ask again, from the head of its answer."""
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"retry-after" and value.strip().isdigit():
            return float(value)
    return RETRY_AFTER_S


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


class Due(msgspec.Struct, eq=False, gc=False):
    """A request that is to be sent."""

    # As it stands in the input.
    number: bytes
    # When it was due first: its latency counts from then.
    intended: float
    # When it was due this time: later than that if it was refused before.
    asked: float
    part: Part
    # How often it was sent again.
    retries: int = 0
    # What to send next: b"" is the request itself, else the question for the result of its task.
    outgoing: bytes = b""
    polling: bool = False

    def failed(self, kind: str) -> None:
        """Count it as failed now."""
        now = monotonic()
        self.part.tally.failed(kind, now - self.asked, now)


class Connection(asyncio.Protocol):
    """One transport's life; it sends a request, reads the answer, and asks the generator for the next."""

    def __init__(self, generator: "LoadGenerator") -> None:
        self.generator = generator
        # The request in flight; None while there is none.
        self.due: Due | None = None
        # How many answers this connection brought: above 0 it is a reused one.
        self.answered = 0
        # The part of an answer that came, and how long the whole is (0 while that is not known).
        self.partial = bytearray()
        self.need = 0
        # None once lost.
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be free for a request."""
        self.transport = cast(asyncio.Transport, transport)
        self.generator.connections.add(self)
        self.generator.release(self)

    def begin(self, due: Due) -> None:
        """Send this request."""
        self.due = due
        due.outgoing = due.outgoing or due.part.payload.request(due.number)
        self.transport.write(due.outgoing)  # type: ignore[union-attr]  # only a live connection is asked

    def data_received(self, data: bytes) -> None:
        """Read on in the answer; act on it once it is whole."""
        if self.partial:
            self.partial += data
            if len(self.partial) < self.need:
                return
            data = bytes(self.partial)
        if self.due is None:
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
        start = head_end + len(HEAD_END)
        whole = start + length
        if len(data) < whole:
            self.partial, self.need = bytearray(data), whole
            return
        if len(data) > whole:
            # Bytes after the answer belong to no request: this connection cannot be trusted any more.
            self.fail("malformed")
            return
        if self.partial:
            self.partial, self.need = bytearray(), 0
        self.answered += 1
        self.on_answer(self.due, status, data, start, stays)

    def on_answer(self, due: Due, status: int, data: bytes, start: int, stays: bool) -> None:
        """Judge the answer to a synchronous request."""
        if status != 200:
            self.refused(due, status, data[:start])
        else:
            settle(due, due.part.payload.verify(data, start, due.number))
        self.next_request(stays)

    def refused(self, due: Due, status: int, head: bytes) -> None:
        """Count the request as refused, unless it will be sent again."""
        if status not in RETRIABLE or not self.generator.try_again(due, retry_after_s(head)):
            due.failed(str(status))

    def next_request(self, stays: bool) -> None:
        """Be free for another request, or leave if the server said so."""
        self.due = None
        if stays:
            self.generator.release(self)
        else:
            self.transport.close()  # type: ignore[union-attr]  # an answer just came through it

    def fail(self, kind: str) -> None:
        """Count the request in flight as failed and give up this connection."""
        assert self.due is not None
        self.due.failed(kind)
        self.drop()

    def drop(self) -> None:
        """Give up this connection without another word."""
        self.due = None
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make place for a new connection, and move or fail the request in flight (rule 4)."""
        self.transport = None
        due, self.due = self.due, None
        if due is not None:
            if self.answered and not self.partial:
                self.generator.waiting.appendleft(due)
            else:
                due.failed("closed" if exc is None else "reset")
        self.generator.lost(self)


def settle(due: Due, journey: Journey | None) -> None:
    """Count an answer that came just now: the right one, or a wrong one."""
    now = monotonic()
    if journey is None:
        due.part.tally.mismatched(now - due.intended, now)
    else:
        due.part.tally.right(now - due.intended, now, *journey)


class _Task(msgspec.Struct):
    task_id: str
    status: str
    output: Any = None


_decode_task = msgspec.json.Decoder(_Task).decode


class TaskConnection(Connection):
    """Submits a task, then asks for its result by long poll on the same connection."""

    def on_answer(self, due: Due, status: int, data: bytes, start: int, stays: bool) -> None:
        """Go on from acceptance to result."""
        if status != (200 if due.polling else 202):
            self.refused(due, status, data[:start])
            self.next_request(stays)
            return
        try:
            task = _decode_task(data[start:])
        except msgspec.DecodeError:
            self.fail("malformed")
            return
        if due.polling:
            self.on_result(due, task, stays)
        else:
            self.on_accepted(due, task, stays)

    def on_accepted(self, due: Due, accepted: _Task, stays: bool) -> None:
        """Ask for the result of the task that now exists."""
        wait_ms = max(1, min(WAIT_MS_MAX, int(self.generator.timeout_s * 1000)))
        target = self.generator.target
        due.polling = True
        due.outgoing = (
            f"GET {target.base_path}/v1/result/{accepted.task_id}?wait_ms={wait_ms} HTTP/1.1\r\n"
            f"Host: {target.host}\r\n{due.part.payload.credential}\r\n"
        ).encode()
        self.poll(due, stays)

    def poll(self, due: Due, stays: bool) -> None:
        """Ask for the result, unless the request has ended meanwhile."""
        if self.due is not due or self.transport is None:
            return
        if not stays:
            # Once lost, the question moves to another connection like any other request.
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write(due.outgoing)

    def on_result(self, due: Due, result: _Task, stays: bool) -> None:
        """Judge a result, or ask again while there is none."""
        if result.status == "PENDING":
            self.generator.loop.call_later(REPOLL_DELAY_S, self.poll, due, stays)
            return
        if result.status != "SUCCESS":
            due.failed("task-failed")
        else:
            settle(due, NOT_TOLD if result.output == due.part.payload.expected_output(due.number) else None)
        self.next_request(stays)


class LoadGenerator:
    """Sends each request when it is due, over connections that it keeps open."""

    def __init__(
        self,
        *,
        target: Target,
        tally: Tally,
        parts: Sequence[Part],
        arrivals: Iterator[float],
        connections: int,
        timeout_s: float,
        tasks: bool,
        retries: int = 0,
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        # Of all requests, whatever their part.
        self.tally = tally
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        # First in, first out, so that every connection gets its turn; may hold lost ones, which are skipped.
        self.idle: deque[Connection] = deque()
        # Requests that found no free connection; at most rate * timeout of them.
        self.waiting: deque[Due] = deque()
        # None before the first and after the last request is due.
        self.sending_since: float | None = None
        self.sending_s = 0.0
        self._protocol: type[Connection] = TaskConnection if tasks else Connection
        self._arrivals = arrivals
        self._connection_count = connections
        # Requests take turns through these: each part is there as often as its share says.
        self._parts = parts
        self._retries = retries
        self._numbers = count(1)
        self._due = inf
        self._opening: set[asyncio.Task[None]] = set()
        self._opening_limit = asyncio.Semaphore(OPENING_MAX)
        self._last_fault = ""
        self._stopped = asyncio.Event()
        self._closing = False
        self._all_lost = asyncio.Event()

    async def open(self) -> None:
        """Open every connection; raises ConnectionError if none could be."""
        for _ in range(self._connection_count):
            self._open_later(0.0)
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

    def end(self) -> None:
        """Send nothing more; `run` returns once the requests on their way have ended."""
        self._arrivals, self._due = iter(()), inf
        while self.waiting:
            self.waiting.popleft().failed("timeout-unsent")

    async def close(self) -> None:
        """Close every connection and wait until they are gone."""
        self._closing = True
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self.connections:
            connection.drop()
        if self.connections:
            await self._all_lost.wait()

    def release(self, connection: Connection) -> None:
        """Give a free connection the request that waits longest, or let it rest."""
        if self.waiting:
            connection.begin(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """Replace a lost connection."""
        self.connections.discard(connection)
        if not self._closing:
            # A server that only accepts and closes must not be asked in a hot loop.
            self._open_later(0.0 if connection.answered else REOPEN_DELAY_S)
        elif not self.connections:
            self._all_lost.set()

    def _tick(self) -> None:
        if self._stopped.is_set():
            return
        now = monotonic()
        due, parts = self._due, self._parts
        if due <= now:
            self.tally.behind.add((now - due) * 1000)
        while due <= now:
            number = next(self._numbers)
            part = parts[number % len(parts)]
            part.tally.came_due()
            request = Due(b"%08x" % number, due, due, part)
            if not self._sent(request):
                self.waiting.append(request)
            due = next(self._arrivals, inf)
        self._due = due
        if due == inf:
            self._end_sending()
        else:
            self.loop.call_later(min(max(due - now, TICK_S), TICK_S_MAX), self._tick)

    def _sent(self, due: Due) -> bool:
        """Send this request now, if a connection is free."""
        while self.idle:
            connection = self.idle.popleft()
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                connection.begin(due)
                return True
        return False

    def try_again(self, due: Due, after_s: float) -> bool:
        """Send a refused request again after `after_s`, if rule 6 allows; returns whether it will be sent."""
        now = monotonic()
        again_at = now + after_s
        if due.retries >= self._retries or again_at >= due.intended + self.timeout_s:
            return False
        due.part.tally.retried(now - due.asked)
        due.asked, due.retries, due.outgoing, due.polling = again_at, due.retries + 1, b"", False
        self.loop.call_later(after_s, self._send_again, due)
        return True

    def _send_again(self, due: Due) -> None:
        if not self._stopped.is_set() and not self._sent(due):
            self.waiting.appendleft(due)  # it is older than the requests that wait

    def _end_sending(self) -> None:
        if self.sending_since is not None:
            self.sending_s = monotonic() - self.sending_since
            self.sending_since = None

    def _sweep(self) -> None:
        if self._stopped.is_set():
            return
        oldest_allowed = monotonic() - self.timeout_s
        while self.waiting and self.waiting[0].asked < oldest_allowed:
            self.waiting.popleft().failed("timeout-unsent")
        for connection in self.connections:
            if connection.due is not None and connection.due.asked < oldest_allowed:
                connection.fail("timeout")
        if self.sending_since is None and not self.tally.in_flight:
            self._stopped.set()
            return
        period_s = DRAIN_SWEEP_S if self.sending_since is None else SWEEP_S
        self.loop.call_later(min(period_s, self.timeout_s / 4), self._sweep)

    def _open_later(self, delay_s: float) -> None:
        task = self.loop.create_task(self._open(delay_s))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        connection = self._protocol(self)
        try:
            async with self._opening_limit, asyncio.timeout(self.timeout_s):
                await self.loop.create_connection(lambda: connection, self.target.address, self.target.port)
        except asyncio.CancelledError:
            # If it was connected at this very moment, its `connection_lost` would never come.
            self.connections.discard(connection)
            raise
        except OSError as fault:  # TimeoutError is one
            self.connections.discard(connection)
            self._last_fault = os.strerror(fault.errno) if fault.errno else "no answer in time"
            # The attempt stands for one request: with a dead server they fail as they come due.
            due = connection.due or (self.waiting.popleft() if self.waiting else None)
            if due is not None:
                due.failed("connect")
            self._open_later(REOPEN_DELAY_S)
