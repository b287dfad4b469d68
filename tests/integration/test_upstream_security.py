"""Calls to real TLS servers and Unix sockets: who is trusted, what is shown to whom, and what nobody gets to see."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.testing import FakeClock
from carpool.upstream.client import ERROR_BYTES_MAX, ERROR_VALUES_MAX, HttpEndpoint
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall, UpstreamResponse
from carpool.upstream.tls import LOOK_EVERY_S, Credentials, UpstreamSecurity
from support.certificates import Certificates
from support.client import ask_once, inference_body
from support.processes import PATIENCE_S, carpool, running_gateway, until, variable
from support.stream_server import Serve, stream_server

CALL = UpstreamCall(b'{"inputs":["abc"]}')
TIMEOUT_S = PATIENCE_S


class Upstream:
    """Reverses strings, and remembers what it was shown."""

    def __init__(self) -> None:
        self.port = 0
        self.targets: list[str] = []
        self.headers: list[dict[str, str]] = []
        # Common names of the certificates that clients showed, one a call.
        self.clients: list[str] = []
        # Answers with this status, and with the headers of the call in the body.
        self.refuse_with = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.split("\r\n")[:-2]
            headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
            inputs = json.loads(await reader.readexactly(int(headers["content-length"])))["inputs"]
            self.targets.append(line.split(" ")[1])
            self.headers.append(headers)
            shown: dict[str, Any] = writer.get_extra_info("peercert") or {}
            self.clients.append(dict(pair for part in shown.get("subject", ()) for pair in part).get("commonName", ""))
            answer: object = {"outputs": [text[::-1] for text in inputs]}
            if self.refuse_with:
                answer = {"error": f"refused: {headers}", "message": headers.get("authorization")}
            body = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (self.refuse_with or 200, len(body), body))
            await writer.drain()


@asynccontextmanager
async def listening(
    context: ssl.SSLContext | None, serve: Serve | None = None, socket: Path | None = None
) -> AsyncIterator[Upstream]:
    """An upstream on a free port, or on a Unix socket."""
    upstream = Upstream()
    async with stream_server(serve or upstream.serve, socket=socket, ssl=context) as server:
        upstream.port = server.port
        yield upstream


@asynccontextmanager
async def endpoint(
    url: str, security: UpstreamSecurity | None = None, clock: FakeClock | None = None
) -> AsyncIterator[HttpEndpoint]:
    found = HttpEndpoint(url, 1, 10_000, Credentials(security or UpstreamSecurity(), clock or FakeClock()))
    try:
        yield found
    finally:
        await found.close()


async def call_once(port: int, security: UpstreamSecurity, host: str = "127.0.0.1") -> UpstreamResponse:
    async with endpoint(f"https://{host}:{port}/infer", security) as target:
        return await target.post(CALL, TIMEOUT_S)


async def refusal(port: int, security: UpstreamSecurity) -> str:
    with pytest.raises(AttemptFailedError) as caught:
        await call_once(port, security)
    assert "no answer within" not in str(caught.value)  # refused, and not waited for
    return str(caught.value)


class TestWhomCarpoolTrusts:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    async def test_a_server_of_the_configured_authority(self, certificates: Certificates, host: str) -> None:
        async with listening(certificates.of_server()) as upstream:
            answer = await call_once(upstream.port, UpstreamSecurity(ca=certificates.pem("ca")), host)
        assert answer == UpstreamResponse(200, b'{"outputs": ["cba"]}')

    async def test_no_server_of_an_unknown_authority(self, certificates: Certificates) -> None:
        async with listening(certificates.of_server()) as upstream:
            by_system = await refusal(upstream.port, UpstreamSecurity())
            by_other = await refusal(upstream.port, UpstreamSecurity(ca=certificates.pem("stranger")))
        assert "its certificate is refused: unable to get local issuer certificate" in by_system
        assert "its certificate is refused" in by_other
        assert upstream.headers == []

    async def test_no_server_of_another_name(self, certificates: Certificates) -> None:
        async with listening(certificates.of_server("elsewhere")) as upstream:
            text = await refusal(upstream.port, UpstreamSecurity(ca=certificates.pem("ca")))
        assert text == "its certificate is refused: it is for another name"
        assert upstream.headers == []

    async def test_no_server_without_tls(self, certificates: Certificates) -> None:
        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()

        async with listening(None, plain) as upstream:
            text = await refusal(upstream.port, UpstreamSecurity(ca=certificates.pem("ca")))
        assert "TLS" in text or "SSL" in text

    async def test_a_server_that_never_says_hello_is_left_in_time(self, certificates: Certificates) -> None:
        async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with (
            listening(None, silence) as upstream,
            endpoint(f"https://127.0.0.1:{upstream.port}/") as target,
        ):
            with pytest.raises(AttemptFailedError, match=r"no answer within 0\.30 s"):
                await target.post(CALL, 0.3)
            assert not await target.accepts_connections()

    async def test_readiness_sees_what_a_call_would(self, certificates: Certificates) -> None:
        async with listening(certificates.of_server()) as upstream:
            url = f"https://127.0.0.1:{upstream.port}/"
            async with endpoint(url, UpstreamSecurity(ca=certificates.pem("ca"))) as target:
                assert await target.accepts_connections()
            async with endpoint(url) as target:
                assert not await target.accepts_connections()


class TestWhatCarpoolShows:
    async def test_its_certificate_where_the_server_asks_for_one(self, certificates: Certificates) -> None:
        security = UpstreamSecurity(certificates.pem("ca"), certificates.pem("client"), certificates.key("client"))
        async with listening(certificates.of_server(asks_for_client=True)) as upstream:
            assert (await call_once(upstream.port, security)).status == 200
        assert upstream.clients == ["client"]

    async def test_without_or_with_a_wrong_one_the_server_refuses(self, certificates: Certificates) -> None:
        ca = certificates.pem("ca")
        forged = UpstreamSecurity(ca, certificates.pem("forged-client"), certificates.key("forged-client"))
        # The server's side of a refused handshake is an error there, which is none of the test's.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with listening(certificates.of_server(asks_for_client=True)) as upstream:
            await refusal(upstream.port, UpstreamSecurity(ca))
            await refusal(upstream.port, forged)
        assert upstream.headers == []

    async def test_no_token_to_an_endpoint_that_sends_it_elsewhere(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("token-1")

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:{trap.port}/\r\n".encode())
            writer.write(b"Content-Length: 0\r\n\r\n")
            await writer.drain()

        async with listening(None) as trap, listening(None, redirect) as upstream:
            security = UpstreamSecurity(token_file=str(tmp_path / "token"))
            async with endpoint(f"http://127.0.0.1:{upstream.port}/", security) as target:
                assert (await target.post(CALL, TIMEOUT_S)).status == 307
        assert trap.headers == []


class TestUnixSockets:
    @pytest.mark.parametrize(
        ("suffix", "path", "target_seen"),
        [
            (":/infer?a=1", "/ignored", "/infer?a=1"),
            ("", "/v1/models/m:predict", "/v1/models/m:predict"),
            (":/", "", "/"),
        ],
    )
    async def test_a_call_by_socket(self, tmp_path: Path, suffix: str, path: str, target_seen: str) -> None:
        socket = tmp_path / "model.sock"
        async with listening(None, socket=socket) as upstream, endpoint(f"unix:{socket}{suffix}") as target:
            answer = await target.post(UpstreamCall(CALL.body, path), TIMEOUT_S)
            assert await target.accepts_connections()
        assert answer == UpstreamResponse(200, b'{"outputs": ["cba"]}')
        assert upstream.targets == [target_seen]
        assert upstream.headers[0]["host"] == "localhost"
        assert target.name == f"unix:{socket}{suffix.partition('?')[0]}"

    async def test_a_socket_that_is_not_there_yet(self, tmp_path: Path) -> None:
        socket = tmp_path / "model.sock"
        async with endpoint(f"unix:{socket}:/infer") as target:
            assert not await target.accepts_connections()
            with pytest.raises(AttemptFailedError, match="no connection: No such file"):
                await target.post(CALL, TIMEOUT_S)
            async with listening(None, socket=socket):
                assert await target.accepts_connections()
                assert (await target.post(CALL, TIMEOUT_S)).status == 200


class TestGateway:
    async def test_mutual_tls_token_and_rotation(self, certificates: Certificates, tmp_path: Path) -> None:
        token = tmp_path / "token"
        token.write_text("token-1")
        settings = {
            "upstream.tls_ca": certificates.pem("ca"),
            "upstream.tls_cert": certificates.pem("client"),
            "upstream.tls_key": certificates.key("client"),
            "upstream.token_file": token,
        }
        async with listening(certificates.of_server(asks_for_client=True)) as upstream:
            url = f"https://localhost:{upstream.port}/infer"
            async with running_gateway(tmp_path, url, settings=settings) as gateway:
                assert (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 200
                response = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("abc"))
                assert (response.status, response.json["output"]) == (200, "cba")
                token.write_text("token-2")

                async def new_token_is_seen() -> bool:
                    await ask_once(gateway.port, "POST", "/v1/inference", inference_body("abc"))
                    return upstream.headers[-1]["authorization"] == "Bearer token-2"

                await until(new_token_is_seen)
        assert set(upstream.clients) == {"client"}
        assert upstream.headers[0]["authorization"] == "Bearer token-1"

    @pytest.mark.parametrize("status", [401, 500])
    async def test_secrets_are_nowhere_to_be_seen(
        self, certificates: Certificates, tmp_path: Path, status: int
    ) -> None:
        (tmp_path / "token").write_text("canary-token")
        (tmp_path / "header").write_text('canary "header"')
        settings = {
            "upstream.tls_ca": certificates.pem("ca"),
            "upstream.tls_cert": certificates.pem("client"),
            "upstream.tls_key": certificates.key("client"),
            "upstream.token_file": tmp_path / "token",
            "upstream.header_files": f"X-Api-Key={tmp_path / 'header'}",
        }
        seen: list[str] = []
        async with listening(certificates.of_server()) as upstream:
            url = f"https://localhost:{upstream.port}/infer"
            async with running_gateway(tmp_path, url, "--log-level", "debug", settings=settings) as gateway:
                for upstream.refuse_with in (0, status, status):
                    response = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("abc"))
                    seen.append(response.body.decode() + str(response.headers))
                assert response.status >= 400
                (tmp_path / "token").write_text("canary but not a token")
                await asyncio.sleep(LOOK_EVERY_S + 0.1)
                await ask_once(gateway.port, "POST", "/v1/inference", inference_body("abc"))
                pages = ("/metrics", "/internal/health", "/internal/ready", "/internal/fleet")
                seen += [(await ask_once(gateway.admin_port, "GET", path)).body.decode() for path in pages]
                gateway.terminate()
                assert await gateway.exit_code() == 0
            seen.append(gateway.log.read_text())
        (tmp_path / "token").write_text("canary-token")
        seen.append(carpool_config(settings, tmp_path))
        assert upstream.headers[0]["authorization"] == "Bearer canary-token"
        assert upstream.headers[0]["x-api-key"] == 'canary "header"'
        assert "are not usable" in seen[-2]
        assert "token_file" in seen[-1]
        for text in seen:
            assert "canary" not in text and certificates.secret_line not in text


def carpool_config(settings: dict[str, Any], directory: Path) -> str:
    """What `carpool config` prints with these settings."""
    done = carpool("config", cwd=directory, **{variable(key): str(value) for key, value in settings.items()})
    assert done.returncode == 0
    return done.stdout + done.stderr


async def test_errors_that_are_long_to_read_are_not_looked_into() -> None:
    faults = json.dumps({"detail": [{"msg": "words"}]}).encode()
    bodies = [
        faults,
        faults + b" " * ERROR_BYTES_MAX,
        faults.replace(b"}]", b"}" + b",{}" * (ERROR_VALUES_MAX + 1) + b"]"),
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in bodies:
            await reader.readuntil(CALL.body)
            writer.write(b"HTTP/1.1 422 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

    async with stream_server(serve) as server:
        endpoint = HttpEndpoint(f"http://127.0.0.1:{server.port}/x", 1, 2 * ERROR_BYTES_MAX)
        answers = [await endpoint.post(CALL, TIMEOUT_S) for _ in bodies]
        await endpoint.close()
    assert [(answer.status, answer.body) for answer in answers] == [(422, faults), (422, b""), (422, b"")]
