"""Finding the input that makes a batch fail. Pure: says what to send next, and is told what became of it.

1. Breadth-first: a refused group is cut in halves, and the halves of one level are sent before their own halves.
2. Innocents are done as soon as a group that holds no poison has succeeded.
3. If nothing has succeeded when the eighths of the batch have been refused (14 calls at most), it is not an input but
   the endpoint: stop, and nobody is poison.
4. A lone request that is refused is poison, if the endpoint is known to be well: a part of this batch succeeded, or
   the caller knows (`endpoint_is_well`). Otherwise it is the endpoint that is sick.

One poison in 64 costs at most 12 calls: two on each of six levels.
"""

from collections import deque

# Rule 3: halvings after which something must have succeeded.
BLIND_LEVELS = 3


class Bisection:
    """The state of one search. Groups are half-open ranges of member indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        # Something of this batch was answered: the endpoint is well.
        self.any_succeeded = False
        # The search was given up: the endpoint is sick.
        self.sick = False
        self.poison: list[int] = []
        # (first, past the last, level) to be sent, breadth-first.
        self._to_send: deque[tuple[int, int, int]] = deque()
        # Refused groups of one that wait for proof that the endpoint is well.
        self._suspects: list[int] = []
        self._blind_refusals_left = 0
        self._split(0, size, 0)

    def __repr__(self) -> str:
        return f"<Bisection size={self.size} calls={self.calls} poison={self.poison} sick={self.sick}>"

    def next_group(self) -> tuple[int, int, int] | None:
        """The next group to send, or None if there is none to send now."""
        if self.sick or not self._to_send:
            return None
        self.calls += 1
        return self._to_send.popleft()

    def succeeded(self, group: tuple[int, int, int]) -> None:
        """A group was answered."""
        self.any_succeeded = True
        self.poison += self._suspects
        self._suspects = []

    def refused(self, group: tuple[int, int, int], endpoint_is_well: bool = False) -> None:
        """A group was refused as bad input."""
        first, end, level = group
        if end - first > 1:
            if level >= BLIND_LEVELS and not self.any_succeeded and not self._hope_at(level):
                self.sick = True
            else:
                self._split(first, end, level)
        elif self.any_succeeded or endpoint_is_well:
            self.poison.append(first)
        else:
            self._suspects.append(first)

    def finish(self) -> list[int]:
        """When nothing is left to send: the members that nothing is known of, because the endpoint is sick."""
        if self._suspects:
            self.sick = not self.any_succeeded
        return self._suspects if self.sick else []

    def _hope_at(self, level: int) -> bool:
        """Whether other groups of this level are still to be sent and might succeed."""
        return any(other == level for _, _, other in self._to_send)

    def _split(self, first: int, end: int, level: int) -> None:
        middle = (first + end) // 2
        self._to_send.append((first, middle, level + 1))
        self._to_send.append((middle, end, level + 1))
