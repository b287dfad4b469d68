"""The connections and the pace of a run.

Rules:
1. Open loop: a request is due when the schedule says so, whatever became of those before it. Its latency
   counts from then. If no connection is free it waits in `LoadGenerator.waiting`, and that wait counts.
2. A connection carries one request at a time. It is one transport's life: when lost it is replaced by a new
   object, so that a late event of an old transport can never touch a newer request.
3. Every request that came due ends exactly once, in `Tally.right`, `mismatched` or `failed`.
4. A server may close a reused connection just as a request leaves. That request, if nothing of an answer
   came, moves to a fresh connection; lost again there, it has failed, as a fresh one is not a reused one.
5. Nothing is made per request but its bytes and a tuple: no task, no future, no timer. One timer paces, one sweep
   finds those out of time. Only a request that is sent again has a timer of its own.
6. A refused request (429, 503) is sent again after its Retry-After, if asked for: at most `retries` times, and not
   later than the timeout after it was due first. Each try has the timeout; the latency counts from the first.
7. The generator's own delay is known: `Tally.behind` has by how much it sent late.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf

from carpool.core.clock import monotonic
from carpool.tools.bench.connection import Connection, Due, Held, Part, Target, TaskConnection
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
        if self.connections:
            await self._all_lost.wait()

    def release(self, connection: Connection) -> None:
        """Give a free connection the request that waits longest, or let it rest."""
        if self.waiting:
            connection.begin(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def lost(self, connection: Connection, held: Held | None) -> None:
        """Replace a lost connection."""
        self.connections.discard(connection)
        if not self._closing:
            # A server that only accepts and closes must not be asked in a hot loop.
            self._open_later(held, 0.0 if connection.answered else REOPEN_DELAY_S)
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
            request = Due(number, due, due, part)
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

    def may_repeat(self, status: int) -> bool:
        """Whether a request that was refused so is ever sent again."""
        return self._retries > 0 and status in RETRIABLE

    def try_again(self, due: Due, after_s: float, now: float) -> bool:
        """Send a refused request again after `after_s`, if rule 6 allows; returns whether it will be sent."""
        again_at = now + after_s
        if due.retries >= self._retries or again_at >= due.intended + self.timeout_s:
            return False
        due.part.tally.retried(now - due.asked)
        again = due._replace(asked=again_at, retries=due.retries + 1)
        self.loop.call_later(again_at - now, self._send_again, again)
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
        now = monotonic()
        oldest_allowed = now - self.timeout_s
        waiting = self.waiting
        while waiting and waiting[0].asked < oldest_allowed:
            due = waiting.popleft()
            due.part.tally.failed("timeout-unsent", now - due.asked, now)
        for connection in self.connections:
            if connection.due is not None and connection.due.asked < oldest_allowed:
                connection.fail("timeout")
        if self.sending_since is None and not self.tally.in_flight:
            self._stopped.set()
            return
        period_s = DRAIN_SWEEP_S if self.sending_since is None else SWEEP_S
        self.loop.call_later(min(period_s, self.timeout_s / 4), self._sweep)

    def _open_later(self, held: Held | None, delay_s: float) -> None:
        task = self.loop.create_task(self._open(held, delay_s))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: Connection) -> None:
        await self.loop.create_connection(lambda: connection, self.target.address, self.target.port)

    async def _open(self, held: Held | None, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        connection = self._protocol(self, held)
        try:
            async with self._opening_limit, asyncio.timeout(self.timeout_s):
                await self._connect(connection)
        except asyncio.CancelledError:
            # If it was connected at this very moment, its `connection_lost` would never come.
            self.connections.discard(connection)
            raise
        except OSError as fault:  # TimeoutError is one
            self.connections.discard(connection)
            self._last_fault = os.strerror(fault.errno) if fault.errno else "no answer in time"
            # The attempt stands for one request: with a dead server they fail as they come due.
            due = connection.due or (held.due if held is not None else None)
            if due is None and self.waiting:
                due = self.waiting.popleft()
            if due is not None:
                now = monotonic()
                due.part.tally.failed("connect", now - due.asked, now)
            self._open_later(None, REOPEN_DELAY_S)
