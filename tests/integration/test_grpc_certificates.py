"""Certificates towards gRPC servers that are replaced while Carpool runs: real servers with mutual TLS on loopback."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from carpool.testing import FakeClock
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall, UpstreamResponse
from carpool.upstream.grpc_endpoint import GrpcEndpoint
from carpool.upstream.tls import LOOK_EVERY_S, UpstreamSecurity
from support.certificates import Certificates
from support.client import ask_once
from support.processes import PATIENCE_S, running_gateway, until
from support.redis_servers import free_port

SERVICE = "inference.GRPCInferenceService"
OLD_CA, NEW_CA = "ca", "stranger"
# Of an authority: the certificate of its server, and one that it signed for clients.
SERVER_OF = {OLD_CA: "server", NEW_CA: "new-server"}
CLIENT_OF = {OLD_CA: "client", NEW_CA: "forged-client"}
# One tensor `y` of one INT8 that is 7, as protobuf writes it.
RESPONSE = b"\x2a\x0d\x0a\x01y\x12\x04INT8\x1a\x02\x01\x01\x32\x01\x07"


@pytest.fixture(scope="module", autouse=True)
def server_of_the_new_authority(certificates: Certificates) -> None:
    certificates.make(SERVER_OF[NEW_CA], NEW_CA, "subjectAltName=DNS:localhost,IP:127.0.0.1")


class Upstream:
    """A gRPC server that takes only clients of one authority, and remembers whom it saw."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        # A port that the system gives to no client: it is still free for the next server.
        self.port = free_port()
        # Common names of the certificates that clients showed, one a call.
        self.clients: list[str] = []
        # Where they called from, one a call: a channel has one connection.
        self.peers: list[str] = []
        # Calls wait here before they are answered.
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_flight = 0

    @asynccontextmanager
    async def running(self, ca: str = OLD_CA) -> AsyncIterator[None]:
        """Until the block ends: then every connection does."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(self._answer)}
        server.add_registered_method_handlers(SERVICE, handlers)
        assert server.add_secure_port(f"127.0.0.1:{self.port}", self._credentials(ca)) == self.port
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    def _credentials(self, ca: str) -> Any:
        made = self._certificates
        paths = (made.key(SERVER_OF[ca]), made.pem(SERVER_OF[ca]), made.pem(ca))
        key, cert, authority = (Path(path).read_bytes() for path in paths)
        return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)

    async def _answer(self, message: bytes, context: Any) -> bytes:
        self.clients.append(context.auth_context()["x509_common_name"][0].decode())
        self.peers.append(context.peer())
        self.in_flight += 1
        try:
            await self.gate.wait()
        finally:
            self.in_flight -= 1
        return RESPONSE


class Files:
    """The files that an operator, or the machine that renews certificates, writes."""

    def __init__(self, certificates: Certificates, folder: Path) -> None:
        self._certificates = certificates
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))

    @property
    def security(self) -> UpstreamSecurity:
        return UpstreamSecurity(str(self.ca), str(self.cert), str(self.key))

    def put(self, ca: str, client: str) -> None:
        """An authority to trust, and a certificate to show with its key."""
        shutil.copy(self._certificates.pem(ca), self.ca)
        shutil.copy(self._certificates.pem(client), self.cert)
        shutil.copy(self._certificates.key(client), self.key)

    def put_certificate_alone(self, client: str) -> None:
        """Half of a rotation."""
        shutil.copy(self._certificates.pem(client), self.cert)


class Rotation:
    """An upstream, an endpoint that calls it, and the files between them, on a clock that the test moves."""

    def __init__(self, certificates: Certificates, folder: Path) -> None:
        self.upstream = Upstream(certificates)
        self.files = Files(certificates, folder)
        self.files.put(OLD_CA, "client")
        self.clock = FakeClock()
        url = f"grpcs://127.0.0.1:{self.upstream.port}"
        self.endpoint = GrpcEndpoint(url, 4, 1 << 20, self.files.security, self.clock)

    async def call(self) -> UpstreamResponse:
        return await self.endpoint.post(UpstreamCall(b""), PATIENCE_S)

    async def reaches_the_server(self) -> bool:
        """False without a connection, and (503) with an old one that the server is just closing."""
        try:
            answer = await self.call()
        except AttemptFailedError:
            return False
        assert answer.status in (200, 503), answer
        return answer.status == 200


@pytest.fixture
async def rotation(certificates: Certificates, tmp_path: Path) -> AsyncIterator[Rotation]:
    made = Rotation(certificates, tmp_path)
    yield made
    await made.endpoint.close()


async def test_a_server_that_trusts_another_authority_is_reached_without_a_restart(rotation: Rotation) -> None:
    async with rotation.upstream.running(OLD_CA):
        assert (await rotation.call()).status == 200
    async with rotation.upstream.running(NEW_CA):
        for _ in range(3):  # each knows the other by the old authority only
            rotation.clock.advance(LOOK_EVERY_S)
            assert not await rotation.reaches_the_server()
            assert not await rotation.endpoint.accepts_connections()
        rotation.files.put(NEW_CA, CLIENT_OF[NEW_CA])
        rotation.clock.advance(LOOK_EVERY_S)
        await until(rotation.endpoint.accepts_connections)
        assert (await rotation.call()).status == 200
    assert rotation.upstream.clients == ["client", "forged-client"]


async def test_calls_under_way_finish(rotation: Rotation) -> None:
    upstream = rotation.upstream
    async with upstream.running():
        upstream.gate.clear()
        old = [asyncio.create_task(rotation.call()) for _ in range(3)]
        await until(lambda: upstream.in_flight == 3)
        rotation.files.put(OLD_CA, "other-client")
        rotation.clock.advance(LOOK_EVERY_S)
        new = asyncio.create_task(rotation.call())
        await until(lambda: upstream.in_flight == 4)
        old[2].cancel()  # its client left
        with pytest.raises(asyncio.CancelledError):
            await old[2]
        assert not old[0].done() and not old[1].done()
        assert rotation.endpoint.open_channels == 2
        upstream.gate.set()
        assert [(await call).status for call in (old[0], old[1], new)] == [200, 200, 200]
        assert upstream.clients == ["client"] * 3 + ["other-client"]
        assert rotation.endpoint.open_channels == 1, "the old channel outlived its last call"
        assert (await rotation.call()).status == 200


@pytest.mark.parametrize("damage", ["the certificate alone", "half a file", "an empty file", "a missing file"])
async def test_what_cannot_be_used_changes_nothing_and_is_said_once(
    rotation: Rotation, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "carpool")
    files, clock = rotation.files, rotation.clock
    async with rotation.upstream.running():
        await rotation.call()
        if damage == "the certificate alone":
            files.put_certificate_alone("other-client")
        elif damage == "half a file":
            files.key.write_bytes(files.key.read_bytes()[:100])
        elif damage == "an empty file":
            files.ca.write_bytes(b"")
        else:
            files.cert.unlink()
        for _ in range(3):
            clock.advance(LOOK_EVERY_S)
            assert (await rotation.call()).status == 200
        assert len(set(rotation.upstream.peers)) == 1, "another channel was made"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "are not usable" in caplog.text
        files.put(OLD_CA, "other-client")
        clock.advance(LOOK_EVERY_S)
        await rotation.call()
    assert rotation.upstream.clients == ["client"] * 4 + ["other-client"]
    assert "-----BEGIN" not in caplog.text


async def test_files_that_change_while_they_are_read_are_not_used(
    rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key and a certificate of different pairs could be in use otherwise, though both pairs were whole."""
    files = rotation.files
    read_context = UpstreamSecurity.ssl_context

    def read_too_late(security: UpstreamSecurity) -> Any:
        files.put(OLD_CA, "other-client")
        return read_context(security)

    async with rotation.upstream.running():
        await rotation.call()
        files.put(OLD_CA, "other-client")
        files.put_certificate_alone("client")
        monkeypatch.setattr(UpstreamSecurity, "ssl_context", read_too_late)
        rotation.clock.advance(LOOK_EVERY_S)
        await rotation.call()
        monkeypatch.undo()
        rotation.clock.advance(LOOK_EVERY_S)
        await rotation.call()
    assert rotation.upstream.clients == ["client", "client", "other-client"]


