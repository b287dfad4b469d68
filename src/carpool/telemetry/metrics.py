"""What Prometheus sees. Stages keep plain counts; they become metric families only when scraped.

Label values are bounded: models and tiers are configured, outcomes come from the error tree, reasons and states
from the code. Nothing a client sends becomes a label.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from carpool.core.tally import Histogram

ENDPOINT_STATES = ("healthy", "degraded", "offline")


class ModelView(Protocol):
    """What telemetry reads of one model."""

    name: str

    def batch_sizes(self) -> Histogram:
        """Requests in each batch."""
        ...

    def call_seconds(self) -> Histogram:
        """Seconds of each answered upstream call."""
        ...

    def batches(self) -> Mapping[str, int]:
        """Batches by dispatch reason."""
        ...

    def calls(self) -> Mapping[str, int]:
        """Upstream calls by result."""
        ...

    def isolation(self) -> Mapping[str, int]:
        """What came of refused batches: calls to find bad inputs, inputs at fault, requests not resolved in time."""
        ...

    def offenders(self) -> int:
        """Owners that ride apart now."""
        ...

    def stray_answers(self) -> int:
        """Connections to the upstream that were closed because bytes came for which nobody had asked."""
        ...

    def slots(self) -> Mapping[str, int]:
        """Slots by state."""
        ...

    def queue_depth(self) -> int:
        """Requests that wait for a slot."""
        ...

    def arrival_rate(self) -> float:
        """Requests a second, lately."""
        ...

    def healthy_slots(self) -> int:
        """Calls that the endpoints that work may have at once."""
        ...

    def capacity_rps(self) -> float:
        """Requests a second that these slots can serve in full batches."""
        ...

    def endpoint_states(self) -> Sequence[tuple[str, str]]:
        """The name and state of every endpoint."""
        ...


class View(Protocol):
    """What telemetry reads of the whole process."""

    def models(self) -> Sequence[ModelView]:
        """Every model."""
        ...

    def outcomes(self) -> Mapping[str, int]:
        """Requests that got an outcome, by code."""
        ...

    def problems(self) -> Mapping[str, int]:
        """Answers to clients that were errors, by code; also for requests that never came in."""
        ...

    def buried(self) -> Mapping[str, int]:
        """Requests that became dead letters, by cause."""
        ...

    def queue_wait_seconds(self) -> Histogram:
        """Seconds that requests waited for a slot."""
        ...

    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Further values of the moment: help text and value by name."""
        ...


class CarpoolCollector(Collector):
    """Turns a view into metric families."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All of Carpool's own metrics."""
        view = self._view
        requests = CounterMetricFamily("carpool_requests", "Requests that got an outcome.", labels=["outcome"])
        for code, number in view.outcomes().items():
            requests.add_metric([code], number)
        yield requests
        problems = CounterMetricFamily("carpool_problems", "Answers to clients that were errors.", labels=["code"])
        for code, number in view.problems().items():
            problems.add_metric([code], number)
        yield problems
        buried = CounterMetricFamily("carpool_dead_letters", "Requests that became dead letters.", labels=["cause"])
        for cause, number in view.buried().items():
            buried.add_metric([cause], number)
        yield buried
        wait = HistogramMetricFamily("carpool_queue_wait_seconds", "Seconds a request waited for a slot.")
        histogram = view.queue_wait_seconds()
        wait.add_metric([], histogram.buckets(), histogram.total)
        yield wait
        yield from self._per_model(view.models())
        for name, (text, value) in view.gauges().items():
            yield GaugeMetricFamily(name, text, value=value)

    def _per_model(self, models: Sequence[ModelView]) -> Iterable[Metric]:
        sizes = HistogramMetricFamily("carpool_batch_size", "Requests in a batch.", labels=["model"])
        seconds = HistogramMetricFamily(
            "carpool_upstream_latency_seconds", "Seconds of an answered upstream call.", labels=["model"]
        )
        batches = CounterMetricFamily("carpool_batches", "Batches sent, by why they were.", labels=["model", "reason"])
        calls = CounterMetricFamily("carpool_upstream_calls", "Upstream calls by result.", labels=["model", "result"])
        isolation = CounterMetricFamily(
            "carpool_isolation",
            "Refused batches: calls to find bad inputs, inputs at fault, requests that were not resolved in time.",
            labels=["model", "what"],
        )
        offenders = GaugeMetricFamily(
            "carpool_offenders", "Owners whose inputs keep being refused, and who ride apart.", labels=["model"]
        )
        strays = CounterMetricFamily(
            "carpool_upstream_stray_answers",
            "Connections to the upstream that were closed because of bytes for which nobody had asked.",
            labels=["model"],
        )
        slots = GaugeMetricFamily("carpool_slots", "Slots by state.", labels=["model", "state"])
        depth = GaugeMetricFamily("carpool_queue_depth", "Requests that wait for a slot.", labels=["model"])
        rate = GaugeMetricFamily("carpool_arrival_rate", "Requests a second, lately.", labels=["model"])
        healthy = GaugeMetricFamily(
            "carpool_healthy_slots", "Calls that the endpoints that work may have at once.", labels=["model"]
        )
        capacity = GaugeMetricFamily(
            "carpool_capacity_rps", "Requests a second that the healthy slots can serve.", labels=["model"]
        )
        states = GaugeMetricFamily(
            "carpool_endpoint_state", "1 for the state an endpoint is in.", labels=["model", "endpoint", "state"]
        )
        for model in models:
            name = model.name
            sizes.add_metric([name], model.batch_sizes().buckets(), model.batch_sizes().total)
            seconds.add_metric([name], model.call_seconds().buckets(), model.call_seconds().total)
            counted = (
                (batches, model.batches()),
                (calls, model.calls()),
                (isolation, model.isolation()),
                (slots, model.slots()),
            )
            offenders.add_metric([name], model.offenders())
            strays.add_metric([name], model.stray_answers())
            for family, counts in counted:
                for label, number in counts.items():
                    family.add_metric([name, label], number)
            depth.add_metric([name], model.queue_depth())
            rate.add_metric([name], model.arrival_rate())
            healthy.add_metric([name], model.healthy_slots())
            capacity.add_metric([name], model.capacity_rps())
            for endpoint, state in model.endpoint_states():
                for each in ENDPOINT_STATES:
                    states.add_metric([name, endpoint, each], each == state)
        yield from (sizes, seconds, batches, calls, isolation, offenders, strays)
        yield from (slots, depth, rate, healthy, capacity, states)


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
