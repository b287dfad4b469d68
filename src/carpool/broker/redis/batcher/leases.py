"""What a batcher took and answers for: leases, and how they are kept until their outcomes are acknowledged.

A lease is for an entry, not for a batcher: what was taken by a reply that never arrived is nobody's, and is claimed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from carpool.broker.redis.batcher.history import History
from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import Header
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.steps import Steps
from carpool.core.clock import Clock
from carpool.core.request import Request

IDS_A_CALL_MAX = 1000
# Of an entry that no other batcher had.
NEW = History()


class Haul(msgspec.Struct, eq=False):
    """Entries of one stream that this batcher took together, and answers for until they are acknowledged."""

    shard: Shard
    field: bytes
    # When they were taken, and when the leases were last known to be ours.
    taken: float
    leased: float
    # By entry id: what is not acknowledged yet.
    open: dict[bytes, Request]


class Lease(msgspec.Struct, eq=False, gc=False):
    """What a staged request remembers: its entry, and who waits."""

    haul: Haul
    entry_id: bytes
    header: Header
    history: History = NEW
    # It was taken to try an endpoint that failed.
    is_probe: bool = False


# Stands for a header where none is needed.
NO_HEADER = Header(0, b"", "", b"", b"", 0, False, 0)


class Leases:
    """All that one batcher has taken and not acknowledged."""

    def __init__(
        self, steps: Steps, consumer: bytes, every_s: float, lost: Callable[[Request], None], clock: Clock
    ) -> None:
        self._steps = steps
        self._consumer = consumer
        self._every_s = every_s
        # Is told of a request whose entry another batcher has by now.
        self._lost = lost
        self._clock = clock
        self._hauls: set[Haul] = set()

    def __len__(self) -> int:
        """Entries that are not acknowledged."""
        return sum(len(haul.open) for haul in self._hauls)

    def add(self, haul: Haul) -> None:
        """Keep the leases of a haul from now on."""
        self._hauls.add(haul)

    def open_ids(self, shard: Shard, field: bytes) -> set[bytes]:
        """What this batcher has of a stream and has not acknowledged yet."""
        return {
            entry_id for haul in self._hauls if haul.shard is shard and haul.field == field for entry_id in haul.open
        }

    def find(self, shard: Shard, field: bytes, entry_id: bytes) -> list[Request]:
        """The requests of an entry that this batcher has: several, if Redis forgot that it was taken."""
        return [
            haul.open[entry_id]
            for haul in self._hauls
            if haul.shard is shard and haul.field == field and entry_id in haul.open
        ]

    def renew(self) -> None:
        """Keep what is staged, running or not acknowledged yet; to be called every `every_s`."""
        now = self._clock()
        due: defaultdict[int, list[Lease]] = defaultdict(list)
        self._hauls = {haul for haul in self._hauls if haul.open}
        for haul in self._hauls:
            if haul.leased < now - self._every_s / 2:
                due[haul.shard.number] += [Lease(haul, entry_id, NO_HEADER) for entry_id in haul.open]
        for number, leases in due.items():
            shard = self._steps.keys.shards[number]
            for part in parts_of(leases):
                self._steps.renew(shard, self._consumer, by_stream(part), partial(self._renewed, part, now))

    def _renewed(self, leases: list[Lease], asked: float, lost: set[tuple[bytes, bytes]] | RedisFailure) -> None:
        if isinstance(lost, RedisFailure):
            return
        for lease in leases:
            haul = lease.haul
            haul.leased = max(haul.leased, asked)
            if (haul.field, lease.entry_id) in lost:
                request = haul.open.pop(lease.entry_id, None)
                if request is not None:
                    self._lost(request)


def by_stream(leases: Sequence[Lease]) -> dict[bytes, list[bytes]]:
    """The ids of their entries, by stream."""
    ids: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for lease in leases:
        ids[lease.haul.field].append(lease.entry_id)
    return ids


def carried_by_stream(leases: Sequence[Lease]) -> dict[bytes, list[tuple[bytes, int]]]:
    """The ids of their entries, by stream, each with what is carried along."""
    entries: defaultdict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    for lease in leases:
        entries[lease.haul.field].append((lease.entry_id, lease.history.carried))
    return entries


def parts_of(leases: list[Lease]) -> list[list[Lease]]:
    """No call carries more ids than Lua can unpack, or than Redis should spend on one call."""
    return [leases[start : start + IDS_A_CALL_MAX] for start in range(0, len(leases), IDS_A_CALL_MAX)]
