"""One server, and the one connection on which commands go to it; and further connections that only read.

Both connect in the background for ever, with a pause that doubles from 50 ms to 1 s.
"""

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from carpool.broker.redis.client.address import HostPort
from carpool.broker.redis.client.link import (
    Command,
    CommandLink,
    Link,
    NotSent,
    OnReply,
    Refused,
    SentCommand,
    ignore,
    reason_of,
)
from carpool.core.timers import Every

# The place of slots whose node is not known.
NOWHERE: HostPort = ("", 0)
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
# A server that hangs may take the connection but not answer the greeting; one far away with TLS needs a while.
CONNECT_S_MIN = 1.0
# A connection that lived so long was a good one: after it the pauses begin anew.
GOOD_S = 2.0
# So often a server is asked for its time.
TIME_EVERY_S = 1.0

AnyLink = TypeVar("AnyLink", bound=Link)


class Pause:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_S_MIN

    def next_s(self) -> float:
        """Longer each time; at random, so that not all clients of a server come back in the same moment."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, PAUSE_S_MAX)
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The last attempt was good."""
        self._pause_s = PAUSE_S_MIN


class Connector:
    """How connections are made to any server of one deployment."""

    def __init__(self, greeting: list[Command], tls: ssl.SSLContext | None, timeout_s: float, bytes_max: int) -> None:
        self.greeting = greeting
        self.timeout_s = timeout_s
        self.bytes_max = bytes_max
        self._tls = tls

    async def keep(
        self,
        where: Callable[[], HostPort],
        make: Callable[[], AnyLink],
        use: Callable[[AnyLink], Awaitable[None]],
        failed: Callable[[str], None],
    ) -> None:
        """Connect for ever: `use` has a connection until that ends, `failed` gets the reason if there is none."""
        loop, pause = asyncio.get_running_loop(), Pause()
        while True:
            at, link = where(), make()
            if objection := await self._greet(at, link):
                failed(objection)
            else:
                connected_at = loop.time()
                if link.is_open:  # it may have ended in the same turn
                    await use(link)
                if loop.time() - connected_at >= GOOD_S:
                    pause.reset()
            await asyncio.sleep(pause.next_s())

    async def _greet(self, at: HostPort, link: Link) -> str:
        """Connect a link to a server, and say why it cannot be used; "" if it can."""
        if at == NOWHERE:
            return "nobody knows where it is"
        try:
            async with asyncio.timeout(max(self.timeout_s, CONNECT_S_MIN)):
                await asyncio.get_running_loop().create_connection(lambda: link, *at, ssl=self._tls)
                return await link.greeted
        except (OSError, TimeoutError) as failure:
            link.close()  # the connection may be made in the moment in which it is given up
            return reason_of(failure)
        except asyncio.CancelledError:
            link.close()
            raise


class Owner(Protocol):
    """What a node and a reader call in the object that keeps them."""

    def node_changed(self, is_trouble: bool) -> None:
        """A node came up or went down, or still is not up."""

    def refused(self, node: "Node", link: CommandLink, entry: SentCommand, refusal: Refused) -> None:
        """An error reply, whose caller is to be seen to."""

    def node_of(self, slot: int) -> "Node":
        """The node that has a slot now."""


