"""The last second of each process of a fleet, in Redis only while an operator looks: one hash, which soon expires.

The process whose page is open reads what the others wrote, and does not trust it: it leaves out what is malformed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.view import FleetView
from carpool.broker.redis.keys import Keys
from carpool.core.live import LivePart

# Beyond these nothing is written or read.
PART_BYTES_MAX = 256 * 1024
PARTS_MAX = 64
# How long it is kept after the last write.
KEPT_MS = 5000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LivePart).decode


class LiveParts:
    """The way to the parts of other processes (composition.live.OtherParts)."""

    def __init__(self, nodes: Nodes, keys: Keys, name: str, view: Callable[[], FleetView]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._name = name
        self._view = view
        self._parts: dict[str, LivePart] = {}
        self._is_asking = False

    def publish(self, part: LivePart) -> None:
        """Let the others have this one. If Redis is away, they miss a second."""
        encoded = _encode(part)
        if len(encoded) > PART_BYTES_MAX:
            encoded = _encode(msgspec.structs.replace(part, batches=()))
        slot, key = self._keys.fleet_slot, self._keys.live
        self._nodes.send(slot, _nothing, b"HSET", key, self._name.encode(), encoded)
        self._nodes.send(slot, _nothing, b"PEXPIRE", key, b"%d" % KEPT_MS)

    def latest(self) -> Sequence[LivePart]:
        """The last part of each live process, as Redis last sent it; asks for the next ones."""
        self._ask()
        live = self._view().live_names()
        return [part for name, part in self._parts.items() if name in live]

    def members(self) -> int:
        """Processes that live."""
        return max(1, len(self._view().live_names()))

    def _ask(self) -> None:
        others = sorted(self._view().live_names() - {self._name})[:PARTS_MAX]
        if others and not self._is_asking:
            self._is_asking = True
            names = [name.encode() for name in others]
            self._nodes.send(self._keys.fleet_slot, self._told, b"HMGET", self._keys.live, *names)

    def _told(self, reply: Any) -> None:
        self._is_asking = False
        if not isinstance(reply, list):
            return
        parts = [read_part(each) for each in reply]
        self._parts = {part.name: part for part in parts if part is not None}


def read_part(value: Any) -> LivePart | None:
    """A part that another process wrote; None if there is none, or if it is malformed."""
    if not isinstance(value, bytes) or len(value) > PART_BYTES_MAX:
        return None
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _nothing(reply: Any) -> None:
    """What Redis says to this does not matter."""
