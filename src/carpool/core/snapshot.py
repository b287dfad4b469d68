"""What a process shows of itself, in types: its health, its fleet, and its numbers. Pages and metrics are made of this.

A snapshot is of one turn of the event loop: the counts and histograms in it are the stages' own, not copies. A number
that becomes a metric says so beside its type; its name is `carpool_` and that of the field. `/metrics` and
docs/metrics.md are made from that. Over a fleet a sum counts each event once: what one process counts, no other does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.histograms import Histogram

Status = Literal["healthy", "degraded", "draining"]
# How requests are served now: by batchers, by this process itself, or not at all.
Mode = Literal["redis", "direct", "down"]
EndpointStatus = Literal["healthy", "degraded", "offline"]
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]

# Which processes show a number: gateways and batchers over Redis (`serve --broker` is both), or `serve` without Redis.
Shown = Literal["all", "gateways, alone", "gateways", "batchers", "over Redis", "alone"]
# By the value of one label, or of two.
Counts = Mapping[str, float]
PairCounts = Mapping[tuple[str, str], float]
Histograms = Mapping[str, Histogram]
PairHistograms = Mapping[tuple[str, str], Histogram]


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What operators are shown as JSON, with all of its fields; `/openapi.json` is made from these types too."""


class Health(Page, frozen=True, kw_only=True):
    """Numbers of the moment; over Redis those of the whole fleet."""

    status: Status
    problem: Annotated[str, Meta(description="what is wrong, and what to change, where it is degraded")] | UnsetType = (
        UNSET
    )
    gpu_utilization: float
    queue_depth: int
    requests_per_second: float
    broker: Annotated[Mode, Meta(description="how work is reached")] | UnsetType = UNSET
    healthy_slots: float | UnsetType = UNSET
    gateways: Annotated[int, Meta(description="who live")] | UnsetType = UNSET
    batchers: Annotated[int, Meta(description="who live")] | UnsetType = UNSET


class EndpointHealth(Page, frozen=True, kw_only=True):
    """One endpoint of a model."""

    endpoint: str
    state: Annotated[str, Meta(extra_json_schema={"enum": ["healthy", "degraded", "offline"]})]
    utilization: Annotated[float, Meta(description="as it reports it, else the busy share of its slots")]
    in_flight: Annotated[int, Meta(description="calls under way")]
    limit: Annotated[
        float,
        Meta(description="calls it may have at once: its slots, or fewer under load; 0.7: one, for 70 % of the time"),
    ]
    slots: int
    breaker: Annotated[str, Meta(extra_json_schema={"enum": ["closed", "open", "half-open"]})]
    last_heartbeat: Annotated[Moment | None, Meta(description="when a call or a probe was last answered well")]
    batcher: Annotated[str, Meta(description="over Redis: who calls it")] | UnsetType = UNSET
    problem: Annotated[str, Meta(description="what its calls become, while none was answered well")] | UnsetType = UNSET
    call_p50_ms: (
        Annotated[float, Meta(description="half of its last 100 answered calls took so long at most")] | UnsetType
    ) = UNSET
    call_p99_ms: Annotated[float, Meta(description="and 99 % of them")] | UnsetType = UNSET


def problem_of(endpoints: Iterable[tuple[str, str]]) -> str:
    """What is wrong with endpoints that have never worked, from their names and problems; "" if there is none."""
    first, *more = list(endpoints) or [("", "")]
    return " ".join((*first, f"(and {len(more)} more like it)" if more else "")).strip()


class CallCost(Page, frozen=True, kw_only=True):
    """What a call takes, learned from the calls themselves: the sum of these, each times what it is for."""

    call_ms: float
    input_ms: Annotated[float, Meta(description="for each input")]
    kb_ms: Annotated[float, Meta(description="for each KB (1,000 bytes) of its inputs")]
    padding_kb_ms: Annotated[float, Meta(description="for each KB that inputs are short of the largest of the call")]


def call_cost(seconds: Sequence[float]) -> CallCost | UnsetType:
    """From seconds by term (batching/cost.py); not there while they are not known."""
    milliseconds = (round(each * 1000, 6) for each in seconds)
    return CallCost(**dict(zip(CallCost.__struct_fields__, milliseconds, strict=True))) if seconds else UNSET


