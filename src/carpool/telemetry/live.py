"""What happens in a second, collected only while there is a viewer. Pure: `now` is an argument.

1. `Collector` gets events of requests and batches (core/events.py) and cuts a `LivePart` each second. It keeps counts,
   the slowest few requests, the batches under way, and those of this second, of which an even sample is shown. Slow
   requests that were shown are remembered for as long as a page shows them; other requests of the same time are
   forgotten sooner.
2. A call that failed and was made again is shown as a batch of its own that ended with an error.
3. `Merger` adds up the parts of a fleet. The events of a part count once, whenever it comes; rates and totals are
   those of the last part of each process.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heapreplace
from math import log2
from typing import TypeVar

import msgspec

from carpool.core.batch import Batch
from carpool.core.events import Subscriber
from carpool.core.histograms import split_seconds
from carpool.core.live import (
    BATCHES_MAX,
    LANES_MAX,
    SLOW_KEPT_S,
    SLOW_MAX,
    STEPS_A_DOUBLING,
    LaneWaiting,
    LiveBatch,
    LiveEvent,
    LivePart,
    LiveProcess,
    LiveRates,
    LiveTier,
    SlowRequest,
)
from carpool.core.outcome import NO_CALL, Outcome, Output
from carpool.core.request import Request, facts_of_failure
from carpool.core.snapshot import FleetState, OutcomeNumbers, SheddingNumbers, Snapshot

Item = TypeVar("Item")
Key = TypeVar("Key")

# Latencies are of so many seconds: one second has too few requests for a p99.
WINDOW_SECONDS = 10
# Endpoints of a model that an event shows.
ENDPOINTS_SHOWN_MAX = 256
# The result that is shown for a call that failed and was made again.
FAILED = "upstream-failed"


class Collector(Subscriber):
    """Counts what happens."""

    def __init__(self, tiers: Sequence[str], now: float) -> None:
        self._tier_names = tiers
        self._number = 0
        self._cut_at = now
        self._shed: Mapping[tuple[str, str], float] | None = None
        # By id: batches whose call is under way.
        self._running: dict[str, LiveBatch] = {}
        self._shown: deque[Request] = deque(maxlen=SLOW_MAX * SLOW_KEPT_S)
        self._begin()

    def _begin(self) -> None:
        """A new second."""
        count = len(self._tier_names)
        self._admitted = [0] * count
        self._answered = [0] * count
        self._failed = [0] * count
        self._latencies: list[dict[int, int]] = [{} for _ in range(count)]
        self._ended: list[LiveBatch] = []
        # A heap of the slowest, the least slow first; `number` keeps requests from being compared.
        self._slow: list[tuple[float, int, SlowRequest, Request]] = []
        # Batches of which a request was added; how many were; and the seconds to exceed once the heap is full.
        self._slow_batches: set[str] = set()
        self._slow_seen = 0
        self._slow_from = -1.0

    # Events.

    def admitted(self, request: Request) -> None:
        """A request came in."""
        self._admitted[request.tier] += 1

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        """A call begins. One of the same batch before it has failed."""
        named = batch[0].batch
        if named is None or named.ended:
            return  # a search call among the requests of a batch that is over: no event tells its end
        counts = [0] * len(self._tier_names)
        for request in batch:
            counts[request.tier] += 1
        before = self._running.pop(named.id, None)
        if before is not None:
            self._ended.append(_ended(before, now, FAILED))
        self._running[named.id] = LiveBatch(
            named.id, named.model, endpoint, len(batch), now, 0.0, "", named.reason, attempt, tuple(counts)
        )

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over."""
        running = self._running.pop(batch.id, None)
        if running is not None:
            self._ended.append(_ended(running, batch.ended, batch.result))

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request got its outcome."""
        # A task may come from a process with more tiers.
        tier, is_ok = min(request.tier, len(self._failed) - 1), request.result_code == "ok"
        if is_ok:
            self._answered[tier] += 1
        else:
            self._failed[tier] += 1
        if request.is_task:
            return  # no client waits for its outcome
        seconds = request.ended - request.arrived
        if is_ok:
            latencies, step = self._latencies[tier], step_of(seconds * 1000)
            latencies[step] = latencies.get(step, 0) + 1
        if seconds > self._slow_from:
            self._keep_slow(seconds, request, outcome)

    def _keep_slow(self, seconds: float, request: Request, outcome: Outcome) -> None:
        """Keep one slow request of each batch: the others of the batch have the same timeline."""
        batch_id = outcome.call.batch_id if isinstance(outcome, Output) else batch_id_of_failure(request)
        kept = self._slow
        if batch_id and batch_id in self._slow_batches:
            return
        self._slow_batches.add(batch_id)
        self._slow_seen += 1
        entry = (seconds, self._slow_seen, slow_request(request, outcome), request)
        if len(kept) < SLOW_MAX:
            heappush(kept, entry)
        else:
            heapreplace(kept, entry)
        if len(kept) == SLOW_MAX:
            self._slow_from = kept[0][0]

    # The part of a second.

    def cut(
        self,
        name: str,
        role: str,
        snapshot: Snapshot,
        lanes: Iterable[LaneWaiting],
        now: float,
        batches_max: int = BATCHES_MAX,
    ) -> LivePart:
        """The time since the last cut, which ends here."""
        numbers = {type(each): each for each in snapshot.numbers}
        outcomes, shedder = numbers.get(OutcomeNumbers), numbers.get(SheddingNumbers)
        shed = self._newly_shed(shedder) if isinstance(shedder, SheddingNumbers) else [0] * len(self._tier_names)
        self._number += 1
        # Batches under way first: they are shown longest.
        batches = [*self._running.values(), *self._ended]
        part = LivePart(
            name=name,
            role=role,
            number=self._number,
            at=now,
            seconds=now - self._cut_at,
            tiers=tuple(
                LiveTier(*each) for each in zip(self._admitted, shed, self._answered, self._failed, strict=True)
            ),
            latencies=tuple(self._latencies),
            batches=tuple(thinned(batches, batches_max)),
            batches_ended=len(self._ended),
            slow=tuple(slow for _, _, slow, _ in self._slow),
            lanes=tuple(lanes)[:LANES_MAX],
            requests=_whole(outcomes.requests) if isinstance(outcomes, OutcomeNumbers) else {},
            problems=_whole(shedder.problems) if isinstance(shedder, SheddingNumbers) else {},
        )
        self._cut_at = now
        self._shown.extend(request for *_, request in self._slow)
        self._begin()
        return part

    def find_slow(self, request_id: str) -> Request | None:
        """One of the slow requests that were shown, or are about to be."""
        slow = (*self._shown, *(request for *_, request in self._slow))
        return next((request for request in slow if request.id == request_id), None)

    def _newly_shed(self, shedder: SheddingNumbers) -> list[int]:
        before, self._shed = self._shed, shedder.shed
        if before is None:
            return [0] * len(self._tier_names)
        return [
            sum(int(count - before.get(key, 0)) for key, count in shedder.shed.items() if key[1] == tier)
            for tier in self._tier_names
        ]


class Merger:
    """Makes events of parts."""

    def __init__(self, tiers: Sequence[str], max_batch: Mapping[str, int]) -> None:
        self._tier_names = tiers
        self._max_batch = max_batch
        # By process: the number of the last part that was counted.
        self._counted: dict[str, int] = {}
        # By tier, of the last seconds.
        self._latencies: deque[list[dict[int, int]]] = deque(maxlen=WINDOW_SECONDS)

    def event(self, snapshot: Snapshot, parts: Sequence[LivePart], at: float, viewers: int) -> LiveEvent:
        """The event of a second; `parts` are the last part of each process."""
        fresh = [part for part in parts if part.number > self._counted.get(part.name, 0)]
        self._counted = {part.name: part.number for part in parts}
        tiers = range(len(self._tier_names))
        new = [_added(part.latencies[tier] for part in fresh if tier < len(part.latencies)) for tier in tiers]
        self._latencies.append(new)
        by_tier = [_added(second[tier] for second in self._latencies) for tier in tiers]
        together = _added(by_tier)
        batches = [(place, batch) for place, part in enumerate(fresh) for batch in part.batches]
        waiting, letters = _of_the_fleet(snapshot)
        return LiveEvent(
            at=at,
            seconds=max((part.seconds for part in fresh), default=0.0),
            health=snapshot.health,
            fleet=shown(snapshot.fleet),
            scale=snapshot.scale,
            max_batch=self._max_batch,
            tiers=[
                self._rates(tier, name, parts, by_tier[tier], int(waiting.get(name, 0)))
                for tier, name in enumerate(self._tier_names)
            ],
            p50_ms=quantile(together, 0.5),
            p99_ms=quantile(together, 0.99),
            processes=[LiveProcess(name=part.name, role=part.role, at=part.at) for part in fresh],
            batches=thinned(batches, BATCHES_MAX),
            batches_ended=sum(part.batches_ended for part in fresh),
            slow=sorted((slow for part in fresh for slow in part.slow), key=lambda slow: -slow.total_ms)[:SLOW_MAX],
            lanes=sorted((lane for part in parts for lane in part.lanes), key=lambda lane: -lane.waiting)[:LANES_MAX],
            requests=_added(part.requests for part in parts),
            problems=_added(part.problems for part in parts),
            dead_letters=letters,
            viewers=viewers,
        )

    def _rates(
        self, tier: int, name: str, parts: Sequence[LivePart], latencies: dict[int, int], waiting: int
    ) -> LiveRates:
        # From the last part of each process, counted before or not: their seconds do not end together.
        here = [part for part in parts if tier < len(part.tiers)]

        def rate(field: str) -> float:
            total: float = sum(getattr(part.tiers[tier], field) / max(part.seconds, 0.001) for part in here)
            return round(total, 1)

        admitted, shed = rate("admitted"), rate("shed")
        return LiveRates(
            name=name,
            offered=round(admitted + shed, 1),
            admitted=admitted,
            shed=shed,
            answered=rate("answered"),
            failed=rate("failed"),
            waiting=waiting,
            p50_ms=quantile(latencies, 0.5),
            p99_ms=quantile(latencies, 0.99),
        )


def step_of(latency_ms: float) -> int:
    """The bucket of a latency."""
    return int(STEPS_A_DOUBLING * log2(latency_ms)) if latency_ms > 1.0 else 0


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The latency in ms that this share was not above, rounded up to the end of its bucket; None of nothing."""
    left = share * sum(counts.values())
    if not counts:
        return None
    for step in sorted(counts):
        left -= counts[step]
        if left <= 1e-9:
            break
    end: float = 2.0 ** ((step + 1) / STEPS_A_DOUBLING)
    return round(end, 1)


