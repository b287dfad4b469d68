"""What the connections of one server share: limits, a coarse clock, starts of responses, and what they hold."""

from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING

import msgspec

from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError
from carpool.core.histograms import RequestSeconds
from carpool.core.ports import RequestTraces
from carpool.core.request import Request
from carpool.core.timers import OncePerTurn, SharedTurns
from carpool.face.http.exchange import JSON, REASONS, Exchange
from carpool.face.http.known_heads import KnownHeads
from carpool.face.http.problem import PROBLEM, ReadyProblem, ready_problem
from carpool.face.intake import RequestGroup

if TYPE_CHECKING:
    from carpool.face.http.connection import Connection

# Errors whose answers are kept ready, for a second at most.
READY_MAX = 1024
SAMPLE_S = 0.05
# A sample that waits longer to be let in is given up; rate limits are known sooner, or not at all.
FOLLOWED_S_MAX = 2.0
# Reading a longer body takes a while: its request waits for a turn. JSON that is made to be hard takes 40 ms a MiB.
LONG_BODY_BYTES = 16 * 1024
# Each takes some 30 us, most of it to write: a turn lasts a few milliseconds.
ERRORS_A_TURN = 100
# Responses that clients have not read yet, over all connections that are behind with reading: of 1 MB, 256.
UNREAD_BYTES_MAX = 256 * 1024 * 1024
# A client that takes less than 4 KB of a response in this time is cut off: a modem takes more.
WRITE_TIMEOUT_S = 10.0


class HttpLimits(msgspec.Struct, frozen=True):
    """What is taken from a client. A gateway passes those that are settings; the others bound memory or stop abuse."""

    # Request line and headers together; proxies and other servers take 8 to 64 KiB and some 100 headers.
    header_bytes_max: int = 16384
    header_count_max: int = 100
    body_bytes_max: int = 1024 * 1024
    # Bodies that are partly received, over all connections.
    receiving_bytes_max: int = 256 * 1024 * 1024
    unread_bytes_max: int = UNREAD_BYTES_MAX
    receive_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = WRITE_TIMEOUT_S
    # Requests in flight on one connection before reading pauses.
    pipeline_max: int = 32
    connections_max: int = 10_000
    # New connections accepted in a turn of the event loop, about; the listener needs so many files for it (server.py).
    accepted_a_turn: int = 1


class ErrorPace:
    """At most ERRORS_A_TURN errors leave in a turn of the event loop; the others wait for the next turns.

    A client that is refused may ask again at once. With a thousand such connections the event loop finds new requests
    as fast as it refuses, and comes to nothing else. Refusals that wait a few milliseconds keep those clients waiting
    too. Requests behind a waiting error are not handled before it leaves: a connection has one place here.
    """

    def __init__(self) -> None:
        self._left = ERRORS_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()
        self._turn = OncePerTurn(self._next_turn)

    def __len__(self) -> int:
        return len(self._waiting)

    def is_now(self, send: Callable[[], None]) -> bool:
        """Whether one more may leave now; else `send` is called when it may."""
        turn = self._turn
        if not turn.is_due:  # a call less for most of them
            turn.notify()
        if self._left > 0:
            self._left -= 1
            return True
        self._waiting.append(send)
        return False

    def _next_turn(self) -> None:
        number = min(len(self._waiting), ERRORS_A_TURN)
        self._left = ERRORS_A_TURN - number
        for _ in range(number):
            self._waiting.popleft()()
        if self._waiting:
            self._turn.notify()


# Header lines for the answer to a request with these headers, also if it is refused before the handler sees it.
ExtraLines = Callable[[dict[bytes, bytes]], bytes]


