"""What gateways and batchers say of streams and shards. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

# An entry's id and its fields, as Redis sends them, unchecked.
StreamEntry = Sequence[Any]
# Which suspects of a model may come.
NONE, WITH_COMPANY, ANY = 0, 1, 2
# Which entries that were given back a claim leaves to others.
NOTHING, OWN, FINAL = 0, 1, 2
# What a batcher took is free for others once it was silent for this long; it renews its leases every third of this.
# Shorter is sooner, but a batcher that pauses for longer does work twice.
LEASE_MS = 1500
# When a gateway deletes an entry: no batcher has it; no client waits for it; no batcher has it, or had it before.
NOT_HELD, LEFT, NOT_TAKEN = 0, 1, 2


class Head(msgspec.Struct):
    """A stream with entries that no batcher took."""

    field: bytes
    model: str
    # The virtual deadline of the first of them.
    place: float
    unread: int
    # What its entries may share a batch with, and how they wait.
    lane: bytes = b""
    line: bytes = b""

    def __post_init__(self) -> None:
        self.lane, _, self.line = self.field.partition(b":")
        self.unread = max(self.unread, 1)  # else it would not be known: a count is wrong, and is put right by a look


class ShardSnapshot(NamedTuple):
    """A shard at one moment."""

    # On Redis's clock, when the answer came, at the latest.
    now_ms: int
    # Of the models that were asked for: the best streams of each, by their places.
    heads: list[Head]
    # Whether a lease is over; None if that was not asked.
    has_lapsed: bool | None = None


class StreamEntries(NamedTuple):
    """Entries of one stream that this batcher has now; how often each was delivered, if not for the first time."""

    field: bytes
    entries: Sequence[StreamEntry]
    deliveries: Sequence[int] | None = None


class Taken(NamedTuple):
    """What a batcher got."""

    streams: list[StreamEntries]
    # None: what was read is ours, but nothing else is known, not even the time.
    view: ShardSnapshot | None
    # By a claim: models of which more could be had with more room, and those of which suspects are left.
    more: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()


class QueueStream(msgspec.Struct, frozen=True):
    """What is said of a stream: its name in every shard, its model, what it adds to an entry's time for its place in
    the order, and whether its lane counts against the bound on lanes.
    """

    field: bytes
    model: str
    offset_ms: int
    is_bound: bool

    @property
    def about(self) -> bytes:
        """As scripts read it."""
        return b"%d %b %b" % (self.offset_ms, b"b" if self.is_bound else b"-", self.model.encode())


class Claim(msgspec.Struct):
    """What may be claimed for one model. `suspects`: which of them (suspects.py)."""

    model: str
    batches: int
    largest: int
    suspects: int
    # As in a budget.
    again: dict[bytes, int] = {}
    # What is left to others: NOTHING where no other batcher is well, else OWN, what this batcher gave back itself; or
    # also FINAL, what may not go back again, where no endpoint of this batcher is known to work.
    left: int = 0


class Budget(msgspec.Struct):
    """What may be taken for one model: batches not begun, and room in those that are."""

    model: str
    batches: int
    largest: int
    headroom: dict[bytes, int]
    # Room in those begun of entries that came again, by lane and delivery.
    again: dict[bytes, int] = {}

    def allows(self, head: Head) -> bool:
        """Whether something of this stream may be taken."""
        return self.model == head.model and (self.batches > 0 or self.headroom.get(head.lane, 0) > 0)
