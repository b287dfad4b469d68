"""One endpoint over HTTP, by TCP, TLS or a Unix socket: bounded in time and size, whatever the other side does."""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from carpool.core.errors import without_frames
from carpool.core.tensors import Data
from carpool.upstream.connections import (
    CallContext,
    EarlyAnswerError,
    EndpointConnections,
    current_call,
    make_trace,
    watched,
)
from carpool.upstream.endpoint import (
    AttemptFailedError,
    ConnectionWasDeadError,
    DoubtfulAnswerError,
    NoAnswerError,
    UpstreamCall,
    UpstreamResponse,
)
from carpool.upstream.load import parse_load
from carpool.upstream.tls import Credentials, UpstreamSecurity

READ_BUFFER_BYTES = 1024 * 1024
# A longer body is written in pieces, so that the event loop gets its turn in between, and no copy is made of it.
PLAIN_BODY_BYTES_MAX = 256 * 1024
PIECE_BYTES = 128 * 1024
# A page beside the calls: health, metrics.
PAGE_BYTES_MAX = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 1.0
KEEPALIVE_S = 60.0
UNIX_PREFIX = "unix:"
# A shorter secret is not looked for in the text of errors: it would be found in words that have nothing to do with it.
SECRET_CHARS_MIN = 8
# A longer error, or one of more values, is not looked into: all that it may tell is a message and some names.
ERROR_BYTES_MAX, ERROR_VALUES_MAX = 8 * 1024 * 1024, 100_000
# OpenSSL's codes for a certificate of another name or address; its text for these would quote the configuration.
_OTHER_NAME = (62, 64)
# What OpenSSL says of bytes that are no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def make_session(unix_socket: str = "") -> aiohttp.ClientSession:
    """The one session that all endpoints share, but for Unix sockets, which need one each.

    The pool's slots bound the connections, not the connector.
    """
    return aiohttp.ClientSession(
        connector=watched(
            aiohttp.UnixConnector(unix_socket, limit=0, keepalive_timeout=KEEPALIVE_S)
            if unix_socket
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        # A compressed answer could be a bomb; none is asked for, and none is unpacked.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "carpool"},
        read_bufsize=READ_BUFFER_BYTES,
        trust_env=False,
        trace_configs=[make_trace()],
    )


class LongBody(aiohttp.Payload):
    """The body of a call, and what follows it, as aiohttp writes it: views of the call's own bytes, one at a time."""

    _autoclose = True  # there is nothing to close

    def __init__(self, call: UpstreamCall) -> None:
        super().__init__(call, content_type=call.content_type)
        self._parts: tuple[Data, ...] = (call.body, *call.tail)
        self._size = call.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """For aiohttp's errors, which do not need it."""
        return ""

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it; waits while the other side does not read."""
        for part in self._parts:
            view = memoryview(part)
            for start in range(0, len(view), PIECE_BYTES):
                await writer.write(view[start : start + PIECE_BYTES])


class HttpEndpoint:
    """One endpoint of the fixed API: `http://…`, `https://…` or `unix:SOCKET[:PATH]`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        slots: int,
        answer_bytes_max: int,
        credentials: Credentials | None = None,
        load_header: str = "",
    ) -> None:
        self._unix_socket = ""
        if url.startswith(UNIX_PREFIX):
            self._unix_socket, _, path = url.removeprefix(UNIX_PREFIX).partition(":")
            self.url = URL(f"http://localhost{path}")
            self.name = url.partition("?")[0]
            session = make_session(self._unix_socket)
        else:
            self.url = URL(url)
            self.name = str(self.url.with_user(None).with_query(None))
        self.slots = slots
        self._session = session
        self._answer_bytes_max = answer_bytes_max
        self._credentials = credentials or Credentials(UpstreamSecurity())
        # "": answers are not looked at for a load.
        self._load_header = load_header
        self._line = EndpointConnections(self.name)
        self._by_path: dict[str, URL] = {}

    @property
    def stray_answers(self) -> int:
        """How often it sent bytes that were no answer to a call, for metrics."""
        return self._line.stray

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Send one call, once, and read its answer; raises AttemptFailedError, or is cancelled."""
        context = CallContext(self._line, call.body, call.tail)
        try:
            secrets = self._credentials.headers()
            async with asyncio.timeout(timeout_s):
                response, body = await self._send(call, secrets, context)
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            is_cut, reason = isinstance(failure, aiohttp.ClientConnectionError | OSError), _reason(failure)
            without_frames(failure)  # which hold the call; aiohttp's own hold the failure too
            if is_cut and context.is_reused and not context.is_heard:
                # A server may close a connection that rests just when it is used again; many do after a 500, unasked.
                self._line.found_dead(asyncio.get_running_loop().time())
                raise ConnectionWasDeadError(reason, closed_before_sent=not context.is_sent) from None
            raise AttemptFailedError(reason) from None
        if context.is_doubtful:
            raise DoubtfulAnswerError("the answer may be the one to the call before, again")
        load = parse_load(response.headers.get(self._load_header, "")) if self._load_header else None
        return UpstreamResponse(response.status, body if response.status < 400 else _error_body(secrets, body), load)

    async def _send(
        self, call: UpstreamCall, secrets: Mapping[str, str], context: CallContext
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        current_call.set(context)
        async with self._session.post(
            self._target(call.path),
            data=LongBody(call) if call.tail or len(call.body) > PLAIN_BODY_BYTES_MAX else call.body,
            headers={"Content-Type": call.content_type, **dict(call.headers), **secrets},
            allow_redirects=False,
            ssl=self._tls() or True,
        ) as response:
            return response, await self._read(response, self._answer_bytes_max)

    async def get(self, where: str, timeout_s: float) -> UpstreamResponse:
        """Read a page beside the calls: a path, `:PORT/PATH` on the same host, or a URL. Raises AttemptFailedError."""
        try:
            url = self._page(where)
            is_own = url.origin() == self.url.origin()
            # The secrets are for the endpoint itself, and for no other server.
            secrets = self._credentials.headers() if is_own else {}
            tls = self._credentials.ssl_context() if url.scheme == "https" else None
            current_call.set(CallContext(self._line if is_own else EndpointConnections(str(url.origin()))))
            async with asyncio.timeout(timeout_s):
                async with self._session.get(url, headers=secrets, allow_redirects=False, ssl=tls or True) as response:
                    body = await self._read(response, PAGE_BYTES_MAX)
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            reason = _reason(failure)
            without_frames(failure)
            raise AttemptFailedError(reason) from None
        return UpstreamResponse(response.status, body)

    def _page(self, where: str) -> URL:
        if where.startswith("/"):
            return self.url.join(URL(where))
        if where.startswith(":"):
            port, _, path = where[1:].partition("/")
            return self.url.with_port(int(port)).join(URL(f"/{path}"))
        return URL(where)

    async def _read(self, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        """The body, up to the size limit."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AttemptFailedError("the answer is compressed, though that was not asked for")
        if (response.content_length or 0) > bytes_max:
            raise AttemptFailedError(f"the answer is longer than {bytes_max} bytes")
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > bytes_max:
                raise AttemptFailedError(f"the answer is longer than {bytes_max} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def accepts_connections(self) -> bool:
        """Whether a connection can be made right now, its TLS included."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._unix_socket:
                    _, writer = await asyncio.open_unix_connection(self._unix_socket)
                else:
                    _, writer = await asyncio.open_connection(self.url.host, self.url.port, ssl=self._tls())
        except (TimeoutError, OSError, ValueError):
            return False
        writer.close()
        return True

    async def close(self) -> None:
        """Close a session of its own; the shared one is its owner's to close."""
        if self._unix_socket:
            await self._session.close()

    def _tls(self) -> ssl.SSLContext | None:
        return self._credentials.ssl_context() if self.url.scheme == "https" else None

    def _target(self, path: str) -> URL:
        """The endpoint's own URL; a protocol's path fills in where the URL has none."""
        if not path or self.url.path not in ("", "/"):
            return self.url
        target = self._by_path.get(path)
        if target is None:
            target = self._by_path[path] = self.url.with_path(path)  # bounded: one path for each model
        return target


def _reason(failure: Exception) -> str:
    """What to tell of a call that broke off: never a text that could quote what the other side sent."""
    if isinstance(failure, aiohttp.ClientConnectorCertificateError):
        fault = failure.certificate_error
        if isinstance(fault, ssl.SSLCertVerificationError):
            other_name = fault.verify_code in _OTHER_NAME
            return f"its certificate is refused: {'it is for another name' if other_name else fault.verify_message}"
    if isinstance(failure, aiohttp.ClientOSError) and isinstance(failure.__cause__, ssl.SSLError):
        hint = ": the server there may be a plain one, http://" if failure.__cause__.reason in _NO_TLS else ""
        return f"TLS failed ({failure.__cause__.reason}){hint}"
    if isinstance(failure, aiohttp.ClientConnectorDNSError):
        return "the name of its host does not resolve"
    if isinstance(failure, aiohttp.ClientConnectorError) and failure.os_error.errno:
        return f"no connection: {os.strerror(failure.os_error.errno)}"
    if isinstance(failure, EarlyAnswerError):
        return "an answer came before the call was sent"
    return f"the call broke off ({type(failure).__name__})"


def _error_body(secrets: Mapping[str, str], body: bytes) -> bytes:
    """The body of an error, in which the codec looks for words; empty if that would take long."""
    is_short = len(body) <= ERROR_BYTES_MAX and body.count(b",") <= ERROR_VALUES_MAX
    return without_secrets(secrets, body) if is_short else b""


def without_secrets(secrets: Mapping[str, str], body: bytes) -> bytes:
    """The body of an error, in case that it repeats the headers of the call: a client may be shown a part of it."""
    for value in secrets.values():
        for secret in (value, value.rpartition(" ")[2]):  # also without the scheme, such as `Bearer`
            if len(secret) >= SECRET_CHARS_MIN:
                body = body.replace(secret.encode(), b"***").replace(json.dumps(secret)[1:-1].encode(), b"***")
    return body
