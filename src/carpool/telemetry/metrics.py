"""What Prometheus sees. Stages keep plain counts; they become metric families only when scraped.

Every metric has its row in METRICS: `/metrics` and docs/metrics.md are made from it. Over a fleet a sum counts each
event once: what one process counts, no other one does.

Label values are bounded: models and tiers are configured, outcomes come from the error tree, reasons and states
from the code. Nothing a client sends becomes a label.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from carpool.core.tally import Histogram

ENDPOINT_STATES = ("healthy", "degraded", "offline")

# By whom a metric is shown: gateways and batchers over Redis (`serve --broker` is both), `serve` without Redis alone.
Shown = Literal["all", "gateways, alone", "gateways", "batchers", "over Redis", "alone"]
# By the values of the labels, where there are any beside `model`.
Value = float | Histogram | Mapping[str, float] | Mapping[tuple[str, str], float]
Numbers = Mapping[str, Value]


class Metric(NamedTuple):
    """One metric. Prometheus sees `_total` behind the name of a counter, and three series of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    shown: Shown
    meaning: str


METRICS = (
    Metric(
        "carpool_requests",
        "counter",
        ("outcome",),
        "all",
        "Requests that got an outcome: `ok` or the code of an error. Synchronous ones count at their gateway, in "
        "direct mode too; tasks where their result was written, or where they were deleted before (`client-left`).",
    ),
    Metric(
        "carpool_problems",
        "counter",
        ("code",),
        "gateways, alone",
        "Answers to clients that were errors, by code; also for requests that never came in.",
    ),
    Metric(
        "carpool_queue_wait_seconds",
        "histogram",
        (),
        "all",
        "Seconds a request waited for a slot; it counts where its outcome does.",
    ),
    Metric("carpool_connections", "gauge", (), "gateways, alone", "Open client connections."),
    Metric(
        "carpool_held_requests",
        "gauge",
        (),
        "gateways, alone",
        "Requests admitted and without an outcome; over Redis without tasks.",
    ),
    Metric("carpool_held_bytes", "gauge", (), "gateways, alone", "Bytes of their inputs."),
    Metric(
        "carpool_dead_letters",
        "counter",
        ("cause",),
        "all",
        "Requests that were given up on, by cause; also those whose letter could not be kept.",
    ),
    Metric("carpool_dead_letters_lost", "counter", (), "all", "Letters that could not be kept: no room, or no Redis."),
    Metric(
        "carpool_dead_letters_kept",
        "gauge",
        (),
        "all",
        "Dead letters that are kept; over Redis every process shows those of the whole fleet.",
    ),
    # One model.
    Metric("carpool_batch_size", "histogram", ("model",), "all", "Requests in a batch."),
    Metric("carpool_batches", "counter", ("model", "reason"), "all", "Batches sent, by why they were."),
    Metric("carpool_upstream_calls", "counter", ("model", "result"), "all", "Upstream calls by result."),
    Metric("carpool_upstream_latency_seconds", "histogram", ("model",), "all", "Seconds of an answered upstream call."),
    Metric(
        "carpool_upstream_stray_answers",
        "counter",
        ("model",),
        "all",
        "Connections to the upstream that were closed because of bytes for which nobody had asked.",
    ),
    Metric(
        "carpool_isolation",
        "counter",
        ("model", "what"),
        "all",
        "Refused batches: calls to find bad inputs, inputs at fault, requests that were not resolved in time.",
    ),
    Metric(
        "carpool_offenders",
        "gauge",
        ("model",),
        "all",
        "Owners whose inputs keep being refused, and who ride apart.",
    ),
    Metric("carpool_slots", "gauge", ("model", "state"), "all", "Slots by state."),
    Metric("carpool_healthy_slots", "gauge", ("model",), "all", "Calls that the endpoints that work may have at once."),
    Metric("carpool_capacity_rps", "gauge", ("model",), "all", "Requests a second that the healthy slots can serve."),
    Metric("carpool_queue_depth", "gauge", ("model",), "all", "Requests that wait in this process for a slot."),
    Metric("carpool_arrival_rate", "gauge", ("model",), "all", "Requests a second that came to this queue, lately."),
    Metric(
        "carpool_endpoint_state",
        "gauge",
        ("model", "endpoint", "state"),
        "all",
        "1 for the state an endpoint is in: healthy, degraded or offline.",
    ),
    Metric(
        "carpool_endpoint_calls",
        "counter",
        ("model", "endpoint", "result"),
        "all",
        "Calls that an endpoint answered well (`ok`), and those that count against it (`failed`).",
    ),
    # The journal.
    Metric("carpool_tasks_pending", "gauge", (), "alone", "Tasks without an outcome."),
    Metric("carpool_results_stored", "gauge", (), "alone", "Results of tasks that are kept."),
    Metric("carpool_dead_letter_bytes", "gauge", (), "all", "Bytes of the dead letters that are kept."),
    Metric("carpool_journal_bytes", "gauge", (), "alone", "Bytes of inputs and results in the journal."),
    Metric("carpool_journal_commit_seconds", "histogram", (), "alone", "Seconds of a transaction of the journal."),
    Metric("carpool_journal_commit_failures", "counter", (), "alone", "Transactions that the disk did not take."),
    # Redis.
    Metric("carpool_broker_mode", "gauge", (), "gateways", "0: down, 1: over Redis, 2: direct."),
    Metric(
        "carpool_broker_memory_share", "gauge", (), "over Redis", "Share of the memory of the fullest primary used."
    ),
    Metric("carpool_broker_memory_bytes", "gauge", (), "over Redis", "Bytes that all primaries use, together."),
    Metric(
        "carpool_broker_disks",
        "gauge",
        (),
        "over Redis",
        "1 while a server of Redis writes to a disk though `broker.persistence` forbids it.",
    ),
    Metric("carpool_queue_unread", "gauge", (), "over Redis", "Requests that wait in Redis for a batcher."),
    Metric("carpool_task_bytes", "gauge", (), "over Redis", "Bytes of tasks and their results in Redis."),
    Metric("carpool_dead_letters_dropped", "counter", (), "over Redis", "Dead letters that went to make room."),
    Metric("carpool_live_gateways", "gauge", (), "over Redis", "Gateways heard of lately."),
    Metric("carpool_live_batchers", "gauge", (), "over Redis", "Batchers heard of lately."),
    Metric("carpool_heartbeat_failures", "counter", (), "over Redis", "Heartbeats that Redis did not answer."),
    Metric("carpool_sent_again", "counter", (), "gateways", "Requests sent again because Redis, or a part, was lost."),
    Metric("carpool_late_outcomes", "counter", (), "gateways", "Outcomes for which nobody waited any more."),
    Metric("carpool_entries_taken", "counter", (), "batchers", "Entries taken from Redis."),
    Metric("carpool_entries_claimed", "counter", (), "batchers", "Entries claimed after their lease had ended."),
    Metric("carpool_entries_unreadable", "counter", (), "batchers", "Entries that nobody can read, set aside."),
    Metric("carpool_leases_lost", "counter", (), "batchers", "Leases that another batcher took over."),
    Metric("carpool_outcomes_unconfirmed", "gauge", (), "batchers", "Outcomes that Redis has not taken yet."),
    Metric("carpool_outcome_retries", "counter", (), "batchers", "Attempts to write outcomes that had to be repeated."),
)
_NAMES = frozenset(metric.name for metric in METRICS)


