"""Simulated GPUs that speak KServe V2, in a thread of their own, and a gateway's configuration for them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from carpool.tools.sim_gpu import GpuFleet, serve_gpus
from carpool.upstream.simulated import SimulationSettings
from support.threads import in_a_thread

CONFIGURATION = """
model = "mirror"

[gateway]
receive_timeout_s = 60

[input]
body_bytes_max = 16777216

[upstream]
endpoints = ["http://127.0.0.1:{port}"]
protocol = "kserve_v2"
slots = 2
timeout_s = 60

[batching]
batch_bytes_max = 33554432

[broker]
queue_timeout_s = 60
total_timeout_s = 60

[shedding]
mode = "off"

[models.mirror]

[models."org/mirror"]
model_version = "3"

[models.image]
tensor = "IMAGE BYTES 1,1"

[models.vector]
tensor = "VECTOR FP32 1,4"
model_version = "3"
cache = true

[models.words]
protocol = "json"
endpoints = ["http://127.0.0.1:{port}/infer"]
"""


@asynccontextmanager
async def _serving(settings: SimulationSettings) -> AsyncIterator[GpuFleet]:
    fleet = await serve_gpus(settings, "127.0.0.1", 0, 1)
    try:
        yield fleet
    finally:
        await fleet.close()


@contextmanager
def tensor_gpu(**settings: Any) -> Iterator[GpuFleet]:
    """A GPU on a free port until the block ends."""
    with in_a_thread(_serving(SimulationSettings(**settings))) as (fleet, _):
        yield fleet
