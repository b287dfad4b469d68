"""What a batcher plans to read: never more than its free slots can use, and nothing out of turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.redis.batcher.shards import (
    Place,
    ShardView,
    cut,
    is_due_again,
    plan_all,
    plan_by_place,
    plan_claims,
    plan_min_share,
    shards_for_claims,
)
from carpool.broker.redis.keys import Keys, tier_of
from carpool.broker.redis.types import ANY, NONE, Budget, Head, ShardSnapshot, StreamEntries, Taken

SHARDS = Keys().shards
MODELS = ("m", "n")
# By lane: its model.
LANES = {b"a": "m", b"b": "m", b"c": "n", b"d": "n"}

heads = st.builds(
    lambda lane, line, place, unread: Head(lane + b":" + line, LANES[lane], float(place), unread),
    st.sampled_from(sorted(LANES)),
    st.sampled_from([b"s0", b"o0", b"s1", b"t0"]),
    st.integers(0, 50),
    st.integers(1, 40),
)
views = st.lists(
    st.lists(heads, max_size=5, unique_by=lambda head: head.field).map(
        lambda found: sorted(found, key=lambda head: (head.place, head.field))
    ),
    min_size=1,
    max_size=10,
)


@st.composite
def budgets(draw: st.DrawFn) -> list[Budget]:
    found = []
    for model in draw(st.sets(st.sampled_from(MODELS), min_size=1)):
        largest = draw(st.integers(1, 16))
        lanes = [lane for lane, its_model in LANES.items() if its_model == model]
        headroom = draw(st.dictionaries(st.sampled_from(lanes), st.integers(1, max(1, largest - 1)), max_size=2))
        again = draw(st.dictionaries(st.sampled_from([b"a 2", b"b 2"]), st.integers(1, 15), max_size=2))
        found.append(Budget(model, draw(st.integers(0, 4)), largest, headroom, again))
    return found


def batches_needed(numbers: dict[bytes, int], budget: Budget) -> int:
    """How many batches must be begun for so many of each lane."""
    return sum(
        -(-max(number - budget.headroom.get(lane, 0), 0) // budget.largest)
        for lane, number in numbers.items()
        if LANES[lane] == budget.model
    )


@given(views=views, budgets=budgets())
def test_what_is_read_can_be_used(views: list[list[Head]], budgets: list[Budget]) -> None:
    shards = [ShardView(SHARDS[number], list(found)) for number, found in enumerate(views)]
    offers = [(view, usable) for view in shards if (usable := view.usable(budgets))]
    for view, usable in offers:
        assert [head for head in view.heads or [] if any(budget.allows(head) for budget in budgets)] == usable
    if not offers or (reads := plan_all(offers, budgets)) is None:
        return
    numbers: dict[bytes, int] = {}
    for number, streams in reads.items():
        known = {head.field: head for head in views[number]}
        for field, wanted in streams:
            assert wanted >= known[field].unread
            lane = known[field].lane
            numbers[lane] = numbers.get(lane, 0) + wanted
    for budget in budgets:
        assert batches_needed(numbers, budget) <= budget.batches
    # Everything is read that is known; the others are for the next question.
    assert [dict(reads[view.shard.number]).keys() for view, _ in offers[:8]] == [
        {head.field for head in usable} for _, usable in offers[:8]
    ]
    assert len(reads) == min(len(offers), 8)


LATE_MS = {b"o0": 20}
places = st.builds(lambda first, length, unread: Place(first, first + length, unread), *[st.integers(0, 100)] * 3)


@given(places=st.lists(places, min_size=1, max_size=20), total=st.integers(0, 300))
def test_a_cut_takes_the_first_of_all(places: list[Place], total: int) -> None:
    numbers = cut(places, total)
    assert sum(numbers) == min(total, sum(place.unread for place in places))
    assert all(0 <= number <= place.unread for number, place in zip(numbers, places, strict=True))
    # Streams that stand behind another's last one have nothing while that has some left.
    for number, place in zip(numbers, places, strict=True):
        if number < place.unread:
            assert not any(
                more for more, other in zip(numbers, places, strict=True) if other.first > place.last + place.unread
            )


@given(views=views, budgets=budgets(), now_ms=st.integers(0, 100))
def test_by_place_no_more_is_read_than_can_be_used(views: list[list[Head]], budgets: list[Budget], now_ms: int) -> None:
    shards = [ShardView(SHARDS[number], list(found)) for number, found in enumerate(views)]
    offers = [(view, usable) for view in shards if (usable := view.usable(budgets))]
    reads = plan_by_place(offers, budgets, {b"s1": 10, b"t0": 30}, LATE_MS, now_ms)
    heads = {(view.shard.number, head.field): head for view, usable in offers for head in usable}
    numbers: dict[bytes, int] = {}
    for number, streams in reads.items():
        assert len(streams) == len(dict(streams))
        for field, count in streams:
            head = heads[number, field]
            assert 0 < count <= head.unread
            numbers[head.lane] = numbers.get(head.lane, 0) + count
    for budget in budgets:
        assert batches_needed(numbers, budget) <= budget.batches
    if offers and plan_all(offers, budgets) is None:
        assert reads, "there is room for some"


def test_by_place_streams_are_cut_and_not_emptied_one_after_the_other() -> None:
    """Two shards have each 100 of the last second, one 10 of a higher tier that just came: 64 are read."""
    heads = [
        [Head(b"a:s1", "m", 1000.0 + number, 100), *([Head(b"a:s0", "m", 1010.0, 10)] if number else [])]
        for number in range(2)
    ]
    offers = [(ShardView(SHARDS[number], found), found) for number, found in enumerate(heads)]
    reads = plan_by_place(offers, [Budget("m", 1, 64, {}, {})], {b"s0": 0, b"s1": 1000}, {}, 1020)
    assert dict(reads[1])[b"a:s0"] == 10
    assert sum(count for streams in reads.values() for _, count in streams) == 64
    assert abs(dict(reads[0])[b"a:s1"] - dict(reads[1])[b"a:s1"]) <= 2


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_by_place_batches_are_full_however_many_lanes_wait(lanes: int) -> None:
    heads = [[Head(b"%d:s0" % lane, "m", 1000.0 + lane + shard, 100) for lane in range(lanes)] for shard in range(4)]
    offers = [(ShardView(SHARDS[number], found), found) for number, found in enumerate(heads)]
    for batches in (1, 2):
        reads = plan_by_place(offers, [Budget("m", batches, 64, {}, {})], {}, {}, 2000)
        assert sum(count for streams in reads.values() for _, count in streams) == 64 * batches


@given(budgets=budgets(), due=st.integers(1, 16))
def test_what_is_claimed_over_all_shards_can_be_used(budgets: list[Budget], due: int) -> None:
    welcome = {budget.model: ANY for budget in budgets}
    shards = min(shards_for_claims(budgets), due)
    assert shards > 0 or not any(budget.batches or budget.again for budget in budgets)
    plan = plan_claims(budgets, shards, welcome)
    for claims in plan[:1]:  # the first one has a part of everything, so whoever waits comes in turn
        assert all(claim.batches > 0 for claim, budget in zip(claims, budgets, strict=True) if budget.batches)
    for position, budget in enumerate(budgets):
        of_model = [claims[position] for claims in plan]
        assert {claim.model for claim in of_model} <= {budget.model}
        assert sum(claim.batches for claim in of_model) <= budget.batches
        for key, room in budget.again.items():
            assert sum(claim.again.get(key, 0) for claim in of_model) in (0 if not shards else room, room)
        assert all(claim.suspects == NONE for claim in of_model[1:])


@given(budgets=budgets(), asked=st.integers(1, 8), more=st.sets(st.sampled_from(MODELS)))
def test_a_shard_that_gave_nothing_of_its_part_is_not_asked_again(
    budgets: list[Budget], asked: int, more: set[str]
) -> None:
    welcome = {budget.model: ANY for budget in budgets}
    taken = Taken([], ShardSnapshot(0, []), frozenset(more), frozenset(more))
    first, *others = plan_claims(budgets, asked, welcome)
    assert not is_due_again(first, budgets, welcome, taken)
    for claims in others:  # but one that had no part of what it has
        has_turn = any(budget.model in more and budget.batches for budget in budgets)
        assert is_due_again(claims, budgets, welcome, taken) == has_turn
    gave = taken._replace(streams=[StreamEntries(b"a:s0", [], [])])
    assert is_due_again(first, budgets, welcome, gave) == bool(more)


def order_of(heads: list[Head], late_ms: dict[bytes, int], now_ms: int) -> list[bytes]:
    """The lines of what is read of a lane, one at a time."""
    order: list[bytes] = []
    while heads:
        ((field, number),) = plan_by_place(
            [(ShardView(SHARDS[0], heads), heads)], [Budget("m", 1, 1, {}, {})], {}, late_ms, now_ms
        )[0]
        assert number == 1
        head = next(head for head in heads if head.field == field)
        order.append(head.line)
        rest = [other for other in heads if other is not head]
        more = [Head(head.field, "m", head.place, head.unread - 1)] if head.unread > 1 else []
        heads = sorted(rest + more, key=lambda each: each.place)
    return order


def test_by_place_strict_order_is_a_matter_of_offsets() -> None:
    heads = [Head(b"a:s%d" % tier, "m", 1000.0 + tier * 10**14, 2) for tier in range(3)]
    assert order_of(heads, {}, 5000) == [b"s0", b"s0", b"s1", b"s1", b"s2", b"s2"]


def test_by_place_what_exceeds_a_share_stands_later_inside_its_tier_alone() -> None:
    heads = [Head(b"a:o0", "m", 50.0, 2), Head(b"a:s0", "m", 90.0, 1), Head(b"a:s1", "m", 160.0, 1)]
    assert order_of(heads, {b"o0": 200}, 100) == [b"s0", b"o0", b"o0", b"s1"]


@given(views=views, budgets=budgets(), due=st.integers(1, 40))
def test_a_trickle_is_what_is_due_of_the_tier_and_can_be_used(
    views: list[list[Head]], budgets: list[Budget], due: int
) -> None:
    shards = [ShardView(SHARDS[number], list(found)) for number, found in enumerate(views)]
    offers = [(view, usable) for view in shards if (usable := view.usable(budgets))]
    reads = plan_min_share(offers, budgets, lambda line: tier_of(line) == 1, due)
    heads = [head for _, usable in offers for head in usable if head.line == b"s1"]
    assert bool(reads) == bool(heads)
    for streams in reads.values():
        ((field, number),) = streams
        assert number <= due and any(head.field == field and number <= head.unread for head in heads)
        for budget in budgets:
            assert batches_needed({field.partition(b":")[0]: number}, budget) <= budget.batches
