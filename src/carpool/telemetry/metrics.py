"""What Prometheus sees: the numbers of a snapshot. Stages keep plain counts; they become families only when scraped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_type_hints

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from carpool.core.histograms import Histogram
from carpool.core.snapshot import ModelNumbers, Numbers, Shown, Shows, Snapshot

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = b"application/openmetrics-text"
generate_open_metrics: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest
FAMILIES = {"histogram": HistogramMetricFamily, "counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class Metric(NamedTuple):
    """One metric. Prometheus sees `_total` behind the name of a counter, and three series of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    shown: Shown
    meaning: str
    # Where its value is found.
    numbers: type[Numbers]
    field: str


def metrics_of(numbers: type[Numbers]) -> Iterator[Metric]:
    """The metrics of one kind of numbers."""
    labels = ("model",) if numbers is ModelNumbers else ()
    hints = get_type_hints(numbers, include_extras=True)
    for field in numbers.__struct_fields__:
        [shows] = (each for each in hints[field].__metadata__ if isinstance(each, Shows))
        yield Metric(
            f"carpool_{field}", shows.kind, labels + shows.labels, numbers.shown, shows.meaning, numbers, field
        )


METRICS = tuple(metric for kind in Numbers.__subclasses__() for metric in metrics_of(kind))


class CarpoolCollector(Collector):
    """Turns a snapshot into metric families."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def collect(self) -> Iterable[Family]:
        """All of Carpool's own metrics."""
        snapshot = self._take()
        # With the name of the model, where they are of one.
        found: dict[type[Numbers], list[tuple[list[str], Numbers]]] = {}
        for numbers in snapshot.numbers:
            found[type(numbers)] = [([], numbers)]
        if snapshot.models:
            found[ModelNumbers] = [([name], numbers) for name, numbers in snapshot.models.items()]
        for metric in METRICS:
            if metric.numbers in found:
                yield family_of(metric, found[metric.numbers])


def family_of(metric: Metric, found: Iterable[tuple[list[str], Numbers]]) -> Family:
    """One metric with its values."""
    family: Any = FAMILIES[metric.kind](metric.name, metric.meaning, labels=metric.labels)
    for labels, numbers in found:
        for more, value in labelled(getattr(numbers, metric.field)):
            if isinstance(value, Histogram):
                family.add_metric([*labels, *more], list(exemplified(value)), value.total)
            else:
                family.add_metric([*labels, *more], value)
    return cast(Family, family)


def exemplified(histogram: Histogram) -> Iterator[Bucket]:
    """The buckets of a histogram, each with the example of a traced request, where it has one."""
    for number, (bound, count) in enumerate(histogram.buckets()):
        example = histogram.examples.get(number)
        if example is None:
            yield bound, count
        else:
            yield bound, count, Exemplar({"trace_id": example.trace_id}, example.value, example.wall)


def labelled(shown: Any) -> Iterator[tuple[Sequence[str], Any]]:
    """The values of one metric, each with its labels."""
    if not isinstance(shown, Mapping):
        yield (), shown
        return
    for key, value in shown.items():
        yield (key,) if isinstance(key, str) else key, value


class Exposition:
    """Renders /metrics from a snapshot that it takes."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(CarpoolCollector(take))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def __call__(self, accept: bytes = b"") -> tuple[bytes, bytes]:
        """The text, and its type: OpenMetrics, with examples of traces, for clients that accept it."""
        if OPEN_METRICS in accept.lower():
            return generate_open_metrics(self._registry), openmetrics.CONTENT_TYPE_LATEST.encode()
        return generate_latest(self._registry), PROMETHEUS
