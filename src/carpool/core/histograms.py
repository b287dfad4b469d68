"""Counts that cost next to nothing to keep; telemetry reads them when it is scraped.

prometheus-client's own `observe` takes about a microsecond and a lock, 64 times a batch. A stage counts here
with plain integers, and `telemetry.metrics` turns them into metric families only when it is scraped.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from carpool.core.outcome import CallFacts


class Example(NamedTuple):
    """A value with a trace, and when it was seen, in seconds since the epoch."""

    trace_id: str
    value: float
    wall: float


class Histogram:
    """Counts of values by bucket, with their sum. `bounds` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        # One more than bounds: the last is everything above.
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        # By number of the bucket: the last value of which there is a trace.
        self.examples: dict[int, Example] = {}

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_alike(self, value: float, count: int) -> None:
        """Count so many of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values: a step for each bucket that they fall into, not for each of them."""
        self.observe_ordered(sorted(values))

    def observe_ordered(self, ordered: Sequence[float], less: float = 0.0) -> None:
        """The same for values that ascend already; each counts as `less` less than it is, and as 0 at least."""
        bounds, counts = self.bounds, self.counts
        bucket, last = bisect_left(bounds, ordered[0] - less), bisect_left(bounds, ordered[-1] - less)
        counted = 0
        while bucket < last:
            below = bisect_right(ordered, bounds[bucket] + less)
            counts[bucket] += below - counted
            counted = below
            bucket += 1
        counts[last] += len(ordered) - counted
        self.total += max(0.0, sum(ordered) - less * len(ordered))

    def exemplify(self, value: float, trace_id: str, wall: float) -> None:
        """Keep the trace of a value that is counted by itself, as an example for its bucket."""
        self.examples[bisect_left(self.bounds, value)] = Example(trace_id, value, wall)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, as Prometheus wants them."""
        running = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound is None else repr(float(bound)), running))
        return pairs


SECONDS_BOUNDS = (1e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0, 10.0, 30.0)
# Bounds for shares of a whole: how full a batch is, how far an estimate is off.
SHARE_BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 63, 64, 96, 128)


def off_by(bounds: Sequence[float]) -> dict[str, Histogram]:
    """How far an estimate is off, by direction: it was more, or less, than what then was."""
    return {"too-high": Histogram(bounds), "too-low": Histogram(bounds)}


STAGES = ("receive", "admit", "queue", "dispatch", "upstream", "reply")


class RequestSeconds:
    """Where the time of synchronous requests went that got an output from a batch: in all by tier, and by stage.

    1. `receive`: from the first to the last read of a request. `admit`: until it is queued: credential, rate limit,
       load shedding. Both take microseconds as a rule: they are samples, for measuring each would cost more than they
       do.
    2. `queue`: from its arrival until it is taken into a batch; over Redis with the way there. `dispatch`: until the
       call begins that brings its output; earlier attempts, and searches, are in it. `upstream`: that call. `reply`:
       until it is settled; over Redis with the way back. These four are all of its time: they sum up to it exactly,
       whatever another process says of its own part.
    3. From `taken` on, all of a batch have the same times: a batch costs a few steps, a request one entry of a list.
    """

    __slots__ = ("admit", "by_tier", "dispatch", "queue", "receive", "reply", "upstream")

    def __init__(self) -> None:
        # From arrival to answer, by number of the tier.
        self.by_tier: defaultdict[int, Histogram] = defaultdict(_seconds)
        self.receive, self.admit = _seconds(), _seconds()
        self.queue, self.dispatch, self.upstream, self.reply = _seconds(), _seconds(), _seconds(), _seconds()

    def answered(self, by_tier: Mapping[int, list[float]], since_taken_s: float, call: CallFacts) -> None:
        """Requests of one batch have their outputs so long after their arrival, and after they were taken.

        Sorts the lists.
        """
        count, since_taken_s = 0, max(0.0, since_taken_s)
        for seconds in by_tier.values():
            seconds.sort()
            count += len(seconds)
            if seconds[0] < since_taken_s:  # no request was taken before it came
                since_taken_s = seconds[0]
        for tier, seconds in by_tier.items():
            self.by_tier[tier].observe_ordered(seconds)
            self.queue.observe_ordered(seconds, since_taken_s)
        if count:
            split = split_seconds(since_taken_s, 0.0, call.started_s, call.upstream_s)
            self.dispatch.observe_alike(split.dispatch, count)
            self.upstream.observe_alike(split.upstream, count)
            self.reply.observe_alike(split.reply, count)

    def answered_apart(self, seconds: Sequence[tuple[int, float]], waits: Sequence[float], call: CallFacts) -> None:
        """The same for requests that came at any time, also while the call ran: by request its tier and its seconds,
        and how long it waited until it was taken.
        """
        splits = [
            split_seconds(each_s, wait_s, call.started_s, call.upstream_s)
            for (_, each_s), wait_s in zip(seconds, waits, strict=True)
        ]
        for tier, each_s in seconds:
            self.by_tier[tier].observe(each_s)
        self.queue.observe_all([split.queue for split in splits])
        self.dispatch.observe_all([split.dispatch for split in splits])
        self.upstream.observe_all([split.upstream for split in splits])
        self.reply.observe_all([split.reply for split in splits])

    def stages(self) -> dict[str, Histogram]:
        """By the name of the stage, in the order in which a request meets them."""
        return {name: getattr(self, name) for name in STAGES}


class Split(NamedTuple):
    """The time of a request by stage."""

    queue: float
    dispatch: float
    upstream: float
    reply: float


def split_seconds(total_s: float, queue_s: float, before_call_s: float, call_s: float | None) -> Split:
    """A time by stage, none of them below zero, all together the time itself; a call without an end takes all of it.

    The parts that are given may be more than the whole: by another process's clock, or because the call had begun when
    a request came that shares its result. The call counts before what was before it.
    """
    queue_s = max(0.0, min(queue_s, total_s))
    left_s = total_s - queue_s
    before_call_s = max(0.0, min(before_call_s, left_s))
    call_s = left_s - before_call_s if call_s is None else max(0.0, min(call_s, left_s))
    dispatch_s = min(before_call_s, left_s - call_s)
    return Split(queue_s, dispatch_s, call_s, left_s - call_s - dispatch_s)


def _seconds() -> Histogram:
    return Histogram(SECONDS_BOUNDS)
