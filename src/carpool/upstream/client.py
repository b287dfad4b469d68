"""One endpoint over HTTP, by TCP, TLS or a Unix socket: bounded in time and size, whatever the other side does."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Mapping, Sequence

from yarl import URL

from carpool.core.errors import without_frames
from carpool.core.tensors import Data
from carpool.upstream.connections import ServerConnections
from carpool.upstream.endpoint import (
    AttemptFailedError,
    ConnectionWasDeadError,
    NoAnswerError,
    UpstreamCall,
    UpstreamResponse,
)
from carpool.upstream.tls import Credentials, UpstreamSecurity

# A page beside the calls: health, metrics.
PAGE_BYTES_MAX = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 1.0
UNIX_PREFIX = "unix:"
# A shorter secret is not looked for in the text of errors: it would be found in words that have nothing to do with it.
SECRET_CHARS_MIN = 8
# A longer error, or one of more values, is not looked into: all that it may tell is a message and some names.
ERROR_BYTES_MAX, ERROR_VALUES_MAX = 8 * 1024 * 1024, 100_000
# OpenSSL's codes for a certificate of another name or address; its text for these would quote the configuration.
_OTHER_NAME = (62, 64)
# What OpenSSL says of bytes that are no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


class HttpEndpoint:
    """One endpoint of the fixed API: `http://…`, `https://…` or `unix:SOCKET[:PATH]`."""

    def __init__(
        self,
        url: str,
        slots: int | None,
        answer_bytes_max: int,
        credentials: Credentials | None = None,
        load_header: str = "",
    ) -> None:
        unix_socket = ""
        if url.startswith(UNIX_PREFIX):
            unix_socket, _, path = url.removeprefix(UNIX_PREFIX).partition(":")
            self.url = URL(f"http://localhost{path}")
            self.name = url.partition("?")[0]
        else:
            self.url = URL(url)
            self.name = str(self.url.with_user(None).with_query(None))
        self.slots = slots
        self._answer_bytes_max = answer_bytes_max
        self._credentials = credentials or Credentials(UpstreamSecurity())
        self._own = ServerConnections(self.name, self.url, unix_socket, load_header)
        # Other servers that have pages of this endpoint. Bounded: the settings name them.
        self._others: dict[URL, ServerConnections] = {}
        # How calls begin, by their path. Bounded: one path for each model.
        self._starts: dict[str, str] = {}

    @property
    def stray_answers(self) -> int:
        """How often it sent bytes that were no answer to a call, for metrics."""
        return self._own.stray

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Send one call, once, and read its answer; raises AttemptFailedError, or is cancelled."""
        secrets = self._credentials.headers()
        start = self._starts.get(call.path)
        if start is None:
            start = self._starts[call.path] = _start("POST", self._target(call.path))
        head = [f"{start}Content-Type: {call.content_type}\r\nContent-Length: {call.size}\r\n"]
        head += map(_line, (*call.headers, *secrets.items()))
        parts = (call.body, *call.tail)
        answer = await self._ask(self._own, "".join(head), parts, self._answer_bytes_max, timeout_s)
        if answer.status < 400:
            return answer
        return UpstreamResponse(answer.status, _error_body(secrets, answer.body), answer.load)

    async def get(self, where: str, timeout_s: float) -> UpstreamResponse:
        """Read a page beside the calls: a path, `:PORT/PATH` on the same host, or a URL. Raises AttemptFailedError."""
        try:
            url = self._page(where)
            origin = url.origin()
        except ValueError:
            raise AttemptFailedError("there can be no such page") from None
        server, secrets = self._own, self._credentials.headers()
        if origin != self.url.origin():
            # The secrets are for the endpoint itself, and for no other server.
            server, secrets = self._others.setdefault(origin, ServerConnections(str(origin), origin)), {}
        head = _start("GET", url) + "".join(map(_line, secrets.items()))
        try:
            return await self._ask(server, head, (), PAGE_BYTES_MAX, timeout_s)
        except ConnectionWasDeadError:  # a page may be asked for twice
            return await self._ask(server, head, (), PAGE_BYTES_MAX, timeout_s)

    async def _ask(
        self, server: ServerConnections, head: str, parts: Sequence[Data], bytes_max: int, timeout_s: float
    ) -> UpstreamResponse:
        try:
            async with asyncio.timeout(timeout_s):
                connection = await server.take(self._tls(server))
                return await connection.exchange(f"{head}\r\n".encode(), parts, bytes_max)
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        except (OSError, ValueError) as failure:
            reason = _reason(failure)
            without_frames(failure)  # which hold the call
            raise AttemptFailedError(reason) from None

    def _page(self, where: str) -> URL:
        if where.startswith("/"):
            return self.url.join(URL(where))
        if where.startswith(":"):
            port, _, path = where[1:].partition("/")
            return self.url.with_port(int(port)).join(URL(f"/{path}"))
        return URL(where)

    async def accepts_connections(self) -> bool:
        """Whether a connection can be made right now, its TLS included."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._own.connect(self._tls(self._own))
        except (TimeoutError, OSError, ValueError, AttemptFailedError) as failure:
            without_frames(failure)  # one of which holds the failure
            return False
        connection.close()
        return True

    async def close(self) -> None:
        """Give up its connections."""
        for server in (self._own, *self._others.values()):
            server.close()

    def _tls(self, server: ServerConnections) -> ssl.SSLContext | None:
        return self._credentials.ssl_context() if server.is_tls else None

    def _target(self, path: str) -> URL:
        """The endpoint's own URL; a protocol's path fills in where the URL has none."""
        return self.url.with_path(path) if path and self.url.path in ("", "/") else self.url


def _start(method: str, url: URL) -> str:
    """The first lines of a request. No compressed answer is asked for: it could be a bomb."""
    return (
        f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
        "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: carpool\r\n"
    )


def _line(header: tuple[str, str]) -> str:
    name, value = header
    if "\r" in value or "\n" in value:
        raise ValueError(f"the header {name} has more than one line")
    return f"{name}: {value}\r\n"


def _reason(failure: Exception) -> str:
    """What to tell of a call that could not be sent: never a text that could quote what the other side sent."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        other_name = failure.verify_code in _OTHER_NAME
        return f"its certificate is refused: {'it is for another name' if other_name else failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        hint = ": the server there may be a plain one, http://" if failure.reason in _NO_TLS else ""
        return f"TLS failed ({failure.reason}){hint}"
    if isinstance(failure, socket.gaierror):
        return "the name of its host does not resolve"
    if isinstance(failure, OSError) and failure.errno:
        return f"no connection: {os.strerror(failure.errno)}"
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
