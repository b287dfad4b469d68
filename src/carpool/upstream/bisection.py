"""Finding the inputs that make a batch fail. Pure: it says what to send next, and its caller reports what became of it.

1. A group of which a call was refused is a suspect: one of its members is bad. Half of it is sent. Answered: the bad
   one is in the other half, which is then the suspect; that needs no call. Refused: this half is the suspect.
2. Of the other half nothing is known then. Where bad inputs are rare it is cleared: one bad input explains all that was
   seen, so its members may ride in ordinary batches again. Otherwise it is sent by itself.
3. Where bad inputs are common, members are sent one by one: halving would need more calls.
4. A member that is suspected alone is sent alone, even if all others have been answered: the refusal of the whole may
   have been the endpoint's fault, so only a refusal alone counts against an input. So one bad input in 64 costs six
   calls, or seven.
5. While no endpoint is known to be alive, nothing is cleared, and both halves are sent at once. If nothing has been
   answered when the eighths have been refused (14 calls at most), it is not an input but the endpoint: the search ends.
6. The largest group goes first: most members are resolved by the first few calls.
"""

from typing import NamedTuple

# Rule 5: the level whose groups are eighths.
BLIND_LEVEL_MAX = 3


class Slice(NamedTuple):
    """A half-open range of members, and how many halvings made it."""

    first: int
    end: int
    level: int = 0

    @property
    def size(self) -> int:
        """How many members."""
        return self.end - self.first


class Bisection:
    """The state of one search over the members 0 … size - 1 of a batch."""

    __slots__ = (
        "_cut_at",
        "_is_alive",
        "_other_half",
        "_suspects",
        "_unknown",
        "answered_members",
        "any_answered",
        "refused_alone",
    )

    def __init__(self, suspects: list[Slice], unknown: list[Slice] | None = None, cut_at: int = 0) -> None:
        self._suspects = suspects
        # Where to cut the whole, if something speaks for another place than its middle; 0 if nothing does.
        self._cut_at = cut_at
        # Groups to be sent as they are.
        self._unknown = unknown or []
        # By a group that is being sent: the group that is a suspect if it is answered; None where there is none.
        self._other_half: dict[Slice, Slice | None] = {}
        self.any_answered = False
        # An endpoint said something that only a living one says.
        self._is_alive = False
        self.answered_members = 0
        # Members that were refused alone in their call.
        self.refused_alone: list[int] = []

    def __repr__(self) -> str:
        return f"<Bisection left={self.unresolved} under_way={len(self._other_half)} refused={self.refused_alone}>"

    @property
    def unresolved(self) -> int:
        """Members of whom nothing is known yet."""
        waiting = sum(group.size for group in (*self._suspects, *self._unknown))
        return waiting + sum(group.size + (other.size if other else 0) for group, other in self._other_half.items())

    @property
    def is_over(self) -> bool:
        """Nothing is left to send, and nothing is under way."""
        return not (self._suspects or self._unknown or self._other_half)

    def peek(self, *, is_alive: bool) -> Slice | None:
        """The group of which something is sent next; None if nothing can be sent now."""
        waiting = [group for group in (*self._unknown, *self._suspects) if self._may_send(group, is_alive)]
        return max(waiting, key=lambda group: group.size, default=None)

    def take_next(self, *, is_alive: bool, singly: bool) -> Slice | None:
        """What to send next, or None. The caller reports its fate by `answered`, `refused`, `too_large` or `left`."""
        group = self.peek(is_alive=is_alive)
        if group is None:
            return None
        is_suspect = group in self._suspects
        (self._suspects if is_suspect else self._unknown).remove(group)
        if group.size > 1 and singly and (is_alive or self.any_answered):
            singles = [Slice(index, index + 1, group.level + 1) for index in range(group.first, group.end)]
            self._unknown += singles[1:]
            group = singles[0]
        elif group.size > 1 and is_suspect:
            group, other = self._cut(group)
            if is_alive or self.any_answered:
                self._other_half[group] = other
                return group
            self._unknown.append(other)
        self._other_half[group] = None
        return group

    def answered(self, group: Slice) -> None:
        """Every member of the group has its output."""
        self.any_answered = True
        self.answered_members += group.size
        other = self._other_half.pop(group)
        if other is not None:
            self._suspects.append(other)

    def refused(self, group: Slice, *, clears: bool) -> Slice | None:
        """The group was refused: it has a bad input. Returns the other half if that is cleared (rule 2)."""
        other = self._other_half.pop(group)
        if group.size > 1:
            self._suspects.append(group)
        else:
            self.refused_alone.append(group.first)
        if other is None or clears:
            return other
        self._unknown.append(other)
        return None

    def too_large(self, group: Slice) -> None:
        """The group was refused for its size, which says nothing of its members, but that the endpoint is alive."""
        self._is_alive = True
        other = self._other_half.pop(group)
        self._unknown += [*halves(group), *([other] if other else [])]

    def left(self, group: Slice) -> None:
        """No member of the group waits any more, or they had another outcome: nothing follows for the other members."""
        other = self._other_half.pop(group, None)
        if other is not None:
            self._unknown.append(other)

    def ask_again(self, index: int) -> None:
        """Send a member alone once more, though it was refused alone."""
        self.refused_alone.remove(index)
        self._unknown.append(Slice(index, index + 1))

    def waiting(self) -> list[int]:
        """Members of whom nothing is known, and who are in no call now."""
        groups = (*self._suspects, *self._unknown, *(other for other in self._other_half.values() if other))
        return sorted(index for group in groups for index in range(group.first, group.end))

    def members(self) -> list[int]:
        """All members of whom nothing is known yet, those in calls included."""
        return sorted([*self.waiting(), *(i for group in self._other_half for i in range(group.first, group.end))])

    def give_up(self) -> list[int]:
        """Send nothing more; returns the members of whom nothing is known, and who are in no call now."""
        waiting = self.waiting()
        self._suspects, self._unknown = [], []
        self._other_half = dict.fromkeys(self._other_half)
        return waiting

    def _cut(self, group: Slice) -> tuple[Slice, Slice]:
        at, self._cut_at = self._cut_at, 0
        if group.level == 0 and group.first < at < group.end:
            return Slice(group.first, at, 1), Slice(at, group.end, 1)
        return halves(group)

    def _may_send(self, group: Slice, is_alive: bool) -> bool:
        is_blind = not (is_alive or self.any_answered or self._is_alive)
        # A suspect is cut first, which adds a level.
        cut = 1 if group in self._suspects and group.size > 1 else 0
        return not is_blind or group.level + cut <= BLIND_LEVEL_MAX


def halves(group: Slice) -> tuple[Slice, Slice]:
    """The two halves of a group of more than one member."""
    middle = (group.first + group.end) // 2
    return Slice(group.first, middle, group.level + 1), Slice(middle, group.end, group.level + 1)
