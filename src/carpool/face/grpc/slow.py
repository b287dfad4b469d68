"""Ends calls that are too slow: their message does not come, or their client does not read the answers.

1. The message of a call must have come within `receive_timeout_s`; else the call is refused.
2. An answer must have been read in `write_timeout_s`, and a second for each 64 KB. grpcio cannot end a call whose
   client does not read: a status waits behind the answer. So its connection is ended. That of a proxy carries
   other clients too: there only the stream is given up, which keeps its owner's place until its client reads on.
3. If more than `unread_bytes_max` of answers wait to be read, clients that leave UNREAD_BYTES_MIN unread are cut off.

A sweep looks at all calls twice a second; a call only pays for being put on a list.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from carpool.core.clock import STOOD_STILL_S, Clock
from carpool.core.defaults import no
from carpool.core.timers import Every
from carpool.face.http.connection import UNREAD_BYTES_MIN

SWEEP_S = 0.5
READ_BYTES_PER_S = 65536
GIVEN_UP_A_TURN = 32
_SOCKETS = "/proc/self/fd"


class Watched(Protocol):
    """A call without its message, or one whose answer is being written."""

    def give_up_receiving(self) -> None:
        """The message has taken too long."""

    def give_up_writing(self) -> None:
        """The answer is not read."""


class SlowCalls:
    """Watches over the calls of one server."""

    def __init__(
        self,
        receive_timeout_s: float,
        write_timeout_s: float,
        unread_bytes_max: int,
        clock: Clock,
        # Whether the peer with this name is a proxy, whose connections other clients share.
        is_shared: Callable[[str], bool] = no,
    ) -> None:
        self._receive_timeout_s = receive_timeout_s
        self._write_timeout_s = write_timeout_s
        self._unread_bytes_max = unread_bytes_max
        self._clock = clock
        self._is_shared = is_shared
        # The time of the last sweep.
        self.now = clock()
        # Calls that wait for their message, with the time when they began; stream writes, with peer and read deadline.
        self.receiving: dict[Watched, float] = {}
        self.writing: dict[Watched, tuple[str, float]] = {}
        # Unary answers handed to grpcio: the task that ends when one was read, its peer, its read deadline, its size.
        self._unread: list[tuple[asyncio.Task[Any] | None, str, float, int]] = []
        # Calls whose message is overdue.
        self._late: list[Watched] = []
        self._sweeps = Every(SWEEP_S, self.sweep)

    def __repr__(self) -> str:
        return f"<SlowCalls receiving={len(self.receiving)} writing={len(self.writing)} unread={len(self._unread)}>"

    def start(self) -> None:
        """From now on."""
        self._sweeps.start()

    def stop(self) -> None:
        """No more."""
        self._sweeps.stop()

    def time_to_read(self, size: int) -> float:
        """Until when an answer of this size that is written now must have been read."""
        return self.now + SWEEP_S + self._write_timeout_s + size / READ_BYTES_PER_S

    def answered(self, peer_name: str, size: int) -> None:
        """Watch the answer of the running task, which ends when the client has read it."""
        self._unread.append((asyncio.current_task(), peer_name, self.time_to_read(size), size))

    def sweep(self) -> None:
        """Look at all of them."""
        now, before = self._clock(), self.now
        self.now = now
        if now - before > STOOD_STILL_S:
            return  # this process stood still: first see what clients sent and read meanwhile
        is_giving_up = bool(self._late)
        self._late = [call for call, since in self.receiving.items() if now - since >= self._receive_timeout_s]
        if self._late and not is_giving_up:
            self._give_up_some()
        self._unread = [each for each in self._unread if each[0] is not None and not each[0].done()]
        slow = {peer_name for _, peer_name, until, _ in self._unread if now >= until}
        for call, (peer_name, until) in list(self.writing.items()):
            if now >= until:
                slow.add(peer_name)
                call.give_up_writing()
        slow = {peer_name for peer_name in slow if not self._is_shared(peer_name)} | self._leave_too_much()
        if slow:
            # In a thread: with ten thousand connections it takes a while.
            asyncio.get_running_loop().run_in_executor(None, cut_off, slow)

    def _give_up_some(self) -> None:
        """Refuse some of the overdue calls, and the rest in the next turns: each refusal takes a while."""
        late, self._late = self._late[:GIVEN_UP_A_TURN], self._late[GIVEN_UP_A_TURN:]
        for call in late:
            call.give_up_receiving()
        if self._late:
            asyncio.get_running_loop().call_soon(self._give_up_some)

    def _leave_too_much(self) -> set[str]:
        """The peers to cut off because all answers together leave too much unread (rule 3)."""
        unread: Counter[str] = Counter()
        for _, peer_name, _, size in self._unread:
            unread[peer_name] += size
        if unread.total() <= self._unread_bytes_max:
            return set()
        return {peer_name for peer_name, size in unread.items() if size >= UNREAD_BYTES_MIN}


def cut_off(peer_names: AbstractSet[str]) -> None:
    """Shut the connections of these peers down, by grpcio's names for them; grpcio notices by itself."""
    try:
        numbers = os.listdir(_SOCKETS)
    except OSError:
        return  # not on this system
    for number in numbers:
        try:
            if not os.readlink(f"{_SOCKETS}/{number}").startswith("socket:"):
                continue
            with socket.fromfd(int(number), socket.AF_INET6, socket.SOCK_STREAM) as connection:  # its own is left alone
                if name_of(connection.getpeername()) in peer_names:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or gone by now


def name_of(address: Any) -> str:
    """grpcio's name of a peer that has this address."""
    if not isinstance(address, tuple):
        return ""
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]  # its IPv6 sockets show IPv4 addresses so
    return f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