class HttpState:
    """Shared by a server and its connections. `handler` must answer every exchange, now or later."""

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: HttpLimits,
        clock: Clock = monotonic,
        extra_lines: ExtraLines | None = None,
    ) -> None:
        # The function that answers the next exchange; a Sampler takes its place now and then.
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.coarse_now = clock()
        # The start of a response, with the date of this second: for any status, and for the usual one, to which header
        # lines may be added; and all of its head, which lacks the length of the body.
        self._heads: dict[tuple[int, bytes], bytes] = {}
        self.start_ok = self.head_ok = b""
        self._date_usual_heads()
        # The same for errors that many clients get. By the error object: it is never raised, so holds no frames.
        self.ready_problems: dict[CarpoolError, ReadyProblem] = {}
        # With a long body a request does not go the short way.
        self.known_heads = KnownHeads(min(limits.body_bytes_max, LONG_BODY_BYTES))
        # In which requests with long bodies are read.
        self.turns = SharedTurns()
        # Connections that are open, and how many more are agreeing upon their TLS.
        self.connections: set[Connection] = set()
        self.handshakes = 0
        # Bytes of bodies that are partly received, or wait in a connection's backlog or for their turn.
        self.receiving_bytes = 0
        # Bytes of responses that wait for clients which are behind; worked out anew in each round of the sweep.
        self.unread_bytes = 0
        # Answers that were errors, by code, for metrics.
        self.problems: dict[str, int] = {}
        # Upgrade handlers, by path and `Upgrade` in lower case: each answers, and returns who gets the bytes.
        self.upgrades: dict[tuple[bytes, bytes], Callable[[Exchange], Callable[[bytes], None] | None]] = {}
        self.extra_lines = extra_lines
        # Traces refusals; None where nothing is traced.
        self.traces: RequestTraces | None = None
        # None where no event loop runs.
        self.error_pace: ErrorPace | None = None
        # While true, the last response of each connection says `Connection: close`.
        self.draining = False

    def head(self, status: int, content_type: bytes) -> bytes:
        """Status line, content type and date of a response."""
        head = self._heads.get((status, content_type))
        if head is None:
            head = b"HTTP/1.1 %d %b\r\nDate: %b\r\n" % (status, REASONS[status], formatdate(usegmt=True).encode())
            if content_type:
                head += b"Content-Type: %b\r\n" % content_type
            self._heads[status, content_type] = head
        return head

    def _date_usual_heads(self) -> None:
        self.start_ok = self.head(200, JSON)
        self.head_ok = self.start_ok + b"Content-Length: %d\r\n\r\n"

    def make_ready(self, error: CarpoolError, id_bytes: int) -> ReadyProblem:
        """Keep the answer for an error ready, for other clients that get it; ids have so many bytes."""
        if len(self.ready_problems) >= READY_MAX:
            self.ready_problems.clear()
        ready = self.ready_problems[error] = ready_problem(self.head(error.status, PROBLEM), error, id_bytes)
        return ready

    def tick(self) -> float:
        """Move the coarse clock on; returns by how many seconds. With a new second, responses get a new date."""
        now, before = self.clock(), self.coarse_now
        if int(now) != int(before):
            self._heads.clear()
            self.ready_problems.clear()
            self._date_usual_heads()
        self.coarse_now = now
        return now - before

    def count_problem(self, code: str) -> None:
        """One more answer was an error."""
        self.problems[code] = self.problems.get(code, 0) + 1  # bounded: codes come from the error tree


class Sampler:
    """Times a request now and then until it is queued. The other requests pay nothing for that, not even a test.

    1. Every SAMPLE_S the sampler takes the place of the routes until it has timed a request, then steps back. So about
       as many are timed in a second at any load.
    2. A request may have to wait before it is let in, until its owner's rate limit is known: then it is given to the
       routes once more, and timed until then.
    3. Only what asks for something (POST) is timed; a task is not: it waits for its disk, or for Redis, which have
       numbers of their own.
    """

    def __init__(self, state: HttpState, seconds: RequestSeconds) -> None:
        self._state = state
        self._seconds = seconds
        self._routes = state.handler
        # The request that is timed, and since when.
        self._followed: Exchange | None = None
        self._since = 0.0

    def take(self) -> None:
        """Time the next request. To be called every SAMPLE_S."""
        followed = self._followed
        is_undecided = followed is not None and followed.response is None and followed.context is None
        if is_undecided and self._state.clock() - self._since < FOLLOWED_S_MAX:
            return
        self._followed = None
        self._state.handler = self._handle

    def _handle(self, exchange: Exchange) -> None:
        if self._followed is None and exchange.method == b"POST":
            self._followed, self._since = exchange, self._state.clock()
            self._seconds.receive.observe(exchange.received_s)
        elif self._followed is not exchange:
            self._routes(exchange)
            return
        try:
            self._routes(exchange)
        finally:
            if isinstance(exchange.context, Request | RequestGroup) or exchange.response is not None:
                self._seconds.admit.observe(self._state.clock() - self._since)
                self._followed = None
                self._state.handler = self._routes
