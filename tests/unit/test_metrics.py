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
    OutcomeNumbers,
    RedisGatewayNumbers,
    Scale,
    SheddingNumbers,
    Snapshot,
)
from carpool.telemetry.metrics import METRICS, Exposition

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
            scale=Scale(models={}),
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
            batches_by_size=0,
            call_cost_share={"padding": 0.5},
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
            endpoint_latency_seconds={},
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


def test_a_model_s_name_is_escaped(view: View) -> None:
    assert samples(Exposition(view))['carpool_queue_depth{model=odd "name"}'] == 7


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
