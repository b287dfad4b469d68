"""How full Redis is. New work is refused while there is room left for the results of what was accepted.

At its `maxmemory` Redis refuses writes, results among them; so the door closes at a share of it.
"""

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

    def __init__(self, nodes: Nodes, *, memory_max: int = 0, share: float = SHARE_MAX, interval_s: float = 0.5) -> None:
        self._nodes = nodes
        # Counts where the server has no limit of its own; 0: there is none.
        self._memory_max = memory_max
        self._share = share
        self._every = Every(interval_s, self._look)
        # Of the fullest primary: used memory by what it may use; 0.0 where nothing limits it.
        self.fraction = 0.0
        # Bytes in use, over all primaries.
        self.used_bytes = 0
        # Bytes that they may use, together; 0 where nothing limits one of them.
        self.limit_bytes = 0
        self._round = _Round(0)

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
        if self._round.missing:
            return  # replies have a time limit: they are near
        slots = self._nodes.primaries()
        current = self._round = _Round(len(slots))

        def told(reply: Any) -> None:
            current.missing -= 1
            facts = memory_facts(reply) if isinstance(reply, bytes) else None
            if facts is not None:
                used, limit = facts
                current.used_bytes += used
                limit = limit or self._memory_max
                current.fraction = max(current.fraction, memory_fraction(used, limit))
                current.limits.append(limit)
            # Where none answered, what was known stays.
            if not current.missing and current.limits:
                self.fraction, self.used_bytes = current.fraction, current.used_bytes
                if len(current.limits) == len(slots):  # a part of them would make it smaller than it is
                    self.limit_bytes = sum(current.limits) if all(current.limits) else 0

        for slot in slots:
            self._nodes.send(slot, told, b"INFO", b"memory")


class _Round:
    """One look at every primary."""

    __slots__ = ("fraction", "limits", "missing", "used_bytes")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        # Of those that answered; 0: none.
        self.limits: list[int] = []
        self.fraction = 0.0
        self.used_bytes = 0


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
