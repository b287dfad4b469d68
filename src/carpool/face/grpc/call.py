"""One call, as services see it: who calls, what came with it, its messages, and how it is refused.

A service answers with a message, or its bytes, or with an error of the tree, which it may return as well as raise: an
error object that many calls share is never raised.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

from carpool.core.errors import CarpoolError, Draining, Malformed, ReceiveTimeout
from carpool.core.messages import Message
from carpool.core.ports import NO_OPTIONS, Caller, LimitVerdict, Peer, RequestOptions, RequestTraces
from carpool.core.timers import TURN_S, SharedTurns
from carpool.face.grpc.slow import SlowCalls
from carpool.face.http.gateway import options_in
from carpool.face.http.ids import request_id
from carpool.face.http.state import LONG_BODY_BYTES
from carpool.face.intake import Intake

# The metadata that the gateway reads. The rest is not even copied.
WANTED = frozenset(
    ("authorization", "x-api-key", "x-forwarded-for", "x-request-id", "traceparent", "tracestate", "cache-control")
)
NO_HEADERS: dict[bytes, bytes] = {}
LINES_KEPT = 4096

Metadata = tuple[tuple[str, str | bytes], ...]
GrpcResult: TypeAlias = bytes | Message | CarpoolError
Told = TypeVar("Told")
Made = TypeVar("Made")


class GrpcCall:
    """One call. `context` is grpcio's."""

    __slots__ = (
        "_interruption",
        "_reader",
        "_slow",
        "_when_unread",
        "came_in",
        "context",
        "headers",
        "own_id",
        "path",
        "peer",
        "peer_name",
    )

    def __init__(self, context: Any, path: str, peer_name: str, peer: Peer, slow: SlowCalls) -> None:
        self.context = context
        self.path = path
        self.peer_name = peer_name
        self.peer = peer
        self.headers = headers_of(context.invocation_metadata())
        # The call became a request: an error of the call is then traced with that request.
        self.came_in = False
        # The id of its request; "" until `request_id` is called.
        self.own_id = ""
        # Called if the client does not read in time the message that is being written.
        self._when_unread: Callable[[], None] | None = None
        self._slow = slow
        # The task that waits for a message, and the error that ends its wait.
        self._reader: asyncio.Task[Any] | None = None
        self._interruption: CarpoolError | None = None

    async def read(self) -> bytes:
        """The one message of the call; raises why there is none."""
        slow = self._slow
        slow.receiving[self] = slow.now
        try:
            message = await self.next()
        finally:
            del slow.receiving[self]
        if message is None:
            raise Malformed("the call has no message; send one")
        return message

    async def next(self) -> bytes | None:
        """The next message of a stream; None if no more will come."""
        task = self._reader = asyncio.current_task()
        try:
            message = await self.context.read()
        except asyncio.CancelledError:
            if self._interruption is None or task is None:
                raise
            task.uncancel()
            raise self._interruption from None
        finally:
            self._reader = None
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes, when_unread: Callable[[], None] | None = None) -> None:
        """One message of a stream, once there is room for it; a client that does not read it in time is cut off."""
        slow, self._when_unread = self._slow, when_unread
        slow.writing[self] = self.peer_name, slow.time_to_read(len(message))
        try:
            await self.context.write(message)
        finally:
            del slow.writing[self]

    def give_up_receiving(self) -> None:
        """The message has taken too long."""
        self.interrupt(ReceiveTimeout("the message did not arrive in time; send it sooner"))

    def give_up_writing(self) -> None:
        """The client did not read a message in time: let the stream give up."""
        if self._when_unread is not None:
            self._when_unread()

    def interrupt(self, why: CarpoolError) -> None:
        """Raise this error in the task that waits for a message. A message that comes at this moment is lost."""
        if self._reader is not None and self._interruption is None:
            self._interruption = why
            self._reader.cancel()

    def caller(self, intake: Intake) -> Caller:
        """Who calls; raises as `identify`."""
        return self.peer.caller or intake.identify(self.headers, self.peer)

    def remaining_s(self) -> float | None:
        """Seconds until the deadline of the call; None if it has none."""
        remaining: float | None = self.context.time_remaining()
        return remaining

    def options(self, *timeouts_s: float | None) -> RequestOptions:
        """How its requests are to be treated: by the soonest of these deadlines, and by its metadata."""
        options = options_in(self.headers, {}) if b"cache-control" in self.headers else NO_OPTIONS
        timeout_s = min((each for each in timeouts_s if each is not None), default=None)
        return options if timeout_s is None else RequestOptions(timeout_s, options.no_store, options.no_cache)

    def tell_limit(self, lines: bytes) -> None:
        """Send the caller the state of its rate limit as trailing metadata, whatever the answer is."""
        if lines:
            self.context.set_trailing_metadata(metadata_of(lines))

    def request_id(self) -> str:
        """The client's own id, or a new one: the same each time, for its error names it too."""
        if not self.own_id:
            self.own_id = request_id(self.headers)
        return self.own_id