async def test_files_that_are_missing_from_the_start_are_a_failed_attempt(rotation: Rotation) -> None:
    rotation.files.key.unlink()
    async with rotation.upstream.running():
        with pytest.raises(AttemptFailedError, match="could not be made"):
            await rotation.call()
        assert not await rotation.endpoint.accepts_connections()
        rotation.files.put(OLD_CA, "client")
        assert (await rotation.call()).status == 200


async def test_a_gateway_goes_on_when_server_and_files_change(certificates: Certificates, tmp_path: Path) -> None:
    upstream, files = Upstream(certificates), Files(certificates, tmp_path)
    files.put(OLD_CA, CLIENT_OF[OLD_CA])
    settings = {
        "upstream.tls_ca": files.ca,
        "upstream.tls_cert": files.cert,
        "upstream.tls_key": files.key,
        "upstream.protocol": "kserve_v2_grpc",
        "upstream.tensor": "x INT8",
    }
    body = b'{"input": {"name": "x", "datatype": "INT8", "shape": [1, 1], "data": [1]}}'

    async with running_gateway(tmp_path, f"grpcs://localhost:{upstream.port}", settings=settings) as gateway:

        async def statuses(*expected: int) -> bool:
            answer = await ask_once(gateway.port, "POST", "/v1/inference", body, "Content-Type: application/json\r\n")
            assert answer.status != 200 or b"[7]" in answer.body, answer.body
            return answer.status in expected

        async with upstream.running(OLD_CA):
            await until(lambda: statuses(200))
        async with upstream.running(NEW_CA):
            await until(lambda: statuses(502, 503))
            files.put(NEW_CA, CLIENT_OF[NEW_CA])
            await until(lambda: statuses(200))
        gateway.terminate()
        assert await gateway.exit_code() == 0
    assert set(upstream.clients) == {"client", "forged-client"}
