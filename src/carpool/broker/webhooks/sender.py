"""Sends one webhook: to a checked address, bounded in time and size, whatever the other side does."""

import asyncio
import socket
from collections.abc import Callable
from io import BytesIO
from typing import Any

import aiohttp
from yarl import URL

from carpool.broker.webhooks.schedule import Answered, retry_after_of

# Read so that the connection can be used again; of a longer answer it is closed.
ANSWER_BYTES_MAX = 16 * 1024
KEEPALIVE_S = 30.0


class AddressDeniedError(OSError):
    """A name stands for an address that nothing is sent to."""


class Sender:
    """The way out. Names are resolved by aiohttp; the address that is connected to is checked right before that."""

    def __init__(self, is_allowed: Callable[[str], bool], timeout_s: float) -> None:
        def checked_socket(info: tuple[Any, ...]) -> socket.socket:
            family, kind, protocol, _, address = info
            if not is_allowed(address[0]):
                raise AddressDeniedError("this address is not sent to")
            return socket.socket(family, kind, protocol)

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=checked_socket),
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
            return Answered(0, _reason(failure))

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