class ModelState(Page, frozen=True, kw_only=True):
    """One model and its endpoints."""

    slots: int
    healthy_slots: Annotated[float, Meta(description="calls that the endpoints that work may have at once")]
    capacity_rps: Annotated[float, Meta(description="healthy slots x batch when all are busy / seconds a batch takes")]
    endpoints: Sequence[EndpointHealth]
    quarantined: Annotated[
        Sequence[str], Meta(description="owners whose inputs keep being refused, and who share no batch with others")
    ]
    cost: Annotated[CallCost, Meta(description="once some calls have ended")] | UnsetType = UNSET


class MemberState(Page, frozen=True, kw_only=True):
    """One process of the fleet."""

    name: str
    status: Annotated[str, Meta(extra_json_schema={"enum": ["ok", "draining", "offline"]})]
    current_utilization: float
    in_flight: int
    last_heartbeat: Annotated[Moment, Meta(description="on the clock of Redis")]


class GatewayState(MemberState, frozen=True, kw_only=True):
    """A gateway."""

    mode: Annotated[str, Meta(description="how it reaches the endpoints: over the broker, or by itself")]


class ModelShare(Page, frozen=True, kw_only=True):
    """One model at one batcher."""

    slots: int
    healthy_slots: float
    in_flight: int
    current_utilization: float
    rate: float
    mean_batch_size: float
    capacity_rps: float
    quarantined: Sequence[str]


class BatcherState(MemberState, frozen=True, kw_only=True):
    """A batcher."""

    models: Mapping[str, ModelShare]


class FleetState(Page, frozen=True, kw_only=True):
    """Every endpoint of every model."""

    models: Mapping[str, ModelState]
    gateways: (
        Annotated[Sequence[GatewayState], Meta(description="over Redis: who lives, or did a minute ago")] | UnsetType
    ) = UNSET
    batchers: Sequence[BatcherState] | UnsetType = UNSET


class Wanted(Page, frozen=True, kw_only=True):
    """How many there should be in all, by the rules of scaling (docs/scaling-rules.md)."""

    wanted: int
    there: Annotated[int | None, Meta(description="how many live and work; null: not known")]
    why: str


class ModelScale(Wanted, frozen=True, kw_only=True):
    """The GPUs of a model: its endpoints."""

    backlog_seconds: Annotated[float, Meta(description="for so long the GPUs that work are busy with what waits")]


class Scale(Page, frozen=True, kw_only=True):
    """What is wanted. What is not here is not known, and should stay as it is."""

    models: Mapping[str, ModelScale]
    gateways: Annotated[Wanted, Meta(description="over Redis")] | UnsetType = UNSET
    batchers: Annotated[Wanted, Meta(description="over Redis")] | UnsetType = UNSET


class Shows(NamedTuple):
    """That a number is a metric. Its labels are those beside `model`."""

    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()


def counter(meaning: str, *labels: str) -> Shows:
    """A number that only grows."""
    return Shows("counter", meaning, labels)


def gauge(meaning: str, *labels: str) -> Shows:
    """A number of this moment."""
    return Shows("gauge", meaning, labels)


