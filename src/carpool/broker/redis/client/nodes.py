"""Redis as the broker sees it: a command goes to the node that has its slot, and its caller is called back once.

One connection per node for commands. Redirections, scripts that a server does not know yet, failovers and reconnections
are dealt with here; what the caller gets is a reply, or a RedisFailure that says whether the command may have run.

While a slot moves from one node to another, each of its keys is on one of them. Redis redirects a command by the keys
that this names (ASK), but most scripts use keys that they do not name: they would make these anew where they are not,
and a part of what the slot holds would be lost. So such scripts do not follow an ASK. The slot stands still until it
has moved: it counts as out of reach, and no such script is sent. Redis itself keeps them from touching what has left.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from carpool.broker.redis.client.address import BrokerAddress, HostPort
from carpool.broker.redis.client.link import (
    PACKED,
    Command,
    CommandLink,
    Link,
    NotSent,
    OnReply,
    RedisFailure,
    Refused,
    SentCommand,
    greeting_of,
    tls_context,
)
from carpool.broker.redis.client.node import NOWHERE, Connector, Node, Pause, Reader, ask_and_request
from carpool.broker.redis.client.topology import NODES_MAX, SlotRange, UnknownTopologyError, topology_of
from carpool.core.clock import monotonic
from carpool.core.defaults import do_nothing
from carpool.core.timers import Every, OncePerTurn

PENDING_BYTES_MAX = 256 * 1024 * 1024
# A command that is sent from node to node more often than this gets the last redirection as its reply.
HOPS_MAX = 5
# Where all is well the topology is looked at so often.
LOOK_EVERY_S = 5.0
# How often to look at a slot that moves, by asking for a key that is never there: only while the slot moves, Redis
# answers that the key may be on the other node.
MOVING_LOOK_S = 0.1
NO_SUCH_KEY = b":none"
# How Redis refuses a script that uses a key which has left.
_KEY_HAS_LEFT = "non local key"
# So often during the timeout, closing looks whether the last replies came.
CLOSE_LOOKS = 50
# Words by which a server says that it cannot be used for now, whatever it is asked.
_UNUSABLE = frozenset(("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH"))


class Script(msgspec.Struct, frozen=True):
    """A script that runs inside Redis: its text, and the name Redis knows it by once it has seen the text."""

    name: str
    source: bytes
    sha: bytes
    # All keys that it uses are among those that it is given.
    names_all_keys: bool = True


class Nodes:
    """All servers of one deployment."""

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float = 0.5,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        changed: Callable[[], None] = do_nothing,
    ) -> None:
        """`pending_bytes_max` is for each node. Raises OSError if a file for TLS cannot be used."""
        self._address = address
        self._timeout_s = timeout_s
        self._look_timeout_s = max(timeout_s, 0.5)
        self._changed = changed
        self._connector = Connector(greeting_of(address), tls_context(address), timeout_s, pending_bytes_max)
        self._nodes: dict[HostPort, Node] = {}
        # Nodes that no longer have slots, but may still owe replies.
        self._leaving: list[Node] = []
        # A node that never connects, for slots whose place is not known.
        self._nowhere = Node(self, self._connector, NOWHERE)
        self._by_slot = [self._nowhere] * SLOTS
        self._primaries: list[int] = []
        self._readers: list[Reader] = []
        # Scripts that were run, by their names in Redis and by their texts.
        self._scripts: dict[bytes, Script] = {}
        # Slots that move now, each with a key that is never there.
        self._moving: dict[int, bytes] = {}
        self._moving_looks = Every(MOVING_LOOK_S, self._look_at_moving)
        self._look_again = asyncio.Event()
        self._is_looking = False
        self._change = OncePerTurn(self._tell_change)
        self._is_closed = False
        self._unknown = "not connected yet"
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect in the background, for ever."""
        if self._address.kind == "single":
            self._apply([SlotRange(0, SLOTS - 1, self._address.hosts[0])])
        else:
            self._watch = asyncio.get_running_loop().create_task(self._keep_looking())

    @property
    def is_cluster(self) -> bool:
        """Whether slots may lie on different nodes."""
        return self._address.kind == "cluster"

    def is_up(self, slot: int) -> bool:
        """Whether the node of this slot is connected, and was usable at the last sign; and the slot does not move."""
        return self._by_slot[slot].link is not None and slot not in self._moving

    @property
    def trouble(self) -> str:
        """Why a node is not up, for a log or a person; "" if all are."""
        if not self._primaries:
            return self._unknown
        for slot in self._primaries:
            node = self._by_slot[slot]
            if node.link is None:
                return f"{node.at[0]}:{node.at[1]}: {node.trouble or 'not connected yet'}"
        return f"slot {min(self._moving)} is being moved to another node" if self._moving else ""

    def primaries(self) -> list[int]:
        """One slot for each known primary node."""
        return list(self._primaries)

    def time_ms(self, slot: int) -> int:
        """What the clock of a slot's node shows now, at least (server_clock.py); 0 while it is not known."""
        link = self._by_slot[slot].link
        return 0 if link is None else link.clock.at_least_ms(monotonic())

    def ask_time(self, slot: int) -> None:
        """Look at the clock of a slot's node: it may have been set."""
        self._by_slot[slot].ask_time()

    def send(self, slot: int, on_reply: OnReply, *command: bytes | int | str) -> None:
        """Send a command to the node of a slot; never calls back before it returned."""
        link = self._by_slot[slot].link
        if link is None:
            self._not_sent(on_reply)
        else:
            link.request(on_reply, command)

    def has_room(self, slot: int, size: int) -> bool:
        """Whether a command of so many bytes would not fail with `NoRoom`; it may fail for another reason."""
        link = self._by_slot[slot].link
        return link is None or link.has_room(size)

    def send_all(self, slot: int, on_reply: OnReply, packed: list[bytes], size: int) -> None:
        """Send many packed commands (link.pack_rest), of so many bytes together; `on_reply` gets the reply of each, in
        their order.
        """
        link = self._by_slot[slot].link
        if link is None:
            for _ in packed:
                self._not_sent(on_reply)
        else:
            link.request_all(on_reply, packed, size)

    def run(
        self,
        script: Script,
        slot: int,
        keys: Sequence[bytes],
        args: Sequence[bytes | int | str],
        on_reply: OnReply,
    ) -> None:
        """Run a script on the node of a slot; never calls back before it returned."""
        self._scripts[script.sha] = self._scripts[script.source] = script
        if slot in self._moving and not script.names_all_keys:
            self._not_sent(on_reply)
            return
        self.send(slot, on_reply, b"EVALSHA", script.sha, len(keys), *keys, *args)

    async def ask(self, slot: int, *command: bytes | int | str) -> Any:
        """Send a command and wait for its reply; raises RedisFailure."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(slot, partial(_settle, reply), *command)
        return await reply

    async def ask_script(
        self, script: Script, slot: int, keys: Sequence[bytes], args: Sequence[bytes | int | str]
    ) -> Any:
        """Run a script and wait for its reply; raises RedisFailure."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.run(script, slot, keys, args, partial(_settle, reply))
        return await reply

    def reader(
        self,
        slot: int,
        *,
        connected: Callable[[Link], None],
        received: OnReply,
        lost: Callable[[], None] = do_nothing,
    ) -> Reader:
        """A connection of its own to the node of a slot, made again for ever.

        After each connect, `connected` may send on the link; every reply and push goes to `received`; `lost` follows
        when the connection is gone.
        """
        reader = Reader(self, self._connector, slot, connected, received, lost)
        self._readers = [*(other for other in self._readers if not other.is_closed), reader]
        return reader

    async def close(self) -> None:
        """Wait a moment for replies that are due, then close everything."""
        self._is_closed = True
        self._moving_looks.stop()
        nodes = [*self._nodes.values(), *self._leaving]
        for _ in range(CLOSE_LOOKS):
            if not any(node.pending for node in nodes):
                break
            await asyncio.sleep(self._timeout_s / CLOSE_LOOKS)
        self._by_slot = [self._nowhere] * SLOTS
        if self._watch is not None:
            self._look_again.set()  # a cancellation can be lost in what it waits for; then this ends it
            if self._is_looking:  # redis-py loses a connection if it is cancelled while it makes one
                await asyncio.wait([self._watch], timeout=self._look_timeout_s)
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for reader in self._readers:
            reader.close()
            await reader.wait_closed()
        for node in nodes:
            await node.close()
        # Transports let go of their sockets in the turn after.
        await asyncio.sleep(0)

    # What nodes and readers call.

    def node_of(self, slot: int) -> Node:
        """The node that has a slot now."""
        return self._by_slot[slot]

    def node_changed(self, is_trouble: bool) -> None:
        """A node came up or went down, or still is not up."""
        if is_trouble:
            self._look_again.set()
        if not self._is_closed:
            self._change.notify()

    def refused(self, node: Node, link: CommandLink, entry: SentCommand, refusal: Refused) -> None:
        """See to the caller of a command that got an error."""
        on_reply, command, _, hops, asking = entry
        code = refusal.code
        if command is PACKED:
            if code in ("MOVED", "ASK"):
                self._look_again.set()
        elif self._needs_whole_slot(command) and (code == "ASK" or _KEY_HAS_LEFT in str(refusal)):
            self._moves(command)
        elif hops < HOPS_MAX:
            if code == "NOSCRIPT" and command[0] == b"EVALSHA":
                script = self._scripts.get(command[1]) if isinstance(command[1], bytes) else None
                if script is not None and link.is_open:
                    ask_and_request(link, on_reply, (b"EVAL", script.source, *command[2:]), hops + 1, asking)
                    return
            elif code in ("MOVED", "ASK") and self._redirect(node, entry, refusal):
                return
        if code in _UNUSABLE and "slot not served" not in str(refusal):
            node.retire(str(refusal))
        elif code in ("TRYAGAIN", "CLUSTERDOWN"):
            self._look_again.set()
        on_reply(refusal)

    def _redirect(self, node: Node, entry: SentCommand, refusal: Refused) -> bool:
        target = parse_redirection(str(refusal), node.at[0])
        if target is None or self._address.kind != "cluster" or self._is_closed:
            return False
        slot, at = target
        other = self._nodes.get(at)
        if other is None:
            if len(self._nodes) >= NODES_MAX:
                return False
            other = self._add(at)
        other.is_named = True
        if refusal.code == "MOVED":
            self._by_slot[slot] = other
            self._look_again.set()
        other.redirect(entry[0], entry[1], entry[3] + 1, refusal.code == "ASK")
        return True

    # Slots that move.

    def _needs_whole_slot(self, command: Command) -> bool:
        """Whether a command uses keys that it does not name."""
        if command[0] not in (b"EVALSHA", b"EVAL"):
            return False
        script = self._scripts.get(command[1]) if isinstance(command[1], bytes) else None
        return script is None or not script.names_all_keys

    def _moves(self, command: Command) -> None:
        """The keys of a script are on two nodes: from now on its slot stands still."""
        key = command[3]
        if isinstance(key, bytes) and not self._is_closed:
            self._moving[key_slot(key)] = key + NO_SUCH_KEY
            self._moving_looks.start()
            self.node_changed(True)

    def _look_at_moving(self) -> None:
        for slot, key in self._moving.items():
            link = self._by_slot[slot].link
            if link is not None:
                # The redirection is the answer: the command does not follow it.
                link.request(partial(self._looked_at_moving, slot), (b"TYPE", key), HOPS_MAX)

    def _looked_at_moving(self, slot: int, reply: Any) -> None:
        is_unknown = isinstance(reply, RedisFailure) and not isinstance(reply, Refused)
        if is_unknown or (isinstance(reply, Refused) and reply.code in ("ASK", "TRYAGAIN")) or self._is_closed:
            return
        self._moving.pop(slot, None)
        if not self._moving:
            self._moving_looks.stop()
        self.node_changed(isinstance(reply, Refused))  # MOVED: where to, the topology tells

    # Topology.

    async def _keep_looking(self) -> None:
        pause = Pause()
        async with topology_of(self._address, self._look_timeout_s) as look:
            while not self._is_closed:
                self._look_again.clear()
                self._is_looking = True
                try:
                    # At first the nodes that work are asked.
                    self._apply(await look([at for at, node in self._nodes.items() if node.link]))
                except UnknownTopologyError as failure:
                    self._unknown = str(failure)
                except Exception as failure:  # whatever it is, to stop looking would be worse
                    self._unknown = f"the servers could not be asked where the slots are ({type(failure).__name__})"
                self._is_looking = False
                if self.trouble and not self._is_closed:
                    await asyncio.sleep(pause.next_s())
                    continue
                pause.reset()
                try:
                    await asyncio.wait_for(self._look_again.wait(), LOOK_EVERY_S)
                except TimeoutError:
                    continue
                # Many commands are redirected at once when slots move: one look is enough for them all.
                await asyncio.sleep(pause.next_s())

    def _apply(self, ranges: list[SlotRange]) -> None:
        by_slot = [self._nowhere] * SLOTS
        primaries: dict[HostPort, int] = {}
        for part in ranges:
            node = self._nodes.get(part.at) or self._add(part.at)
            by_slot[part.first : part.last + 1] = [node] * (part.last + 1 - part.first)
            primaries.setdefault(part.at, part.first)
        is_same = by_slot == self._by_slot
        self._by_slot, self._primaries = by_slot, list(primaries.values())
        for at, node in list(self._nodes.items()):
            if at not in primaries and not node.is_named:
                del self._nodes[at]
                self._leaving = [*(other for other in self._leaving if other.pending), node]
                node.leave()
            node.is_named = False
        for reader in self._readers:
            reader.follow()
        if not is_same:
            self.node_changed(False)

    def _add(self, at: HostPort) -> Node:
        node = self._nodes[at] = Node(self, self._connector, at)
        node.start()
        return node

    def _tell_change(self) -> None:
        if not self._is_closed:
            self._changed()

    def _not_sent(self, on_reply: OnReply) -> None:
        reason = "the connections to Redis are closed" if self._is_closed else "Redis is not connected"
        asyncio.get_running_loop().call_soon(on_reply, NotSent(reason))


def parse_redirection(text: str, asked: str) -> tuple[int, HostPort] | None:
    """Slot and place of `MOVED 3999 host:port` or `ASK …`; without a host, the one that was `asked`."""
    words = text.split(" ")
    if len(words) != 3:
        return None
    host, _, port = words[2].rpartition(":")
    if not (words[1].isdecimal() and port.isdecimal()) or int(words[1]) >= SLOTS:
        return None
    return int(words[1]), (host or asked, int(port))


def _settle(future: asyncio.Future[Any], reply: Any) -> None:
    if future.done():  # the caller has left
        return
    if isinstance(reply, RedisFailure):
        future.set_exception(reply)
    else:
        future.set_result(reply)