def thinned(items: Sequence[Item], most: int) -> Sequence[Item]:
    """At most so many of them, evenly."""
    if len(items) <= most:
        return items
    return [items[number * len(items) // most] for number in range(most)]


def shown(fleet: FleetState) -> FleetState:
    """The fleet with at most ENDPOINTS_SHOWN_MAX endpoints of each model."""
    if all(len(model.endpoints) <= ENDPOINTS_SHOWN_MAX for model in fleet.models.values()):
        return fleet
    models = {
        name: msgspec.structs.replace(model, endpoints=model.endpoints[:ENDPOINTS_SHOWN_MAX])
        for name, model in fleet.models.items()
    }
    return msgspec.structs.replace(fleet, models=models)


def _of_the_fleet(snapshot: Snapshot) -> tuple[Mapping[str, float], int]:
    """Waiting requests by tier, and dead letters: over Redis every process knows those of the fleet."""
    for numbers in snapshot.numbers:
        if isinstance(numbers, OutcomeNumbers):
            return numbers.waiting, numbers.dead_letters_kept
    return {}, 0


def _ended(call: LiveBatch, now: float, result: str) -> LiveBatch:
    return msgspec.structs.replace(call, ended=now, result=result)


def slow_request(request: Request, outcome: Outcome) -> SlowRequest:
    """Where the time of a request went."""
    total_s = request.ended - request.arrived
    call = outcome.call if isinstance(outcome, Output) else facts_of_failure(request) or NO_CALL
    queue_s = request.taken - request.arrived if request.taken else total_s
    split = split_seconds(total_s, queue_s, call.started_s, call.upstream_s)
    return SlowRequest(
        id=request.id,
        model=request.model,
        tier=request.tier,
        result=request.result_code,
        total_ms=round(total_s * 1000, 1),
        queue_ms=round(split.queue * 1000, 1),
        retry_ms=round(split.dispatch * 1000, 1),
        call_ms=round(split.upstream * 1000, 1),
        endpoint=call.endpoint,
        attempts=call.attempts,
        batch=call.batch_id,
        batch_size=call.batch_size,
    )


def batch_id_of_failure(request: Request) -> str:
    """The last batch of a request that failed; "" for none. Over Redis the facts come from another process."""
    if request.call is not None:
        return request.call.batch_id
    return "" if request.batch is None else request.batch.id


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: dict[Key, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total


def _whole(counts: Mapping[str, float]) -> dict[str, int]:
    return {key: int(count) for key, count in counts.items()}
