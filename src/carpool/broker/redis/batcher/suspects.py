"""Entries that were delivered before: one of them may be what kills batchers.

An entry that a dead batcher had need not be guilty: the batcher was stopped, or another entry was the reason. With each
death fewer entries can be. The first time, they are sent again as soon as slots are free, apart from others. From then
on they are suspects: sent with fewer of their like each time, in at most one slot of a model; the last two times alone,
with no other suspect in this batcher; then they are given up. claim.lua chooses by the same rules.
"""

from collections.abc import Sequence

from carpool.broker.redis.batcher.leases import LeasedEntries
from carpool.broker.redis.types import ANY, NONE, WITH_COMPANY, StreamEntries, StreamEntry
from carpool.core.request import AGAIN

# How often an entry is delivered before it is given up: by then it was alone twice, and its batcher died both times.
DELIVERIES_MAX = 6
# Entries that may be sent in so large a company are no suspects.
COMPANY_MAX = 64


class Suspects:
    """The suspects that this batcher has."""

    def __init__(self) -> None:
        # By model, with whether they are alone.
        self._leased_sets: dict[str, list[tuple[LeasedEntries, bool]]] = {}

    def add(self, model: str, leased: LeasedEntries, delivery: int) -> None:
        """An entry that was taken with others was delivered so often."""
        company = company_of(delivery)
        if company < COMPANY_MAX and delivery <= DELIVERIES_MAX:
            self._leased_sets.setdefault(model, []).append((leased, company == 1))

    def welcome(self, model: str) -> int:
        """Which suspects of a model may come now."""
        self._leased_sets = {
            name: kept
            for name in self._leased_sets
            if (kept := [each for each in self._leased_sets[name] if each[0].open])
        }
        if not self._leased_sets:
            return ANY
        is_one_alone = any(is_alone for leased_sets in self._leased_sets.values() for _, is_alone in leased_sets)
        return NONE if is_one_alone or model in self._leased_sets else WITH_COMPANY

    def have_left(self, leased: LeasedEntries) -> bool:
        """All entries that were taken together are done with: whether they were suspects; then the next may come."""
        return any(other is leased for leased_sets in self._leased_sets.values() for other, _ in leased_sets)


def company_of(delivery: int) -> int:
    """With how many others like it an entry may be sent that was delivered so often, itself included."""
    return COMPANY_MAX if delivery < 2 else min(int(4 ** max(0, DELIVERIES_MAX - 1 - delivery)), COMPANY_MAX)


def again_of(lane_key: bytes) -> tuple[bytes, int] | None:
    """The original lane of entries that came again, and their deliveries; None for others, and for one alone."""
    before, mark, delivery = lane_key.rpartition(AGAIN)
    return (before.removesuffix(b"\0"), int(delivery)) if mark and delivery.isdigit() else None


def pairs_of(stream: StreamEntries) -> list[tuple[StreamEntry, int]]:
    """The entries of a stream that was claimed, each with its deliveries."""
    return list(zip(stream.entries, stream.deliveries or (), strict=True))


def some_stream(field: bytes, pairs: Sequence[tuple[StreamEntry, int]]) -> list[StreamEntries]:
    """A stream of these entries; none if there are none."""
    return [StreamEntries(field, [entry for entry, _ in pairs], [delivery for _, delivery in pairs])] if pairs else []
