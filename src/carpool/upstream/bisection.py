"""Finding the inputs that make a batch fail. Pure: says what to send next, and is told what became of it.

1. Breadth-first: a refused group is cut in halves; the groups of one level are sent before any of the next.
2. Innocents are done as soon as a group without poison has been answered.
3. If nothing has been answered when the eighths of the batch have been refused (14 calls at most), it is not an input
   but the endpoint: the search ends.
4. What the search finds are members that were refused alone. Whether they are poison is for the caller to say: surely
   if the refusal blames the input; otherwise only if a part of the batch was answered and the endpoint is known to be
   well, since an endpoint that fails everything refuses every lone member too.

One poison in 64 costs at most 12 calls: two on each of six levels.
"""

from typing import NamedTuple

# Rule 3: the level whose groups are eighths.
BLIND_LEVEL_MAX = 3


class Group(NamedTuple):
    """A half-open range of member indices, and how many halvings made it."""

    first: int
    end: int
    level: int


class Bisection:
    """The state of one search over the members 0 … size - 1 of a batch that was refused whole."""

    def __init__(self, size: int) -> None:
        # Members that were refused with nobody else in their call.
        self.refused_alone: list[int] = []
        self.any_answered = False
        self._next_level: list[Group] = []
        self._split(Group(0, size, 0))

    def __repr__(self) -> str:
        return f"<Bisection refused_alone={self.refused_alone} any_answered={self.any_answered}>"

    def take_level(self) -> list[Group]:
        """The groups to send next, all of one level; empty when the search is over."""
        level, self._next_level = self._next_level, []
        if level and level[0].level > BLIND_LEVEL_MAX and not self.any_answered:
            return []
        return level

    def answered(self, group: Group) -> None:
        """A group was answered."""
        self.any_answered = True

    def refused(self, group: Group) -> None:
        """A group was refused as bad input."""
        if group.end - group.first > 1:
            self._split(group)
        else:
            self.refused_alone.append(group.first)

    def _split(self, group: Group) -> None:
        middle = (group.first + group.end) // 2
        for first, end in ((group.first, middle), (middle, group.end)):
            if end > first:
                self._next_level.append(Group(first, end, group.level + 1))
