"""What a batcher knows of the shards, and how it asks them for what its free slots can use. Pure."""

from collections.abc import Sequence

import msgspec

from carpool.broker.redis.keys import Shard

# One question goes to so many shards at most.
SHARDS_A_QUESTION_MAX = 8


class ShardView(msgspec.Struct, eq=False):
    """What this batcher knows of a shard."""

    shard: Shard
    # Entries that nobody took; None if that must be asked.
    unread: int | None = None
    # The smallest virtual deadline that was seen, which may be gone by now; None if that must be asked.
    place: float | None = None
    # Nothing there was for us: not asked for the same again before this, or before a bell.
    barren_until: float = 0.0
    # What was asked for last: models with a free slot, lanes with room.
    asked_for: frozenset[bytes | str] = frozenset()
    # What the last bell since the last question said.
    rung: int = 0
    # The only stream with entries to take, and its model, until a bell names another; None if that is not known.
    only: tuple[bytes, str] | None = None


class Budget(msgspec.Struct):
    """What may be taken for one model: batches not begun, and room in those that are."""

    model: str
    batches: int
    largest: int
    rooms: dict[bytes, int]

    def wants(self) -> set[bytes | str]:
        """What may come for it: anything of its model, or of these lanes alone."""
        return {self.model} if self.batches > 0 else set(self.rooms)


def is_scarce(views: Sequence[ShardView], budgets: Sequence[Budget]) -> bool:
    """Whether more waits than can be taken: only then does it matter what goes first."""
    room = sum(budget.batches * budget.largest + sum(budget.rooms.values()) for budget in budgets)
    return sum(view.unread or 0 for view in views) > room or any(view.unread is None for view in views)


def plan_reads(views: Sequence[ShardView], budgets: Sequence[Budget]) -> list[tuple[ShardView, int]]:
    """Where a shard has one stream there is no order to find out: a plain read costs Redis a quarter of a script
    that has to carry the entries. Shards with the same stream are read together, as many as it takes to fill all
    free slots; the numbers add up to what may be taken.
    """
    only = views[0].only
    if only is None:
        return []
    field, model = only
    left = sum(
        budget.rooms.get(field.partition(b":")[0], 0) + budget.batches * budget.largest
        for budget in budgets
        if budget.model == model
    )
    reads: list[tuple[ShardView, int]] = []
    for view in views[:SHARDS_A_QUESTION_MAX]:
        number = min(view.unread or 1, left)
        if view.only == only and number > 0:
            reads.append((view, number))
            left -= number
    if reads:
        reads[0] = (views[0], reads[0][1] + left)  # there may be more by now
    return reads
