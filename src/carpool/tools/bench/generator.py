"""The connections and the pace of a run.

Rules:
1. Open loop: a request is due when the schedule says so, whatever became of those before it. Its latency
   counts from then. If no connection is free it waits in `LoadGenerator.waiting`, and that wait counts.
2. A connection carries one request at a time. It is one transport's life: when lost it is replaced by a new
   object, so that a late event of an old transport can never touch a newer request.
3. Every request that came due ends exactly once, in `Tally.right`, `mismatched` or `failed`.
4. A server may close a reused connection just as a request leaves. That request, if nothing of an answer
   came, moves to a fresh connection; lost again there, it has failed, as a fresh one is not a reused one.
5. Nothing is made per request but its bytes: no task, no future, no timer. One timer paces, one sweep finds
   those out of time.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from itertools import count
from math import inf

from carpool.core.clock import monotonic
from carpool.tools.bench.connection import Connection, Held, Target, TaskConnection
from carpool.tools.bench.payload import Payload
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
            connection.begin(self.waiting.popleft(), b"%08x" % next(self._numbers))
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
        period_s = DRAIN_SWEEP_S if self.sending_since is None else SWEEP_S
        self.loop.call_later(min(period_s, self.timeout_s / 4), self._sweep)

    def _open_later(self, held: Held | None, delay_s: float) -> None:
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
            self._last_fault = os.strerror(fault.errno) if fault.errno else "no answer in time"
            # The attempt stands for one request: with a dead server they fail as they come due.
            if held is not None:
                self.tally.failed("connect")
            elif self.waiting:
                self.waiting.popleft()
                self.tally.failed("connect")
            self._open_later(None, REOPEN_DELAY_S)