def histogram(meaning: str, *labels: str) -> Shows:
    """Counts by size."""
    return Shows("histogram", meaning, labels)


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that belong together. Label values are bounded: nothing that a client sends becomes one."""

    shown: ClassVar[Shown]


class OutcomeNumbers(Numbers, frozen=True, kw_only=True):
    """What became of requests."""

    shown = "all"

    requests: Annotated[
        Counts,
        counter(
            "Requests that got an outcome: `ok` or the code of an error. Synchronous ones count at their gateway, in "
            "direct mode too; tasks where their result was written, or where they were deleted before (`client-left`).",
            "outcome",
        ),
    ]
    queue_wait_seconds: Annotated[
        Histogram, histogram("Seconds a request waited for a slot; it counts where its outcome does.")
    ]
    request_seconds: Annotated[
        Histograms,
        histogram(
            "Seconds from the arrival of a synchronous request to its output. Those that were answered from a batch: "
            "neither tasks nor results that were kept.",
            "tier",
        ),
    ]
    stage_seconds: Annotated[
        Histograms,
        histogram(
            "The same requests by stage: `queue` until it was taken into a batch, `dispatch` until the call began that "
            "brought its output (earlier attempts are in it), `upstream` that call, `reply` until its batch was "
            "answered; over Redis with the ways there and back. These four sum up to `carpool_request_seconds`. "
            "`receive`, from the first to the last read of a request, and `admit`, until it is queued, are samples of "
            "all that come over HTTP.",
            "stage",
        ),
    ]
    waiting: Annotated[
        Counts,
        gauge(
            "Requests and tasks that wait for a slot. Over Redis: for a batcher, and every process shows those of the "
            "whole fleet.",
            "tier",
        ),
    ]
    dead_letters: Annotated[
        Counts,
        counter("Requests that were given up on, by cause; also those whose letter could not be kept.", "cause"),
    ]
    dead_letters_lost: Annotated[int, counter("Letters that could not be kept: no room, or no Redis.")]
    dead_letters_kept: Annotated[
        int, gauge("Dead letters that are kept; over Redis every process shows those of the whole fleet.")
    ]
    dead_letter_bytes: Annotated[int, gauge("Bytes of the dead letters that are kept.")]


class SheddingNumbers(Numbers, frozen=True, kw_only=True):
    """The clients' side."""

    shown = "gateways, alone"

    problems: Annotated[
        Counts, counter("Answers to clients that were errors, by code; also for requests that never came in.", "code")
    ]
    connections: Annotated[int, gauge("Open client connections, but for those of gRPC.")]
    streams: Annotated[int, gauge("Of these, WebSockets.")] = 0
    event_listeners: Annotated[int, gauge("Of these, clients that listen to events of a task.")] = 0
    grpc_calls: Annotated[int, gauge("gRPC calls under way, streams included.")] = 0
    held_requests: Annotated[int, gauge("Requests admitted and without an outcome; over Redis without tasks.")]
    held_bytes: Annotated[int, gauge("Bytes of their inputs.")]
    pressure: Annotated[
        Counts,
        gauge(
            "What comes in, also what is refused, by what should at most: three quarters of the "
            "capacity. 1 is the target; over Redis every gateway shows that of the whole fleet.",
            "model",
        ),
    ]
    shed: Annotated[
        PairCounts, counter("Requests that were refused because they would have waited too long.", "model", "tier")
    ]
    wait_error_seconds: Annotated[
        PairHistograms,
        histogram(
            "By how many seconds the wait that the load shedder predicted was longer (`too-high`) or shorter "
            "(`too-low`) than the wait that was; a sample. Waiting for company is not predicted.",
            "model",
            "direction",
        ),
    ]
    utilization_target: Annotated[float, gauge("The share of the slots that should be used.")]


class CacheNumbers(Numbers, frozen=True, kw_only=True):
    """Models whose results are kept."""

    shown = "gateways, alone"

    cache_lookups: Annotated[
        Counts,
        counter(
            "Requests to models whose results are kept: the result was there (`hit`), they shared an "
            "identical one (`shared`), they were sent (`miss`), or no client asked twice lately and they "
            "were sent without a look (`passed`).",
            "result",
        ),
    ]
    cache_entries: Annotated[int, gauge("Results that this process keeps.")]
    cache_bytes: Annotated[int, gauge("Bytes of these, with their keys.")]


