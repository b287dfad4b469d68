"""The registry: each process says twice a second that it lives, and learns in the same step who else does.

One script call writes this process's heartbeat, forgets those long silent and returns the others. Redis's clock stamps
them, so a process that hangs, or whose machine is cut off, is offline for all others once its stamp is old.
"""

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import msgspec

from carpool.broker.redis.client.link import RedisFailure, ignore
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.view import BEAT_BYTES_MAX, FleetView, Heartbeat, encode_heartbeat, read_view
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.scripts import HEARTBEAT
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing
from carpool.core.live import LivePart
from carpool.core.names import Role
from carpool.core.timers import Every

logger = logging.getLogger("carpool")

# A process that fell silent is shown as offline for so long.
KEPT_MS = 60_000
# Room for the stamp before a heartbeat.
VALUE_BYTES_MAX = BEAT_BYTES_MAX + 32
# Until the first answer, and after each failure, the next attempt comes sooner.
RETRY_S = 0.1
# What a process publishes while an operator looks: most bytes, most processes, and how long it is kept.
PART_BYTES_MAX = 256 * 1024
PARTS_MAX = 64
PARTS_KEPT_MS = 5000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LivePart).decode


class Registry:
    """This process's heartbeat, and its view of the fleet."""

    def __init__(
        self,
        nodes: Nodes,
        keys: Keys,
        *,
        name: bytes,
        role: Role,
        describe: Callable[[], Heartbeat],
        interval_s: float = 0.5,
        stale_s: float = 1.5,
        clock: Clock = monotonic,
        heard: Callable[[FleetView], None] = do_nothing,
    ) -> None:
        self._nodes = nodes
        self._keys = keys
        self._name = name
        self._role = role
        # What this process says of itself.
        self._describe = describe
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._clock = clock
        # Called with each view.
        self._heard_view = heard
        # The last view that Redis sent. Empty and long out of date before the first one.
        self.view = FleetView(-inf, stale_s, (), (), 0)
        self.failures = 0
        self._every = Every(interval_s, self._beat)
        self._is_asking = False
        # A heartbeat was due while an answer was out.
        self._again = False
        self._left = False

    def has_heard(self) -> bool:
        """Whether there was a view: before that nothing is known of the others."""
        return self.view.seen_at > -inf

    def is_fresh(self) -> bool:
        """Whether the view is of now."""
        return self.view.is_fresh(self._clock())

    def start(self) -> None:
        """Say that this process lives, from now on."""
        self.heartbeat()

    def heartbeat(self) -> None:
        """Say that at once; for changes that others should see before the next heartbeat."""
        if not self._left:
            self._every.start_now()

    async def leave(self) -> None:
        """Be gone for the others at once. If Redis does not answer, they find out by the silence."""
        self.close()
        try:
            for key in (self._keys.gateways, self._keys.batchers):
                await self._nodes.ask(self._keys.fleet_slot, b"HDEL", key, self._name)
        except RedisFailure as failure:
            logger.warning("could not leave the registry: %s", type(failure).__name__)

    def close(self) -> None:
        """Fall silent."""
        self._left = True
        self._every.stop()

    def _beat(self) -> None:
        if self._is_asking:
            self._again = True  # the answer, or word that none comes, is near: replies have a time limit
            return
        self._again = False
        said, keys = self._describe(), self._keys
        as_gateway = encode_heartbeat(said, with_models=False) if self._role != "batcher" else b""
        as_batcher = encode_heartbeat(said, with_models=True) if self._role != "gateway" else b""
        about = (self._name, as_gateway, as_batcher, b"", KEPT_MS, VALUE_BYTES_MAX)
        self._is_asking = True  # after all that could fail: nobody else would set it back
        self._nodes.run(HEARTBEAT, keys.fleet_slot, [keys.gateways, keys.batchers], about, self._heard)

    def _heard(self, reply: Any) -> None:
        self._is_asking = False
        if self._left:
            return
        try:
            if isinstance(reply, RedisFailure):
                raise reply
            self.view = read_view(reply, seen_at=self._clock(), stale_s=self._stale_s)
        except (RedisFailure, ValueError):
            self.failures += 1
            self._every.next_in(min(RETRY_S, self._interval_s))
            return
        if self._again:
            self.heartbeat()
        self._heard_view(self.view)


class LiveParts:
    """The last second of each process of the fleet (composition.live.OtherParts), in Redis only while an operator
    looks: one hash, which soon expires.
    """

    def __init__(self, nodes: Nodes, keys: Keys, name: str, view: Callable[[], FleetView]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._name = name
        self._view = view
        self._parts: dict[str, LivePart] = {}

    def publish(self, part: LivePart) -> None:
        """Let the others have this one. If Redis is away, they miss a second."""
        encoded = _encode(part)
        if len(encoded) > PART_BYTES_MAX:
            encoded = _encode(msgspec.structs.replace(part, batches=()))
        slot, key = self._keys.fleet_slot, self._keys.live
        self._nodes.send(slot, ignore, b"HSET", key, self._name, encoded)
        self._nodes.send(slot, ignore, b"PEXPIRE", key, PARTS_KEPT_MS)

    def latest(self) -> Sequence[LivePart]:
        """The last part of each live process, as Redis last sent it; asks for the next ones."""
        live = self._view().live_names()
        if others := sorted(live - {self._name})[:PARTS_MAX]:
            self._nodes.send(self._keys.fleet_slot, self._told, b"HMGET", self._keys.live, *others)
        return [part for name, part in self._parts.items() if name in live]

    def members(self) -> int:
        """Processes that live."""
        return max(1, len(self._view().live_names()))

    def _told(self, reply: Any) -> None:
        parts = [read_part(each) for each in reply] if isinstance(reply, list) else []
        self._parts = {part.name: part for part in parts if part is not None}


def read_part(value: bytes | None) -> LivePart | None:
    """A part that another process wrote, maybe of another version; None if there is none, or if it is malformed."""
    try:
        return None if value is None else _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
