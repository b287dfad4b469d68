"""A real NVIDIA Triton behind Carpool: HTTP JSON, HTTP with raw tensors, gRPC."""

import asyncio
import base64
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.client import ask_once
from support.interop import (
    Case,
    Findings,
    ask_python,
    environment_python,
    free_ports,
    inference,
    running_server,
    show,
    show_version,
    verify,
)
from support.processes import GatewayProcess, running_gateway, until

pytestmark = pytest.mark.timeout(300)

REQUESTS = 10_000
NEGATE_BATCH_MAX = 16
MODEL = Path(__file__).parent / "servers" / "triton_model.py"
MIRROR = """
name: "mirror"
backend: "python"
max_batch_size: 64
input [{ name: "TEXT", data_type: TYPE_STRING, dims: [1] }, { name: "VECTOR", data_type: TYPE_FP32, dims: [4] }]
output [{ name: "REVERSED", data_type: TYPE_STRING, dims: [1] }, { name: "NEGATED", data_type: TYPE_FP32, dims: [4] }]
instance_group [{ kind: KIND_CPU, count: 1 }]
"""
NEGATE = f"""
name: "negate"
backend: "python"
max_batch_size: {NEGATE_BATCH_MAX}
input [{{ name: "VECTOR", data_type: TYPE_FP32, dims: [4] }}]
output [{{ name: "NEGATED", data_type: TYPE_FP32, dims: [4] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
"""
GATEWAY = """
model = "mirror"

[upstream]
endpoints = ["{endpoint}"]
protocol = "{protocol}"
timeout_s = 20

[broker]
queue_timeout_s = 30
total_timeout_s = 50

[models.mirror]

[models.negate]
tensor = "VECTOR FP32 1,4"
"""


