"""What Prometheus sees: the counts of the stages, in its text format, with bounded labels."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from carpool.core.histograms import BATCH_SIZE_BOUNDS, SECONDS_BOUNDS, Histogram
from carpool.core.snapshot import (
    FleetState,
    Health,
    ModelNumbers,
    Numbers,
    OutcomeNumbers,
    RedisGatewayNumbers,
    SheddingNumbers,
    Snapshot,
)
from carpool.telemetry.metrics import KINDS, METRICS, Exposition

read_open_metrics: Callable[[str], Iterable[Any]] = openmetrics.text_string_to_metric_families


class View:
    """The numbers of a process, as its stages count them."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.wait = Histogram(SECONDS_BOUNDS)
        self.took = Histogram(SECONDS_BOUNDS)
        self.sizes = Histogram(BATCH_SIZE_BOUNDS)
        self.seconds = Histogram(SECONDS_BOUNDS)

    def __call__(self) -> Snapshot:
        nothing = Histogram(BATCH_SIZE_BOUNDS), Histogram(SECONDS_BOUNDS)
        return Snapshot(
            health=Health(status="healthy", gpu_utilization=0.0, queue_depth=0, requests_per_second=0.0),
            fleet=FleetState(models={}),
            numbers=[
                OutcomeNumbers(
                    requests=self.counts,
                    queue_wait_seconds=self.wait,
                    request_seconds={"paid": self.took, "free": Histogram(SECONDS_BOUNDS)},
                    stage_seconds={"queue": self.wait},
                    waiting={"paid": 0, "free": 3},
                    dead_letters={"input-refused": 2, "upstream-failed": 0},
                    dead_letters_lost=0,
                    dead_letters_kept=2,
                    dead_letter_bytes=9,
                ),
                SheddingNumbers(
                    problems={},
                    connections=5,
                    grpc_calls=2,
                    held_requests=0,
                    held_bytes=0,
                    pressure={"m": 1.5},
                    shed={("m", "free"): 7},
                    wait_error_seconds={("m", "too-high"): self.wait},
                    utilization_target=0.75,
                ),
                RedisGatewayNumbers(
                    broker_mode=1, sent_again=4, late_outcomes=0, rate_limit_asks=0, rate_limit_failures=0
                ),
            ],
            models={"m": self.model(self.sizes, self.seconds), 'odd "name"': self.model(*nothing)},
        )

    def model(self, sizes: Histogram, seconds: Histogram) -> ModelNumbers:
        return ModelNumbers(
            batch_size=sizes,
            batches={"full": 3, "waited": 1},
            batch_fill={"full": Histogram((0.5, 1.0))},
            upstream_calls={},
            upstream_latency_seconds=seconds,
            upstream_stray_answers=0,
            isolation={},
            quarantined=0,
            slots={"busy": 1, "free": 3},
            healthy_slots=4,
            capacity_rps=640.0,
            queue_depth=7,
            arrival_rate=12.5,
            arrival_error_ratio={},
            utilization=0.5,
            endpoint_state={("http://gpu-1/infer", "healthy"): 1, ("http://gpu-1/infer", "offline"): 0},
            endpoint_breaker={"http://gpu-1/infer": 2},
            endpoint_calls={},
        )


def samples(exposition: Exposition) -> dict[str, float]:
    """Every sample, as `name{label=value}`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture
def view() -> View:
    return View()


def test_the_counts_of_the_stages_are_shown_as_they_are_when_scraped(view: View) -> None:
    exposition = Exposition(view)
    assert "carpool_requests_total{outcome=ok}" not in samples(exposition)
    view.counts["ok"] = 3
    view.counts["queue-full"] = 2
    view.wait.observe(0.02)
    view.took.observe(0.3)
    view.sizes.observe(64)
    view.sizes.observe(3)
    view.seconds.observe(0.2)
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
        "carpool_request_seconds_bucket{le=0.3,tier=paid}": 1,
        "carpool_request_seconds_count{tier=free}": 0,
        "carpool_stage_seconds_count{stage=queue}": 1,
        "carpool_wait_error_seconds_count{direction=too-high,model=m}": 1,
        "carpool_waiting{tier=free}": 3,
        "carpool_batch_fill_bucket{le=0.5,model=m,reason=full}": 0,
        "carpool_endpoint_breaker{endpoint=http://gpu-1/infer,model=m}": 2,
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
        "carpool_pressure{model=m}": 1.5,
        "carpool_shed_total{model=m,tier=free}": 7,
        "carpool_sent_again_total{}": 4,
    }
    assert {name: shown[name] for name in expected} == expected


def test_a_model_s_name_is_escaped(view: View) -> None:
    assert samples(Exposition(view))['carpool_queue_depth{model=odd "name"}'] == 7


def test_the_process_is_shown_too(view: View) -> None:
    shown = samples(Exposition(view))
    assert shown["process_resident_memory_bytes{}"] > 0
    assert any(name.startswith("python_gc_collections_total") for name in shown)


def test_there_are_no_series_but_those_of_models_and_codes(view: View) -> None:
    """Whatever clients send, the number of series is that of the configuration and the code."""
    exposition = Exposition(view)
    before = len(samples(exposition))
    for number in range(1000):
        view.wait.observe(number)
        view.sizes.observe(number)
    assert len(samples(exposition)) == before


def test_counters_are_counters(view: View) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(Exposition(view)()[0].decode())}
    assert (kinds["carpool_sent_again"], kinds["carpool_connections"]) == ("counter", "gauge")


def test_what_a_process_does_not_have_is_not_shown(view: View) -> None:
    assert not any(name.startswith(("carpool_journal", "carpool_entries")) for name in samples(Exposition(view)))


def test_every_kind_of_numbers_is_shown() -> None:
    assert set(KINDS) == set(Numbers.__subclasses__())


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert not any(name.endswith(("_total", "_count", "_sum", "_bucket")) for name in names)


def test_who_accepts_it_gets_examples_that_lead_to_traces(view: View) -> None:
    view.took.observe(0.15)
    view.took.observe(0.3)
    view.took.exemplify(0.3, "4bf92f3577b34da6a3ce929d0e0e4736", 1_700_000_000.25)
    exposition = Exposition(view)
    plain, kind = exposition(b"text/plain;version=0.0.4")
    assert kind.startswith(b"text/plain; version=0.0.4")
    assert b"trace_id" not in plain
    text, kind = exposition(b"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    assert kind.startswith(b"application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in read_open_metrics(text.decode())}
    assert set(families) >= {metric.name for metric in METRICS if metric.numbers in (OutcomeNumbers, ModelNumbers)}
    examples = {
        (sample.labels["tier"], sample.labels["le"]): sample.exemplar
        for sample in families["carpool_request_seconds"].samples
        if sample.exemplar is not None
    }
    assert list(examples) == [("paid", "0.3")]
    example = examples["paid", "0.3"]
    assert (example.labels, example.value) == ({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}, 0.3)
    assert float(example.timestamp) == 1_700_000_000.25
