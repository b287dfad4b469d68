"""How often a body is in memory while it passes: the process is looked at, and its largest size counts.

An upper bound on a process's memory depends on nothing but what it holds here: each block of this size is memory of its
own, which the system gets back with it (`MALLOC_MMAP_THRESHOLD_`), and the largest size since the last look is the
kernel's own count.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.gateway import ask, serving
from support.processes import CLEAN_ENVIRONMENT, GatewayProcess
from support.stream_server import stream_server
from support.tensor_gpu import CONFIGURATION
from support.threads import in_a_thread

pytestmark = pytest.mark.xdist_group("large_bodies")
IMAGE_BYTES = 5_000_000
IMAGE = b"\xff" + bytes(IMAGE_BYTES - 1)
OCTETS = ("Content-Type: application/octet-stream", "Accept: application/octet-stream")
# Beside the copies: buffers of sockets, pages that Python needs for other things.
SLACK_BYTES = 1_000_000


class Upstream:
    """A V2 server that answers with as many bytes as it is told."""

    def __init__(self) -> None:
        self.answer_bytes = 1
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            size = self.answer_bytes
            text = (
                b'{"outputs":[{"name":"Y","datatype":"UINT8","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}'
                % (size, size)
            )
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(text) + size) + text + bytes(size))
            await writer.drain()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Upstream"]:
        async with stream_server(self.serve, limit=1 << 20) as server:
            self.port = server.port
            yield self


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with in_a_thread(Upstream().running()) as (running, _):
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: Upstream) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "carpool.toml").write_text(CONFIGURATION.format(port=upstream.port))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLEAN_ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_", "131072")
        with serving(directory, "") as running:
            yield running


def memory(gateway: GatewayProcess, name: str) -> int:
    text = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def send(gateway: GatewayProcess, upstream: Upstream, image: bytes, answer_bytes: int) -> None:
    upstream.answer_bytes = answer_bytes
    answer = ask(gateway.port, "POST", "/v1/predict?model_id=image", image, *OCTETS)
    assert answer.status == 200, answer.body[:500]
    assert answer.body == bytes(answer_bytes)


@pytest.mark.parametrize(
    ("image", "answer_bytes", "copies"),
    [
        pytest.param(IMAGE, 1, 2, id="a large input"),
        pytest.param(b"\xff", IMAGE_BYTES, 2, id="a large output"),
        # The input is kept until its output is known to be one: one copy of it, two of the output.
        pytest.param(IMAGE, IMAGE_BYTES, 3, id="both"),
    ],
)
def test_no_more_than_two_copies_of_a_body(
    gateway: GatewayProcess, upstream: Upstream, image: bytes, answer_bytes: int, copies: int
) -> None:
    # What is imported, and allocated once, with the first of its kind.
    send(gateway, upstream, image, answer_bytes)
    for _ in range(3):  # with the turns of the event loop that these need, nothing is left of it
        assert ask(gateway.port, "GET", "/v2/health/live").status == 200
    before = memory(gateway, "VmRSS")
    Path(f"/proc/{gateway.process.pid}/clear_refs").write_text("5")  # the largest size is that of now
    for _ in range(3):
        send(gateway, upstream, image, answer_bytes)
    largest = memory(gateway, "VmHWM") - before
    assert IMAGE_BYTES <= largest <= copies * IMAGE_BYTES + SLACK_BYTES
