"""How full Redis is, and how much waits and is kept in it.

At its `maxmemory` Redis refuses writes, results among them; so gateways refuse work at a share of it: there is room
left for the results of what was accepted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.keys import Keys, Shard, tier_of
from carpool.core.timers import Every

SHARE_MAX = 0.8
# Before that dead letters make room.
LETTERS_SHARE_MAX = 0.75
# What letters may have in any case: a flood of them passes from one share to the other between two looks.
LETTERS_OWN_SHARE_MAX = 0.5


class MemoryWatch:
    """Looks at the memory of every primary from time to time."""

    def __init__(self, nodes: Nodes, *, interval_s: float = 0.5) -> None:
        self._nodes = nodes
        self._every = Every(interval_s, self._look)
        # Of the fullest primary: used memory by what it may use; 0.0 where nothing limits it.
        self.fraction = 0.0
        # Bytes in use, over all primaries.
        self.used_bytes = 0
        # Bytes that they may use, together; 0 where nothing limits one of them.
        self.limit_bytes = 0
        # By primary: bytes in use, and those that it may use (0: no limit), as it last said.
        self._facts: dict[int, tuple[int, int]] = {}

    @property
    def is_full(self) -> bool:
        """Whether some primary uses more than the share of its memory."""
        return self.fraction > SHARE_MAX

    @property
    def is_short(self) -> bool:
        """Whether some primary uses so much that dead letters are to go."""
        return self.fraction > LETTERS_SHARE_MAX

    def letter_bytes_max(self, shards: int) -> int | None:
        """Bytes that dead letters may have in each shard; None where nothing limits the memory."""
        return round(LETTERS_OWN_SHARE_MAX * self.limit_bytes / shards) if self.limit_bytes else None

    def start(self) -> None:
        """Look now, and again after each interval."""
        self._every.start_now()

    def close(self) -> None:
        """Look no more."""
        self._every.stop()

    def _look(self) -> None:
        for slot in self._nodes.primaries():
            self._nodes.send(slot, partial(self._told, slot), b"INFO", b"memory")

    def _told(self, slot: int, reply: Any) -> None:
        facts = memory_facts(reply) if isinstance(reply, bytes) else None
        if facts is None:
            return
        self._facts[slot] = facts
        # A primary that does not answer is as full as it was; so is one that was replaced, until its successor answers.
        slots = self._nodes.primaries()
        if all(slot in self._facts for slot in slots):
            self._facts = {slot: self._facts[slot] for slot in slots}
            limits = [limit for _, limit in self._facts.values()]
            self.limit_bytes = sum(limits) if all(limits) else 0
        self.fraction = max(memory_fraction(*facts) for facts in self._facts.values())
        self.used_bytes = sum(used for used, _ in self._facts.values())


def memory_facts(info: bytes) -> tuple[int, int] | None:
    """Bytes in use and `maxmemory` (0: no limit), from `INFO memory`; None where it does not say."""
    found: dict[bytes, int] = {}
    for line in info.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name in (b"used_memory", b"maxmemory") and value.isdigit():
            found[name] = int(value)
    used = found.get(b"used_memory")
    return None if used is None else (used, found.get(b"maxmemory", 0))


def memory_fraction(used: int, limit: int) -> float:
    """The share of the limit in use; 0.0 where there is none."""
    return used / limit if limit else 0.0


# Asked for once a second, one small command a shard.
DEPTH_S = 1.0
COUNTS = ("unread", "input_bytes", "result_bytes", "letter_bytes", "cache_bytes", "hooks", "hook_bytes", "read_bytes")


class DepthWatch:
    """Knows the counts of all shards, added up."""

    def __init__(self, nodes: Nodes, keys: Keys, lines: Sequence[bytes] = ()) -> None:
        self._nodes = nodes
        self._keys = keys
        # The fields of the entries of each tier, in all its lines: requests and tasks.
        self._lines = [(tier_of(line), f"unread:{line.decode()}") for line in lines]
        self._fields = (*COUNTS, *(field for _, field in self._lines))
        self._counts = [dict.fromkeys(self._fields, 0) for _ in keys.shards]
        self._every = Every(DEPTH_S, self._ask)

    def start(self) -> None:
        """Ask now, and from now on."""
        self._every.start_now()

    def close(self) -> None:
        """Ask no more."""
        self._every.stop()

    def _ask(self) -> None:
        for shard in self._keys.shards:
            self._nodes.send(shard.slot, partial(self._told, shard), b"HMGET", shard.counts, *self._fields)

    def _told(self, shard: Shard, reply: Any) -> None:
        if isinstance(reply, list):
            counts = [max(0, int(count or 0)) for count in reply]
            self._counts[shard.number] = dict(zip(self._fields, counts, strict=True))

    def total(self, field: str) -> int:
        """One of COUNTS, over all shards."""
        return sum(counts[field] for counts in self._counts)

    def unread(self) -> int:
        """Entries that no batcher took yet."""
        return self.total("unread")

    def unread_of_tier(self, tier: int) -> int:
        """Such entries of one tier."""
        return sum(self.total(field) for each, field in self._lines if each == tier)

    def times_of(self, shard: Shard) -> float:
        """How many times as much waits in all shards together as in this one; 1 where that is not known."""
        own = self._counts[shard.number]["unread"]
        return self.unread() / own if own else 1.0

    def webhooks(self) -> tuple[int, int]:
        """Outcomes that wait to be sent, and what they count in bytes."""
        return self.total("hooks"), self.total("hook_bytes")

    def shards_with_webhooks(self) -> list[Shard]:
        """The shards where some wait."""
        return [shard for shard in self._keys.shards if self._counts[shard.number]["hooks"]]
