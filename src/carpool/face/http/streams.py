"""The streams of a process: their upgrade, and the checks on all of them. `stream.py` has the rules."""

import logging
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from websockets.utils import accept_key

from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import no
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    Draining,
    Forbidden,
    InternalError,
    Malformed,
    Unauthorized,
    UpgradeRequired,
)
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import RequestTraces
from carpool.core.request import Request
from carpool.core.timers import Every
from carpool.face.http.exchange import Exchange
from carpool.face.http.places import Places
from carpool.face.http.problem import respond_problem
from carpool.face.http.router import query_of
from carpool.face.http.state import HttpState
from carpool.face.http.stream import COME_BACK_S, StreamLimits, WebSocketStream, output_pieces
from carpool.face.http.wire import InferenceAnswers
from carpool.face.intake import Intake

if TYPE_CHECKING:  # slow to import, and few need it
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

logger = logging.getLogger("carpool.http")

PATH = b"/v1/stream"
# The streams of a process, a thousand at most, are checked so often: some microseconds each.
LOOK_S = 1.0
# The streams of a process in so many parts: checking credentials of all at once would hold up others.
LOOK_PARTS = 10
TICKET_S = 60
TICKET_CHARS_MAX = 16 * 1024
NONCE_BYTES = 12
# Where a credential may be.
CREDENTIALS = (b"authorization", b"x-api-key")
_PURPOSE = b"carpool: tickets for streams\0"
_key = re.compile(rb"[A-Za-z0-9+/]{22}==\Z").match
_ACCEPTED = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n"


class Tickets:
    """What opens a stream for a browser, which cannot send headers with a WebSocket.

    1. A ticket is the credential itself, sealed (ChaCha20-Poly1305) with the time until which it is good: TICKET_S
       seconds. So a stream has the credential that it was opened with, and ends when that is revoked or over.
    2. The key comes from the service token: any gateway with the same token opens it. While tokens change, each of
       them is tried. Without a token it is this process's own.
    3. It may be used more than once while it is good: gateways have nothing in common that would remember it. It
       stands in URLs, which proxies may log: that is why it is short-lived.
    4. Whatever is wrong with a ticket, its client gets the same error.
    """

    def __init__(self, tokens: Iterable[str] = (), wall: Callable[[], float] = time.time) -> None:
        self._secrets = [token.encode() for token in tokens] or [secrets.token_bytes(32)]
        self._wall = wall

    @cached_property
    def _seals(self) -> "list[ChaCha20Poly1305]":
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return [ChaCha20Poly1305(sha256(_PURPOSE + secret).digest()) for secret in self._secrets]

    def give(self, headers: Mapping[bytes, bytes]) -> str:
        """A ticket with the credential in these headers."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        shown = b"\n".join(headers.get(name, b"") for name in CREDENTIALS)
        sealed = self._seals[0].encrypt(nonce, b"%d\n%b" % (self._wall() + TICKET_S, shown), None)
        return urlsafe_b64encode(nonce + sealed).decode()

    def open(self, ticket: str) -> dict[bytes, bytes]:
        """The credential's headers in it; raises Unauthorized."""
        from cryptography.exceptions import InvalidTag

        try:
            sealed = urlsafe_b64decode(ticket) if len(ticket) <= TICKET_CHARS_MAX else b""
        except ValueError:
            sealed = b""
        for seal in self._seals if len(sealed) > NONCE_BYTES else ():
            try:
                until, *shown = seal.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None).split(b"\n")
            except InvalidTag:
                continue
            if self._wall() < int(until):
                return {name: value for name, value in zip(CREDENTIALS, shown, strict=True) if value}
        raise Unauthorized("this ticket is not valid; `POST /v1/stream/tickets` gives one, which is good for a minute")


