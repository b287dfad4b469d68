"""What a process shows of itself, in types: its health, its fleet, and its numbers. Whoever shows something reads this.

A snapshot is of one turn of the event loop: the counts and histograms in it are the stages' own, not copies. A number
that becomes a metric says so beside its type; its name is `carpool_` and that of the field. `/metrics` and
docs/metrics.md are made from that. Over a fleet a sum counts each event once: what one process counts, no other does.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from carpool.core.tally import Histogram

Status = Literal["healthy", "degraded", "draining"]
EndpointStatus = Literal["healthy", "degraded", "offline"]

# By whom a number is shown: gateways and batchers over Redis (`serve --broker` is both), `serve` without Redis alone.
Shown = Literal["all", "gateways, alone", "gateways", "batchers", "over Redis", "alone"]
# By the value of one label, or of two.
Counts = Mapping[str, float]
PairCounts = Mapping[tuple[str, str], float]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`/internal/health`; over Redis the numbers are of the whole fleet."""

    status: Status
    # What is wrong, and what to change, where it is degraded.
    problem: str | UnsetType = UNSET
    gpu_utilization: float
    queue_depth: int
    requests_per_second: float
    # Over Redis: how requests are served now.
    broker: str | UnsetType = UNSET
    healthy_slots: int | UnsetType = UNSET
    gateways: int | UnsetType = UNSET
    batchers: int | UnsetType = UNSET


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    endpoint: str
    state: str
    utilization: float
    in_flight: int
    limit: int
    slots: int
    breaker: str
    # RFC 3339; None if it was never heard of.
    last_heartbeat: str | None
    # Over Redis: who calls it.
    batcher: str | UnsetType = UNSET


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model and its endpoints."""

    slots: int
    healthy_slots: int
    capacity_rps: float
    endpoints: Sequence[EndpointState]
    # Owners whose inputs keep being refused.
    offenders: Sequence[str]


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a fleet."""

    name: str
    status: str
    current_utilization: float
    in_flight: int
    last_heartbeat: str
    # How a gateway reaches the GPUs.
    mode: str | UnsetType = UNSET
    # The numbers of a batcher's models, without their endpoints.
    models: Mapping[str, Mapping[str, object]] | UnsetType = UNSET


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """`/internal/fleet`: the models, and over Redis every process."""

    models: Mapping[str, ModelState]
    gateways: Sequence[MemberState] | UnsetType = UNSET
    batchers: Sequence[MemberState] | UnsetType = UNSET


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


def histogram(meaning: str) -> Shows:
    """Counts by size."""
    return Shows("histogram", meaning)


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
    dead_letters: Annotated[
        Counts,
        counter("Requests that were given up on, by cause; also those whose letter could not be kept.", "cause"),
    ]
    dead_letters_lost: Annotated[int, counter("Letters that could not be kept: no room, or no Redis.")]
    dead_letters_kept: Annotated[
        int, gauge("Dead letters that are kept; over Redis every process shows those of the whole fleet.")
    ]
    dead_letter_bytes: Annotated[int, gauge("Bytes of the dead letters that are kept.")]


class DoorNumbers(Numbers, frozen=True, kw_only=True):
    """The clients' side."""

    shown = "gateways, alone"

    problems: Annotated[
        Counts, counter("Answers to clients that were errors, by code; also for requests that never came in.", "code")
    ]
    connections: Annotated[int, gauge("Open client connections.")]
    held_requests: Annotated[int, gauge("Requests admitted and without an outcome; over Redis without tasks.")]
    held_bytes: Annotated[int, gauge("Bytes of their inputs.")]


class ModelNumbers(Numbers, frozen=True, kw_only=True):
    """One model, at a process that has endpoints of it."""

    shown = "all"

    batch_size: Annotated[Histogram, histogram("Requests in a batch.")]
    batches: Annotated[Counts, counter("Batches sent, by why they were.", "reason")]
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
    offenders: Annotated[int, gauge("Owners whose inputs keep being refused, and who ride apart.")]
    slots: Annotated[Counts, gauge("Slots by state.", "state")]
    healthy_slots: Annotated[int, gauge("Calls that the endpoints that work may have at once.")]
    capacity_rps: Annotated[float, gauge("Requests a second that the healthy slots can serve.")]
    queue_depth: Annotated[int, gauge("Requests that wait in this process for a slot.")]
    arrival_rate: Annotated[float, gauge("Requests a second that came to this queue, lately.")]
    endpoint_state: Annotated[
        PairCounts, gauge("1 for the state an endpoint is in: healthy, degraded or offline.", "endpoint", "state")
    ]
    endpoint_calls: Annotated[
        PairCounts,
        counter(
            "Calls that an endpoint answered well (`ok`), and those that count against it (`failed`).",
            "endpoint",
            "result",
        ),
    ]


class JournalNumbers(Numbers, frozen=True, kw_only=True):
    """The journal of tasks."""

    shown = "alone"

    tasks_pending: Annotated[int, gauge("Tasks without an outcome.")]
    results_stored: Annotated[int, gauge("Results of tasks that are kept.")]
    journal_bytes: Annotated[int, gauge("Bytes of inputs and results in the journal.")]
    journal_commit_seconds: Annotated[Histogram, histogram("Seconds of a transaction of the journal.")]
    journal_commit_failures: Annotated[int, counter("Transactions that the disk did not take.")]


class RedisNumbers(Numbers, frozen=True, kw_only=True):
    """Redis, and the fleet that meets there."""

    shown = "over Redis"

    broker_memory_share: Annotated[float, gauge("Share of the memory of the fullest primary used.")]
    broker_memory_bytes: Annotated[int, gauge("Bytes that all primaries use, together.")]
    broker_disks: Annotated[
        bool, gauge("1 while a server of Redis writes to a disk though `broker.persistence` forbids it.")
    ]
    queue_unread: Annotated[int, gauge("Requests that wait in Redis for a batcher.")]
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


class RedisBatcherNumbers(Numbers, frozen=True, kw_only=True):
    """A batcher's way through Redis."""

    shown = "batchers"

    entries_taken: Annotated[int, counter("Entries taken from Redis.")]
    entries_claimed: Annotated[int, counter("Entries claimed after their lease had ended.")]
    entries_unreadable: Annotated[int, counter("Entries that nobody can read, set aside.")]
    leases_lost: Annotated[int, counter("Leases that another batcher took over.")]
    outcomes_unconfirmed: Annotated[int, gauge("Outcomes that Redis has not taken yet.")]
    outcome_retries: Annotated[int, counter("Attempts to write outcomes that had to be repeated.")]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment."""

    health: Health
    fleet: FleetState
    # Of the process as a whole, each kind at most once.
    numbers: Sequence[Numbers]
    models: Mapping[str, ModelNumbers]
