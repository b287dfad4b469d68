"""What an endpoint tells beside its answers: its load in a header, and its pages of health and metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carpool.upstream.client import PAGE_BYTES_MAX, HttpEndpoint
from carpool.upstream.endpoint import AttemptFailedError
from carpool.upstream.tls import Credentials, UpstreamSecurity
from support.processes import running_gateway, until
from support.stream_server import stream_server


class PageServer:
    """Answers every request with the same head and body, and keeps the requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.status = 200
        self.headers = ""
        self.body = b"{}"
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = head.lower().partition("content-length:")[2].split("\r\n")[0]
                await reader.readexactly(int(length or 0))
                self.heads.append(head)
                writer.write(
                    f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.body)}\r\n{self.headers}\r\n".encode()
                    + self.body
                )
        except (asyncio.IncompleteReadError, OSError):
            pass

    @property
    def asked(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]


@asynccontextmanager
async def page_server(socket: Path | None = None) -> AsyncIterator[PageServer]:
    server = PageServer()
    async with stream_server(server.serve, socket=socket) as listener:
        server.port = listener.port
        yield server


@asynccontextmanager
async def endpoint(url: str, security: UpstreamSecurity | None = None, header: str = "") -> AsyncIterator[HttpEndpoint]:
    made = HttpEndpoint(url, 1, 1000, Credentials(security or UpstreamSecurity()), header)
    yield made
    await made.close()


async def test_a_page_is_a_path_a_port_or_a_url_and_secrets_go_to_the_endpoint_alone(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("canary-token")
    async with page_server() as own, page_server() as other:
        security = UpstreamSecurity(token_file=str(token))
        async with endpoint(f"http://127.0.0.1:{own.port}/deep/infer?key=1", security) as made:
            await made.get("/v1/models/org/m:2", 5.0)
            await made.get(f":{other.port}/metrics?x=1", 5.0)
            await made.get(f"http://127.0.0.1:{other.port}/all", 5.0)
            await made.get(f":{own.port}/metrics", 5.0)
        assert own.asked == ["/v1/models/org/m:2", "/metrics"]
        assert other.asked == ["/metrics?x=1", "/all"]
        assert all("canary-token" in head for head in own.heads)
        assert not any("canary-token" in head for head in other.heads)


async def test_a_page_over_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    async with page_server(socket) as server, endpoint(f"unix:{socket}:/infer") as made:
        server.status = 503
        assert (await made.get("/health", 5.0)).status == 503
        assert server.asked == ["/health"]


async def test_a_page_is_bounded_in_size_and_time() -> None:
    async with page_server() as server, endpoint(f"http://127.0.0.1:{server.port}/") as made:
        server.body = b"x" * PAGE_BYTES_MAX
        assert len((await made.get("/", 5.0)).body) == PAGE_BYTES_MAX
        server.body += b"x"
        with pytest.raises(AttemptFailedError, match="longer than"):
            await made.get("/", 5.0)
        server.headers = "Content-Length: x\r\n"
        with pytest.raises(AttemptFailedError, match="broke off"):
            await made.get("/", 5.0)
    with pytest.raises(AttemptFailedError):
        async with endpoint("http://127.0.0.1:1/") as made:
            await made.get("/", 5.0)


@pytest.mark.parametrize(
    ("protocol", "page"),
    [
        ("kserve_v1", "/v1/models/default"),
        ("kserve_v2", "/v2/health/ready"),
        ("openai_embeddings", "/v1/models"),
        ("openai_completions", "/v1/models"),
        ("tei_embed", "/health"),
    ],
)
async def test_each_protocol_is_probed_at_its_own_page_and_the_metric_sets_the_limit(
    tmp_path: Path, protocol: str, page: str
) -> None:
    settings = {
        "carpool.service.HEALTH_INTERVAL_S": 0.1,
        "upstream.load": "/metrics#te_queue_size/512",
    }
    async with page_server() as server:
        server.body = b"te_queue_size 512\n"
        url = f"http://127.0.0.1:{server.port}"
        flags = ("--protocol", protocol, "--slots", "4")
        async with running_gateway(tmp_path, url, *flags, settings=settings) as gateway:
            await until(lambda: page in server.asked)

            async def is_limited() -> bool:
                await asyncio.sleep(0.05)
                [shown] = (await gateway.fleet())["endpoints"]
                return bool(shown["limit"] < 4 and shown["state"] == "degraded" and shown["utilization"] == 1.0)

            await until(is_limited)
            assert set(server.asked) <= {page, "/metrics", "/info", "/v2/models/default", "/v2/models/default/config"}
