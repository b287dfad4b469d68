"""What Prometheus sees: the counts of the stages, in its text format, with bounded labels."""

from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.core.tally import BATCH_SIZE_BOUNDS, SECONDS_BOUNDS, Histogram
from carpool.telemetry.metrics import METRICS, Exposition, Numbers


class FakeModel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.seconds = Histogram(SECONDS_BOUNDS)

    def numbers(self) -> Numbers:
        return {
            "carpool_batch_size": self.sizes,
            "carpool_upstream_latency_seconds": self.seconds,
            "carpool_batches": {"full": 3, "waited": 1},
            "carpool_queue_depth": 7,
            "carpool_arrival_rate": 12.5,
            "carpool_endpoint_state": {("http://gpu-1/infer", "healthy"): 1, ("http://gpu-1/infer", "offline"): 0},
        }


class FakeView:
    def __init__(self) -> None:
        self.model_views = [FakeModel("m"), FakeModel('odd "name"')]
        self.counts: dict[str, int] = {}
        self.wait = Histogram(SECONDS_BOUNDS)
        self.more: dict[str, float] = {}

    def models(self) -> Sequence[FakeModel]:
        return self.model_views

    def numbers(self) -> Numbers:
        return {
            "carpool_requests": self.counts,
            "carpool_dead_letters": {"input-refused": 2, "upstream-failed": 0},
            "carpool_queue_wait_seconds": self.wait,
            "carpool_connections": 5,
            "carpool_sent_again": 4,
            **self.more,
        }


def samples(exposition: Exposition) -> dict[str, float]:
    """Every sample, as `name{label=value}`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture
def view() -> FakeView:
    return FakeView()


def test_the_counts_of_the_stages_are_shown_as_they_are_when_scraped(view: FakeView) -> None:
    exposition = Exposition(view)
    assert "carpool_requests_total{outcome=ok}" not in samples(exposition)
    view.counts["ok"] = 3
    view.counts["queue-full"] = 2
    view.wait.observe(0.02)
    view.model_views[0].sizes.observe(64)
    view.model_views[0].sizes.observe(3)
    view.model_views[0].seconds.observe(0.2)
    shown = samples(exposition)
    expected = {
        "carpool_requests_total{outcome=ok}": 3,
        "carpool_requests_total{outcome=queue-full}": 2,
        "carpool_dead_letters_total{cause=input-refused}": 2,
        "carpool_dead_letters_total{cause=upstream-failed}": 0,
        "carpool_queue_wait_seconds_bucket{le=0.01}": 0,
        "carpool_queue_wait_seconds_bucket{le=0.025}": 1,
        "carpool_queue_wait_seconds_count{}": 1,
        "carpool_queue_wait_seconds_sum{}": 0.02,
        "carpool_batch_size_bucket{le=4.0,model=m}": 1,
        "carpool_batch_size_bucket{le=64.0,model=m}": 2,
        "carpool_batch_size_sum{model=m}": 67,
        "carpool_batch_size_count{model=m}": 2,
        "carpool_upstream_latency_seconds_count{model=m}": 1,
        "carpool_batches_total{model=m,reason=full}": 3,
        "carpool_queue_depth{model=m}": 7,
        "carpool_arrival_rate{model=m}": 12.5,
        "carpool_endpoint_state{endpoint=http://gpu-1/infer,model=m,state=healthy}": 1,
        "carpool_endpoint_state{endpoint=http://gpu-1/infer,model=m,state=offline}": 0,
        "carpool_connections{}": 5,
        "carpool_sent_again_total{}": 4,
    }
    assert {name: shown[name] for name in expected} == expected


def test_a_model_s_name_is_escaped(view: FakeView) -> None:
    assert samples(Exposition(view))['carpool_queue_depth{model=odd "name"}'] == 7


def test_the_process_is_shown_too(view: FakeView) -> None:
    shown = samples(Exposition(view))
    assert shown["process_resident_memory_bytes{}"] > 0
    assert any(name.startswith("python_gc_collections_total") for name in shown)


def test_there_are_no_series_but_those_of_models_and_codes(view: FakeView) -> None:
    """Whatever clients send, the number of series is that of the configuration and the code."""
    exposition = Exposition(view)
    before = len(samples(exposition))
    for number in range(1000):
        view.wait.observe(number)
        view.model_views[0].sizes.observe(number)
    assert len(samples(exposition)) == before


def test_counters_are_counters(view: FakeView) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(Exposition(view)().decode())}
    assert (kinds["carpool_sent_again"], kinds["carpool_connections"]) == ("counter", "gauge")


def test_a_metric_needs_its_row(view: FakeView) -> None:
    view.more["carpool_never_heard_of"] = 1
    with pytest.raises(AssertionError, match="METRICS"):
        Exposition(view)()


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert not any(name.endswith(("_total", "_count", "_sum", "_bucket")) for name in names)
