"""What a batcher knows of the shards, and how it asks them for what its free slots can use. Pure."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from carpool.broker.redis.keys import Shard, tier_of
from carpool.broker.redis.types import NONE, NOTHING, Budget, Claim, Head, ShardSnapshot, Taken

# One question goes to so many shards at most.
SHARDS_A_QUESTION_MAX = 8
# So many streams of a model are known in a shard: more than a question brings, and enough for any free slots.
HEADS_KNOWN_MAX = 64
# One shard gives no more at once.
BATCHES_A_CLAIM_MAX = 4
# Bisection steps where many streams are cut: they narrow two seconds down to a millisecond.
CUT_STEPS = 12
NO_MODELS: Mapping[str, int] = {}


class ShardView(msgspec.Struct, eq=False):
    """What this batcher knows of a shard."""

    shard: Shard
    # Streams with entries to take, by their places; None if that must be asked.
    heads: list[Head] | None = None
    # It failed: not asked again before this, or before a wakeup.
    barren_until: float = 0.0
    # What wakeups have told since the question that is out, by stream; None while none is out.
    woken: dict[bytes, Head] | None = None
    # Leases were over at the last look for that; models with suspects that were left at the last claim.
    has_lapsed: bool = False
    suspects: frozenset[str] = frozenset()

    def asked(self) -> None:
        """A question goes out. Wakeups may be here before its answer, which is older than they are."""
        self.woken = {}

    def told(self, view: ShardSnapshot) -> None:
        """Redis has said what is there."""
        self.heads, self.barren_until = view.heads, 0.0
        if view.has_lapsed is not None:
            self.has_lapsed = view.has_lapsed
        woken, self.woken = self.woken or {}, None
        for head in woken.values():
            self._add(head)

    def failed(self, barren_until: float) -> None:
        """Redis has not said what is there."""
        self.heads, self.woken, self.barren_until = None, None, barren_until

    def heard(self, head: Head) -> None:
        """A wakeup came for a stream that had nothing to take."""
        self.barren_until = 0.0
        if self.woken is not None:
            self.woken[head.field] = head
        self._add(head)

    def unread(self, model: str) -> int:
        """Entries of a model that no batcher took, in the streams that are known."""
        return sum(head.unread for head in self.heads or () if head.model == model)

    def usable(self, budgets: Sequence[Budget]) -> list[Head]:
        """The streams of which something may be taken."""
        heads = self.heads
        if not heads:
            return []
        if len(budgets) == 1 and budgets[0].batches > 0:  # the usual case
            model = budgets[0].model
            return [head for head in heads if head.model == model]
        return [head for head in heads if any(budget.allows(head) for budget in budgets)]

    def _add(self, head: Head) -> None:
        if self.heads is None or any(head.field == known.field for known in self.heads):
            return
        self.heads.append(head)
        self.heads.sort(key=lambda known: (known.place, known.field))
        # A batcher without a free slot asks nothing, and hears every wakeup. The answer to its next question tells of
        # those that are dropped here.
        of_model = [known for known in self.heads if known.model == head.model]
        if len(of_model) > HEADS_KNOWN_MAX:
            self.heads.remove(of_model[-1])


# Shards with something to take, and what that is.
Offers = Sequence[tuple[ShardView, list[Head]]]


class Room:
    """What is left of the budgets while a question is planned."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._batches = {budget.model: budget.batches for budget in budgets}
        self._largest = {budget.model: budget.largest for budget in budgets}
        self._headroom = {lane: room for budget in budgets for lane, room in budget.headroom.items()}

    def for_lane(self, head: Head) -> int:
        """How many of a lane may come."""
        return self._headroom.get(head.lane, 0) + self._batches.get(head.model, 0) * self._largest.get(head.model, 0)

    def use(self, head: Head, number: int) -> None:
        """So many of a lane are taken: what is left of its last batch is room for others of it."""
        room = self._headroom.get(head.lane, 0) - number
        if room < 0:
            largest = self._largest[head.model]
            opened = -(room // largest)
            self._batches[head.model] -= opened
            room += opened * largest
        self._headroom[head.lane] = room


Reads = dict[int, list[tuple[bytes, int]]]


def same_tier(line: bytes) -> bytes:
    """The line of a tier that has what does not exceed its owner's share."""
    return b"s" + line[1:] if line[:1] == b"o" else line


def plan_min_share(offers: Offers, budgets: Sequence[Budget], is_due: Callable[[bytes], bool], due: int) -> Reads:
    """Read so many of the lines that are due, from where the best is; nothing if there is none, or no room for it."""
    room = Room(budgets)
    best = min(
        ((head, view) for view, heads in offers for head in heads if is_due(head.line)),
        key=lambda found: found[0].place,
        default=None,
    )
    if best is None:
        return {}
    head, view = best
    number = min(due, head.unread, room.for_lane(head))
    return {view.shard.number: [(head.field, number)]} if number > 0 else {}


def offers_of(offers: Offers, model: str) -> Offers:
    """What there is of one model."""
    return [(view, own) for view, heads in offers if (own := [head for head in heads if head.model == model])]


def is_task_line(line: bytes) -> bool:
    """Whether tasks wait there."""
    return line[:1] == b"t"


def synchronous_of_the_best(offers: Offers, *, is_strict: bool) -> Callable[[bytes], bool] | None:
    """Which lines have synchronous requests that a task would go before; None if there is no such task. With strict
    order it goes before others of its tier alone. What exceeds an owner's share comes behind what does not.
    """
    best = min(((head.place, head.line) for _, heads in offers for head in heads), default=(0.0, b""))[1]
    if not is_task_line(best):
        return None
    lines = {head.line for _, heads in offers for head in heads if not is_task_line(head.line)}
    if is_strict:
        lines = {line for line in lines if tier_of(line) == tier_of(best)}
    lines = {line for line in lines if same_tier(line) == line} or lines
    return lines.__contains__


def shards_for_claims(budgets: Sequence[Budget]) -> int:
    """How many shards can be asked at once for what dead batchers had, so that all together bring no more than fits."""
    headroom = [budget.batches + sum(budget.again.values()) for budget in budgets]
    return min(max(headroom, default=0), SHARDS_A_QUESTION_MAX)


def plan_claims(
    budgets: Sequence[Budget], shards: int, welcome: Mapping[str, int], left: Mapping[str, int] = NO_MODELS
) -> list[list[Claim]]:
    """What to ask each of some shards for. `welcome`: by model, which suspects may come, from the first shard alone.

    `left`: by model, what is left to other batchers.
    """
    # Redis's other clients wait while a shard's script fetches entries: several batches only if one shard is asked.
    batches_max = BATCHES_A_CLAIM_MAX if shards == 1 else 1
    return [
        [
            Claim(
                budget.model,
                min(_part_of(budget.batches, position, shards), batches_max),
                budget.largest,
                NONE if position else welcome[budget.model],
                {key: part for key, room in budget.again.items() if (part := _part_of(room, position, shards))},
                left.get(budget.model, NOTHING),
            )
            for budget in budgets
        ]
        for position in range(shards)
    ]


def is_due_again(claims: Sequence[Claim], budgets: Sequence[Budget], welcome: Mapping[str, int], taken: Taken) -> bool:
    """Whether a shard that was asked for these has more, for which there is still room or may be soon. One that had
    its part of everything, and gave nothing, has not.
    """
    if taken.streams:
        return bool(taken.more or taken.suspects)
    return any(
        budget.batches > 0
        and (
            (claim.model in taken.more and not claim.batches)
            or (claim.model in taken.suspects and welcome[claim.model] != NONE and claim.suspects == NONE)
        )
        for claim, budget in zip(claims, budgets, strict=True)
    )


def _part_of(number: int, position: int, shards: int) -> int:
    """A shard's part of a number; the first shards have more."""
    return number // shards + (position < number % shards)


class Place(NamedTuple):
    """Where a stream stands: the places of its first entry and of one that came now, and how many wait in it."""

    first: float
    last: float
    unread: int

    def before(self, place: float) -> int:
        """How many stand before a place, if they came evenly."""
        if place < self.first:
            return 0
        return min(self.unread, 1 + int(self.unread * (place - self.first) / max(self.last - self.first, 1.0)))


def cut(places: Sequence[Place], total: int) -> list[int]:
    """How many of each stream are among the first so many of all."""
    if sum(place.unread for place in places) <= total:
        return [place.unread for place in places]
    low, high = min(place.first for place in places), max(place.last for place in places)
    for _ in range(CUT_STEPS):
        middle = (low + high) / 2
        if sum(place.before(middle) for place in places) <= total:
            low = middle
        else:
            high = middle
    numbers = [place.before(low) for place in places]
    left = total - sum(numbers)
    best_first = sorted(range(len(places)), key=lambda index: places[index].first)
    for index in best_first if left > 0 else reversed(best_first):
        more = max(min(left, places[index].unread - numbers[index]), -numbers[index])
        numbers[index] += more
        left -= more
    return numbers


def best_lanes(offers: Offers, budget: Budget) -> list[tuple[Head, int]]:
    """The streams of the lanes for which there are batches, by their places, and their shards: the others would be
    planned for nothing.
    """
    found: list[tuple[Head, int]] = []
    lanes = set(budget.headroom)
    lanes_max = len(lanes) + budget.batches
    everything = ((head, view.shard.number) for view, heads in offers for head in heads)
    for head, shard in sorted(everything, key=lambda each: each[0].place):
        if head.lane in lanes or len(lanes) < lanes_max:
            lanes.add(head.lane)
            found.append((head, shard))
    return found


def plan_by_place(
    offers: Offers,
    budgets: Sequence[Budget],
    offsets_ms: Mapping[bytes, int],
    late_ms: Mapping[bytes, int],
    now_ms: int,
) -> Reads:
    """What to read where more waits than can be taken: in order of the places, as if the entries of each stream had
    come evenly. Inside its tier a line may stand later. Lanes come in by their first entries.
    """
    room = Room(budgets)
    reads: Reads = {}
    for budget in budgets:
        found = best_lanes(offers_of(offers, budget.model), budget)
        if not found:
            continue
        total = budget.batches * budget.largest + sum(budget.headroom.values())
        places = [Place(head.place, now_ms + offsets_ms.get(head.line, 0), head.unread) for head, _ in found]
        of_tiers: defaultdict[bytes, list[int]] = defaultdict(list)
        numbers = cut(places, total)
        for index, (head, _) in enumerate(found):
            of_tiers[same_tier(head.line)].append(index)
        for own in of_tiers.values():
            late = [late_ms.get(found[index][0].line, 0) for index in own]
            if any(late):
                later = [
                    Place(first + more, last + more, unread)
                    for (first, last, unread), more in zip((places[index] for index in own), late, strict=True)
                ]
                for index, number in zip(own, cut(later, sum(numbers[index] for index in own)), strict=True):
                    numbers[index] = number
        counts = [0] * len(found)
        for wanted in (numbers, [place.unread for place in places]):  # then what is left of the lanes' last batches
            for index, (head, _) in enumerate(found):
                if (more := min(wanted[index] - counts[index], room.for_lane(head))) > 0:
                    counts[index] += more
                    room.use(head, more)
        for (head, shard), count in zip(found, counts, strict=True):
            if count:
                reads.setdefault(shard, []).append((head.field, count))
    return reads


def plan_all(offers: Offers, budgets: Sequence[Budget]) -> Reads | None:
    """By shard: streams and how many to read of each, if all that waits fits; None if it does not, and the order
    matters. Shards are read together.
    """
    room = Room(budgets)
    for _, heads in offers:
        for head in heads:
            if head.unread > room.for_lane(head):
                return None
            room.use(head, head.unread)
    reads = {
        view.shard.number: [(head.field, head.unread) for head in heads]
        for view, heads in offers[:SHARDS_A_QUESTION_MAX]
    }
    view, heads = offers[0]
    # There may be more by now.
    reads[view.shard.number][0] = (heads[0].field, heads[0].unread + room.for_lane(heads[0]))
    return reads
