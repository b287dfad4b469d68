"""For any batch and any set of poisons: the innocent are answered, the calls are bounded, the sick endpoint is known.

An endpoint is modelled as what it does with a group: it refuses one with poison in it, and answers all others.
"""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.bisection import Bisection, Group

SIZES = st.integers(2, 64)


class Search:
    """A search that has come to its end."""

    def __init__(self, size: int, refuses: Callable[[Group], bool]) -> None:
        self.search = Bisection(size)
        self.sent: list[Group] = []
        self.answered: set[int] = set()
        while level := self.search.take_level():
            assert len({group.level for group in level}) == 1
            assert not self.sent or level[0].level == self.sent[-1].level + 1  # breadth-first
            self.sent += level
            for group in level:
                if refuses(group):
                    self.search.refused(group)
                else:
                    self.answered |= set(range(group.first, group.end))
                    self.search.answered(group)


def members(group: Group) -> set[int]:
    return set(range(group.first, group.end))


def eighths(size: int) -> list[set[int]]:
    """The groups of the third level, or the lone members of a smaller batch."""
    groups = [Group(0, size, 0)]
    for _ in range(3):
        halves: list[Group] = []
        for first, end, level in groups:
            middle = (first + end) // 2
            halves += (
                [Group(first, middle, level + 1), Group(middle, end, level + 1)]
                if end - first > 1
                else [Group(first, end, level + 1)]
            )
        groups = halves
    return [members(group) for group in groups]


@st.composite
def batches_with_poison(draw: st.DrawFn) -> tuple[int, set[int]]:
    size = draw(SIZES)
    return size, draw(st.sets(st.integers(0, size - 1), min_size=1))


@given(batches_with_poison())
def test_no_innocent_fails_while_one_eighth_is_clean(batch: tuple[int, set[int]]) -> None:
    size, poison = batch
    done = Search(size, lambda group: bool(members(group) & poison))
    if any(not eighth & poison for eighth in eighths(size)):
        assert done.search.any_answered
        assert sorted(done.search.refused_alone) == sorted(poison)
        assert done.answered == set(range(size)) - poison
    else:
        assert not done.search.any_answered
        assert done.answered == set()
        assert set(done.search.refused_alone) <= poison
        assert len(done.sent) <= 14


@given(batches_with_poison())
def test_calls_are_bounded(batch: tuple[int, set[int]]) -> None:
    """Two for each level and poison at most, and never more than a whole tree has groups."""
    size, poison = batch
    done = Search(size, lambda group: bool(members(group) & poison))
    levels = (size - 1).bit_length()
    assert len(done.sent) <= min(2 * levels * len(poison), 2 * size - 2)
    for number in poison:
        assert sum(number in members(group) for group in done.sent) <= levels  # and once with the whole batch


@given(SIZES, st.data())
def test_one_poison_costs_at_most_twelve_calls(size: int, data: st.DataObject) -> None:
    poison = data.draw(st.integers(0, size - 1))
    done = Search(size, lambda group: poison in members(group))
    assert len(done.sent) <= 12
    assert done.search.refused_alone == [poison]
    assert done.answered == set(range(size)) - {poison}


@given(SIZES)
def test_an_endpoint_that_fails_everything_is_known_after_fourteen_calls(size: int) -> None:
    done = Search(size, lambda group: True)
    assert len(done.sent) <= 14
    assert not done.search.any_answered  # without which nobody is poison, unless the refusal blames the input


@given(SIZES, st.data())
def test_nobody_is_sent_twice_on_one_level_and_nobody_who_was_answered(size: int, data: st.DataObject) -> None:
    """Whatever the endpoint does, also if it does not do the same twice."""
    answered: set[int] = set()

    def refuses(group: Group) -> bool:
        assert not members(group) & answered
        refused = data.draw(st.booleans())
        if not refused:
            answered.update(members(group))
        return refused

    done = Search(size, refuses)
    for level in range(1, 8):
        sent = [number for group in done.sent if group.level == level for number in members(group)]
        assert len(sent) == len(set(sent))
    if done.search.any_answered:
        assert answered | set(done.search.refused_alone) == set(range(size))
