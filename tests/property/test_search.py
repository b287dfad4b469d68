"""The search finds any set of bad inputs in any batch; everybody else is answered or cleared; calls are bounded."""

from math import ceil, log2

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.upstream.bisection import Bisection, Slice


class Found:
    """What became of the members of a batch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[int, ...]] = []
        self.answered: list[int] = []
        self.cleared: list[int] = []
        self.refused: list[int] = []


def run(size: int, bad: frozenset[int], *, clears: bool = True, singly: bool = False, is_alive: bool = True) -> Found:
    """Search one batch to its end against an API that refuses every call with a bad input."""
    found = Found(size)
    search = Bisection([Slice(0, size)])
    while group := search.take_next(is_alive=is_alive, singly=singly):
        members = tuple(range(group.first, group.end))
        found.calls.append(members)
        if bad & set(members):
            cleared = search.refused(group, clears=clears and is_alive)
            found.cleared += range(cleared.first, cleared.end) if cleared else ()
        else:
            found.answered += members
            search.answered(group)
    found.refused = sorted(search.refused_alone)
    assert search.unresolved == len(search.members()) == len(search.waiting())
    return found


def run_all(size: int, bad: frozenset[int], **how: bool) -> tuple[list[int], list[int], int]:
    """The same, and whoever is cleared rides again: who was answered, who refused, and how many calls that took."""
    answered: list[int] = []
    refused: list[int] = []
    calls = 0
    waiting = [list(range(size))]
    while waiting:
        batch = waiting.pop()
        calls += 1
        here = frozenset(place for place, member in enumerate(batch) if member in bad)
        if not here:
            answered += batch
            continue
        found = run(len(batch), here, **how)
        calls += len(found.calls)
        answered += [batch[place] for place in found.answered]
        refused += [batch[place] for place in found.refused]
        if found.cleared:
            waiting.append([batch[place] for place in found.cleared])
    return answered, refused, calls


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, frozenset[int]]:
    size = draw(st.integers(2, 200))
    return size, draw(st.frozensets(st.integers(0, size - 1), min_size=1, max_size=size))


@given(batches(), st.booleans(), st.booleans())
@example((64, frozenset({63})), True, False)
@example((2, frozenset({0, 1})), True, False)
def test_every_innocent_is_answered_once_and_every_bad_one_is_found(
    batch: tuple[int, frozenset[int]], clears: bool, singly: bool
) -> None:
    size, bad = batch
    answered, refused, _ = run_all(size, bad, clears=clears, singly=singly)
    assert sorted(answered) == [member for member in range(size) if member not in bad]  # nobody twice
    assert sorted(refused) == sorted(bad)


@given(st.integers(2, 200), st.data())
def test_one_bad_input_needs_about_as_many_answers_as_halvings(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    found = run(size, frozenset({bad}))
    assert len(found.calls) <= ceil(log2(size)) + 1
    assert found.refused == [bad]
    # And the bad input itself was sent at most so often, with the batch.
    assert sum(bad in call for call in found.calls) + 1 <= ceil(log2(size)) + 1


def test_one_in_64_costs_six_calls_or_seven() -> None:
    calls = [len(run(64, frozenset({bad})).calls) for bad in range(64)]
    assert set(calls) == {6, 7}
    assert sum(calls) == 64 * 6.5


@given(batches())
def test_calls_are_bounded(batch: tuple[int, frozenset[int]]) -> None:
    size, bad = batch
    for clears in (True, False):
        _, _, calls = run_all(size, bad, clears=clears)
        assert calls <= 1 + 2 * len(bad) * (ceil(log2(size)) + 2)
    assert len(run(size, bad, singly=True).calls) == size


@given(batches())
def test_nobody_is_in_two_places(batch: tuple[int, frozenset[int]]) -> None:
    size, bad = batch
    for clears in (True, False):
        found = run(size, bad, clears=clears)
        assert sorted(found.answered + found.cleared + found.refused) == list(range(size))


@given(st.integers(2, 200))
def test_an_endpoint_that_refuses_everything_is_known_after_fourteen_calls(size: int) -> None:
    found = run(size, frozenset(range(size)), is_alive=False)
    assert len(found.calls) <= 14
    assert not found.answered and not found.cleared


@given(batches())
def test_without_a_sign_of_life_nobody_is_cleared(batch: tuple[int, frozenset[int]]) -> None:
    size, bad = batch
    found = run(size, bad, is_alive=False)
    assert found.cleared == []
    if found.answered:  # that was one: everybody is found from then on
        assert sorted(found.answered + found.refused) == list(range(size))


@given(batches(), st.data())
def test_groups_in_any_order_of_answers(batch: tuple[int, frozenset[int]], data: st.DataObject) -> None:
    """Several groups may be under way at once."""
    size, bad = batch
    search = Bisection([Slice(0, size)], cut_at=data.draw(st.integers(0, size)))
    under_way: list[Slice] = []
    answered: list[int] = []
    is_alive = data.draw(st.booleans())
    while True:
        if data.draw(st.booleans()) or not under_way:
            group = search.take_next(is_alive=is_alive, singly=False)
            if group is not None:
                under_way.append(group)
            elif not under_way:
                break
            continue
        group = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        members = range(group.first, group.end)
        if bad & set(members):
            search.refused(group, clears=False)
        else:
            answered += members
            search.answered(group)
    assert len(answered) == len(set(answered))
    if answered or is_alive:
        assert sorted(answered) == [member for member in range(size) if member not in bad]
        assert sorted(search.refused_alone) == sorted(bad)


@given(batches(), st.integers(1, 100))
def test_groups_that_are_too_large_are_only_halved(batch: tuple[int, frozenset[int]], most: int) -> None:
    size, _ = batch
    search = Bisection([], [Slice(0, size)])
    sent: list[int] = []
    while group := search.take_next(is_alive=True, singly=False):
        if group.size > most:
            search.too_large(group)
        else:
            sent += range(group.first, group.end)
            search.answered(group)
    assert sorted(sent) == list(range(size))


def test_nothing_follows_for_others_from_a_group_that_nobody_waits_for() -> None:
    search = Bisection([Slice(0, 4)])
    first = search.take_next(is_alive=True, singly=False)
    assert first is not None
    search.left(first)
    assert not search.any_answered
    second = search.take_next(is_alive=True, singly=False)
    assert second == Slice(2, 4, 1)  # whole: it is not known to be bad