class Triton(NamedTuple):
    """A running Triton."""

    http_port: int
    grpc_port: int
    metrics_port: int

    def settings(self, form: str, more: str = "") -> str:
        """A configuration that reaches it: `json`, `binary` or `grpc`."""
        if form == "grpc":
            endpoint, protocol = f"grpc://127.0.0.1:{self.grpc_port}", "kserve_v2_grpc"
        else:
            endpoint, protocol = f"http://127.0.0.1:{self.http_port}", "kserve_v2"
        return GATEWAY.format(endpoint=endpoint, protocol=protocol) + more


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    directory = tmp_path_factory.mktemp("triton")
    python = environment_python("triton")
    for name, configuration in (("mirror", MIRROR), ("negate", NEGATE)):
        version = directory / "models" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(configuration)
        shutil.copy(MODEL, version / "model.py")
    packages = Path(ask_python(python, "sysconfig.get_path('purelib')"))
    carried = packages / "pytriton" / "tritonserver"
    # The stub that runs models belongs beside the backend; the package keeps one for each version of Python.
    # Links, because these files look for their libraries from where they really are.
    backend = directory / "backends" / "python"
    backend.mkdir(parents=True)
    python_version = ask_python(python, "'%d.%d' % sys.version_info[:2]")
    stub = carried / "python_backend_stubs" / python_version / "triton_python_backend_stub"
    for file in (*(carried / "backends" / "python").iterdir(), stub):
        (backend / file.name).symlink_to(file)
    ports = Triton(*free_ports(3))
    command: list[str | Path] = [carried / "bin" / "tritonserver"]
    command += [f"--model-repository={directory / 'models'}", f"--backend-directory={backend.parent}"]
    for service, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{service}-address=127.0.0.1", f"--{service}-port={port}"]
    environment = {
        "LD_LIBRARY_PATH": ask_python(python, "sysconfig.get_config_var('LIBDIR')"),
        # The stub takes its packages from the first Python on the path, and its numpy must be the one it was built for.
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    with running_server(command, environment, (ports.http_port, "/v2/health/ready"), directory / "triton.log"):
        show_version(python, "nvidia-pytriton")
        yield ports


def mirror_case(number: int, b64: bool, text: str = "") -> Case:
    """A text and a vector that no other request has, as JSON or as raw bytes."""
    text = text or f"№{number} naïve 日本"
    vector = [float(number), number + 0.25, -number - 0.5, number * 2.0]
    turned, negated = text[::-1], [-value for value in vector]

    def is_own(output: Any) -> bool:
        by_name = {tensor["name"]: tensor for tensor in output}
        said, minus = by_name["REVERSED"], by_name["NEGATED"]
        if b64:
            return raw(said) == packed_text(turned) and raw(minus) == struct.pack("<4f", *negated)
        return bool(said["data"] == [turned] and minus["data"] == negated)

    texts: dict[str, Any] = {"shape": [1, 1], "datatype": "BYTES"}
    values: dict[str, Any] = {"shape": [1, 4], "datatype": "FP32"}
    if b64:
        texts["b64"], values["b64"] = encoded(packed_text(text)), encoded(struct.pack("<4f", *vector))
    else:
        texts["data"], values["data"] = [text], vector
    return inference({"TEXT": texts, "VECTOR": values}, is_own)


def octets_case(number: int) -> Case:
    """A vector as an octet-stream body; what it is, is configured."""
    vector = [float(number), number + 0.25, -number - 0.5, number * 2.0]
    negated = struct.pack("<4f", *[-value for value in vector])
    return Case(
        struct.pack("<4f", *vector),
        lambda output: raw(output[0]) == negated,
        "/v1/predict?model_id=negate",
        "Content-Type: application/octet-stream\r\n",
    )


def packed_text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw(tensor: dict[str, Any]) -> bytes:
    return base64.b64decode(tensor["b64"])


async def verified(triton: Triton, directory: Path, form: str, cases: list[Case]) -> tuple[Findings, GatewayProcess]:
    """What became of the cases, and the gateway (which has left) for its log."""
    (directory / "carpool.toml").write_text(triton.settings(form))
    async with running_gateway(directory, "") as gateway:
        return await verify(gateway.port, cases), gateway


@pytest.mark.parametrize("form", ["json", "binary", "grpc"])
async def test_everyone_gets_their_own(triton: Triton, tmp_path: Path, form: str) -> None:
    # Over gRPC all tensors are raw, and clients of both forms share batches.
    cases = [
        mirror_case(number, b64=form == "binary" or (form == "grpc" and number % 2 == 0)) for number in range(REQUESTS)
    ]
    findings, _ = await verified(triton, tmp_path, form, cases)
    findings.report(f"Triton, {form}")
    assert findings.statuses == {200: REQUESTS} and findings.foreign == 0
    assert findings.batch_size_max > 1


@pytest.mark.parametrize("form", ["binary", "grpc"])
async def test_octet_streams_and_a_model_that_takes_fewer(triton: Triton, tmp_path: Path, form: str) -> None:
    count = REQUESTS // 5
    findings, gateway = await verified(triton, tmp_path, form, [octets_case(number) for number in range(count)])
    findings.report(f"Triton, octet-stream, {form}, at most {NEGATE_BATCH_MAX}")
    assert findings.statuses == {200: count} and findings.foreign == 0
    learned = [message for message in gateway.log_messages("warning") if "inputs at once" in message]
    assert len(learned) == 1 and f"takes {NEGATE_BATCH_MAX} inputs" in learned[0]


@pytest.mark.parametrize("form", ["json", "binary", "grpc"])
async def test_one_text_that_makes_the_model_raise(triton: Triton, tmp_path: Path, form: str) -> None:
    (tmp_path / "carpool.toml").write_text(triton.settings(form))
    async with running_gateway(tmp_path, "", "--policy", "fixed", "--max-wait-ms", "100") as gateway:
        # An endpoint that fails everything is sick; this one has just been well.
        warm = await verify(gateway.port, [mirror_case(0, form == "binary")])
        cases = [mirror_case(number, form == "binary") for number in range(1, 64)]
        poison = mirror_case(0, form == "binary", text="poison")
        innocents, refused = await asyncio.gather(
            verify(gateway.port, cases), ask_once(gateway.port, "POST", poison.target, poison.body)
        )
        assert warm.statuses == {200: 1}
        assert innocents.statuses == {200: 63} and innocents.foreign == 0 and innocents.batch_size_max > 1
        assert refused.status == 422
        assert "does not like this text" in refused.json["detail"]
        calls = await gateway.metric("carpool_upstream_calls_total")
        show(f"Triton, {form}, one poison among 64: {calls - 1:.0f} calls in all")


async def test_a_model_that_is_not_there(triton: Triton, tmp_path: Path) -> None:
    (tmp_path / "carpool.toml").write_text(triton.settings("grpc", "[models.missing]\n"))
    async with running_gateway(tmp_path, "") as gateway:
        body = json.loads(mirror_case(1, False).body) | {"model": "missing"}
        answer = await ask_once(gateway.port, "POST", "/v1/inference", json.dumps(body).encode())
        assert answer.status == 502


async def test_health_and_the_metrics_page(triton: Triton, tmp_path: Path) -> None:
    # Without a GPU there is no utilisation to read; the memory of the machine has a value all the same.
    total = 0.0
    async with asyncio.timeout(20):
        while not total:  # Triton fills it in after some seconds
            await asyncio.sleep(0.2)
            page = (await ask_once(triton.metrics_port, "GET", "/metrics")).body.decode()
            [found] = re.findall(r"^nv_cpu_memory_total_bytes (\S+)$", page, re.MULTILINE)
            total = float(found)
    metric = f":{triton.metrics_port}/metrics#nv_cpu_memory_total_bytes/{total * 4:.0f}"
    settings = triton.settings("json").replace("timeout_s = 20", f'timeout_s = 20\nload = "{metric}"')
    (tmp_path / "carpool.toml").write_text(settings)
    async with running_gateway(tmp_path, "") as gateway:

        async def is_seen() -> bool:
            [endpoint] = (await gateway.fleet("mirror"))["endpoints"]
            return bool(endpoint["utilization"] == 0.25 and endpoint["last_heartbeat"])

        await until(is_seen)
        [endpoint] = (await gateway.fleet("mirror"))["endpoints"]
        assert endpoint["state"] == "healthy"
    server = (await ask_once(triton.http_port, "GET", "/v2")).json
    show(f"Triton server {server['version']}")
