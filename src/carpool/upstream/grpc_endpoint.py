"""One endpoint over gRPC: `inference.GRPCInferenceService/ModelInfer`, messages as bytes.

1. A status becomes the HTTP status that means the same, its text the body `{"error": …}`, so that one set of rules
   (`classify`) serves both transports.
2. What the server did not say, that there is no connection, no answer in time or too long a one, is an
   AttemptFailedError.
   Only the text tells it from what a server says, and a server may quote its clients. So texts are taken whole, with a
   number in them that no client knows. Where both readings lead to the same (another endpoint), that is not needed.
3. grpcio is imported with the first endpoint: a process without one does not pay for it.
4. A channel keeps the certificates that it was made with. When they change, the next call makes another channel; the
   old one is closed when its last call has ended.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from yarl import URL

from carpool.core.clock import Clock, monotonic
from carpool.upstream.endpoint import AttemptFailedError, NoAnswerError, UpstreamCall, UpstreamResponse
from carpool.upstream.tls import Credentials, Pems, UpstreamSecurity

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONNECT_TIMEOUT_S = 1.0
UNIX_PREFIX = "unix:"

HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
OTHER_STATUS = 502
# An answer over our limit, in grpcio's words; and a call over the server's limit, in those of C++, Python and Go.
_ANSWER_TOO_LONG = re.compile(
    r"(?:Stream removed \()?CLIENT: Received message larger than max \([0-9]+ vs\. (?P<max>[0-9]+)\)\)?"
)
_CALL_TOO_LONG = re.compile(
    r"(?:SERVER: Received|Received|grpc: received) message larger than max \((?P<size>[0-9]+) vs\. [0-9]+\)"
)
_NO_CONNECTION = "failed to connect to all addresses"
_NO_SUCH_NAME = ("DNS resolution failed", "errors resolving")

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # A server that comes back is noticed within a second; by default it could take two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Attempts are counted in one place, and that is not here.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Channel:
    """A channel of grpcio, and how many calls use it."""

    def __init__(self, channel: Any, pems: Pems | None) -> None:
        self.channel = channel
        # No serializers: bytes go in and come out as they are.
        self.infer = channel.unary_unary(METHOD)
        # What it was made with; None without TLS.
        self.pems = pems
        self.users = 0


class GrpcEndpoint:
    """One endpoint of the fixed API: `grpc://host:port`, `grpcs://host:port` with TLS, or `unix:SOCKET`."""

    def __init__(
        self,
        url: str,
        slots: int | None,
        answer_bytes_max: int,
        security: UpstreamSecurity | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.slots = slots
        self._answer_bytes_max = answer_bytes_max
        self._credentials = Credentials(security or UpstreamSecurity(), clock)
        self._is_secure = False
        if url.startswith(UNIX_PREFIX):
            self.name = self._target = url
        else:
            parsed = URL(url)
            self._is_secure = parsed.scheme in ("grpcs", "https")
            self._target = parsed.raw_authority.rpartition("@")[2]
            self.name = f"{parsed.scheme}://{self._target}"
        # The channels that are not closed. Only the last one gets further calls.
        self._channels: list[Channel] = []

    @property
    def open_channels(self) -> int:
        """The newest channel, and those with older certificates whose calls have not ended."""
        return len(self._channels)

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Send one call and read its answer; raises AttemptFailedError, or is cancelled."""
        from grpc import RpcError

        try:
            secrets = self._credentials.headers()
            metadata = [*call.headers, *((name.lower(), value) for name, value in secrets.items())]
            async with self._channel() as channel, asyncio.timeout(timeout_s):
                # The server gets the timeout too, so that it can stop when no client waits any more.
                body: bytes = await channel.infer(call.body, timeout=timeout_s, metadata=metadata)
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        except (OSError, ValueError) as failure:  # of the files with credentials
            raise AttemptFailedError(f"the call could not be made ({type(failure).__name__})") from None
        except RpcError as failure:
            return self._answer_of(failure, len(call.body), timeout_s, list(secrets.values()))
        return UpstreamResponse(200, body)

    def _answer_of(self, failure: Any, call_bytes: int, timeout_s: float, secrets: list[str]) -> UpstreamResponse:
        """The HTTP answer that means the same as a gRPC status; raises AttemptFailedError if grpcio itself gave it."""
        code: str = failure.code().name
        text: str = failure.details() or ""
        status = HTTP_STATUS.get(code, OTHER_STATUS)
        if code == "DEADLINE_EXCEEDED" and text == "Deadline Exceeded":
            raise NoAnswerError(timeout_s) from None
        if code == "UNAVAILABLE" and text.startswith(_NO_CONNECTION):
            raise AttemptFailedError("no connection: nothing listens there, or it does not speak gRPC") from None
        if code == "UNAVAILABLE" and text.startswith(_NO_SUCH_NAME):
            raise AttemptFailedError("the name of its host does not resolve") from None
        if code == "RESOURCE_EXHAUSTED":
            here, there = _ANSWER_TOO_LONG.fullmatch(text), _CALL_TOO_LONG.fullmatch(text)
            if here and here["max"] == str(self._answer_bytes_max):
                raise AttemptFailedError(f"the answer is longer than {self._answer_bytes_max} bytes") from None
            if there and there["size"] == str(call_bytes):
                status = 413
        for secret in secrets:  # in case that the server repeats them: a client may be shown a part of this
            text = text.replace(secret.removeprefix("Bearer "), "***")
        return UpstreamResponse(status, msgspec.json.encode({"error": text}))

    async def accepts_connections(self) -> bool:
        """Whether there is a connection right now, or can be."""
        try:
            async with self._channel() as channel, asyncio.timeout(CONNECT_TIMEOUT_S):
                await channel.channel.channel_ready()
        except (TimeoutError, OSError, ValueError):
            return False
        return True

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.channel.close()

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        """The channel to use now; raises OSError or ValueError if there is none and its files cannot be used."""
        channel = self._newest()
        channel.users += 1
        try:
            yield channel
        finally:
            channel.users -= 1
            await self._close_unused()

    def _newest(self) -> Channel:
        """A channel belongs to the event loop in which it is made, so it is made with the first call."""
        pems = self._credentials.pems() if self._is_secure else None
        if not self._channels or self._channels[-1].pems is not pems:
            self._channels.append(Channel(self._make(pems), pems))
        return self._channels[-1]

    def _make(self, pems: Pems | None) -> Any:
        import grpc

        options = [*_OPTIONS, ("grpc.max_receive_message_length", self._answer_bytes_max)]
        if pems is None:
            return grpc.aio.insecure_channel(self._target, options)
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        return grpc.aio.secure_channel(self._target, credentials, options)

    async def _close_unused(self) -> None:
        for channel in [older for older in self._channels[:-1] if not older.users]:
            self._channels.remove(channel)
            await channel.channel.close()
