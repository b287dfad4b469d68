"""What became of the requests: counts and latencies, kept in constant memory however long the run."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from math import ceil, exp, log

import msgspec

# Buckets grow by 1 %, and a bucket answers with its middle: half a percent of error at most.
_BUCKETS_PER_E = 1 / log(1.01)
_SMALLEST_MS = 0.001
# The first bucket is everything up to a microsecond, zero included; what is just above goes to the second.
_OFFSET = 1 - log(_SMALLEST_MS) * _BUCKETS_PER_E
_BUCKETS = ceil(log(86_400_000) * _BUCKETS_PER_E + _OFFSET)


class LogHistogram:
    """Values in ms by logarithmic buckets, from a microsecond to a day, within 0.5 %."""

    __slots__ = ("count", "counts", "largest")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.count = 0
        self.largest = 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        self.count += 1
        if value_ms > self.largest:
            self.largest = value_ms
        try:
            self.counts[int(log(value_ms) * _BUCKETS_PER_E + _OFFSET) if value_ms > _SMALLEST_MS else 0] += 1
        except (IndexError, OverflowError):  # over a day
            self.counts[-1] += 1

    def percentile(self, share: float) -> float | None:
        """The value that `share` of the values do not exceed; None when there are none."""
        if not self.count:
            return None
        rank = max(1, ceil(share * self.count))
        if rank == self.count:
            return self.largest
        bucket = bisect_left(list(accumulate(self.counts)), rank)
        if bucket == 0:
            return 0.0
        return min(exp((bucket + 0.5 - _OFFSET) / _BUCKETS_PER_E), self.largest)


class Quantiles(msgspec.Struct, frozen=True):
    """The latencies of a report, in ms; null when nothing was answered."""

    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    max: float | None


class QueueQuantiles(msgspec.Struct, frozen=True):
    """The time in Carpool's queue as the answers tell it, in ms; null when they do not."""

    p50: float | None
    p99: float | None


class Report(msgspec.Struct, frozen=True):
    """The result of a run, in the shape that `--json` writes."""

    # Requests that came due. ok + wrong + errors + unanswered; answers nobody asked for are errors on top.
    sent: int
    ok: int
    # Answers other than 2xx, transport failures and timeouts; `status` tells which.
    errors: int
    # Answers of 200 whose output is not the expected one.
    wrong: int
    # Requests answered 2xx per second.
    rate: float
    status: dict[str, int]
    latency_ms: Quantiles
    queue_ms: QueueQuantiles
    # Mean over batches, not over requests: a request is the likelier to be in a batch the larger that is.
    batch_mean: float | None
    intended_rate: float
    # Due, but without an answer when the run was interrupted.
    unanswered: int
    # Share of one core that the generator used; near 1 the latencies are its own and not the gateway's.
    generator_busy: float

    @property
    def clean(self) -> bool:
        """Whether every answer came and was right."""
        return not self.errors and not self.wrong


class Tally:
    """Counts while the run goes on; times are in seconds on the monotonic clock."""

    __slots__ = (
        "batches",
        "errors",
        "first_answer",
        "last_answer",
        "latency",
        "ok",
        "queue",
        "sent",
        "status",
        "told_batch",
        "unasked",
        "wrong",
    )

    def __init__(self) -> None:
        self.sent = 0
        self.ok = 0
        self.wrong = 0
        self.errors = 0
        # Answers that no request of ours asked for; kept apart since they settle no request.
        self.unasked = 0
        self.status: Counter[str] = Counter()
        self.latency = LogHistogram()
        self.queue = LogHistogram()
        # Each request of a batch of n adds 1/n: the sum is the number of batches.
        self.batches = 0.0
        self.told_batch = 0
        self.first_answer: float | None = None
        self.last_answer = 0.0

    def right(self, latency_s: float, now: float, queue_ms: float, batch_size: int) -> None:
        """Count an answer that is the expected one; a negative queue_ms or a batch_size of 0 was not told."""
        self.ok += 1
        self._answered(latency_s, now)
        if queue_ms >= 0:
            self.queue.add(queue_ms)
        if batch_size > 0:
            self.told_batch += 1
            self.batches += 1 / batch_size

    def mismatched(self, latency_s: float, now: float) -> None:
        """Count a 200 with an output that is not the expected one."""
        self.wrong += 1
        self._answered(latency_s, now)

    def _answered(self, latency_s: float, now: float) -> None:
        self.latency.add(latency_s * 1000)
        self.last_answer = now
        if self.first_answer is None:
            self.first_answer = now

    def failed(self, kind: str) -> None:
        """Count a request that got no usable answer, by HTTP status or by what went wrong."""
        self.errors += 1
        self.status[kind] += 1

    @property
    def in_flight(self) -> int:
        """Requests that came due and have no outcome yet."""
        return self.sent - self.ok - self.wrong - self.errors

    def report(self, *, sending_s: float, intended_rate: float, generator_busy: float) -> Report:
        """The result so far, after `sending_s` seconds of arrivals."""
        answered = self.ok + self.wrong
        # From the first answer to the last: the wait before the first is latency and no lack of throughput.
        answering_s = self.last_answer - self.first_answer if self.first_answer is not None else 0.0
        # At least the time of sending: a run that was answered in one burst did not have that burst's rate.
        rate = answered / max(sending_s, answering_s, 1e-3)
        status = dict(sorted(self.status.items()))
        if answered:
            status = {"200": answered, **status}
        if self.unasked:
            status["unasked"] = self.unasked
        latency, queue = self.latency, self.queue
        return Report(
            sent=self.sent,
            ok=self.ok,
            errors=self.errors + self.unasked,
            wrong=self.wrong,
            rate=round(rate, 1),
            status=status,
            latency_ms=Quantiles(
                p50=_rounded(latency.percentile(0.5)),
                p90=_rounded(latency.percentile(0.9)),
                p99=_rounded(latency.percentile(0.99)),
                p999=_rounded(latency.percentile(0.999)),
                max=_rounded(latency.percentile(1.0)),
            ),
            queue_ms=QueueQuantiles(p50=_rounded(queue.percentile(0.5)), p99=_rounded(queue.percentile(0.99))),
            batch_mean=_rounded(self.told_batch / self.batches) if self.batches else None,
            intended_rate=round(intended_rate, 1),
            unanswered=self.in_flight,
            generator_busy=round(generator_busy, 3),
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
