"""One connection to one Redis server, on hiredis, without a task or a future per command.

Rules:
1. Commands of one event-loop turn leave in one write, in the order in which they were sent.
2. Replies come in the order of the commands. A reply that no written command waits for closes the connection: from then
   on no reply could be trusted to be its caller's.
3. A caller is called back exactly once: with the reply, with `Lost` if the command may have been executed, or with
   `NotSent` if it certainly was not.
4. While writing is paused, commands stay here: they are not sent, and a connection that breaks says so.
5. Age is counted in ticks of this link's one timer: if this process itself was stopped, that is one tick, no timeout.

`Link` hands every reply to one receiver: for blocking reads and subscriptions. `CommandLink` gives each its own caller.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from hiredis import ProtocolError, Reader, pack_command

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.client.server_clock import ServerClock
from carpool.core.clock import monotonic
from carpool.core.timers import Every

OnReply = Callable[[Any], None]
Command = tuple[bytes | int | str, ...]
# Caller, command, its bytes on the wire, how often it was redirected, whether ASKING went before it.
SentCommand = tuple[OnReply, Command, int, int, bool]

# Stands for the command of an entry that was packed by its caller.
PACKED: Command = ()
TIME: Command = (b"TIME",)

# What the reader keeps allocated between replies; less would mean a new allocation for each batch of replies.
READ_BUFFER_BYTES = 1024 * 1024
# More than this of one reply is not collected.
REPLY_BYTES_MAX = 256 * 1024 * 1024
WRITE_BUFFER_BYTES = 1024 * 1024
# So many commands are joined into one write; more are written piece by piece, so that a pause comes in time.
COMMANDS_AT_ONCE = 1024
TICKS_PER_TIMEOUT = 8
# A server whose replies are late for so long is given up although some come.
LATE_TICKS_MAX = 10 * TICKS_PER_TIMEOUT
ERROR_CHARS_MAX = 256
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 3

_NOTHING: Any = object()
# Its own types know tuples of one item only.
_pack = cast("Callable[[Command], bytes]", pack_command)


class RedisFailure(Exception):
    """What a command may get in place of a reply."""


class NotSent(RedisFailure):
    """The command was certainly not executed."""


class NoRoom(NotSent):
    """So much waits for the replies of a server that nothing more is sent to it."""


class Lost(RedisFailure):
    """The connection broke or timed out before the reply: the command may have been executed."""


class Refused(RedisFailure):
    """Redis's own error reply."""

    def __init__(self, text: str) -> None:
        # Redis quotes the arguments of a command that it does not know: these may be a client's bytes.
        super().__init__(text.partition(", with args beginning with")[0][:ERROR_CHARS_MAX])
        # Its first word, such as "OOM".
        self.code = text.partition(" ")[0]


def tls_context(address: BrokerAddress) -> ssl.SSLContext | None:
    """How to check Redis's certificate; raises OSError if a file cannot be used."""
    if not address.tls:
        return None
    context = ssl.create_default_context(cafile=address.files.ca or None)
    if address.files.cert:
        context.load_cert_chain(address.files.cert, address.files.key)
    return context