class WebSocketStreams:
    """Opens streams, checks those that are open, and gives outcomes to the right one."""

    def __init__(
        self,
        intake: Intake,
        state: HttpState,
        tickets: Tickets,
        places: Places,
        limits: StreamLimits,
        *,
        # Whether pages of another origin may come.
        allows: Callable[[bytes], bool] = no,
        traces: RequestTraces | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.intake = intake
        self.state = state
        self.limits = limits
        self.clock = clock
        self.traces = traces
        self._tickets = tickets
        self._places = places
        self._allows = allows
        self._open: set[WebSocketStream] = set()
        self._pieces = InferenceAnswers().pieces
        self._looks = Every(LOOK_S / LOOK_PARTS, self.look)
        self._to_look_at: list[WebSocketStream] = []
        self._a_part = 1
        self.is_draining = False
        self.turns = intake.turns

    def __len__(self) -> int:
        return len(self._open)

    def ticket(self, exchange: Exchange, _: str) -> None:
        """`POST /v1/stream/tickets`."""
        self.intake.identify(exchange.headers, exchange.sink.peer)
        body = b'{"ticket":"%b","expires_in_s":%d}' % (self._tickets.give(exchange.headers).encode(), TICKET_S)
        exchange.respond(200, body, headers=b"Cache-Control: no-store\r\n")

    def no_upgrade(self, exchange: Exchange, _: str) -> None:
        """`GET /v1/stream` by a client that does not ask for a WebSocket, or asks wrongly."""
        alone = "this path is a WebSocket: ask for an upgrade, with no other request before it on its connection"
        raise UpgradeRequired(alone, header_lines=b"Upgrade: websocket\r\n")

    def open(self, exchange: Exchange) -> Callable[[bytes], None] | None:
        """The upgrade: open a stream, or answer why not. Returns the function for received bytes, or None."""
        try:
            accept = self._check(exchange)
            shown = self._shown(exchange)
            caller = self.intake.identify(shown, exchange.sink.peer)
            if (refusal := self._places.refusal(caller.owner)) is not None:
                raise refusal
        except CarpoolError as error:
            respond_problem(exchange, error)
            return None
        exchange.begin(101, b"", _ACCEPTED % accept)
        stream = WebSocketStream(self, exchange, caller.owner, shown)
        self._open.add(stream)
        self._looks.start()
        return stream.received

    def closed(self, stream: WebSocketStream) -> None:
        """A stream has ended."""
        if stream in self._open:
            self._open.remove(stream)
            self._places.give_back(stream.owner)
        if not self._open:
            self._looks.stop()
            self._to_look_at = []  # nothing is kept of those who left, least of all their credentials

    def look(self) -> None:
        """Called by a timer: check a part of the streams each time (`WebSocketStream.look`), all of them in LOOK_S."""
        if not self._to_look_at:
            self._to_look_at = list(self._open)
            self._a_part = len(self._open) // LOOK_PARTS + 1
        part, self._to_look_at = self._to_look_at[: self._a_part], self._to_look_at[self._a_part :]
        now = self.clock()
        for stream in part:
            stream.look(now)

    def drain(self) -> None:
        """Begin nothing new, and end each of them when it has its answers (rule 10)."""
        self.is_draining = True
        for stream in list(self._open):
            stream.end_if_drained()

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Give an outcome to the stream that it belongs to (core.request.Waiter)."""
        stream, own_id = request.ticket
        try:
            if isinstance(outcome, Output):
                stream.answer(own_id, output_pieces(own_id, self._pieces(request, outcome)))
            elif isinstance(outcome, ClientLeft):
                stream.forget(own_id)
            else:
                stream.refuse(own_id, outcome, request.id)
        except Exception:
            logger.exception("an answer could not be written")
            stream.refuse(own_id, InternalError("the gateway failed on this request"), request.id)

    def _check(self, exchange: Exchange) -> bytes:
        """The `Sec-WebSocket-Accept` of the upgrade; raises why it is refused."""
        headers = exchange.headers
        if self.state.draining:
            raise Draining("this gateway is shutting down; connect again to reach another", retry_after_s=COME_BACK_S)
        origin = headers.get(b"origin")
        if origin is not None and not self._allows(origin):
            authority = origin.partition(b"://")[2].lower()
            if not authority or authority != headers.get(b"host", b"").lower():
                raise Forbidden("pages of this origin may not open streams; gateway.cors_origins has those that may")
        if headers.get(b"sec-websocket-version") != b"13":
            version = b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            raise UpgradeRequired("this gateway speaks version 13 of WebSocket", header_lines=version)
        key = headers.get(b"sec-websocket-key", b"")
        if not _key(key):
            raise Malformed("`Sec-WebSocket-Key` must be 16 bytes in base64")
        return accept_key(key.decode()).encode()

    def _shown(self, exchange: Exchange) -> dict[bytes, bytes]:
        """The headers that identify the caller, kept because they are checked again and again."""
        ticket = query_of(exchange).get("ticket")
        headers = exchange.headers
        kept = {name: headers[name] for name in (*CREDENTIALS, b"x-forwarded-for") if name in headers}
        return kept if ticket is None else kept | self._tickets.open(ticket)
