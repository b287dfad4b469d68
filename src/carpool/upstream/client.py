"""One endpoint over HTTP: bounded in time and size, whatever the other side does."""

import asyncio
from io import BytesIO

import aiohttp
from yarl import URL

from carpool.upstream.endpoint import Answer, AttemptFailedError, Call

READ_BUFFER_BYTES = 1024 * 1024
# A longer body is written in pieces, so that the event loop gets its turn in between; aiohttp warns otherwise.
PLAIN_BODY_BYTES_MAX = 1024 * 1024
CONNECT_TIMEOUT_S = 1.0


def make_session() -> aiohttp.ClientSession:
    """The one session that all endpoints share. The pool's slots bound the connections, not the connector."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        # A compressed answer could be a bomb; none is asked for, and none is unpacked.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "carpool"},
        read_bufsize=READ_BUFFER_BYTES,
        trust_env=False,
    )


class HttpEndpoint:
    """One endpoint of the fixed API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, slots: int, answer_bytes_max: int) -> None:
        self.url = URL(url)
        self.name = str(self.url.with_user(None).with_query(None))
        self.slots = slots
        self._session = session
        self._answer_bytes_max = answer_bytes_max
        self._by_path: dict[str, URL] = {}

    async def post(self, call: Call, timeout_s: float) -> Answer:
        """Send one call and read its answer; raises AttemptFailedError, or is cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.post(
                    self._target(call.path),
                    data=call.body if len(call.body) <= PLAIN_BODY_BYTES_MAX else BytesIO(call.body),
                    headers={"Content-Type": call.content_type},
                    allow_redirects=False,
                ) as response:
                    return Answer(response.status, await self._read(response))
        except TimeoutError:
            raise AttemptFailedError(f"no answer within {timeout_s:.2f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            # The class says enough; the text of some would quote what the other side sent.
            raise AttemptFailedError(f"the call broke off ({type(failure).__name__})") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body, up to the size limit."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AttemptFailedError("the answer is compressed, though that was not asked for")
        if (response.content_length or 0) > self._answer_bytes_max:
            raise AttemptFailedError(f"the answer is longer than {self._answer_bytes_max} bytes")
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._answer_bytes_max:
                raise AttemptFailedError(f"the answer is longer than {self._answer_bytes_max} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def accepts_connections(self) -> bool:
        """Whether a TCP connection can be made right now."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.url.host, self.url.port)
        except (TimeoutError, OSError):
            return False
        writer.close()
        return True

    async def close(self) -> None:
        """The session is shared; its owner closes it."""

    def _target(self, path: str) -> URL:
        """The endpoint's own URL; a protocol's path fills in where the URL has none."""
        if not path or self.url.path not in ("", "/"):
            return self.url
        target = self._by_path.get(path)
        if target is None:
            target = self._by_path[path] = self.url.with_path(path)  # bounded: one path for each model
        return target
