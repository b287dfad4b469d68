"""How much waits and is kept in Redis: asked once a second, one small command a shard."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.keys import Keys, Shard, tier_of
from carpool.core.timers import Every

INTERVAL_S = 1.0
COUNTS = (
    b"unread",
    b"input_bytes",
    b"result_bytes",
    b"letter_bytes",
    b"cache_bytes",
    b"hooks",
    b"hook_bytes",
    b"read_bytes",
)


class DepthWatch:
    """Knows the counts of all shards, added up."""

    def __init__(self, nodes: Nodes, keys: Keys, lines: Sequence[bytes] = ()) -> None:
        self._nodes = nodes
        self._keys = keys
        # The tier of each line whose entries are counted by themselves.
        self._tiers = [tier_of(line) for line in lines]
        self._fields = (*COUNTS, *(b"unread:" + line for line in lines))
        self._counts = [[0] * len(self._fields) for _ in keys.shards]
        self._every = Every(INTERVAL_S, self._ask)

    def start(self) -> None:
        """Ask now, and from now on."""
        self._every.start_now()

    def close(self) -> None:
        """Ask no more."""
        self._every.stop()

    def _ask(self) -> None:
        for shard in self._keys.shards:
            self._nodes.send(shard.slot, partial(self._told, shard), b"HMGET", shard.counts, *self._fields)

    def unread(self) -> int:
        """Entries that no batcher took yet."""
        return sum(counts[0] for counts in self._counts)

    def unread_of_tier(self, tier: int) -> int:
        """Such entries of one tier: requests and tasks."""
        lines = [index for index, each in enumerate(self._tiers, len(COUNTS)) if each == tier]
        return sum(counts[index] for counts in self._counts for index in lines)

    def times_of(self, shard: Shard) -> float:
        """How many times as much waits in all shards together as in this one; 1 where that is not known."""
        own = self._counts[shard.number][0]
        return self.unread() / own if own else 1.0

    def task_bytes(self) -> int:
        """Bytes of tasks without a result, and of results."""
        return sum(counts[1] + counts[2] + counts[7] for counts in self._counts)

    def letter_bytes(self) -> int:
        """Bytes of dead letters."""
        return sum(counts[3] for counts in self._counts)

    def cache_bytes(self) -> int:
        """Bytes of results that are kept for requests that are the same."""
        return sum(counts[4] for counts in self._counts)

    def webhooks(self) -> tuple[int, int]:
        """Outcomes that wait to be sent, and what they count in bytes."""
        return sum(counts[5] for counts in self._counts), sum(counts[6] for counts in self._counts)

    def shards_with_webhooks(self) -> list[Shard]:
        """The shards where some wait."""
        return [shard for shard in self._keys.shards if self._counts[shard.number][5]]

    def _told(self, shard: Shard, reply: Any) -> None:
        if isinstance(reply, list):
            self._counts[shard.number] = [max(0, int(count or 0)) for count in reply]
