"""What gateways and batchers say of streams and shards. Pure."""

from typing import NamedTuple

import msgspec


class Head(msgspec.Struct):
    """A stream with entries that nobody took."""

    field: bytes
    model: str
    # The virtual deadline of the first of them.
    place: float
    unread: int
    # What its entries may share a batch with.
    lane: bytes = b""

    def __post_init__(self) -> None:
        self.lane = self.field.partition(b":")[0]


class View(NamedTuple):
    """A shard at one moment."""

    # On Redis's clock.
    now_ms: int
    # Of the models that were asked for: the best streams of each, by their places.
    heads: list[Head]


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


class Budget(msgspec.Struct):
    """What may be taken for one model: batches not begun, and room in those that are."""

    model: str
    batches: int
    largest: int
    rooms: dict[bytes, int]
    # Room in those begun of entries that came again, by lane and delivery.
    again: dict[bytes, int] = {}

    def allows(self, head: Head) -> bool:
        """Whether something of this stream may be taken."""
        return self.model == head.model and (self.batches > 0 or self.rooms.get(head.lane, 0) > 0)
