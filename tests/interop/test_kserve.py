"""A real KServe model server behind Carpool: V1, V2 as JSON, with raw tensors, and over gRPC."""

import asyncio
import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.client import ask_once
from support.interop import (
    Case,
    environment_python,
    free_ports,
    inference,
    running_server,
    show_version,
    verify,
)
from support.processes import running_gateway

pytestmark = pytest.mark.timeout(300)

REQUESTS = 2_000
MODEL = Path(__file__).parent / "servers" / "kserve_mirror.py"
FORMS = ["v1", "v2 json", "v2 binary", "v2 grpc"]
TIMES = {"upstream.timeout_s": 20, "broker.queue_timeout_s": 30, "broker.total_timeout_s": 50}


class KServe(NamedTuple):
    """A running KServe."""

    http_port: int
    grpc_port: int

    def flags(self, form: str) -> tuple[str, ...]:
        """How to reach it."""
        http, grpc = f"http://127.0.0.1:{self.http_port}", f"grpc://127.0.0.1:{self.grpc_port}"
        upstream, protocol = {"v1": (http, "kserve_v1"), "v2 grpc": (grpc, "kserve_v2_grpc")}.get(
            form, (http, "kserve_v2")
        )
        return ("--upstream", upstream, "--protocol", protocol, "--model", "mirror")


@pytest.fixture(scope="module")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KServe]:
    directory = tmp_path_factory.mktemp("kserve")
    python = environment_python("kserve")
    server = KServe(*free_ports(2))
    command: list[str | Path] = [python, MODEL, *map(str, server)]
    with running_server(command, {}, (server.http_port, "/v2/health/ready"), directory / "kserve.log"):
        show_version(python, "kserve")
        yield server


def case(form: str, number: float) -> Case:
    """An input that no other request has."""
    if form == "v1":
        return inference(f"№{number} naïve", lambda output: output == f"№{number} naïve"[::-1])
    vector = [float(number), number + 0.25, number * 3.0]
    negated = [-value for value in vector]
    tensor: dict[str, Any] = {"name": "VECTOR", "datatype": "FP32", "shape": [1, 3]}
    if form == "v2 binary":
        packed = base64.b64encode(struct.pack("<3f", *negated)).decode()
        data = base64.b64encode(struct.pack("<3f", *vector)).decode()
        return inference(tensor | {"b64": data}, lambda output: output[0]["b64"] == packed)
    return inference(tensor | {"data": vector}, lambda output: output[0]["data"] == negated)


@pytest.mark.parametrize("form", FORMS)
async def test_everyone_gets_their_own(kserve: KServe, tmp_path: Path, form: str) -> None:
    async with running_gateway(tmp_path, "", *kserve.flags(form), settings=TIMES) as gateway:
        findings = await verify(gateway.port, [case(form, number) for number in range(REQUESTS)])
    findings.report(f"KServe, {form}")
    assert findings.statuses == {200: REQUESTS} and findings.foreign == 0
    assert findings.batch_size_max > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "number"), [("poison", -1.0), ("surprise", -2.0)], ids=["refuses", "raises"])
async def test_one_input_that_the_model(kserve: KServe, tmp_path: Path, form: str, text: str, number: float) -> None:
    waiting = ("--policy", "fixed", "--max-wait-ms", "100")
    poison = inference(text, lambda _: False) if form == "v1" else case(form, number)
    async with running_gateway(tmp_path, "", *kserve.flags(form), *waiting, settings=TIMES) as gateway:
        # The gateway warns of an endpoint whose very first call fails, and rightly so.
        assert (await verify(gateway.port, [case(form, 0)])).statuses == {200: 1}
        innocents, refused = await asyncio.gather(
            verify(gateway.port, [case(form, number) for number in range(63)]),
            ask_once(gateway.port, "POST", poison.target, poison.body),
        )
        assert gateway.log_messages("warning") == []
    assert innocents.statuses == {200: 63} and innocents.foreign == 0 and innocents.batch_size_max > 1
    assert refused.status == 422