class ModelNumbers(Numbers, frozen=True, kw_only=True):
    """One model, at a process that has endpoints of it."""

    shown = "all"

    batch_size: Annotated[Histogram, histogram("Requests in a batch.")]
    batches: Annotated[Counts, counter("Batches sent, by why they were.", "reason")]
    batch_fill: Annotated[
        Histograms, histogram("How full a batch was: its size by the most that may be in it; 1 is full.", "reason")
    ]
    batches_by_size: Annotated[int, gauge("1 while batches are put together by size, 0 while in order.")]
    call_cost_share: Annotated[
        Counts,
        gauge(
            "Where the time of a batch in order goes, learned from the calls: to the call itself, to its number of "
            "inputs, to their size, to what is padded to the largest of them; all 0 before some calls have ended.",
            "term",
        ),
    ]
    upstream_calls: Annotated[Counts, counter("Upstream calls by result.", "result")]
    upstream_latency_seconds: Annotated[Histogram, histogram("Seconds of an answered upstream call.")]
    upstream_stray_answers: Annotated[
        int, counter("Connections to the upstream that were closed because of bytes for which nobody had asked.")
    ]
    isolation: Annotated[
        Counts,
        counter(
            "Refused batches: calls to find bad inputs, inputs at fault, requests that were not resolved in time.",
            "what",
        ),
    ]
    quarantined: Annotated[int, gauge("Owners whose inputs keep being refused, and who share no batch with others.")]
    slots: Annotated[Counts, gauge("Slots by state.", "state")]
    healthy_slots: Annotated[float, gauge("Calls that the endpoints that work may have at once.")]
    capacity_rps: Annotated[float, gauge("Requests a second that the healthy slots can serve.")]
    queue_depth: Annotated[int, gauge("Requests that wait in this process for a slot.")]
    arrival_rate: Annotated[float, gauge("Requests a second that came to this queue, lately.")]
    arrival_error_ratio: Annotated[
        Histograms,
        histogram(
            "How far the estimate of the arrivals of the next second was off, as a share of the larger of the two; it "
            "was more (`too-high`) or less (`too-low`) than what came. Lanes with 10 a second at least, and "
            "only with the policy that goes by it, `adaptive`.",
            "direction",
        ),
    ]
    utilization: Annotated[float, gauge("The share of the slots that was busy, lately.")]
    endpoint_state: Annotated[
        PairCounts, gauge("1 for the state an endpoint is in: healthy, degraded or offline.", "endpoint", "state")
    ]
    endpoint_breaker: Annotated[
        Counts, gauge("How an endpoint's breaker is: 0 closed, 1 half-open, 2 open.", "endpoint")
    ]
    endpoint_calls: Annotated[
        PairCounts,
        counter(
            "Calls that an endpoint answered well (`ok`), and those that count against it (`failed`).",
            "endpoint",
            "result",
        ),
    ]
    endpoint_latency_seconds: Annotated[
        PairCounts,
        gauge(
            "How long half (`0.5`), and 99 % (`0.99`), of an endpoint's last 100 answered calls took at most; not "
            "there while it has answered none for five minutes.",
            "endpoint",
            "quantile",
        ),
    ]


class ScaleNumbers(Numbers, frozen=True, kw_only=True):
    """What is wanted, for whatever scales."""

    shown = "all"

    wanted: Annotated[
        PairCounts,
        gauge(
            "How many there should be in all: `gpus` (endpoints) of a model; over Redis `gateways` and `batchers`, and "
            "every process shows the same. What is not shown is not known, and should stay as it is.",
            "what",
            "model",
        ),
    ]
    backlog_seconds: Annotated[
        Counts, gauge("For so many seconds the GPUs that work are busy with what waits, tasks included.", "model")
    ]


class JournalNumbers(Numbers, frozen=True, kw_only=True):
    """The journal of tasks."""

    shown = "alone"

    tasks_pending: Annotated[int, gauge("Tasks without an outcome.")]
    results_stored: Annotated[int, gauge("Results of tasks that are kept.")]
    journal_bytes: Annotated[int, gauge("Bytes of inputs and results in the journal.")]
    journal_commit_seconds: Annotated[Histogram, histogram("Seconds of a transaction of the journal.")]
    journal_commit_failures: Annotated[int, counter("Transactions that the disk did not take.")]
    journal_disk_free_share: Annotated[
        float, gauge("The share of the journal's disk that is free; 1 where tasks are kept in memory only.")
    ]
    journal_fill: Annotated[float, gauge("What the journal holds by the most that it may: `tasks.stored_bytes_max`.")]


class WebhookNumbers(Numbers, frozen=True, kw_only=True):
    """Outcomes of tasks that are sent to a URL, where `webhooks.hosts` names some."""

    shown = "gateways, alone"

    webhooks_waiting: Annotated[
        int,
        gauge(
            "Webhooks that are due, or wait to be sent again; over Redis every gateway shows those of the whole fleet. "
            "Only with `webhooks.hosts`."
        ),
    ]
    webhook_bytes: Annotated[int, gauge("What these count in bytes; at 256 MiB no more are taken.")]
    webhook_attempts: Annotated[
        Counts,
        counter(
            "Attempts to send a webhook: `delivered`, `failed` and to be sent again, or `given_up` for good.", "result"
        ),
    ]


