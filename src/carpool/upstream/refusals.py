"""How common bad inputs are in a lane, and what follows for its batches. Pure.

1. The share of refused inputs is an average over about the last thousand, which starts with a hundred and some good
   ones. One bad input among those is no reason to change anything: it does not count.
2. A batch with a bad input costs a search. `calls_for` says how many calls a batch is expected to need, the search
   included; outputs for each call are its yield. The best size is the smallest whose yield is close to the best one:
   where bad inputs are rare that is the largest batch, where they are common about 1 / √share.
3. Where less than one bad input is to be expected in a full batch, a search may clear the members that are not needed
   to explain what was refused.
4. From SINGLY_SHARE on inputs are better sent one by one.
"""

from collections.abc import Hashable
from math import log2

SEEN_MAX = 1024.0
SEEN_AT_FIRST = 128.0
# Rule 2: how much of the best yield the best size must have.
YIELD_SHARE = 0.8
SINGLY_SHARE = 0.3
# Within a search, so many members must be known before it may judge by its own share.
SEEN_IN_SEARCH_MIN = 4
LANES_MAX = 256


class RefusedShare:
    """The share of bad inputs in one lane."""

    __slots__ = ("_refused", "_seen")

    def __init__(self) -> None:
        self._seen = SEEN_AT_FIRST
        self._refused = 0.0

    def __repr__(self) -> str:
        return f"<RefusedShare {self.share:.4f}>"

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return max(0.0, self._refused - 1.0) / self._seen

    @property
    def is_as_good_as_none(self) -> bool:
        """Whether bad inputs were so long ago that they need not be remembered."""
        return self._refused * SEEN_MAX < 0.5 * self._seen

    def answered(self, count: int) -> None:
        """So many inputs were good."""
        self._add(count)

    def refused(self) -> None:
        """An input was bad."""
        self._add(1)
        self._refused += 1

    def _add(self, count: int) -> None:
        self._seen += count
        if self._seen > SEEN_MAX:
            self._refused *= SEEN_MAX / self._seen
            self._seen = SEEN_MAX


class RefusedShares:
    """The shares of the lanes that have bad inputs; others have none, and cost nothing."""

    def __init__(self) -> None:
        # The longest unused first.
        self._lanes: dict[Hashable, RefusedShare] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __repr__(self) -> str:
        return f"<RefusedShares {self._lanes}>"

    def answered(self, lane: Hashable, count: int) -> None:
        """So many inputs of a lane were good."""
        share = self._lanes.get(lane)
        if share is not None:
            share.answered(count)
            if share.is_as_good_as_none:
                del self._lanes[lane]

    def refused(self, lane: Hashable) -> None:
        """An input of a lane was bad."""
        share = self._lanes.pop(lane, None) or RefusedShare()
        if len(self._lanes) >= LANES_MAX:
            del self._lanes[next(iter(self._lanes))]
        self._lanes[lane] = share
        share.refused()

    def share(self, lane: Hashable) -> float:
        """The share of bad inputs in a lane."""
        share = self._lanes.get(lane)
        return share.share if share is not None else 0.0

    def best_size(self, lane: Hashable, max_batch: int) -> int:
        """The size of batches with the best yield."""
        share = self._lanes.get(lane)
        return best_size(share.share, max_batch) if share is not None else max_batch


def calls_for(size: int, share: float) -> float:
    """Calls that a batch of this size is expected to need until each of its members has an outcome."""
    if size == 1:
        return 1.0
    bad = size * share
    # For each bad input the search halves its part of the batch until that is alone, and sends it alone.
    steps = log2(size / max(bad, 1.0)) + 1.5
    return 1.0 + min(bad * steps, float(size))


def best_size(share: float, max_batch: int) -> int:
    """The smallest size, of halvings of `max_batch`, whose yield is close to the best."""
    if share <= 0.0:
        return max_batch
    sizes = [max_batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    yields = [size / calls_for(size, share) for size in sizes]
    wanted = max(yields) * YIELD_SHARE
    return min(size for size, gain in zip(sizes, yields, strict=True) if gain >= wanted)


def may_clear(share: float, max_batch: int) -> bool:
    """Whether one bad input may be taken for the only one."""
    return share * max_batch < 1.0


def is_singly(share: float, refused_here: int, answered_here: int) -> bool:
    """Whether to send one by one: by what is known of the lane, or of this search itself."""
    seen = refused_here + answered_here
    return share >= SINGLY_SHARE or (seen >= SEEN_IN_SEARCH_MIN and refused_here >= SINGLY_SHARE * seen)
