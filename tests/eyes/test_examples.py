"""From a slow bucket to a trace: the examples of a histogram, kept by a real Prometheus, name traces that were sent."""

from pathlib import Path

from support.client import ask_once, inference_body
from support.otlp import receiver
from support.processes import running_gateway, until
from support.prometheus import running_prometheus

UPSTREAM = "sim:?latency_ms=5&slots=4"


async def test_an_example_leads_to_its_trace(tmp_path: Path) -> None:
    async with receiver() as taking:
        settings = {"tracing.otlp_endpoint": taking.url, "tracing.sample_ratio": 1}
        async with (
            running_gateway(tmp_path / "serve", UPSTREAM, settings=settings) as process,
            running_prometheus(tmp_path / "prometheus", [process.admin_port]) as prometheus,
        ):
            for number in range(3):
                await ask_once(process.port, "POST", "/v1/inference", inference_body(f"{number}"))

            async def are_examples_kept() -> bool:
                return bool(await prometheus.examples('carpool_request_seconds_bucket{tier="free"}'))

            async def are_traces_there() -> bool:
                return len(taking.named("POST /v1/inference")) == 3

            await until(are_examples_kept)
            await until(are_traces_there)
            sent = {span.trace_id for span in taking.named("POST /v1/inference")}
            examples = await prometheus.examples('carpool_request_seconds_bucket{tier="free"}')
            assert {example["labels"]["trace_id"] for example in examples} <= sent