class Problems:
    """Counts, and traces, every error that the gateway sends to a client."""

    def __init__(self, count: Callable[[str], None], traces: RequestTraces | None = None) -> None:
        self._count = count
        # None where nothing is traced.
        self.traces = traces

    def note(self, call: GrpcCall, error: CarpoolError, *, came_in: bool) -> None:
        """Count an error; a request that came in has a trace of its own."""
        self._count(error.code)
        if self.traces is not None and not came_in:
            self.traces.refused(b"POST", b"", call.headers, error, call.path[1:])


class Method(NamedTuple):
    """What a service does when it is called."""

    handle: Callable[[GrpcCall], Awaitable[GrpcResult | None]]
    # It writes its answers by itself, any number of them, and returns None or an error.
    is_stream: bool = False


class Service(Protocol):
    """Methods under one name."""

    name: str

    @property
    def methods(self) -> Mapping[str, Method]:
        """By their names."""

    def drain(self) -> None:
        """End what would go on for ever: take nothing new on streams, answer what came, then end them."""


async def enter(intake: Intake, call: GrpcCall, caller: Caller, cost: int = 1) -> CarpoolError | None:
    """The refusal, if a call that counts as so many is beyond its caller's rate limit."""
    if caller.limit is None:
        return None
    entry = intake.enter(caller) if cost == 1 else intake.enter(caller, cost)
    if entry is None:
        known: asyncio.Future[LimitVerdict] = asyncio.get_running_loop().create_future()
        intake.when_known(caller, partial(tell, known), cost)
        entry = await known
    if isinstance(entry, CarpoolError):
        return entry
    call.tell_limit(entry)
    return None


def tell(waiting: "asyncio.Future[Told]", told: Told) -> None:
    """Let a call go on with what it waits for, unless it has left."""
    if not waiting.done():
        waiting.set_result(told)


def headers_of(metadata: Any) -> dict[bytes, bytes]:
    """Metadata as the headers that `identify` and others know; repeated ones joined by a comma."""
    headers = NO_HEADERS
    for name, value in metadata:
        if name in WANTED:
            if headers is NO_HEADERS:
                headers = {}
            key, given = name.encode(), value if isinstance(value, bytes) else value.encode()
            headers[key] = headers[key] + b"," + given if key in headers else given
    return headers


@lru_cache(LINES_KEPT)
def metadata_of(lines: bytes) -> Metadata:
    """HTTP header lines as metadata."""
    pairs = (line.partition(": ") for line in lines.decode("latin-1").split("\r\n") if line)
    return tuple((name.lower(), value) for name, _, value in pairs)


def leaving() -> Draining:
    """The error with which streams end at a drain."""
    return Draining("this gateway is shutting down; connect again to reach another one", retry_after_s=1)


def address_of(peer_name: str) -> str:
    """The address in grpcio's name of a peer, such as `ipv4:127.0.0.1:4711`; "" for a Unix socket."""
    kind, _, where = peer_name.partition(":")
    return unquote(where).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


async def in_a_turn(turns: SharedTurns, message: bytes, work: Callable[[], Made]) -> Made:
    """Do the work on a message: at once for a short message, in a turn of its own for a long one."""
    # Each call for itself, as each connection over HTTP.
    return work() if len(message) <= LONG_BODY_BYTES else await in_turns(turns, _in_one_step(work), whose=object())


def _in_one_step(work: Callable[[], Made]) -> Generator[None, None, Made]:
    yield from ()
    return work()


async def in_turns(turns: SharedTurns, steps: Generator[None, None, Made], whose: object = None) -> Made:
    """Do long work in slices of a few milliseconds, one in a turn of the event loop, shared with other such work."""
    made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
    turns.now(partial(_work, turns, steps, made), whose)
    return await made


def _work(turns: SharedTurns, steps: Generator[None, None, Made], made: "asyncio.Future[Made]") -> None:
    """Do one slice of the work."""
    if made.done():
        return  # the call that waited for it has ended
    time = made.get_loop().time
    until = time() + TURN_S
    try:
        next(steps)
        while time() < until:
            next(steps)
    except StopIteration as end:
        made.set_result(end.value)
    except Exception as failure:
        made.set_exception(failure)
    else:
        turns.later(partial(_work, turns, steps, made))