class TrackingNumbers(Numbers, frozen=True, kw_only=True):
    """What is kept of requests and batches, where `tracking.store` says so."""

    shown = "all"

    tracking_written: Annotated[
        Counts,
        counter(
            "Rows that were written, where `tracking.store` is on: of a `request`, a `batch` or one `in_flight`.", "row"
        ),
    ]
    tracking_dropped: Annotated[
        Counts, counter("Rows that were given up because the store was slow or away. No request suffers.", "row")
    ]
    tracking_waiting: Annotated[int, gauge("Rows that wait to be written, at most 100,000 of each kind.")]
    tracking_failures: Annotated[int, counter("Times that the store did not take what was to be written.")]


class RedisNumbers(Numbers, frozen=True, kw_only=True):
    """Redis, and the fleet that meets there."""

    shown = "over Redis"

    broker_memory_share: Annotated[float, gauge("Share of the memory of the fullest primary used.")]
    broker_memory_bytes: Annotated[int, gauge("Bytes that all primaries use, together.")]
    broker_disks: Annotated[
        bool, gauge("1 while a server of Redis writes to a disk though `broker.persistence` forbids it.")
    ]
    queue_unread: Annotated[int, gauge("Requests that wait in Redis for a batcher.")]
    broker_cache_bytes: Annotated[int, gauge("Bytes of results that are kept in Redis for requests that are the same.")]
    task_bytes: Annotated[int, gauge("Bytes of tasks and their results in Redis.")]
    dead_letters_dropped: Annotated[int, counter("Dead letters that went to make room.")]
    live_gateways: Annotated[int, gauge("Gateways heard of lately.")]
    live_batchers: Annotated[int, gauge("Batchers heard of lately.")]
    heartbeat_failures: Annotated[int, counter("Heartbeats that Redis did not answer.")]


class RedisGatewayNumbers(Numbers, frozen=True, kw_only=True):
    """A gateway's way through Redis."""

    shown = "gateways"

    broker_mode: Annotated[int, gauge("0: down, 1: over Redis, 2: direct.")]
    sent_again: Annotated[int, counter("Requests sent again because Redis, or a part, was lost.")]
    late_outcomes: Annotated[int, counter("Outcomes for which nobody waited any more.")]
    rate_limit_asks: Annotated[int, counter("Times that Redis was asked about the rate limit of an owner.")]
    rate_limit_failures: Annotated[
        int, counter("Of these, without an answer: this gateway then allows its part of the limit.")
    ]


class RedisBatcherNumbers(Numbers, frozen=True, kw_only=True):
    """A batcher's way through Redis."""

    shown = "batchers"

    entries_taken: Annotated[int, counter("Entries taken from Redis.")]
    entries_claimed: Annotated[int, counter("Entries claimed after their lease had ended.")]
    entries_unreadable: Annotated[int, counter("Entries that nobody can read, set aside.")]
    leases_lost: Annotated[int, counter("Leases that another batcher took over.")]
    outcomes_unconfirmed: Annotated[int, gauge("Outcomes that Redis has not taken yet.")]
    outcome_retries: Annotated[int, counter("Attempts to write outcomes that had to be repeated.")]


class TraceNumbers(Numbers, frozen=True, kw_only=True):
    """Tracing."""

    shown = "all"

    traces_kept: Annotated[
        Counts,
        counter(
            "Requests whose trace is kept: their caller asked for it, or the ratio fell on them. Only with "
            "`tracing.otlp_endpoint`.",
            "why",
        ),
    ]
    trace_spans: Annotated[
        Counts,
        counter("Spans that the receiver took (`sent`), or `rejected`, or that were `dropped` on the way.", "result"),
    ]
    trace_export_failures: Annotated[int, counter("Calls to the receiver of traces that brought nothing.")]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment."""

    health: Health
    fleet: FleetState
    scale: Scale
    # Of the process as a whole, each kind at most once.
    numbers: Sequence[Numbers]
    models: Mapping[str, ModelNumbers]
