"""KServe's own clients, unmodified, in front of Carpool: V1 and V2 over HTTP, V2 over gRPC, every answer by value."""

import json
import subprocess
from pathlib import Path

from support.gateway import serving
from support.interop import environment_python, show, show_version
from support.processes import PATIENCE_S
from support.tensor_gpu import CONFIGURATION, tensor_gpu

PROGRAM = Path(__file__).parent / "clients" / "kserve_client.py"


def test_kserve_client(tmp_path: Path) -> None:
    python = environment_python("kserve")
    with tensor_gpu(latency_ms=20, slots=2) as gpu:
        (tmp_path / "carpool.toml").write_text(CONFIGURATION.format(port=gpu.ports[0]))
        with serving(tmp_path, "", "--grpc-port=0") as gateway:
            addresses = f"http://127.0.0.1:{gateway.port}", f"127.0.0.1:{gateway.grpc_port}"
            command = [str(python), str(PROGRAM), *addresses]
            done = subprocess.run(command, check=False, timeout=2 * PATIENCE_S, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert gateway.log_messages("error") == []
        found = json.loads(done.stdout.splitlines()[-1])
        calls = gpu.total().calls
    show_version(python, "kserve")
    show(f"kserve's clients: right by value {found}, in {calls} calls of the GPU")
    assert found == {"v1": 50, "v2": 50, "grpc": 50, "errors": 6}
    # 100 of 1 to 4 rows and 50 of 1 to 3 were far fewer calls.
    assert calls < 75