class Node:
    """One server and the connection for commands."""

    def __init__(self, owner: Owner, connector: Connector, at: HostPort) -> None:
        self.at = at
        # Where commands go; None while the server is not usable.
        self.link: CommandLink | None = None
        # Why it is not up; "" while it is, and before the first attempt has failed.
        self.trouble = ""
        # A command was redirected to it since the topology was last looked at.
        self.is_named = False
        self.readers: set[Reader] = set()
        self._owner = owner
        self._connector = connector
        # Redirected commands that came before the first connection.
        self._waiting: list[tuple[OnReply, Command, int, bool]] = []
        self._is_closed = False
        # A retiring link still has replies to bring.
        self._retiring: CommandLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._times = Every(TIME_EVERY_S, self.ask_time)

    @property
    def pending(self) -> int:
        """Commands without a reply."""
        links = (self.link, self._retiring)
        return len(self._waiting) + sum(link.pending for link in links if link is not None)

    def start(self) -> None:
        """Begin to connect."""
        kept = self._connector.keep(lambda: self.at, self._make_link, self._use, self._failed)
        self._task = asyncio.get_running_loop().create_task(kept)
        self._times.start()

    def ask_time(self) -> None:
        """Learn what the server's clock shows."""
        if self.link is not None:
            self.link.ask_time()

    def redirect(self, on_reply: OnReply, command: Command, hops: int, asking: bool) -> None:
        """Send a command that another node does not serve; a new connection is waited for."""
        if self.link is not None:
            ask_and_request(self.link, on_reply, command, hops, asking)
        elif self.trouble or self._is_closed:
            asyncio.get_running_loop().call_soon(on_reply, NotSent("the node that has the slot is not connected"))
        else:
            self._waiting.append((on_reply, command, hops, asking))

    def retire(self, trouble: str) -> None:
        """Use the connection no more once its pending commands have their replies; then connect anew."""
        link, self.link = self.link, None
        if link is None:
            return
        self.trouble = trouble
        self._retiring = link
        link.retire()
        self._owner.node_changed(True)

    def leave(self) -> None:
        """The server has no slots any more: connect no more, but take the replies that are still due."""
        self._is_closed = True
        self._times.stop()
        if self._task is not None:
            self._task.cancel()
        self._retiring, self.link = self.link or self._retiring, None
        if self._retiring is not None:
            self._retiring.retire()
        self._give_up_waiting()

    async def close(self) -> None:
        """Connect no more; what is pending is lost."""
        self._is_closed = True
        self._times.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for link in (self.link, self._retiring):
            if link is not None:
                link.close()
        self._give_up_waiting()

    def _failed(self, reason: str) -> None:
        self.trouble = reason
        self._give_up_waiting()
        self._owner.node_changed(True)

    def _make_link(self) -> CommandLink:
        return CommandLink(
            self._connector.greeting,
            refused=partial(self._owner.refused, self),
            lost=self._on_lost,
            timeout_s=self._connector.timeout_s,
            pending_bytes_max=self._connector.bytes_max,
        )

    async def _use(self, link: CommandLink) -> None:
        self.link, self.trouble = link, ""
        waiting, self._waiting = self._waiting, []
        for redirected in waiting:
            ask_and_request(link, *redirected)
        self._owner.node_changed(False)
        await link.ended.wait()

    def _on_lost(self, reason: str) -> None:
        self.link = self._retiring = None
        self.trouble = self.trouble or reason
        # What made this connection end concerns them too, and they have no timeout to find it by themselves.
        for reader in list(self.readers):
            reader.reconnect(reason)
        if not self._is_closed:
            self._owner.node_changed(True)

    def _give_up_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for on_reply, *_ in waiting:
            asyncio.get_running_loop().call_soon(on_reply, NotSent("the node that has the slot is not connected"))


def ask_and_request(link: CommandLink, on_reply: OnReply, command: Command, hops: int, asking: bool) -> None:
    """Send a command, where needed with the word that lets an importing node serve it."""
    if asking:
        link.request(ignore, (b"ASKING",))
    link.request(on_reply, command, hops, asking)


class Reader:
    """A connection of its own to the node of one slot, for blocking reads and subscriptions. It follows the slot."""

    def __init__(
        self,
        owner: Owner,
        connector: Connector,
        slot: int,
        connected: Callable[[Link], None],
        received: OnReply,
        lost: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._connector = connector
        self._slot = slot
        self._connected = connected
        self._received = received
        self._lost = lost
        self._link: Link | None = None
        self._node: Node | None = None
        self.is_closed = False
        # The node's own connection has the same trouble, and shows it.
        kept = connector.keep(self._where, self._make_link, self._use, ignore)
        self._task = asyncio.get_running_loop().create_task(kept)

    def close(self) -> None:
        """Read no more. `lost` is not called."""
        self.is_closed = True
        self._task.cancel()
        if self._link is not None:
            self._link.close()

    async def wait_closed(self) -> None:
        """Until its task has ended."""
        await asyncio.gather(self._task, return_exceptions=True)

    def reconnect(self, reason: str) -> None:
        """Drop the connection and make another."""
        if self._link is not None:
            self._link.close(reason)

    def follow(self) -> None:
        """Drop the connection if the slot is on another node by now."""
        if self._node is not None and self._node is not self._owner.node_of(self._slot):
            self.reconnect("the slot is on another node")

    def _where(self) -> HostPort:
        self._node = self._owner.node_of(self._slot)
        return self._node.at

    async def _use(self, link: Link) -> None:
        if self._node is None or self._node is not self._owner.node_of(self._slot):
            link.close()  # the slot moved meanwhile
            return
        self._link = link
        self._node.readers.add(self)
        try:
            self._connected(link)
            await link.ended.wait()
        except Exception as failure:  # the owner's fault; it gets another connection
            link.close()
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the owner of a Redis reader failed", "exception": failure}
            )
        finally:
            self._node.readers.discard(self)
            self._link = None

    def _make_link(self) -> Link:
        return Link(
            self._connector.greeting,
            received=self._on_received,
            lost=self._on_lost,
            pending_bytes_max=self._connector.bytes_max,
        )

    def _on_received(self, reply: Any) -> None:
        if reply.__class__ is Refused:
            if reply.code in ("MOVED", "ASK"):
                self._owner.node_changed(True)
                self.reconnect("the slot is on another node")
                return
            if reply.code in ("READONLY", "UNBLOCKED", "MASTERDOWN", "CLUSTERDOWN", "LOADING"):
                self._owner.node_changed(True)
        self._received(reply)

    def _on_lost(self, _: str) -> None:
        # `connected` was called for this link, unless it ended in the turn in which it was greeted.
        if self._link is not None and not self.is_closed:
            self._lost()
