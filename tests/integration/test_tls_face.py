"""The HTTP face behind TLS: who has not agreed upon it yet counts, ends in time, and holds up nobody."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from carpool.face.http.exchange import Exchange
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from support.certificates import Certificates
from support.processes import PATIENCE_S, running_gateway, until


@asynccontextmanager
async def tls_server(
    certificates: Certificates, limits: HttpLimits, handler: Callable[[Exchange], None]
) -> AsyncIterator[tuple[HttpServer, int, ssl.SSLContext]]:
    server = HttpServer(handler, limits)
    port = await server.start("127.0.0.1", 0, certificates.of_server())
    try:
        yield server, port, ssl.create_default_context(cafile=certificates.pem("ca"))
    finally:
        server.stop_listening()
        await server.finish(0.0)


def answer(exchange: Exchange) -> None:
    exchange.respond(200, b"{}")


async def silent(port: int) -> socket.socket:
    """A client that connects and says nothing."""
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def is_closed(client: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(client, 1) == b""
    except ConnectionResetError:
        return True


async def test_handshakes_count_as_connections(certificates: Certificates) -> None:
    async with tls_server(certificates, HttpLimits(connections_max=3), answer) as (server, port, _):
        clients = [await silent(port) for _ in range(20)]
        await until(lambda: server.state.handshakes == 3)
        ended = [asyncio.ensure_future(is_closed(client)) for client in clients]
        await until(lambda: sum(each.done() for each in ended) == 17)
        assert server.state.handshakes == 3
        for each in ended:
            each.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for client in clients:
            client.close()
        await until(lambda: server.state.handshakes == 0)


async def test_a_handshake_that_never_ends_is_closed(certificates: Certificates) -> None:
    async with tls_server(certificates, HttpLimits(receive_timeout_s=0.2), answer) as (server, port, _):
        client = await silent(port)
        assert await asyncio.wait_for(is_closed(client), PATIENCE_S)
        client.close()
        await until(lambda: server.state.handshakes == 0)


async def test_a_handshake_that_never_ends_does_not_hold_up_a_drain(certificates: Certificates) -> None:
    async with tls_server(certificates, HttpLimits(receive_timeout_s=600.0), answer) as (server, port, trusted):
        half_open = await silent(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
        await until(lambda: server.state.handshakes == 1 and len(server.connections) == 1)
        server.stop_listening()
        await asyncio.wait_for(server.finish(server.state.clock() + 600.0), PATIENCE_S)
        assert await reader.read() == b""
        assert await asyncio.wait_for(is_closed(half_open), PATIENCE_S)
        half_open.close()
        writer.close()


async def test_sighup_brings_the_new_certificate_to_new_connections(tmp_path: Path, certificates: Certificates) -> None:
    certificates.make("next", "ca", "subjectAltName=DNS:localhost")
    certificates.make("rsa", "ca", "subjectAltName=DNS:localhost", is_rsa=True)
    cert, key = tmp_path / "shown.pem", tmp_path / "shown.key"
    trusted = ssl.create_default_context(cafile=certificates.pem("ca"))

    def show(name: str, key_of: str) -> None:
        cert.write_bytes(Path(certificates.pem(name)).read_bytes())
        key.write_bytes(Path(certificates.key(key_of)).read_bytes())

    async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return reader, writer, ssl.DER_cert_to_PEM_cert(shown)

    async def seen(port: int) -> str:
        _, writer, shown = await connect(port)
        writer.close()
        return shown

    def made(name: str) -> str:
        return Path(certificates.pem(name)).read_text()

    async def until_seen(port: int, name: str) -> None:
        async def is_seen() -> bool:
            return await seen(port) == made(name)

        await until(is_seen)

    show("server", "server")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    async with running_gateway(tmp_path / "g", "sim:?latency_ms=1", *flags) as gateway:
        reader, writer, shown = await connect(gateway.port)
        assert shown == made("server")
        show("next", "server")  # not a pair
        gateway.reload()
        await until(lambda: "the configuration was not changed" in gateway.log.read_text())
        assert await seen(gateway.port) == made("server")
        show("next", "next")
        gateway.reload()

        await until_seen(gateway.port, "next")
        show("rsa", "rsa")  # a key of another type takes the place of the last one too
        gateway.reload()
        await until_seen(gateway.port, "rsa")
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: h\r\n\r\n")  # connections that are open go on
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
