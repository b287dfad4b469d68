"""One line of waiting requests that owners share fairly, by cost. Pure.

1. An owner's own requests keep their order. The next one is the owner's with the smallest start tag; its tag then grows
   by the cost of what it got. So owners who always have something waiting get equal shares of cost, within one largest.
2. A new owner's tag is the line's virtual time: it stands beside owners that have had their share so far, however many
   requests they have waiting. Virtual time grows with every request by its cost ÷ the owners that wait, so later owners
   stand behind those that wait, and no owner starves, however many come.
3. An owner with nothing waiting is forgotten, unless a large request put it ahead of virtual time: it must not come
   back as if it had not got that. At most as many of these tags are kept as owners wait, and KEPT_MIN more.
4. While one owner alone waits, the line is a plain deque: no tags. Nor are there any while all that waits goes into
   one batch: what others sent is sorted by owner when a batch is taken that leaves some of it.
5. Requests that were put back go before all others: they have been paid for.
6. A request may be taken out of its turn (`charge`): its owner pays for it at once, and it stays in the line like those
   that were settled while they waited. Nobody meets either again: if it is put back it waits in `back`, and what is
   still in the line is dead.
7. The line's place among lines is that of its longest-waiting request, whichever goes next: sharing inside a line takes
   nothing from other lines, and gives them nothing.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from itertools import chain, islice
from math import inf

from carpool.broker.queue_stats import COST_BYTES, WaitingCount, count_out
from carpool.core.request import QUEUED, RUNNING, Request

# The tags of so many owners with nothing waiting may be kept, beside as many as wait.
KEPT_MIN = 64
# An owner no further ahead of virtual time than this is forgotten when it has nothing waiting.
AHEAD_MIN = 2.0


class BatchBuilder:
    """A batch while it is put together."""

    __slots__ = ("batch", "bytes_left", "expired", "now", "room", "room_bytes")

    def __init__(self, now: float, bytes_left: float, room_bytes: float) -> None:
        self.now = now
        # How many more there is room for, and how many bytes; below 0 if there is no room for the next one.
        self.room = 0
        self.bytes_left = bytes_left
        self.room_bytes = room_bytes
        self.batch: list[Request] = []
        self.expired: list[Request] = []

    def move(self, queue: deque[Request], bound: float, has_shadows: bool) -> tuple[int, int, int]:
        """Move requests out of a queue while their place is not after `bound`: `accepts` for many, on the hot path.

        Returns how many, their bytes, and how many that were dead.
        """
        popleft, batch, expired = queue.popleft, self.batch, self.expired
        now, room, bytes_left = self.now, self.room, self.bytes_left
        before = len(batch) + len(expired)
        moved_bytes = dead = 0
        while queue and room and bytes_left >= 0:
            request = popleft()
            if request.phase != QUEUED or (has_shadows and request.is_back):
                dead += 1
                continue
            if request.place > bound:
                queue.appendleft(request)
                break
            size = request.size
            if request.deadline <= now:
                expired.append(request)
            elif size > bytes_left and (batch or size > self.room_bytes):
                queue.appendleft(request)
                bytes_left = -1.0
                break
            else:
                bytes_left -= size
                room -= 1
                batch.append(request)
            request.phase = RUNNING
            request.taken = now
            moved_bytes += size
        self.room, self.bytes_left = room, bytes_left
        return len(batch) + len(expired) - before, moved_bytes, dead

    def accepts(self, request: Request) -> bool:
        """Take the next request, unless there is no room for it."""
        size = request.size
        if request.deadline <= self.now:
            self.expired.append(request)
        elif size > self.bytes_left and (self.batch or size > self.room_bytes):
            self.bytes_left = -1.0
            return False
        else:
            self.bytes_left -= size
            self.room -= 1
            self.batch.append(request)
        request.phase = RUNNING
        request.taken = self.now
        return True


class Backlog:
    """What one owner has waiting in a line, in its order."""

    __slots__ = ("first", "more", "owner", "start")

    def __init__(self, owner: str, start: float, first: Request, more: deque[Request] | None = None) -> None:
        self.owner = owner
        # The tag of its first request.
        self.start = start
        self.first: Request | None = first
        # Behind the first. Most owners have one request: a deque for each would cost more than all else here.
        self.more = more

    def append(self, request: Request) -> None:
        """One more."""
        if self.first is None:
            self.first = request
        elif self.more is None:
            self.more = deque((request,))
        else:
            self.more.append(request)

    def requests(self) -> list[Request]:
        """All of them, in their order."""
        return [] if self.first is None else [self.first, *(self.more or ())]


class FairQueue:
    """Requests of one lane and one tier."""

    __slots__ = (
        "_ahead",
        "_backlogs",
        "_came",
        "_has_shadows",
        "_serial",
        "_size",
        "_turns",
        "_virtual",
        "back",
        "dead",
        "is_shared",
        "mixed",
        "plain",
        "sole",
    )

    def __init__(self, *, has_shadows: bool = True) -> None:
        # Whether requests are taken out of their turn here (rule 6).
        self._has_shadows = has_shadows
        # The only owner that waits, its requests in `plain`; None while several wait. Then `plain` has those of the
        # owner that was alone, and `mixed` what came since, of any owner, until it has to be shared.
        self.sole: str | None = None
        self.plain: deque[Request] = deque()
        self.mixed: deque[Request] = deque()
        # Requests that were put back, by their places.
        self.back: deque[Request] = deque()
        # Settled while they waited, and still here.
        self.dead = 0
        self._serial = 0
        self._share_nothing()

    def _share_nothing(self) -> None:
        # Several owners wait for their turns, or did a moment ago. Only then the rest is used.
        self.is_shared = False
        self._backlogs: dict[str, Backlog] = {}
        # The same as a heap, by their tags; and the tags of owners with nothing waiting that are ahead of virtual time.
        self._turns: list[tuple[float, int, Backlog]] = []
        self._ahead: dict[str, float] = {}
        self._virtual = 0.0
        # Requests in order of arrival, taken ones among them; and how many are here, the dead among them.
        self._came: deque[Request] = deque()
        self._size = 0

    def add(self, request: Request) -> None:
        """Let a request wait. (It may be appended to `plain` if its owner is `sole`, to `mixed` if that has some.)"""
        if self.is_shared:
            self._add_shared(request)
        elif not self.plain and not self.mixed:
            self.sole = request.owner
            self.plain.append(request)
        elif request.owner == self.sole:
            self.plain.append(request)
        else:
            self.sole = None
            self.mixed.append(request)

    def _add_shared(self, request: Request) -> None:
        owner = request.owner
        backlog = self._backlogs.get(owner)
        if backlog is None:
            start = max(self._virtual, self._ahead.pop(owner, 0.0)) if self._ahead else self._virtual
            self._take_turns(Backlog(owner, start, request))
        else:
            backlog.append(request)
        self._size += 1
        self._came.append(request)
        if len(self._came) > 2 * self._size + KEPT_MIN:
            here = {id(each) for one in self._backlogs.values() for each in one.requests()}
            self._came = deque(each for each in self._came if id(each) in here)

    def _take_turns(self, backlog: Backlog) -> None:
        """An owner that had nothing waiting has something."""
        self._backlogs[backlog.owner] = backlog
        self._serial += 1
        heappush(self._turns, (backlog.start, self._serial, backlog))

    def put_back(self, request: Request, *, is_moved: bool = False) -> None:
        """Let a request that was taken wait again, before those behind it. `is_moved`: it comes from another lane."""
        request.is_back = True
        newest = self._came or self.mixed or self.plain
        if is_moved and newest and newest[-1].place <= request.place:
            self.add(request)
            return
        back = self.back
        if back and back[-1].place <= request.place:
            back.append(request)
            return
        later: list[Request] = []
        while back and back[0].place < request.place:  # a few at most
            later.append(back.popleft())
        back.appendleft(request)
        back.extendleft(reversed(later))

    def longest_waiting(self) -> Request | None:
        """The request with the smallest place; None if none waits."""
        other = self._longest_shared() if self.is_shared else self._first_of(self.plain) or self._first_of(self.mixed)
        if not self.back or (first := self._first_back()) is None:
            return other
        return other if other is not None and other.place < first.place else first

    def move(self, builder: BatchBuilder, bound: float, queue_stats: WaitingCount) -> tuple[int, int]:
        """Move requests into a batch while the line's place is not after `bound` and there is room.

        Returns how many, and their bytes.
        """
        number = size = 0
        if self.back:
            number, size = self._move_back(builder, bound, queue_stats)
        if builder.room and builder.bytes_left >= 0:
            if self.mixed and not self._fits(builder, bound):
                self._share()
            if self.is_shared:
                more, more_bytes = self._move_shared(builder, bound, queue_stats)
                self._relax()
            elif self.mixed:
                more, more_bytes = self._move_all(builder, queue_stats)
            else:
                more, more_bytes, dead = builder.move(self.plain, bound, self._has_shadows)
                self.dead -= dead
                if more:
                    queue_stats.remove(self.sole or "", more, more_bytes)
            number, size = number + more, size + more_bytes
        return number, size

    def newcomers(self, since: float, most: int) -> list[Request]:
        """Requests whose turn comes with the next `most`, though they came after `since`: of owners that have none from
        before it.
        """
        if self.mixed:
            self._share()
        if not self.is_shared:
            head = self._first_of(self.plain)
            return [] if head is None or head.arrived <= since else list(filter(self._waits, islice(self.plain, most)))
        found: list[Request] = []
        turns = self._turns[:most]  # the first of a heap are about the smallest of it
        until = self._virtual + most / max(1, len(self._turns))
        for _, _, backlog in turns:
            if (first := self._first_in(backlog)) is None or first.arrived <= since:
                continue
            start = backlog.start
            for request in filter(self._waits, chain((first,), islice(backlog.more or (), most))):
                if start >= until:
                    break
                found.append(request)
                start += cost_of(request)
        return found

    def lag(self) -> float:
        """How much less than its share the owner has had whose turn it is."""
        return self._virtual - self._turns[0][0] if self._next_shared() is not None else 0.0

    def charge(self, request: Request) -> None:
        """A request that waits here is taken out of its turn."""
        if self.mixed:
            self._share()
        if (backlog := self._backlogs.get(request.owner)) is not None:
            cost = cost_of(request)
            backlog.start += cost
            self._virtual += cost / len(self._turns)

    def rebuild(self, leaving: Request | None = None) -> None:
        """Remove all the dead, and one that is about to be settled."""
        self.back = deque(each for each in self.back if each.phase == QUEUED and each is not leaving)
        self.plain = self._living(self.plain, leaving)
        self.mixed = self._living(self.mixed, leaving)
        self.dead = 0
        if self.is_shared:
            self._came = self._living(self._came, leaving)
            backlogs = list(self._backlogs.values())
            self._backlogs, self._turns = {}, []
            for backlog in backlogs:
                left = self._living(backlog.requests(), leaving)
                backlog.first, backlog.more = left.popleft() if left else None, left
                if backlog.first is None:
                    self._forget(backlog)
                else:
                    self._take_turns(backlog)
            self._size = sum(len(backlog.requests()) for backlog in backlogs)
            self._relax()
        elif self.plain and not self.mixed:
            self.sole = self.plain[0].owner

    def requests(self) -> list[Request]:
        """All that wait."""
        found = [*self.plain, *self.mixed]
        if self.is_shared:
            shared = [request for backlog in self._backlogs.values() for request in backlog.requests()]
            found += sorted(shared, key=lambda request: request.arrived)
        return [*(each for each in self.back if each.phase == QUEUED), *filter(self._waits, found)]

    def _move_back(self, builder: BatchBuilder, bound: float, queue_stats: WaitingCount) -> tuple[int, int]:
        number = moved_bytes = 0
        while builder.room and (request := self._first_back()) is not None:
            if request.place > bound or not builder.accepts(request):
                break
            self.back.popleft()
            queue_stats.remove(request.owner, 1, request.size)
            number += 1
            moved_bytes += request.size
        return number, moved_bytes

    def _move_shared(self, builder: BatchBuilder, bound: float, queue_stats: WaitingCount) -> tuple[int, int]:
        """One by one, each time of the owner with the smallest tag."""
        turns, number, moved_bytes = self._turns, 0, 0
        while builder.room and turns:
            start, _, backlog = turns[0]
            request = backlog.first
            if request is None or start < backlog.start or not self._waits(request):
                if (request := self._next_shared()) is None:
                    break
                start, _, backlog = turns[0]
            if bound < inf and ((longest := self._longest_shared()) is None or longest.place > bound):
                break
            if not builder.accepts(request):
                break
            size = request.size
            number += 1
            moved_bytes += size
            queue_stats.remove(backlog.owner, 1, size)
            cost = 1.0 + size / COST_BYTES if request.deadline > builder.now else 0.0
            self._virtual = max(start, self._virtual) + cost / len(turns)
            backlog.start = start + cost
            backlog.first = backlog.more.popleft() if backlog.more else None
            if backlog.first is None:
                heappop(turns)
                self._forget(backlog)
            else:
                self._serial += 1
                heapreplace(turns, (backlog.start, self._serial, backlog))
        self._size -= number
        return number, moved_bytes

    def _next_shared(self) -> Request | None:
        """The first request of the owner with the smallest tag, who is then the first of `_turns`."""
        turns = self._turns
        while turns:
            start, _, backlog = turns[0]
            if start < backlog.start:  # it was charged for one out of its turn
                self._serial += 1
                heapreplace(turns, (backlog.start, self._serial, backlog))
            elif (request := self._first_in(backlog)) is not None:
                return request
            else:
                heappop(turns)
                self._forget(backlog)
        return None

    def _fits(self, builder: BatchBuilder, bound: float) -> bool:
        """Whether all that waits, of whichever owners, goes into this batch: then there is nothing to share."""
        if len(self.plain) + len(self.mixed) > builder.room:
            return False
        waiting = (*self.plain, *self.mixed)
        return sum(request.size for request in waiting) <= builder.bytes_left and (
            bound == inf or all(request.place <= bound for request in waiting)
        )

    def _move_all(self, builder: BatchBuilder, queue_stats: WaitingCount) -> tuple[int, int]:
        """Move all that waits, of several owners."""
        batched, expired = len(builder.batch), len(builder.expired)
        number = moved_bytes = 0
        for queue in (self.plain, self.mixed):
            more, more_bytes, dead = builder.move(queue, inf, self._has_shadows)
            number, moved_bytes = number + more, moved_bytes + more_bytes
            self.dead -= dead
        for request in (*builder.batch[batched:], *builder.expired[expired:]):
            count_out(queue_stats.by_owner, request.owner)
        queue_stats.waiting -= number
        queue_stats.bytes -= moved_bytes
        return number, moved_bytes

    def _share(self) -> None:
        """Not all that waits goes: from now on there are tags."""
        self.is_shared = True
        plain, mixed, self.plain, self.mixed = self.plain, self.mixed, deque(), deque()
        if plain:
            self._came, self._size = plain.copy(), len(plain)
            first = plain.popleft()
            self._take_turns(Backlog(first.owner, 0.0, first, plain))
        for request in mixed:
            self._add_shared(request)

    def _relax(self) -> None:
        """Be a plain line again, if no owner waits, or one alone and no other's tag is kept."""
        if len(self._turns) > 1:
            return
        if self._turns:
            self._tidy()
            if self._ahead:
                return
            backlog = self._turns[0][2]
            self.sole, self.plain = backlog.owner, backlog.more or deque()
            if backlog.first is not None:
                self.plain.appendleft(backlog.first)
        self._share_nothing()

    def _forget(self, backlog: Backlog) -> None:
        """An owner has nothing waiting any more: keep its tag if that is ahead; of none, if these are too many."""
        self._backlogs.pop(backlog.owner, None)
        if backlog.start > self._virtual + AHEAD_MIN:
            self._ahead[backlog.owner] = backlog.start
            if len(self._ahead) > len(self._turns) + KEPT_MIN:
                self._tidy()
                if len(self._ahead) > len(self._turns) + KEPT_MIN // 2:
                    self._ahead = {}

    def _tidy(self) -> None:
        """Of owners with nothing waiting, keep the tags of those that are still far ahead."""
        ahead = self._virtual + AHEAD_MIN
        self._ahead = {owner: start for owner, start in self._ahead.items() if start > ahead}

    def _longest_shared(self) -> Request | None:
        came, backlogs = self._came, self._backlogs
        while came:
            request = came[0]
            backlog = backlogs.get(request.owner) if self._waits(request) else None
            # A request that still waits is its owner's first: those before it were before it here, too.
            if backlog is not None and self._first_in(backlog) is request:
                return request
            came.popleft()
        return None

    def _waits(self, request: Request) -> bool:
        """Whether a request that is found in the line still waits there (rule 6)."""
        return request.phase == QUEUED and not (self._has_shadows and request.is_back)

    def _living(self, queue: Iterable[Request], leaving: Request | None) -> deque[Request]:
        """The queue without those that wait no more, and without one that is about to be settled."""
        return deque(request for request in queue if self._waits(request) and request is not leaving)

    def _first_of(self, queue: deque[Request]) -> Request | None:
        """The first that lives; the dead before it go."""
        while queue:
            if self._waits(queue[0]):
                return queue[0]
            queue.popleft()
            self.dead -= 1
        return None

    def _first_back(self) -> Request | None:
        """The same, of those that were put back."""
        while self.back:
            if self.back[0].phase == QUEUED:
                return self.back[0]
            self.back.popleft()
            self.dead -= 1
        return None

    def _first_in(self, backlog: Backlog) -> Request | None:
        """The same, of one owner."""
        while (request := backlog.first) is not None and not self._waits(request):
            backlog.first = backlog.more.popleft() if backlog.more else None
            self.dead -= 1
            self._size -= 1
        return request


def cost_of(request: Request) -> float:
    """What a request costs its owner."""
    return 1.0 + request.size / COST_BYTES