class ModelView(Protocol):
    """What telemetry reads of one model."""

    name: str

    def numbers(self) -> Numbers:
        """Values by the names of metrics with the label `model`."""
        ...


class View(Protocol):
    """What telemetry reads of the whole process."""

    def models(self) -> Sequence[ModelView]:
        """Every model."""
        ...

    def numbers(self) -> Numbers:
        """Values by the names of the other metrics, as many as this process has."""
        ...


class CarpoolCollector(Collector):
    """Turns a view into metric families."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterable[Family]:
        """All of Carpool's own metrics."""
        numbers: list[tuple[tuple[str, ...], Numbers]] = [((), self._view.numbers())]
        numbers += [((model.name,), model.numbers()) for model in self._view.models()]
        assert all(shown.keys() <= _NAMES for _, shown in numbers), "a metric without a row in METRICS"
        for metric in METRICS:
            found = [(labels, shown[metric.name]) for labels, shown in numbers if metric.name in shown]
            if found:
                yield family_of(metric, found)


def family_of(metric: Metric, found: Iterable[tuple[tuple[str, ...], Value]]) -> Family:
    """One metric with its values; each comes with the model's name, where it is of a model."""
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, value in found:
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, value.buckets(), value.total)
        return histograms
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in found:
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([*labels, *([key] if isinstance(key, str) else key)], number)
        else:
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
    return family


class Exposition:
    """Renders /metrics."""

    def __init__(self, view: View) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(CarpoolCollector(view))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def __call__(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
