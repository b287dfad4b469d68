"""The embedded broker: requests wait in this process.

Bounded by count and bytes of everything admitted and not yet settled (waiting or running), and by the number of
lanes in which requests wait. `settle`, `settle_batch` and `withdraw` keep those counts true.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf

from carpool.broker.deadlines import Deadlines
from carpool.broker.lanes import Lane, Ranks
from carpool.broker.queue_stats import count_out
from carpool.broker.task_places import TaskPlaces
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, ClientLeft, DeadlineExceeded, QueueFull, queue_time_passed
from carpool.core.events import Events
from carpool.core.histograms import SECONDS_BOUNDS, Histogram, RequestSeconds
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import LaneCounts, LaneQueue, QueueStats
from carpool.core.request import ADMITTED, DONE, QUEUED, RUNNING, Request

# Lanes without requests are kept for their arrival rate; beyond so many lanes the longest-unused go.
IDLE_LANES_KEPT = 256


class WaitingLanes:
    """Synchronous requests that wait, by lane; without quarantined owners (core.ports.LaneCounts)."""

    def __init__(self, lanes: Mapping[bytes, Lane], opened: Mapping[str, int], tiers: int, batch_max: int) -> None:
        self.batch_max = batch_max
        self._lanes = lanes
        self._opened = opened
        self._tiers = tiers

    def by_tier(self) -> list[int]:
        """By tier, in how many lanes synchronous requests of it, or of tiers above it, wait."""
        counts = [0] * self._tiers
        for lane in self._lanes.values():
            if not lane.is_quarantined and (highest := lane.highest_on_line()) is not None:
                counts[highest] += 1
        return list(accumulate(counts))

    def opened_by(self, owner: str) -> int:
        """How many of them this owner opened."""
        return self._opened.get(owner, 0)

    def waiting_in(self, lane_key: bytes) -> int:
        """How many requests wait in a lane; 0 if all of them are tasks."""
        lane = self._lanes.get(lane_key)
        return lane.waiting if lane is not None and lane.highest_on_line() is not None else 0


class MemoryBroker:
    """Keeps what was admitted until it has an outcome."""

    def __init__(
        self,
        *,
        waiting_max: int,
        bytes_max: int,
        lanes_max: int,
        tiers: int,
        strict_order: bool = False,
        # With strict order: the share of what is served that the lowest tier gets all the same.
        min_share: float = 0.0,
        task_patience_s: float = 0.0,
        quarantined: Container[tuple[str, str]] = (),
        # Where the time of requests is counted; a process has one for all of its parts.
        seconds: RequestSeconds | None = None,
        events: Events | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.waiting_max = waiting_max
        self.bytes_max = bytes_max
        self.lanes_max = lanes_max
        self._tiers = tiers
        # By model: what its lanes have in common.
        self._ranks: defaultdict[str, Ranks] = defaultdict(partial(Ranks, tiers, strict_order, min_share))
        # Added to a task's place in the order: no client waits on a connection for it.
        self._task_patience_s = task_patience_s
        # Model and owner of the quarantined, who share batches with each other only. Empty is false.
        self._quarantined = quarantined
        self.events = events or Events()
        self._clock = clock
        # Requests admitted and not settled yet, and the bytes of their inputs.
        self.held = 0
        self.held_bytes = 0
        # Per model, by lane key: the lanes in which requests wait, and those that are empty now.
        self._active: dict[str, dict[bytes, Lane]] = {}
        # By model and owner: how many lanes with parameters it opened that still wait.
        self._opened: dict[str, Counter[str]] = {}
        self._idle: dict[tuple[str, bytes], Lane] = {}
        # By model: bytes of the inputs that were taken and have no outcome yet; what to call when they become fewer.
        self._running_bytes: dict[str, int] = {}
        self._bytes_freed: dict[str, Callable[[], None]] = {}
        self._arrived: dict[str, Callable[[LaneQueue], None]] = {}
        self._deadlines = Deadlines()
        self._is_strict = strict_order
        self._task_places = TaskPlaces(strict_order=strict_order)
        # By model: arrivals in lanes that were dropped.
        self._arrivals_gone: dict[str, int] = {}
        # For metrics: outcomes by code, how long requests waited for a slot, and where their time went. Those that
        # another broker holds (Redis) are counted there, when that one has their outcome.
        self.outcomes: Counter[str] = Counter()
        self.waited = Histogram(SECONDS_BOUNDS)
        self.seconds = seconds or RequestSeconds()

    def __repr__(self) -> str:
        return f"<MemoryBroker held={self.held} bytes={self.held_bytes} waiting={self.depth}>"

    @property
    def depth(self) -> int:
        """Requests that wait for a slot."""
        return sum(map(self.depth_of, self._active))

    def depth_of(self, model: str) -> int:
        """Requests of one model that wait for a slot."""
        return sum(lane.waiting for lane in self._active[model].values())

    def depth_of_tier(self, tier: int) -> int:
        """Requests and tasks of one tier that wait for a slot."""
        return sum(
            ranks.stats_by_tier[index].waiting for ranks in self._ranks.values() for index in (tier, tier + self._tiers)
        )

    def arrivals(self, model: str) -> int:
        """Requests of one model that have come so far. The lanes count them already: here they are only summed up."""
        idle = (lane for lane in self._idle.values() if lane.model == model)
        return self._arrivals_gone[model] + sum(lane.arrivals for lane in (*self._active[model].values(), *idle))

    def waiting_quarantined(self, model: str) -> int:
        """Requests of quarantined owners that wait."""
        return sum(lane.waiting for lane in self._active[model].values() if lane.is_quarantined)

    def quarantined_owners(self) -> set[tuple[str, str]]:
        """Model and owner of the quarantined owners whose requests wait."""
        lanes = [lane for lanes in self._active.values() for lane in lanes.values() if lane.is_quarantined]
        return {(lane.model, request.owner) for lane in lanes for request in lane.requests()}

    def all_waiting(self, model: str) -> int:
        """Requests that wait and whose owners are not quarantined."""
        return sum(lane.waiting for lane in self._active[model].values() if not lane.is_quarantined)

    def most_waiting(self, model: str) -> int:
        """Requests in the longest lane whose owners are not quarantined."""
        return max((lane.waiting for lane in self._active[model].values() if not lane.is_quarantined), default=0)

    def queue_stats(self, model: str, tier: int, *, is_task: bool = False) -> QueueStats:
        """What waits of one tier, in all lanes of a model: synchronous requests, or tasks. It stays the same object."""
        return self._ranks[model].stats_by_tier[tier + self._tiers * is_task]

    def lane_counts(self, model: str, batch_max: int) -> LaneCounts:
        """The synchronous requests of a model that wait, by lane."""
        return WaitingLanes(self._active[model], self._opened[model], self._tiers, batch_max)

    def when_work_arrives(self, model: str, arrived: Callable[[LaneQueue], None]) -> None:
        """Have `arrived(lane)` called for each arrival. Models are known before the first request."""
        self._arrived[model] = arrived
        self._active.setdefault(model, {})
        self._opened.setdefault(model, Counter())
        self._running_bytes.setdefault(model, 0)
        self._arrivals_gone.setdefault(model, 0)

    def when_bytes_free(self, model: str, notify: Callable[[], None]) -> None:
        """Have `notify` called when fewer bytes are under way than before."""
        self._bytes_freed[model] = notify

    def bytes_running(self, model: str) -> int:
        """Bytes of the inputs of one model that were taken and have no outcome yet."""
        return self._running_bytes[model]

    def submit(self, request: Request) -> CarpoolError | None:
        """Queue the request, or say why not: `reserve` and `enqueue`, on the hot path."""
        held_bytes = self.held_bytes + request.size
        if self.held >= self.waiting_max or held_bytes > self.bytes_max or request.parameters or request.lane:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
        self.held += 1
        self.held_bytes = held_bytes
        # Before it is queued: it may fill a batch, which is taken at once.
        if self.events.of_admitted:
            self.events.admitted(request)
        self.enqueue(request)
        return None

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why there is no room for all of them; None if there is."""
        size = sum(request.size for request in requests)
        if self.held + len(requests) > self.waiting_max or self.held_bytes + size > self.bytes_max:
            return QueueFull("the queue has no room for all inputs of this call; try again soon", retry_after_s=1)
        lanes = {request.lane_key: request for request in requests}
        return next((refusal for each in lanes.values() if (refusal := self._refusal(each)) is not None), None)

    def reserve(self, request: Request) -> CarpoolError | None:
        """Count the request against the bounds; it must be enqueued or settled later."""
        refusal = self._refusal(request)
        if refusal is None:
            self.held += 1
            self.held_bytes += request.size
        return refusal

    def hold(self, request: Request) -> None:
        """Count the request in without asking: it was accepted before this process began, maybe with more tiers."""
        request.tier = min(request.tier, self._tiers - 1)
        self.held += 1
        self.held_bytes += request.size

    def enqueue(self, request: Request) -> None:
        """Let a reserved request wait in its lane."""
        model, key = request.model, request.parameters
        if self._quarantined or request.lane:
            request.is_quarantined = (model, request.owner) in self._quarantined
            key = request.lane_key
        lane = self._active[model].get(key)
        if lane is None:
            lane = self._activate(model, key, request.owner)
        if request.is_task:
            request.place += self._task_patience_s
            self._deadlines.add_unordered(request, request.deadline)
            self._task_places.add(request)
        elif request.queue_timeout_s < inf:
            self._deadlines.add(request)
        lane.append(request)
        arrived = self._arrived[model]
        arrived(lane)

    def settle(self, request: Request, outcome: Outcome) -> bool:
        """Give a request its one outcome; false if it has one already."""
        if request.phase == DONE:
            return False
        self._leave(request)
        request.settle(outcome, self._clock())
        if request.held_by is None:
            self.outcomes[request.result_code] += 1  # bounded: codes come from the error tree
            if request.taken and not request.is_shared:
                self.waited.observe(request.taken - request.arrived)
            if self.events.subscribers:
                self.events.settled(request, outcome)
        return True

    def settle_batch(self, batch: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Settle the members of a batch with their outputs: `settle` for many, on the hot path."""
        if len(batch) != len(outputs):  # before a client could get another's output
            raise ValueError(f"{len(outputs)} outputs for {len(batch)} requests")
        now, is_heard = self._clock(), bool(self.events.subscribers)
        settled = settled_bytes = counted = 0
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        # Requests that subscribers do not hear of from here.
        others: set[int] = set()
        for request, output in zip(batch, outputs, strict=True):
            if request.phase != DONE:  # the client may have left meanwhile
                settled += 1
                settled_bytes += request.size
                if request.held_by is None:
                    counted += 1
                    if request.is_task:
                        self.waited.observe(request.taken - request.arrived)
                    elif not request.is_shared:  # else the coalescer counts its members
                        seconds[request.tier].append(now - request.arrived)
                # Before its waiter is called: the next request of the same client may come from there.
                self.held -= 1
                self.held_bytes -= request.size
                request.settle(output, now)
                if is_heard and request.held_by is not None:
                    others.add(id(request))
            elif is_heard:
                others.add(id(request))
        self.outcomes["ok"] += counted
        if seconds:
            since_taken_s = now - batch[0].taken
            self.seconds.answered(seconds, since_taken_s, outputs[0].call)
            for ordered in seconds.values():
                self.waited.observe_ordered(ordered, since_taken_s)
        if is_heard and len(others) < len(batch):
            if others:
                told = [pair for pair in zip(batch, outputs, strict=True) if id(pair[0]) not in others]
                batch, outputs = [request for request, _ in told], [output for _, output in told]
            self.events.all_settled(batch, outputs)
        if settled:
            self._runs_no_more(batch[0].model, settled_bytes)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Let requests that were taken wait again, before requests that came after them."""
        lanes: dict[int, Lane] = {}
        now = self._clock()
        for request in requests:
            if (is_running := request.phase == RUNNING) or request.phase == ADMITTED:
                model = request.model
                request.searched_s += now - request.taken
                request.is_quarantined = bool(self._quarantined) and (model, request.owner) in self._quarantined
                key = request.lane_key
                lane = self._active[model].get(key) or self._activate(model, key, request.owner)
                lane.put_back(request)
                if request.is_task:
                    self._task_places.add(request)
                lanes[id(lane)] = lane
                if is_running:
                    self._runs_no_more(model, request.size)
        for lane in lanes.values():
            self._arrived[lane.model](lane)

    def rest(self, request: Request) -> None:
        """A request that was taken runs no more, but does not wait yet; `put_back` lets it wait again."""
        if request.phase == RUNNING:
            request.phase = ADMITTED
            self._runs_no_more(request.model, request.size)

    def withdraw(self, request: Request) -> None:
        """Take a waiting request out without an outcome: it stays in the journal, or in Redis, for another process."""
        if request.phase <= QUEUED:
            self._leave(request)
            request.phase = DONE

    def cancel(self, request: Request) -> None:
        """The client left: never send it if it has not been sent yet, discard its result otherwise."""
        self.settle(request, ClientLeft("the client left"))

    def lanes(self, model: str) -> Iterable[LaneQueue]:
        """The lanes of one model in which requests wait."""
        return list(self._active[model].values())

    def take(
        self,
        lane: LaneQueue,
        count: int,
        now: float,
        bytes_max: float = inf,
        room_bytes: float = inf,
        *,
        by_size: bool = False,
    ) -> list[Request]:
        """Remove up to `count` requests with up to `bytes_max` bytes, best place first, none of them past its deadline.

        One that is larger comes alone, and only if it has not more than `room_bytes`. `by_size`: the best, and others
        of similar size.
        """
        assert isinstance(lane, Lane)
        waiting_bytes = lane.waiting_bytes
        batch, expired = lane.take(count, now, bytes_max, room_bytes, by_size=by_size)
        self._running_bytes[lane.model] += waiting_bytes - lane.waiting_bytes
        if self._task_places.waiting:
            for request in (*batch, *expired):
                if request.is_task:
                    self._task_places.remove(request)
        if self._quarantined and not lane.is_quarantined:
            # Their owners were quarantined while they waited.
            model = lane.model
            apart = [request for request in batch if (model, request.owner) in self._quarantined]
            if apart:
                batch = [request for request in batch if request not in apart]
                self.put_back(apart)
        if not lane.waiting:
            self._retire(lane)
        for request in expired:
            self.settle(request, DeadlineExceeded("the deadline passed before a slot was free"))
        if batch and self.events.subscribers:
            self.events.taken(batch)
        return batch

    def expire(self, now: float) -> None:
        """Settle the requests whose time is over."""
        for request in self._deadlines.due(now):
            if request.deadline <= now:
                self.settle(request, DeadlineExceeded("no result in time; the request was given up"))
            elif request.phase == QUEUED and not request.taken and request.queue_timeout_s < inf:
                # Else it had its slot, and was put back; or it is shared, and each member has its own timeout.
                self.settle(request, queue_time_passed(request.queue_timeout_s))
            else:
                self._deadlines.add_unordered(request, request.deadline)

    def before_task(self, request: Request) -> int | None:
        """How many go before a task that waits: tasks by their places, and all synchronous ones; else None."""
        tasks = self._task_places.before(request, self._clock())
        if tasks is None:
            return None
        return tasks + max(0, self.depth_of(request.model) - self._task_places.waiting_of(request.model))

    def place_of(self, request: Request) -> int:
        """Where a request of this order stands: 1 for the next. Looks at all that wait: for operators only."""

        def rank(each: Request) -> tuple[int, float]:
            return each.tier if self._is_strict else 0, each.place

        own, lanes = rank(request), self._active[request.model].values()
        return 1 + sum(rank(each) < own for lane in lanes for each in lane.requests())

    def waiting_requests(self) -> list[Request]:
        """Everything that waits for a slot."""
        return [request for lanes in self._active.values() for lane in lanes.values() for request in lane.requests()]

    def _refusal(self, request: Request) -> CarpoolError | None:
        """Why there is no room for a request; None if there is."""
        if self.held >= self.waiting_max or self.held_bytes + request.size > self.bytes_max:
            return QueueFull("the queue is full; try again soon", retry_after_s=1)
        if (request.parameters or request.lane) and self._no_lane_left(request):
            return QueueFull(
                "too many different `parameters` are waiting; use fewer distinct ones or try again soon",
                retry_after_s=1,
            )
        return None

    def _no_lane_left(self, request: Request) -> bool:
        lanes = self._active[request.model]
        if len(lanes) < self.lanes_max or request.lane_key in lanes:
            return False
        # An owner that opened less than its share of the lanes is not refused because of what others opened.
        opened = self._opened[request.model]
        own = opened[request.owner]
        return own >= max(1, self.lanes_max // (len(opened) + (own == 0)))

    def _leave(self, request: Request) -> None:
        """Give back what the request counts for."""
        self.held -= 1
        self.held_bytes -= request.size
        if request.phase == QUEUED:
            if request.is_task:
                self._task_places.remove(request)
            if request.searched_s:
                request.batch = None  # it was put back, and waits for another one
            lane = self._active[request.model][request.lane_key]
            lane.forget(request)
            if not lane.waiting:
                self._retire(lane)
        elif request.phase == RUNNING:
            self._runs_no_more(request.model, request.size)

    def _runs_no_more(self, model: str, size: int) -> None:
        """So many bytes fewer are under way: the batching loop may wait for that."""
        self._running_bytes[model] -= size
        if (notify := self._bytes_freed.get(model)) is not None:
            notify()

    def _activate(self, model: str, key: bytes, owner: str) -> Lane:
        """The lane for a first request: the one that was emptied, with its history, or a new one."""
        lane = self._idle.pop((model, key), None)
        if lane is None:
            lane = Lane(model, key, self._ranks[model])
        self._active[model][key] = lane
        if key:
            lane.opener = owner
            self._opened[model][owner] += 1
        return lane

    def _retire(self, lane: Lane) -> None:
        """Put an emptied lane aside; the longest unused of those is dropped when there are many."""
        if self._active[lane.model].pop(lane.key, None) is None:
            return
        lane.forget_sizes()
        if lane.key:
            count_out(self._opened[lane.model], lane.opener)
        self._idle[lane.model, lane.key] = lane
        if len(self._idle) > IDLE_LANES_KEPT:
            dropped = self._idle.pop(next(iter(self._idle)))
            self._arrivals_gone[dropped.model] += dropped.arrivals
