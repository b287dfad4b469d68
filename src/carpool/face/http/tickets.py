"""Tickets: what opens a stream for a browser, which cannot send headers with a WebSocket.

1. A ticket is the credential itself, sealed (ChaCha20-Poly1305) with the time until which it is good: TICKET_S seconds.
   So a stream has the credential that it was opened with, and ends when that is revoked or over.
2. The key comes from the service token: any gateway with the same token opens it. While tokens change, each of them is
   tried. Without a token it is this process's own.
3. It may be used more than once while it is good: gateways have nothing in common that would remember it. It stands in
   URLs, which proxies may log: that is why it is short-lived.
4. Whatever is wrong with a ticket, its client gets the same error.
"""

import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from carpool.core.errors import Unauthorized

if TYPE_CHECKING:  # slow to import, and few need it
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

TICKET_S = 60
TICKET_CHARS_MAX = 16 * 1024
NONCE_BYTES = 12
# Where a credential may be.
CREDENTIALS = (b"authorization", b"x-api-key")
_PURPOSE = b"carpool: tickets for streams\0"


class Tickets:
    """Gives tickets, and opens them."""

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
