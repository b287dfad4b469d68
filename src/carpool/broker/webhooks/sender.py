"""Sends one webhook: to a checked address, bounded in time and size, whatever the other side does."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from threading import Thread
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from carpool.broker.webhooks.rules import Answered, retry_after_of
from carpool.core.errors import without_frames

# Read so that the connection can be used again; of a longer answer it is closed.
ANSWER_BYTES_MAX = 16 * 1024
KEEPALIVE_S = 30.0
# Names that are looked up at once.
RESOLVING_MAX = 64


class AddressDeniedError(OSError):
    """A name stands for an address that no webhook may go to."""


class Names(AbstractResolver):
    """Resolves names in threads of its own. The event loop's threads are few and shared: names for which no server
    answers would hold up each new connection to an upstream or to Redis. Nor does this process wait for its threads.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(RESOLVING_MAX)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a name; raises OSError or ValueError."""
        async with self._room:
            loop = asyncio.get_running_loop()
            found: asyncio.Future[list[ResolveResult]] = loop.create_future()
            Thread(target=_look_up, args=(loop, found, host, port, family), daemon=True).start()
            return await found

    async def close(self) -> None:
        """Lookups under way are left to their daemon threads."""


def _look_up(
    loop: asyncio.AbstractEventLoop,
    found: "asyncio.Future[list[ResolveResult]]",
    host: str,
    port: int,
    family: socket.AddressFamily,
) -> None:
    results: list[ResolveResult] = []
    failure: Exception | None = None
    try:
        for kind, _, protocol, _, address in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM):
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            where = ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol, flags=flags
            )
            results.append(where)
    except Exception as raised:
        failure = raised

    def tell() -> None:
        if found.done():
            return
        if failure is None:
            found.set_result(results)
        else:
            found.set_exception(failure)

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tell)


class Sender:
    """The way out. The address that is connected to is checked right before that."""

    def __init__(self, is_allowed: Callable[[str], bool], timeout_s: float) -> None:
        def checked_socket(info: tuple[Any, ...]) -> socket.socket:
            family, kind, protocol, _, address = info
            if not is_allowed(address[0]):
                raise AddressDeniedError("this address is not sent to")
            return socket.socket(family, kind, protocol)

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=checked_socket, resolver=Names()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "carpool"},
            trust_env=False,
        )

    async def send(self, url: URL, headers: dict[str, str], body: bytes) -> Answered:
        """What the receiver says; it never raises for what the other side does. Nothing of the answer is kept."""
        try:
            # A file is written in pieces: a long body must not hold up the loop.
            async with self._session.post(url, data=BytesIO(body), headers=headers, allow_redirects=False) as answer:
                await answer.content.read(ANSWER_BYTES_MAX)
                return Answered(answer.status, retry_after_s=retry_after_of(answer.headers.get("retry-after")))
        except TimeoutError:
            return Answered(0, "no answer in time")
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            reason = _reason(failure)
            without_frames(failure)  # which hold the body; aiohttp's own hold the failure too
            return Answered(0, reason)

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()
        await asyncio.sleep(0)


def _reason(failure: Exception) -> str:
    """In words that quote nothing of the URL or the answer."""
    if isinstance(failure, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "TLS failed"
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        return "the name cannot be resolved"
    if isinstance(failure, aiohttp.ClientConnectorError):
        if isinstance(failure.os_error, AddressDeniedError):
            return "the address is not allowed"
        return "no connection"
    return f"the exchange failed ({type(failure).__name__})"
