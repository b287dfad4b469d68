"""What became of the requests: counts and latencies, kept in constant memory however long the run."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, exp, log
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Arrivals = Literal["poisson", "uniform"]
# Of a tier, in proportion to the others.
SHARE_MAX = 1e9
# What files have is in these bounds: a report is read again, from whoever gives it.
INPUT_BYTES_MAX = 16 * 1024 * 1024
Text = Annotated[str, Meta(max_length=4096)]

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

    def quantiles(self) -> "Quantiles":
        """What a report tells."""
        values = map(self.percentile, (0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
        return Quantiles(*(None if value is None else round(value, 3) for value in values))


class Quantiles(msgspec.Struct, frozen=True):
    """Of times in ms; null when there were none."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None


class InputBytes(msgspec.Struct, frozen=True):
    """How large the inputs were."""

    mean: float
    p99: int
    max: int


def input_bytes(sizes: Sequence[int], sent: int) -> InputBytes | None:
    """Of `sent` requests that took these sizes in turn: over one round of them at most. None if there are none."""
    taken = sorted(sizes[number % len(sizes)] for number in range(1, min(sent, len(sizes)) + 1))
    if not taken:
        return None
    return InputBytes(round(sum(taken) / len(taken), 1), taken[ceil(0.99 * len(taken)) - 1], taken[-1])


class Segment(msgspec.Struct, frozen=True):
    """A stretch of time with one rate."""

    rate: Annotated[float, Meta(ge=0)]
    duration_s: Annotated[float, Meta(gt=0)]

    @property
    def expected(self) -> float:
        """How many arrivals this segment is expected to bring."""
        return self.rate * self.duration_s


class SentLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was to send: enough to make the same requests again."""

    segments: Annotated[list[Segment], Meta(min_length=1, max_length=10_000)]
    arrivals: Arrivals
    seed: int
    payload_bytes: Annotated[int, Meta(ge=4, le=INPUT_BYTES_MAX)]
    # As --sizes has it.
    sizes: Text
    # Shares by name.
    tiers: Annotated[dict[Text, Annotated[float, Meta(gt=0, le=SHARE_MAX)]], Meta(max_length=1000)]


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
    latency_ms: Quantiles
    refusal_ms: Quantiles
    status: dict[str, int]


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
    # The time in Carpool's queue as the answers tell it.
    queue_ms: Quantiles
    # Mean over batches, not over requests: a request is the likelier to be in a batch the larger that is.
    batch_mean: float | None
    intended_rate: float
    # Due, but without an answer when the run was interrupted.
    unanswered: int
    # Share of one core that the generator used; near 1 the latencies are its own and not the gateway's.
    generator_busy: float
    # By how much the generator itself sent late: that is not the gateway's.
    behind_ms: Quantiles
    # How long refused clients (429, 503) waited for their refusal.
    refusal_ms: Quantiles
    # Refusals after which a request was sent again; those are not in `status`.
    retries: int
    # With --sizes.
    input_bytes: InputBytes | None = None
    # With --tiers.
    tiers: dict[str, TierReport] = {}
    # What it was to send: `carpool simulate --trace` takes it.
    load: SentLoad | None = None

    @property
    def clean(self) -> bool:
        """Whether every answer came and was right."""
        return not self.errors and not self.wrong


class Tally:
    """Counts while the run goes on; times are in seconds on the monotonic clock. A tier's counts in `whole`, too."""

    def __init__(self, name: str = "", whole: "Tally | None" = None, *, keep_record: bool = False) -> None:
        self.name = name
        self.whole = whole
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
        if self.whole is not None:
            self.whole.came_due()

    def right(self, latency_s: float, now: float, queue_ms: float, batch_size: int) -> None:
        """Count an answer that is the expected one; a negative queue_ms or a batch_size of 0 is unknown."""
        self.ok += 1
        self._answered(latency_s, now)
        if queue_ms >= 0:
            self.queue.add(queue_ms)
        if batch_size > 0:
            self.told_batch += 1
            self.batches += 1 / batch_size
        if self.whole is not None:
            self.whole.right(latency_s, now, queue_ms, batch_size)

    def mismatched(self, latency_s: float, now: float) -> None:
        """Count a 200 with an output that is not the expected one."""
        self.wrong += 1
        self._answered(latency_s, now)
        if self.whole is not None:
            self.whole.mismatched(latency_s, now)

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
        if self.whole is not None:
            self.whole.failed(kind, latency_s, now)

    def retried(self, latency_s: float) -> None:
        """Count a refusal after which the request will be sent again."""
        self.retries += 1
        self.refusals.add(latency_s * 1000)
        if self.whole is not None:
            self.whole.retried(latency_s)

    @property
    def in_flight(self) -> int:
        """Requests that came due and have no outcome yet."""
        return self.sent - self.ok - self.wrong - self.errors

    def report(
        self,
        *,
        sending_s: float,
        intended_rate: float,
        generator_busy: float,
        tiers: Iterable["Tally"] = (),
        sizes: Sequence[int] = (),
        load: SentLoad | None = None,
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
        return Report(
            sent=self.sent,
            ok=self.ok,
            errors=self.errors + self.unasked,
            wrong=self.wrong,
            rate=round(answered / duration_s, 1),
            status=status,
            latency_ms=self.latency.quantiles(),
            queue_ms=self.queue.quantiles(),
            batch_mean=round(self.told_batch / self.batches, 3) if self.batches else None,
            intended_rate=round(intended_rate, 1),
            unanswered=self.in_flight,
            generator_busy=round(generator_busy, 3),
            behind_ms=self.behind.quantiles(),
            refusal_ms=self.refusals.quantiles(),
            retries=self.retries,
            input_bytes=input_bytes(sizes, self.sent),
            tiers={tier.name: tier.tier_report(duration_s) for tier in tiers},
            load=load,
        )

    def tier_report(self, duration_s: float) -> TierReport:
        """The result of this tier so far; the whole run took so long."""
        status = self.status
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
            latency_ms=self.latency.quantiles(),
            refusal_ms=self.refusals.quantiles(),
            status=dict(sorted(status.items())),
        )
