"""How many requests wait in Redis: asked once a second, one small command a shard."""

import asyncio
from functools import partial
from typing import Any

from carpool.broker.redis.keys import Keys, Shard
from carpool.broker.redis.nodes import Nodes

INTERVAL_S = 1.0


class DepthWatch:
    """Knows how many entries nobody took yet, over all shards."""

    def __init__(self, nodes: Nodes, keys: Keys) -> None:
        self._nodes = nodes
        self._keys = keys
        self._unread = [0] * len(keys.shards)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Ask now, and from now on."""
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.start)
        for shard in self._keys.shards:
            self._nodes.send(shard.slot, partial(self._told, shard), b"HGET", shard.counts, b"unread")

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def unread(self) -> int:
        """Entries that nobody took yet."""
        return sum(self._unread)

    def _told(self, shard: Shard, reply: Any) -> None:
        if reply is None:
            self._unread[shard.number] = 0
        elif isinstance(reply, bytes):
            self._unread[shard.number] = max(0, int(reply))
