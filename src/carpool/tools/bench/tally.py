"""What became of the requests: counts and latencies, kept in constant memory however long the run."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import ceil, exp, log

import msgspec

# Buckets grow by 1 %, and a bucket answers with its middle: half a percent of error at most.
_BUCKETS_PER_E = 1 / log(1.01)
_SMALLEST_MS = 0.001
# The first bucket is everything up to a microsecond, zero included; what is just above goes to the second.
_OFFSET = 1 - log(_SMALLEST_MS) * _BUCKETS_PER_E
_BUCKETS = ceil(log(86_400_000) * _BUCKETS_PER_E + _OFFSET)

REFUSALS = ("429", "503")
# No answer in time: as the gateway says, as the generator sees it, and where no connection was free to send it on.
TIMEOUTS = ("504", "timeout", "timeout-unsent")


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


class TierQuantiles(msgspec.Struct, frozen=True):
    """The latencies of a tier's right answers, in ms; null when there were none."""

    p50: float | None
    p95: float | None
    p99: float | None


class RefusalQuantiles(msgspec.Struct, frozen=True):
    """How long refused clients (429, 503) waited for their refusal, in ms; null when none was refused."""

    p50: float | None
    p99: float | None


class TierReport(msgspec.Struct, frozen=True):
    """What became of one tier's requests."""

    # Requests that came due. ok + wrong + shed + limited + timed_out + failed + unanswered.
    offered: int
    ok: int
    wrong: int
    # 503, 429; and no answer in time: 504, or none at all.
    shed: int
    limited: int
    timed_out: int
    # Everything else; `status` tells which.
    failed: int
    unanswered: int
    # Right answers a second.
    goodput: float
    # Refusals after which a request was sent again.
    retries: int
    latency_ms: TierQuantiles
    refusal_ms: RefusalQuantiles
    status: dict[str, int]


class Lateness(msgspec.Struct, frozen=True):
    """By how much the generator itself sent late, in ms: that is not the gateway's."""

    p99: float | None
    max: float | None


class Report(msgspec.Struct, frozen=True):
    """The result of a run, in the shape that `--json` writes."""

    # Requests that came due. ok + wrong + errors + unanswered; answers without a request are errors on top.
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
    behind_ms: Lateness
    refusal_ms: RefusalQuantiles
    # Refusals after which a request was sent again; those are not in `status`.
    retries: int
    # With --tiers.
    tiers: dict[str, TierReport] = {}

    @property
    def clean(self) -> bool:
        """Whether every answer came and was right."""
        return not self.errors and not self.wrong


