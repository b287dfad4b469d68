"""Entries that were delivered before: one of them may be what kills batchers.

Whoever was in the hands of a batcher that died is not guilty: somebody stopped it, or another entry was the reason.
With each death there are fewer who can be. So they ride apart from others, in at most one slot of a batcher, with fewer
of their like each time; the last two times alone, and then they are given up.
"""

from collections.abc import Sequence

from carpool.broker.redis.batcher.leases import Haul
from carpool.broker.redis.steps import Entry, Stream

# How often an entry is delivered before it is given up.
DELIVERIES_MAX = 6


class Suspects:
    """Those that this batcher has."""

    def __init__(self, deliveries_max: int) -> None:
        self._deliveries_max = deliveries_max
        self._hauls: list[Haul] = []

    def add(self, haul: Haul, stream: Stream) -> None:
        """Entries came; if some were delivered before, no more such ones are kept while these have no outcome."""
        if stream.deliveries and max(stream.deliveries) > 1:
            self._hauls = [*(other for other in self._hauls if other.open), haul]

    def have_left(self, haul: Haul) -> bool:
        """All entries of a haul are done with: whether they were suspects, so that the next ones may come."""
        were_suspects = haul in self._hauls
        if were_suspects:
            self._hauls = [other for other in self._hauls if other.open]
        return were_suspects

    def some_of(self, streams: Sequence[Stream]) -> tuple[list[Stream], list[Stream]]:
        """Of what was claimed: some that may ride together, with those that only need an answer; and all others."""
        kept: list[Stream] = []
        given_back: list[Stream] = []
        is_one_here = any(haul.open for haul in self._hauls)
        company: tuple[bytes, int] | None = None
        room = 0
        for stream in streams:
            mine: list[tuple[Entry, int]] = []
            others: list[tuple[Entry, int]] = []
            for entry, delivery in pairs_of(stream):
                if 1 < delivery <= self._deliveries_max:
                    if company is None and not is_one_here:
                        company, room = (stream.field, delivery), company_of(delivery, self._deliveries_max)
                    if company != (stream.field, delivery) or room == 0:
                        others.append((entry, delivery))
                        continue
                    room -= 1
                mine.append((entry, delivery))
            kept += some_stream(stream.field, mine)
            given_back += some_stream(stream.field, others)
        return kept, given_back


def company_of(delivery: int, deliveries_max: int) -> int:
    """With how many others like it an entry may be sent that was delivered so often, itself included."""
    return int(4 ** max(0, deliveries_max - 1 - delivery))


def pairs_of(stream: Stream) -> list[tuple[Entry, int]]:
    """The entries of a stream that was claimed, each with its deliveries."""
    return list(zip(stream.entries, stream.deliveries or (), strict=True))


def some_stream(field: bytes, pairs: Sequence[tuple[Entry, int]]) -> list[Stream]:
    """A stream of these entries; none if there are none."""
    return [Stream(field, [entry for entry, _ in pairs], [delivery for _, delivery in pairs])] if pairs else []
