"""Unmodified tritonclient, sync and aio, in front of Carpool: every answer by value, single rows in full batches."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.gateway import serving
from support.interop import environment_python, show, show_version
from support.tensor_gpu import CONFIGURATION, tensor_gpu

PROGRAMS = Path(__file__).parent / "clients"
# By transport: how many answers of each kind a program checks.
FOUND = {"http": {"sync": 23, "aio": 31, "errors": 3}, "grpc": {"sync": 11, "aio": 30, "errors": 3}}
SINGLES = 1000


def run(transport: str, *arguments: str) -> Any:
    """What the program found."""
    program = PROGRAMS / f"tritonclient_{transport}.py"
    command = [str(environment_python("tritonclient")), str(program), *arguments]
    done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("transport", FOUND)
def test_tritonclient(tmp_path: Path, transport: str) -> None:
    with tensor_gpu(latency_ms=50, slots=2) as gpu:
        (tmp_path / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
        with serving(tmp_path, "", "--grpc-port=0", settings={"shedding.mode": "off"}) as gateway:
            url = f"127.0.0.1:{gateway.port if transport == 'http' else gateway.grpc_port}"
            values = run(transport, url)
            before = gpu.total()
            singles = run(transport, url, str(SINGLES))
            after = gpu.total()
    show_version(environment_python("tritonclient"), "tritonclient")
    calls = after.calls - before.calls
    show(
        f"tritonclient over {transport}: right by value {values}; {SINGLES} single rows in flight were {calls} calls "
        f"of the GPU, mean batch {SINGLES / calls:.1f}, largest {after.largest_batch}"
    )
    assert values == FOUND[transport] and singles["aio"] == SINGLES
    assert after.inputs - before.inputs == SINGLES and SINGLES / calls > 10
