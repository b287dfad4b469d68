"""What a batcher took and answers for: leases, and how they are kept until their outcomes are acknowledged.

A lease is for an entry, not for a batcher: no batcher renews what a lost reply brought, so it is claimed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from carpool.broker.redis.batcher.history import History
from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import Header
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import Clock
from carpool.core.defaults import do_nothing
from carpool.core.request import Request

IDS_A_CALL_MAX = 1000
# Of an entry that no other batcher had.
NEW = History()


class LeasedEntries(msgspec.Struct, eq=False):
    """Entries of one stream that this batcher took together, and answers for until they are acknowledged."""

    shard: Shard
    field: bytes
    # When they were taken, and when the leases were last known to be ours.
    taken: float
    leased: float
    # By entry id: what is not acknowledged yet.
    open: dict[bytes, Request]
    # Called when the last of them is acknowledged.
    are_done_with: Callable[["LeasedEntries"], None] = do_nothing


class EntryLease(msgspec.Struct, eq=False, gc=False):
    """What a staged request remembers: its entry, and the gateway that waits."""

    leased: LeasedEntries
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
        self, steps: RedisOps, consumer: bytes, every_s: float, lost: Callable[[Request], None], clock: Clock
    ) -> None:
        self._steps = steps
        self._consumer = consumer
        self._every_s = every_s
        # Called with a request whose entry another batcher has by now.
        self._lost = lost
        self._clock = clock
        self._leased_sets: set[LeasedEntries] = set()

    def __len__(self) -> int:
        """Entries that are not acknowledged."""
        return sum(len(leased.open) for leased in self._leased_sets)

    def add(self, leased: LeasedEntries) -> None:
        """Keep the leases of these entries from now on."""
        self._leased_sets.add(leased)

    def open_ids(self, shard: Shard, field: bytes) -> set[bytes]:
        """What this batcher has of a stream and has not acknowledged yet."""
        return {
            entry_id
            for leased in self._leased_sets
            if leased.shard is shard and leased.field == field
            for entry_id in leased.open
        }

    def find(self, shard: Shard, field: bytes, entry_id: bytes) -> list[Request]:
        """The requests of an entry that this batcher has: several, if Redis forgot that it was taken."""
        return [
            leased.open[entry_id]
            for leased in self._leased_sets
            if leased.shard is shard and leased.field == field and entry_id in leased.open
        ]

    def renew(self) -> None:
        """Keep what is staged, running or not acknowledged yet; to be called every `every_s`."""
        now = self._clock()
        due: defaultdict[int, list[EntryLease]] = defaultdict(list)
        self._leased_sets = {leased for leased in self._leased_sets if leased.open}
        for leased in self._leased_sets:
            if leased.leased < now - self._every_s / 2:
                due[leased.shard.number] += [EntryLease(leased, entry_id, NO_HEADER) for entry_id in leased.open]
        for number, leases in due.items():
            shard = self._steps.keys.shards[number]
            for part in parts_of(leases):
                self._steps.renew(shard, self._consumer, by_stream(part), partial(self._renewed, part, now))

    def _renewed(self, leases: list[EntryLease], asked: float, lost: set[tuple[bytes, bytes]] | RedisFailure) -> None:
        if isinstance(lost, RedisFailure):
            return
        for lease in leases:
            leased = lease.leased
            leased.leased = max(leased.leased, asked)
            if (leased.field, lease.entry_id) in lost:
                request = leased.open.pop(lease.entry_id, None)
                if request is not None:
                    self._lost(request)


def by_stream(leases: Sequence[EntryLease]) -> dict[bytes, list[bytes]]:
    """The ids of their entries, by stream."""
    ids: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for lease in leases:
        ids[lease.leased.field].append(lease.entry_id)
    return ids


def carried_by_stream(leases: Sequence[EntryLease]) -> dict[bytes, list[tuple[bytes, int]]]:
    """The ids of their entries, by stream, each with what is carried along."""
    entries: defaultdict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    for lease in leases:
        entries[lease.leased.field].append((lease.entry_id, lease.history.carried))
    return entries


def parts_of(leases: list[EntryLease]) -> list[list[EntryLease]]:
    """No call carries more ids than Lua can unpack, or than Redis should spend on one call."""
    return [leases[start : start + IDS_A_CALL_MAX] for start in range(0, len(leases), IDS_A_CALL_MAX)]