class Tally:
    """Counts while the run goes on; times are in seconds on the monotonic clock."""

    __slots__ = (
        "batches",
        "behind",
        "errors",
        "first_answer",
        "last_answer",
        "latency",
        "ok",
        "queue",
        "record",
        "refusals",
        "retries",
        "sent",
        "status",
        "told_batch",
        "unasked",
        "wrong",
    )

    def __init__(self, *, keep_record: bool = False) -> None:
        # When each request was due, its latency in seconds, and what became of it: 200, or as in `status`.
        self.record: list[tuple[float, float, str]] | None = [] if keep_record else None
        self.sent = 0
        self.ok = 0
        self.wrong = 0
        self.errors = 0
        # Answers that no request of ours asked for; kept apart since they settle no request.
        self.unasked = 0
        self.status: Counter[str] = Counter()
        self.latency = LogHistogram()
        self.queue = LogHistogram()
        self.refusals = LogHistogram()
        self.retries = 0
        # By how much the oldest request of each tick was sent late.
        self.behind = LogHistogram()
        # Each request of a batch of n adds 1/n: the sum is the number of batches.
        self.batches = 0.0
        self.told_batch = 0
        self.first_answer: float | None = None
        self.last_answer = 0.0

    def came_due(self) -> None:
        """Count a request that is to be sent now."""
        self.sent += 1

    def right(self, latency_s: float, now: float, queue_ms: float, batch_size: int) -> None:
        """Count an answer that is the expected one; a negative queue_ms or a batch_size of 0 is unknown."""
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
        if self.record is not None:
            self.record.append((now - latency_s, latency_s, "200"))
        self.last_answer = now
        if self.first_answer is None:
            self.first_answer = now

    def failed(self, kind: str, latency_s: float, now: float) -> None:
        """Count a request that got no usable answer, by HTTP status or by what went wrong."""
        self.errors += 1
        self.status[kind] += 1
        if kind in REFUSALS:
            self.refusals.add(latency_s * 1000)
        if self.record is not None:
            self.record.append((now - latency_s, latency_s, kind))

    def retried(self, latency_s: float) -> None:
        """Count a refusal after which the request will be sent again."""
        self.retries += 1
        self.refusals.add(latency_s * 1000)

    @property
    def in_flight(self) -> int:
        """Requests that came due and have no outcome yet."""
        return self.sent - self.ok - self.wrong - self.errors

    def report(
        self, *, sending_s: float, intended_rate: float, generator_busy: float, tiers: Iterable["TierTally"] = ()
    ) -> Report:
        """The result so far, after `sending_s` seconds of arrivals."""
        answered = self.ok + self.wrong
        # From the first answer to the last: the wait before the first is latency and no lack of throughput.
        answering_s = self.last_answer - self.first_answer if self.first_answer is not None else 0.0
        # At least the time of sending: a run that was answered in one burst did not have that burst's rate.
        duration_s = max(sending_s, answering_s, 1e-3)
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
            rate=round(answered / duration_s, 1),
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
            behind_ms=Lateness(p99=_rounded(self.behind.percentile(0.99)), max=_rounded(self.behind.percentile(1.0))),
            refusal_ms=_refusal_quantiles(self.refusals),
            retries=self.retries,
            tiers={tier.name: tier.tier_report(duration_s) for tier in tiers},
        )


class TierTally(Tally):
    """The requests of one tier; each counts in the whole, too."""

    __slots__ = ("name", "whole")

    def __init__(self, name: str, whole: Tally, *, keep_record: bool = False) -> None:
        super().__init__(keep_record=keep_record)
        self.name = name
        self.whole = whole

    def came_due(self) -> None:
        """Here and in the whole."""
        self.sent += 1
        self.whole.sent += 1

    def right(self, latency_s: float, now: float, queue_ms: float, batch_size: int) -> None:
        """Here and in the whole."""
        super().right(latency_s, now, queue_ms, batch_size)
        self.whole.right(latency_s, now, queue_ms, batch_size)

    def mismatched(self, latency_s: float, now: float) -> None:
        """Here and in the whole."""
        super().mismatched(latency_s, now)
        self.whole.mismatched(latency_s, now)

    def failed(self, kind: str, latency_s: float, now: float) -> None:
        """Here and in the whole."""
        super().failed(kind, latency_s, now)
        self.whole.failed(kind, latency_s, now)

    def retried(self, latency_s: float) -> None:
        """Here and in the whole."""
        super().retried(latency_s)
        self.whole.retried(latency_s)

    def tier_report(self, duration_s: float) -> TierReport:
        """The result so far; the whole run took so long."""
        status, latency = self.status, self.latency
        shed, limited = status["503"], status["429"]
        timed_out = sum(status[kind] for kind in TIMEOUTS)
        return TierReport(
            offered=self.sent,
            ok=self.ok,
            wrong=self.wrong,
            shed=shed,
            limited=limited,
            timed_out=timed_out,
            failed=self.errors - shed - limited - timed_out,
            unanswered=self.in_flight,
            goodput=round(self.ok / duration_s, 1),
            retries=self.retries,
            latency_ms=TierQuantiles(*(_rounded(latency.percentile(share)) for share in (0.5, 0.95, 0.99))),
            refusal_ms=_refusal_quantiles(self.refusals),
            status=dict(sorted(self.status.items())),
        )


def _refusal_quantiles(refusals: LogHistogram) -> RefusalQuantiles:
    return RefusalQuantiles(p50=_rounded(refusals.percentile(0.5)), p99=_rounded(refusals.percentile(0.99)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
