"""Unmodified tritonclient, sync and aio, in front of Carpool: every answer by value, single rows in full batches."""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.gateway import serving
from support.interop import environment_python, show, show_version
from support.tensor_gpu import CONFIGURATION, tensor_gpu

PROGRAM = Path(__file__).parent / "clients" / "tritonclient_http.py"
SINGLES = 1000


def run(*arguments: str) -> Any:
    """What the program found."""
    command = [str(environment_python("tritonclient")), str(PROGRAM), *arguments]
    done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tritonclient_over_http(tmp_path: Path) -> None:
    with tensor_gpu(latency_ms=50, slots=2) as gpu:
        (tmp_path / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
        with serving(tmp_path, "", settings={"shedding.mode": "off"}) as gateway:
            url = f"127.0.0.1:{gateway.port}"
            values = run(url)
            before = gpu.total()
            singles = run(url, str(SINGLES))
            after = gpu.total()
    show_version(environment_python("tritonclient"), "tritonclient")
    calls = after.calls - before.calls
    show(
        f"tritonclient over HTTP: right by value {values}; {SINGLES} single rows in flight were {calls} calls of the "
        f"GPU, mean batch {SINGLES / calls:.1f}, largest {after.largest_batch}"
    )
    assert values == {"sync": 23, "aio": 31, "errors": 3} and singles["aio"] == SINGLES
    assert after.inputs - before.inputs == SINGLES and SINGLES / calls > 10
