"""`buf curl`, which knows of Carpool what reflection tells it: calls by value, and errors with their details."""

import json
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

from support.gateway import SIM, serving
from support.interop import ENVIRONMENTS, show

BUF = ENVIRONMENTS / "buf" / "node_modules" / ".bin" / "buf"


def buf_curl(port: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments[:-1]]
    url = f"http://127.0.0.1:{port}{arguments[-1]}"
    return subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=False)


def test_buf_curl(tmp_path: Path) -> None:
    with serving(tmp_path, SIM, "--grpc-port=0") as gateway:
        port = gateway.grpc_port

        def ask(method: str, **fields: Any) -> "subprocess.CompletedProcess[str]":
            return buf_curl(port, "-d", json.dumps(fields), f"/carpool.v1.Inference/{method}")

        services = buf_curl(port, "--list-services", "").stdout.split()
        assert "carpool.v1.Inference" in services and "inference.GRPCInferenceService" in services
        answered = json.loads(ask("Predict", input_json='"hello"').stdout)
        assert b64decode(answered["output"]) == b'"olleh"' and answered["metadata"]["model"] == "default"
        task = json.loads(ask("Submit", request={"input_json": '"task"'}).stdout)
        result = json.loads(ask("GetResult", task_id=task["taskId"], wait_ms=30_000).stdout)
        assert (result["status"], b64decode(result["output"])) == ("TASK_STATUS_SUCCESS", b'"ksat"')
        refused = json.loads(ask("Predict", input_json="{").stderr)
        assert refused["code"] == "invalid_argument"
        assert [each["type"] for each in refused["details"]] == ["google.rpc.ErrorInfo"]
        health = buf_curl(port, "-d", "{}", "/grpc.health.v1.Health/Check")
        assert json.loads(health.stdout) == {"status": "SERVING"}
    version = subprocess.run([str(BUF), "--version"], capture_output=True, text=True, check=True)
    show(f"buf {(version.stdout or version.stderr).strip()}: `buf curl` by reflection, 5 calls right by value")
