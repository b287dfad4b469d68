"""One lane's waiting requests in the order in which they should be served. Pure.

1. Inside a tier: owners share fairly, by cost (`fair_queue.py`); an owner's own requests in order of arrival; tasks
   apart. Between tiers: the smallest `place` (arrival + the tier's target) of the tiers' longest-waiting requests goes
   first. So higher tiers go first, and no request starves: its place stays while later arrivals' places grow. With
   `strict`, a higher tier always goes first, but for what is due to the lowest (`MinShare`). Requests of a burst
   have later places. So have tasks; those that are old enough go before synchronous requests, but for what is due to
   these.
2. A request that was settled while it waited (client left, queue timeout) stays in its line until it comes to the
   head, but counts no longer. When the dead outnumber the living the line is rebuilt, so memory follows the living.
3. A batch is bounded in bytes too: it ends before the request with which it would have too many. No request
   overtakes that one. The first is taken however large it is, so that the lane gets shorter, unless there is no
   room for it at all.
4. Batches that fit (`by_size`), while FIT_MIN batches or more wait: the first in the order goes, always. Each line
   gets as many places as it would have in order: lines are compared by the places of as many requests as wait in
   each, those that came last, so that who is left behind in one takes nothing from others. With the first go the
   first of each such line, and newcomers: requests of owners who have none waiting from before the last batch in
   order. All other places go to requests of similar size (`size_index.py`), of the line whose places they are while
   any wait there. The batch is in order after all if the first came after the last batch in order, and the last batch
   was by size; if the first was put back; or if an owner has had LAG_MAX of a batch less than its share. So those who
   waited when a batch left in order go before the next such one; and whom the order prefers (its owner sends little,
   its tier is high) is hardly passed over.
   What is taken by size stays in its line like the dead. The lane of quarantined owners is served in order: requests
   move there from other lanes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from math import inf
from typing import Any

from carpool.broker.fair_queue import BatchBuilder, FairQueue
from carpool.broker.queue_stats import COST_BYTES, WaitingCount
from carpool.broker.size_index import SizeIndex
from carpool.core.request import APART, QUEUED, Request

REBUILD_DEAD_MIN = 64
# Rule 4: with fewer batches waiting there is little to choose from.
FIT_MIN = 2
LAG_MAX = 0.25
# What came so shortly before a batch may not have been here when it was put together: over Redis it has to be fetched.
ON_THE_WAY_S = 0.01
# With `strict`, what a tier adds to the place by which lanes are compared: more seconds than any clock counts.
STRICT_STEP_S = 1e9
# The most credit that is saved up.
DUE_MAX = 1024.0
# What the lowest tier gets of what is served, with strict order: enough to go on, too little for the others to miss.
LOWEST_TIER_SHARE = 0.05
# What synchronous requests get of what is served, however many tasks are old enough to go first.
SYNCHRONOUS_SHARE = 0.9


# A line with requests that wait: its rank, place and number, and the request that has waited longest.
LiveLine = tuple[int, float, int, Request]


class MinShare:
    """A minimum share of what is served, for requests that the order alone would starve.

    With strict order the lowest tier has one. In any order synchronous requests have one: tasks that are old enough go
    before them, and there may be very many tasks. While such requests wait, each request served adds the share to their
    credit; each whole request of credit is due. What they get while other requests wait is charged, also beyond what
    was due (a batch of a lane without others), so that the share holds over time: at most `debt_max` of it. What they
    get while no other request waits is free.
    """

    __slots__ = ("_credit", "_debt_max", "_share")

    def __init__(self, share: float, debt_max: float = DUE_MAX) -> None:
        self._share = share
        self._debt_max = debt_max
        self._credit = 0.0

    def due(self) -> int:
        """How many of these requests go first now."""
        return int(self._credit) if self._credit >= 1.0 else 0

    def served(self, others: int, lowest: int, *, others_wait: bool, lowest_waits: bool) -> None:
        """Count a batch: how many others and how many of these it had, and whether either still wait."""
        if others_wait:
            self._credit -= lowest
        if lowest_waits:
            self._credit = min(self._credit + self._share * (others + lowest), DUE_MAX)
        else:
            self._credit = min(self._credit, 0.0)
        self._credit = max(self._credit, -self._debt_max)


class Ranks:
    """What the lanes of one model have in common: who waits in each line, and the rule between tiers."""

    __slots__ = ("is_strict", "lowest", "min_share", "stats_by_tier", "synchronous", "tiers")

    def __init__(self, tiers: int, strict: bool = False, min_share: float = 0.0) -> None:
        self.tiers = tiers
        self.is_strict = strict
        # Synchronous requests by tier, then tasks by tier, then synchronous ones that came in late: those have later
        # places, so they need lines of their own. A tier's two lines of synchronous requests share one count.
        counts = [WaitingCount() for _ in range(2 * tiers)]
        self.stats_by_tier = counts + counts[:tiers]
        self.lowest = (tiers - 1, 3 * tiers - 1, 2 * tiers - 1)
        self.min_share = MinShare(min_share) if strict and min_share and tiers > 1 else None
        self.synchronous = MinShare(SYNCHRONOUS_SHARE, debt_max=0.0)

    def served(self, batch: list[Request]) -> None:
        """A batch was taken: keep the shares."""
        stats_by_tier, tiers = self.stats_by_tier, self.tiers
        if any(stats_by_tier[index].waiting for index in range(tiers, 2 * tiers)):
            tasks = sum(request.is_task for request in batch)
            # Tasks alone, though synchronous requests are due: these may not go now (quarantined, or of a lower rank).
            # They gain no credit for it, or later synchronous requests would spend it, and tasks would starve.
            if tasks < len(batch) or not self.synchronous.due():
                waits = any(stats_by_tier[index].waiting for index in range(tiers))
                self.synchronous.served(tasks, len(batch) - tasks, others_wait=True, lowest_waits=waits)
        if self.min_share is not None:
            tier = self.tiers - 1
            lowest = sum(request.tier == tier for request in batch)
            waiting = sum(queue_stats.waiting for queue_stats in stats_by_tier[: 2 * tiers])
            lowest_waiting = stats_by_tier[tier].waiting + stats_by_tier[tier + tiers].waiting
            self.min_share.served(
                len(batch) - lowest,
                lowest,
                others_wait=waiting > lowest_waiting,
                lowest_waits=lowest_waiting > 0,
            )


class Lane:
    """Requests of one model with the same lane key."""

    __slots__ = (
        "_in_order_at",
        "_lines",
        "_places",
        "_ranks",
        "_sizes",
        "_stats_by_tier",
        "_tiers",
        "arrivals",
        "batching_notes",
        "is_in_order",
        "is_quarantined",
        "key",
        "model",
        "opener",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, model: str, key: bytes, ranks: Ranks) -> None:
        self.model = model
        self.key = key
        self.is_quarantined = key.endswith(APART)
        # The owner whose request found the lane empty.
        self.opener = ""
        self.waiting = 0
        self.waiting_bytes = 0
        self.arrivals = 0
        self.batching_notes: Any = None
        self._ranks = ranks
        self._tiers = ranks.tiers
        # One line each, as `ranks` has them.
        self._stats_by_tier = ranks.stats_by_tier
        self._lines = [FairQueue(has_shadows=not self.is_quarantined) for _ in ranks.stats_by_tier]
        # Rule 4: by line what waits by size, while that is used; when the last batch left in order, and whether the
        # last one did.
        self._sizes: list[SizeIndex] | None = None
        # Meanwhile: the places of as many requests of each line as wait there, those that came last.
        self._places: list[deque[float]] = []
        self._in_order_at = -inf
        self.is_in_order = False

    def __repr__(self) -> str:
        return f"<Lane {self.model} waiting={self.waiting} dead={sum(line.dead for line in self._lines)}>"

    def highest_on_line(self) -> int | None:
        """The highest tier of the synchronous requests that wait; None if only tasks wait."""
        tiers, lines = self._tiers, self._lines
        for tier in range(tiers):
            if lines[tier].longest_waiting() is not None or lines[2 * tiers + tier].longest_waiting() is not None:
                return tier
        return None

    def append(self, request: Request) -> None:
        """Let a request wait."""
        request.phase = QUEUED
        self.waiting += 1
        self.waiting_bytes += request.size
        self.arrivals += 1
        index = request.tier
        if request.is_task:
            index += self._tiers
        elif request.is_late:
            self._stats_by_tier[index].add_late(request.owner)
            index += 2 * self._tiers
        owner = request.owner
        queue_stats = self._stats_by_tier[index]
        queue_stats.waiting += 1
        queue_stats.bytes += request.size
        by_owner = queue_stats.by_owner
        by_owner[owner] = by_owner.get(owner, 0) + 1
        line = self._lines[index]
        if line.sole == owner:  # the usual cases, and the quick ones
            line.plain.append(request)
        elif line.mixed:
            line.mixed.append(request)
        else:
            line.add(request)
        if self._sizes is not None:
            self._sizes[index].add(request)
            self._places[index].append(request.place)

    def put_back(self, request: Request) -> None:
        """Let a request that was taken wait again, before those behind it: it has waited already."""
        request.phase = QUEUED
        self.waiting += 1
        self.waiting_bytes += request.size
        index = self._index_of(request)
        self._stats_by_tier[index].add(request.owner, request.size)
        if index >= 2 * self._tiers:
            self._stats_by_tier[index].add_late(request.owner)
        self._lines[index].put_back(request, is_moved=self.is_quarantined)
        if self._sizes is not None:
            self._places[index].appendleft(request.place)

    def forget(self, request: Request) -> None:
        """Count out a waiting request that is about to be settled."""
        if self._sizes is not None:  # who leaves gives up the last place, and takes nothing from those that wait
            self._places[self._index_of(request)].rotate(1)
        self._count_out(request)
        if self._sizes is not None:
            self._sizes[self._index_of(request)].keep_small(self.waiting)

    def _count_out(self, request: Request) -> None:
        self.waiting -= 1
        self.waiting_bytes -= request.size
        index = self._index_of(request)
        self._stats_by_tier[index].remove(request.owner, 1, request.size)
        if index >= 2 * self._tiers:
            self._stats_by_tier[index].remove_late(request.owner)
        if self._sizes is not None:
            self._places[index].popleft()
        line = self._lines[index]
        line.dead += 1
        if line.dead > REBUILD_DEAD_MIN and line.dead > self.waiting:
            line.rebuild(request)

    def forget_sizes(self) -> None:
        """Choose in order again."""
        if self._sizes is not None:
            self._sizes, self._places = None, []
            for line in self._lines:
                line.rebuild()

    def oldest(self) -> float:
        """When the longest-waiting request arrived."""
        return min(head.arrived for _, _, _, head in self._live_lines())

    def place(self) -> float:
        """Where the lane stands among others: the smallest goes first."""
        live, min_share = self._live_lines(), self._ranks.min_share
        if min_share is not None and min_share.due():
            due = [place for _, place, index, _ in live if index in self._ranks.lowest]
            if due:
                return min(due) - STRICT_STEP_S
        rank, place, _, _ = min(live)
        step = float(rank)
        if self._ranks.synchronous.due():
            due = [line[1] for line in live if line[0] == rank and not self._has_tasks(line[2])]
            if due:
                place = min(due)
            else:
                step += 0.5  # behind the lanes with synchronous requests
        return step * STRICT_STEP_S + place

    def requests(self) -> list[Request]:
        """All that wait, tier by tier."""
        return [request for line in self._lines for request in line.requests()]

    def take(
        self, count: int, now: float, bytes_max: float = inf, room_bytes: float = inf, *, by_size: bool = False
    ) -> tuple[list[Request], list[Request]]:
        """Remove up to `count`, and with them those whose deadline has passed, which do not count.

        In order; or, `by_size`, the first in the order and others of similar size. At most `bytes_max` bytes together;
        a larger one comes alone, if it has not more than `room_bytes`.
        """
        builder = BatchBuilder(now, min(bytes_max, room_bytes), room_bytes)
        if by_size and self.waiting >= FIT_MIN * count and not self.is_quarantined:
            self._take_by_size(count, builder)
        else:
            self.forget_sizes()
            self._take_in_order(count, builder)
        self._ranks.served(builder.batch)
        return builder.batch, builder.expired

    def _take_in_order(self, count: int, builder: BatchBuilder) -> None:
        min_share = self._ranks.min_share
        if min_share is not None and (due := min(min_share.due(), count)):
            for index in self._ranks.lowest:
                builder.room = max(0, due - len(builder.batch))
                self._take_from(index, inf, builder)
        if (due := min(self._ranks.synchronous.due(), count - len(builder.batch))) > 0:
            builder.room = due
            self._take_best(builder, is_synchronous=True)
        builder.room = count - len(builder.batch)
        self._take_best(builder)

    def _take_by_size(self, count: int, builder: BatchBuilder) -> None:
        """Rule 4."""
        if self._sizes is None:
            self._sizes = [SizeIndex(line.requests()) for line in self._lines]
            self._places = [deque(sorted(each.place for each in line.requests())) for line in self._lines]
        for sizes in self._sizes:
            sizes.keep_small(self.waiting)
        lag_max = LAG_MAX * count * (1.0 + self.waiting_bytes / self.waiting / COST_BYTES)
        self._take_in_order(1, builder)
        if not builder.batch:
            return
        first = builder.batch[0]
        own = self._index_of(first)
        is_new = first.arrived > self._in_order_at and not self.is_in_order
        if is_new or first.is_back or self._lines[own].lag() > lag_max:
            self._take_in_order(count, builder)
            self._in_order_at, self.is_in_order = builder.now - ON_THE_WAY_S, True
            return
        self.is_in_order = False
        builder.room = count - len(builder.batch)
        if self.waiting and builder.room:
            self._take_out_of_turn(self._company(first, own, builder.room), builder)

    def _company(self, first: Request, own: int, count: int) -> Iterator[Request]:
        """Who goes with the first, of this line: of each line as many as in order."""
        assert self._sizes is not None
        live = sorted(self._live_lines())
        numbers = self._numbers(live, count)
        lines = [own, *(index for _, _, index, _ in live if index != own)]
        for index in lines:
            number = numbers[index]
            head = self._lines[index].longest_waiting() if number and index != own else None
            if head is not None and not head.is_back:
                yield head
                number -= 1
            newcomers = self._lines[index].newcomers(self._in_order_at, number)[:number] if number else []
            yield from newcomers
            yield from islice(self._sizes[index].nearest(first.size), number - len(newcomers))
        for index in lines:
            yield from self._sizes[index].nearest(first.size)

    def _numbers(self, live: list[LiveLine], count: int) -> Counter[int]:
        """How many of each line would be in a batch in order."""
        if len(live) == 1:
            return Counter({live[0][2]: count})
        due, numbers = self._ranks.min_share.due() if self._ranks.min_share is not None else 0, Counter[int]()
        if due:
            numbers += self._next_of([line for line in live if line[2] in self._ranks.lowest], min(due, count))
        if (due := min(self._ranks.synchronous.due(), count - numbers.total())) > 0:
            numbers += self._next_of(self._synchronous_of(live), due)
        return numbers + self._next_of(live, count - numbers.total())

    def _next_of(self, live: list[LiveLine], count: int) -> Counter[int]:
        """How many of the next so many of these lines each of them has."""
        places = ([(rank, place, index) for place in islice(self._places[index], count)] for rank, _, index, _ in live)
        return Counter(index for _, _, index in islice(merge(*places), count))

    def _synchronous_of(self, live: list[LiveLine]) -> list[LiveLine]:
        """The lines of synchronous requests among those of the best rank."""
        return [line for line in live if line[0] == live[0][0] and not self._has_tasks(line[2])]

    def _take_out_of_turn(self, requests: Iterable[Request], builder: BatchBuilder) -> None:
        for request in requests:
            index = self._index_of(request)
            if not builder.accepts(request):
                if self._sizes is not None:
                    self._sizes[index].add(request)
                return
            if request.deadline > builder.now:
                self._lines[index].charge(request)
            self._count_out(request)
            if not builder.room:
                return

    def _take_best(self, builder: BatchBuilder, *, is_synchronous: bool = False) -> None:
        """Move requests in their order while there is room; of the best rank, synchronous ones alone."""
        while builder.room and self.waiting and builder.bytes_left >= 0:
            live = sorted(self._live_lines())
            if is_synchronous:
                live = self._synchronous_of(live)
                if not live:
                    return
            bound = max(live[1][1], live[0][3].place) if len(live) > 1 and live[0][0] == live[1][0] else inf
            self._take_from(live[0][2], bound, builder)

    def _take_from(self, index: int, bound: float, builder: BatchBuilder) -> None:
        """Move requests from one line while it is still the best (its place not after `bound`) and there is room."""
        before = len(builder.batch), len(builder.expired)
        number, size = self._lines[index].move(builder, bound, self._stats_by_tier[index])
        self.waiting -= number
        self.waiting_bytes -= size
        if self._sizes is not None:
            for _ in range(number):
                self._places[index].popleft()
        if index >= 2 * self._tiers:
            for request in (*builder.batch[before[0] :], *builder.expired[before[1] :]):
                self._stats_by_tier[index].remove_late(request.owner)

    def _index_of(self, request: Request) -> int:
        kind = 1 if request.is_task else 2 if request.is_late else 0
        return request.tier + kind * self._tiers

    def _has_tasks(self, index: int) -> bool:
        return self._tiers <= index < 2 * self._tiers

    def _live_lines(self) -> list[LiveLine]:
        """The lines with requests that wait: rank, place, number, and the request that has waited longest."""
        live = []
        tiers = self._tiers if self._ranks.is_strict else 1
        for index, line in enumerate(self._lines):
            if line.plain or line.back or line.mixed or line.is_shared:
                head = line.longest_waiting()
                if head is not None:
                    place = head.place if self._sizes is None else max(head.place, self._places[index][0])
                    live.append((index % tiers, place, index, head))
        return live
