"""What a batcher took and answers for: leases, and how they are kept until their outcomes are acknowledged.

A lease is for an entry, not for a batcher: no batcher renews what a lost reply brought, so it is claimed. What batchers
know of an entry that others had before them:

1. Redis counts how often an entry was delivered. A batcher that gives one back sets that count, and carries along in
   it, above the deliveries: with how many batchers it failed, how often it was given back, whether it was a probe,
   and whether its input was blamed. So nothing is written for entries that are served at once, and replicas know it.
2. An entry goes back to the queue twice at most. So two batchers that are both sick cannot hand it to each other for
   ever.
3. An entry is a probe once: batchers whose endpoints failed must not try them with the same request one after another.
4. An entry that failed with two batchers was not alone in its calls, as a rule: one of its company may have killed both
   endpoints. From then on it is sent alone.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import Header
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import Clock
from carpool.core.defaults import do_nothing
from carpool.core.request import Request

IDS_A_CALL_MAX = 1000
# As in scripts/common.lua.
CARRIED_FROM = 1024
_FAILURES_MAX, _RETURNS_MAX = 7, 3
_RETURN, _PROBE, _BLAMED = 8, 32, 64
# Rules 2 and 4.
RETURNS_MAX = 2
ALONE_FROM = 2


class History(NamedTuple):
    """One entry, before this batcher sends it."""

    # How often it was delivered; each but the last time its batcher died.
    deliveries: int = 1
    # Batchers that sent it and got no answer for it.
    failures: int = 0
    returns: int = 0
    was_probe: bool = False
    # A batcher would have blamed its input, and asks for another batcher's verdict.
    was_blamed: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it has a batch of its own: rule 4."""
        return self.failures >= ALONE_FROM

    @property
    def may_go_back(self) -> bool:
        """Rule 2."""
        return self.returns < RETURNS_MAX

    @property
    def carried(self) -> int:
        """As scripts/release.lua wants it."""
        failures, returns = min(self.failures, _FAILURES_MAX), min(self.returns, _RETURNS_MAX)
        return failures + _RETURN * returns + _PROBE * self.was_probe + _BLAMED * self.was_blamed

    def given_back(self, *, failed: bool, was_probe: bool, is_alone: bool = False) -> "History":
        """The history of an entry that goes back. `failed`: it was sent, and not answered; `is_alone`: it was sent
        alone, too, and is to be so again.
        """
        failures = self.failures + failed
        if is_alone:
            failures = max(failures, ALONE_FROM)
        was_probe, was_blamed = self.was_probe or was_probe, self.was_blamed or is_alone
        return History(self.deliveries, failures, self.returns + 1, was_probe, was_blamed)


def history_of(count: int) -> History:
    """What Redis's count of deliveries says of an entry."""
    carried, deliveries = divmod(count, CARRIED_FROM)
    was_probe, was_blamed = carried % _BLAMED >= _PROBE, carried >= _BLAMED
    return History(deliveries, carried % _RETURN, carried % _PROBE // _RETURN, was_probe, was_blamed)


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


class BatchersElsewhere:
    """The other batchers of one model (core.ports.OtherBatchers)."""

    def __init__(self, are_well: Callable[[], bool]) -> None:
        # Whether one of them has an endpoint that works, by its heartbeat.
        self.are_well = are_well

    def may_serve(self, request: Request, *, for_verdict: bool = False) -> bool:
        """Whether a request may go back to the queue. For a verdict: no other batcher has blamed its input yet."""
        lease = request.ticket
        if (
            not isinstance(lease, EntryLease)
            or not lease.history.may_go_back
            or (for_verdict and lease.history.was_blamed)
        ):
            return False
        return self.are_well()

    def had(self, request: Request) -> bool:
        """Whether another batcher has given a request back."""
        lease = request.ticket
        return isinstance(lease, EntryLease) and lease.history.returns > 0
