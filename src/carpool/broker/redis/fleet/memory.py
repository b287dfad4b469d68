"""How full Redis is. New work is refused while there is room left for the results of what was accepted.

At its `maxmemory` Redis refuses writes, results among them; so gateways refuse work at a share of it.
"""

from functools import partial
from typing import Any

from carpool.broker.redis.client.nodes import Nodes
from carpool.core.timers import Every

SHARE_MAX = 0.8
# Before that dead letters make room.
LETTERS_SHARE_MAX = 0.75
# What letters may have in any case: a flood of them passes from one share to the other between two looks.
LETTERS_OWN_SHARE_MAX = 0.5


class MemoryWatch:
    """Looks at the memory of every primary from time to time."""

    def __init__(self, nodes: Nodes, *, share: float = SHARE_MAX, interval_s: float = 0.5) -> None:
        self._nodes = nodes
        self._share = share
        self._every = Every(interval_s, self._look)
        # Of the fullest primary: used memory by what it may use; 0.0 where nothing limits it.
        self.fraction = 0.0
        # Bytes in use, over all primaries.
        self.used_bytes = 0
        # Bytes that they may use, together; 0 where nothing limits one of them.
        self.limit_bytes = 0
        # Primaries that have not answered in this round.
        self._missing = 0
        # By primary: bytes in use, and those that it may use (0: no limit), as it last said.
        self._facts: dict[int, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"<MemoryWatch {self.fraction:.0%} of the memory, {self.used_bytes} bytes>"

    @property
    def is_full(self) -> bool:
        """Whether some primary uses more than the share of its memory."""
        return self.fraction > self._share

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
        if self._missing:
            return  # replies have a time limit: they are near
        slots = self._nodes.primaries()
        self._missing = len(slots)
        for slot in slots:
            self._nodes.send(slot, partial(self._told, slot, slots), b"INFO", b"memory")

    def _told(self, slot: int, slots: list[int], reply: Any) -> None:
        self._missing -= 1
        facts = memory_facts(reply) if isinstance(reply, bytes) else None
        if facts is not None:
            self._facts[slot] = facts
        if self._missing or not self._facts:
            return
        # A primary that does not answer is as full as it was; so is one that was replaced, until its successor answers.
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
