"""Simulated GPUs that speak KServe V2, in a thread of their own, and a gateway's configuration for them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carpool.tools.sim_gpu import GpuFleet, serve_gpus
from carpool.upstream.simulated import SimulationSettings
from support.processes import PATIENCE_S

CONFIGURATION = """
model = "mirror"

[gateway]
body_bytes_max = 16777216
receive_timeout_s = 60
write_timeout_s = 60

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

[models.image]
tensor_name = "IMAGE"
tensor_datatype = "BYTES"
tensor_shape = "1,1"

[models.vector]
tensor_name = "VECTOR"
tensor_datatype = "FP32"
tensor_shape = "1,4"
model_version = "3"
cache = true

[models.words]
protocol = "json"
endpoints = ["http://127.0.0.1:{port}/infer"]
"""


@contextmanager
def tensor_gpu(**settings: Any) -> Iterator[GpuFleet]:
    """A GPU on a free port until the block ends."""
    is_listening, found = threading.Event(), []
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        fleet = await serve_gpus(SimulationSettings(**settings), "127.0.0.1", 0, 1)
        found.append(fleet)
        is_listening.set()
        await is_over.wait()
        await fleet.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_listening.wait(PATIENCE_S)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()