def reason_of(failure: Exception) -> str:
    """Why a connection could not be made or broke. Only the system's words: other texts may quote what was sent."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        return f"TLS failed: {failure.reason or 'no reason given'}"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return "no answer in time" if isinstance(failure, TimeoutError) else "the connection was refused or broke"


def greeting_of(address: BrokerAddress) -> list[Command]:
    """What is said first on every connection: log in, ask for the time, and see whether the server can be used."""
    commands: list[Command] = []
    if address.username:
        commands.append((b"AUTH", address.username, address.password))
    elif address.password:
        commands.append((b"AUTH", address.password))
    if address.db:
        commands.append((b"SELECT", address.db))
    commands.append((b"CLIENT", b"SETNAME", b"carpool"))
    commands.append((b"ROLE",))
    if address.kind == "cluster":
        commands.append((b"CLUSTER", b"INFO"))
    commands.append(TIME)
    # A server that still loads its data refuses this one.
    commands.append((b"PING",))
    return commands


def objection_to(command: Command, reply: Any) -> str:
    """Why a server that answers the greeting so cannot be used; "" if it can."""
    name, is_refusal = command[0], isinstance(reply, Refused)
    if command == TIME:
        return ""  # deadlines count from the ids of entries then
    if name == b"ROLE":
        # A user without the right to ask may still be allowed all that Carpool needs.
        is_replica = isinstance(reply, list) and reply and reply[0] not in (b"master", b"sentinel")
        return "it is a replica" if is_replica else ""
    if name == b"CLIENT":
        # A name is a courtesy; but what comes first may be the server's refusal to have one more connection.
        return str(reply) if is_refusal and "max number of clients" in str(reply) else ""
    if name == b"CLUSTER" and isinstance(reply, bytes):
        return "" if b"cluster_state:ok" in reply else "the Cluster is down"
    return str(reply) if is_refusal else ""


class Link(asyncio.Protocol):
    """One connection whose every reply goes to one receiver."""

    def __init__(
        self,
        greeting: Sequence[Command],
        *,
        received: OnReply,
        lost: Callable[[str], None],
        pending_bytes_max: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._greeting = deque(greeting)
        self._received = received
        # Called once, with the reason, when the connection ends after it was greeted.
        self._lost = lost
        self._bytes_max = pending_bytes_max
        self._reader = Reader(replyError=Refused, notEnoughData=_NOTHING)
        self._reader.setmaxbuf(READ_BUFFER_BYTES)
        self._transport: asyncio.Transport | None = None
        # While it is empty no flush is due: commands are too many for a call of `OncePerTurn.notify` each.
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._is_paused = False
        # Greeted, and neither closed nor broken.
        self.is_open = False
        self._is_over = False
        self.ended = asyncio.Event()
        # Since the last look.
        self._has_received = False
        # What the server said to the greeting: "" if all is well, else why not.
        self.greeted: asyncio.Future[str] = self._loop.create_future()
        self._greeted_at = 0.0
        self.clock = ServerClock()

    def send(self, *command: bytes | int | str) -> None:
        """Send a command; its reply goes to the receiver. Without effect on a link that is not open."""
        if not self.is_open:
            return
        packed = _pack(command)
        self._outgoing_bytes += len(packed)
        if self._outgoing_bytes > self._bytes_max:
            self.close("it reads too slowly")
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(packed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server."""
        transport = cast(asyncio.Transport, transport)  # uvloop has one of its own
        self._transport = transport
        if self._is_over:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _keep_alive(transport.get_extra_info("socket"))
        self._greeted_at = monotonic()
        transport.write(b"".join(map(_pack, self._greeting)))

    def connection_lost(self, failure: Exception | None) -> None:
        """The other side closed, or this one did."""
        self.close(reason_of(failure) if failure is not None else "the server closed the connection")
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Replies, in pieces of any size."""
        if self._is_over:
            return
        try:
            self._has_received = True
            self._reader.feed(data)
            if self._greeting and not self._read_greeting():
                return
            self._deliver()
            if self._reader.len() > REPLY_BYTES_MAX:
                self.close("a reply is too long")
        except ProtocolError:
            self.close("it does not speak Redis's protocol")

    def pause_writing(self) -> None:
        """The server reads more slowly than this side writes."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The server caught up."""
        self._is_paused = False
        self._flush()

    def _read_greeting(self) -> bool:
        """Whether the greeting is over and well."""
        while self._greeting:
            reply = self._reader.gets()
            if reply is _NOTHING:
                return False
            command = self._greeting.popleft()
            if command == TIME:
                self._told_time(self._greeted_at, reply)
            if objection := objection_to(command, reply):
                self.close(objection)
                return False
        self.is_open = True
        self._opened()
        if not self.greeted.done():
            self.greeted.set_result("")
        return True

    def _opened(self) -> None:
        """The greeting is over."""

    def _told_time(self, asked_at: float, reply: Any) -> None:
        """The server said what time it is, or something else."""
        if isinstance(reply, list):
            seconds, microseconds = map(int, reply)
            self.clock.told(seconds + microseconds / 1e6, asked_at, monotonic())

    def _deliver(self) -> None:
        gets, received = self._reader.gets, self._received
        while (reply := gets()) is not _NOTHING:
            try:
                received(reply)
            except Exception as failure:  # the receiver's fault; the next reply is still owed
                self._report(failure)
            if self._is_over:
                return

    def _flush(self) -> None:
        outgoing = self._outgoing
        while outgoing and not self._is_paused and self._transport is not None:
            if len(outgoing) <= COMMANDS_AT_ONCE:
                self._outgoing = []
                self._write(outgoing)
                return
            piece = outgoing[:COMMANDS_AT_ONCE]
            del outgoing[:COMMANDS_AT_ONCE]
            self._write(piece)

    def _write(self, packed: list[bytes]) -> None:
        assert self._transport is not None
        data = packed[0] if len(packed) == 1 else b"".join(packed)
        self._outgoing_bytes -= len(data)
        self._transport.write(data)

    def close(self, reason: str = "closed") -> None:
        """End the connection now, and tell the owner that it is lost."""
        if self._is_over:
            return
        was_open, self._is_over, self.is_open = self.is_open, True, False
        if not self.greeted.done():
            self.greeted.set_result(reason)
        if self._transport is not None:
            # Not close(): a server that hangs would never let it finish.
            self._transport.abort()
        self._outgoing = []
        if was_open:
            self._call(self._lost, reason)
        self.ended.set()

    def _call(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            callback(argument)
        except Exception as failure:  # a caller's fault must not keep the others from their replies
            self._report(failure)

    def _report(self, failure: Exception) -> None:
        self._loop.call_exception_handler({"message": "a receiver of Redis's replies failed", "exception": failure})


class CommandLink(Link):
    """One connection on which every command has its own caller and its own reply."""

    def __init__(
        self,
        greeting: Sequence[Command],
        *,
        refused: Callable[["CommandLink", SentCommand, Refused], None],
        lost: Callable[[str], None],
        timeout_s: float,
        pending_bytes_max: int,
    ) -> None:
        super().__init__(greeting, received=ignore, lost=lost, pending_bytes_max=pending_bytes_max)
        # Gets error replies in place of the caller, whom it must see to.
        self._refused = refused
        self._ticks = Every(timeout_s / TICKS_PER_TIMEOUT, self._tick)
        # Commands without a reply, oldest first; the last ones of them may not be written yet.
        self._pending: deque[SentCommand] = deque()
        self._pending_bytes = 0
        self._written = 0
        self._answered = 0
        # How many commands had been sent at each of the last ticks.
        self._sent_at_ticks: deque[int] = deque(maxlen=TICKS_PER_TIMEOUT)
        self._answered_at_tick = 0
        self._idle_ticks = 0
        # For how many ticks replies have been late, and for how many none has come.
        self._late_ticks = 0
        self._silent_ticks = 0
        self._is_retiring = False

    @property
    def pending(self) -> int:
        """Commands without a reply."""
        return len(self._pending)

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may wait for their replies."""
        return self._pending_bytes + size <= self._bytes_max

    def request(self, on_reply: OnReply, command: Command, hops: int = 0, asking: bool = False) -> None:
        """Send a command and call back with its reply, never before this returned."""
        packed = _pack(command)
        size = len(packed)
        if not self.has_room(size) or not self.is_open:
            self._loop.call_soon(on_reply, self._not_sent())
            return
        self._pending_bytes += size
        outgoing = self._outgoing
        if not outgoing:
            self._loop.call_soon(self._flush)
        outgoing.append(packed)
        self._pending.append((on_reply, command, size, hops, asking))

    def request_all(self, on_reply: OnReply, packed: list[bytes], size: int) -> None:
        """Send many commands that are packed already, and call back with the reply of each, in their order. `size`: of
        all of them.

        One entry stands for all, so that a command costs no call of its own. They cannot be redirected: a caller
        that gets MOVED or ASK has to send again.
        """
        share = size // len(packed)
        size = share * len(packed)
        if not self.has_room(size) or not self.is_open:
            failure = self._not_sent()
            for _ in packed:
                self._loop.call_soon(on_reply, failure)
            return
        self._pending_bytes += size
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += packed
        self._pending.extend([(on_reply, PACKED, share, 0, False)] * len(packed))

    def ask_time(self) -> None:
        """Learn what the server's clock shows."""
        if self.is_open:
            self.request(partial(self._told_time, monotonic()), TIME)

    def retire(self) -> None:
        """Close once all pending commands have their replies. The owner sends no more."""
        self._is_retiring = True
        if not self._pending:
            self.close("the connection was given up")

    def _not_sent(self) -> NotSent:
        return NoRoom("too much waits for Redis") if self.is_open else NotSent("the connection to Redis is closed")

    def _opened(self) -> None:
        self._ticks.start()

    def _deliver(self) -> None:
        gets, pending = self._reader.gets, self._pending
        while (reply := gets()) is not _NOTHING:
            if self._answered >= self._written:
                self.close("it sent a reply that nobody waits for")
                return
            self._answered += 1
            entry = pending.popleft()
            self._pending_bytes -= entry[2]
            try:
                if reply.__class__ is Refused:
                    self._refused(self, entry, reply)
                else:
                    entry[0](reply)
            except Exception as failure:  # the caller's fault; the next one is still owed its reply
                self._report(failure)
            if self._is_over:
                return
        if self._is_retiring and not pending:
            self.close("the connection was given up")

    def _write(self, packed: list[bytes]) -> None:
        assert self._transport is not None
        self._written += len(packed)
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))

    def _tick(self) -> None:
        sent = self._answered + len(self._pending)
        marks = self._sent_at_ticks
        is_late = len(marks) == TICKS_PER_TIMEOUT and marks[0] > self._answered
        self._late_ticks = self._late_ticks + 1 if is_late else 0
        # A long reply that is on its way is a sign of life, too.
        self._silent_ticks = 0 if self._has_received else self._silent_ticks + 1
        self._has_received = False
        # A server that is late but goes on answering is overloaded: to connect anew would only add to that.
        if is_late and (self._silent_ticks >= TICKS_PER_TIMEOUT or self._late_ticks >= LATE_TICKS_MAX):
            self.close("no reply in time")
            return
        marks.append(sent)
        is_idle = not self._pending and self._answered == self._answered_at_tick
        self._idle_ticks = self._idle_ticks + 1 if is_idle else 0
        if self._idle_ticks * 2 >= TICKS_PER_TIMEOUT:
            # A server that hangs is to be noticed also when no command is sent to it.
            self._idle_ticks = 0
            self.request(ignore, (b"PING",))
        self._answered_at_tick = self._answered

    def close(self, reason: str = "closed") -> None:
        """End the connection now; tell the owner first, so that a caller that sends again is not sent here."""
        if self._is_over:
            return
        self._ticks.stop()
        super().close(reason)
        lost, not_sent = Lost(reason), NotSent(reason)
        maybe_executed = self._written - self._answered
        pending, self._pending = self._pending, deque()
        self._pending_bytes = 0
        for number, entry in enumerate(pending):
            self._call(entry[0], lost if number < maybe_executed else not_sent)


def pack_beginning(*command: bytes | int | str) -> bytes:
    """What commands have in common that differ in their last argument alone."""
    return _pack((*command, b"")).removesuffix(b"$0\r\n\r\n")


def pack_rest(beginning: bytes, start: bytes, end: bytes) -> bytes:
    """A command from its beginning and the two parts of its last argument; one copy of them."""
    return b"".join((beginning, b"$%d\r\n" % (len(start) + len(end)), start, end, b"\r\n"))


def pack_digests(digests: Sequence[bytes]) -> bytes:
    """Arguments of the same length, for the end of a command."""
    beginning = b"$%d\r\n" % len(digests[0])
    return beginning + (b"\r\n" + beginning).join(digests) + b"\r\n"


def pack_with(arguments: bytes, count: int, *command: bytes) -> bytes:
    """A command with so many packed arguments at its end."""
    return b"*%d\r\n%b%b" % (len(command) + count, _pack(command).partition(b"\r\n")[2], arguments)


def ignore(_: Any) -> None:
    """For replies on which nothing depends."""


def _keep_alive(connection: socket.socket | None) -> None:
    """Have the system notice a machine that is gone, also on a connection that only reads."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
