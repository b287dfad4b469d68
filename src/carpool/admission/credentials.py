"""Which caller asks, where a credential is needed: an API key or a JSON Web Token.

1. `Authorization: Bearer …` has a key or a token, `X-API-Key: …` a key. Both headers at once are refused: the gateway
   cannot know which of the two was meant. A key may have any form, so what is no known key may be a token.
2. Whatever is wrong with a credential, its client gets the same error.
3. Keys are found by their SHA-256: how long that takes tells nothing of a key that is near to it.
4. What was verified is remembered by the header that it came in, until it is over, is revoked, or the keys that sign
   tokens change, or there are too many of them. Not by a digest: that of a token takes longer than all the
   rest of admission, and the bytes of a header that a connection sends each time are hashed but once. Python's own
   hash has a secret key, so how long a lookup takes tells nothing.
5. While the stored keys have not been read yet, what is no known key and no token gets a 503: it may well be good.
6. A Caller is made once for each credential. The limits are the key's own, else its tier's.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.core.api_key import KEY_CHARS_MAX, KEY_CHARS_MIN, ApiKey
from carpool.core.errors import BrokerDown, CarpoolError, Unauthorized
from carpool.core.kept import Kept
from carpool.core.ports import Caller, Peer, RateLimit

if TYPE_CHECKING:  # slow to import, and only some have it
    from carpool.admission.tokens import TokenKeys

logger = logging.getLogger("carpool")

# Headers that are remembered for each of the two names, and their bytes.
KNOWN_MAX = 8192
KNOWN_BYTES_MAX = 8 * 1024 * 1024

_BEARER = b"bearer "


class TierTerms(NamedTuple):
    """What a credential of a tier has."""

    number: int
    limit: RateLimit


class Known(NamedTuple):
    """A credential that is valid."""

    caller: Caller
    # The wall clock's time from which on it is not.
    until: float


class Credentials:
    """Says who asks, or refuses. Each of the two kinds of credentials may be absent."""

    def __init__(
        self,
        tiers: Mapping[str, TierTerms],
        lowest_tier: str,
        *,
        takes_keys: bool = True,
        configured: Iterable[ApiKey] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tiers = tiers
        self._lowest_tier = lowest_tier
        self._takes_keys = takes_keys
        self._wall = wall
        # Keys by their digest: those of the configuration, and those of a store, which may not have been read yet.
        self._configured = tuple(configured)
        self._stored: tuple[ApiKey, ...] | None = ()
        self._keys: dict[bytes, Known] = {}
        self._token_keys: TokenKeys | None = None
        # By the header `Authorization`, and by `X-API-Key`.
        self._bearers: Kept[bytes, Known] = Kept(KNOWN_MAX, KNOWN_BYTES_MAX)
        self._api_keys: Kept[bytes, Known] = Kept(KNOWN_MAX, KNOWN_BYTES_MAX)
        self._index_keys()

    def __repr__(self) -> str:
        return f"<Credentials {len(self._keys)} keys, {len(self._bearers) + len(self._api_keys)} remembered>"

    def expect_stored_keys(self) -> None:
        """There is a store, and it has not been read yet (rule 5)."""
        self._stored = None

    def change_stored_keys(self, keys: Iterable[ApiKey]) -> None:
        """These are the keys of the store from now on."""
        self._stored = tuple(keys)
        self._index_keys()

    def change_configured_keys(self, keys: Iterable[ApiKey]) -> None:
        """These are the keys of the configuration from now on."""
        self._configured = tuple(keys)
        self._index_keys()

    def change_token_keys(self, keys: "TokenKeys") -> None:
        """These keys sign tokens from now on; whatever others signed is not known any more."""
        self._token_keys = keys
        self._bearers.clear()

    def identify(self, headers: dict[bytes, bytes], peer: Peer | None = None) -> Caller:
        """The caller with these headers. The peer does not matter: its next request may have others. Raises why not."""
        given, remembered = headers.get(b"authorization"), self._bearers
        if given is None:
            given, remembered = headers.get(b"x-api-key"), self._api_keys
            if given is None:
                raise refusal()
        elif b"x-api-key" in headers:
            raise refusal()
        known = remembered.get(given)
        if known is not None and self._wall() < known.until:
            return known.caller
        known = self._look_closer(given, remembered is self._bearers)
        remembered.keep(given, known, len(given))
        return known.caller

    def _look_closer(self, given: bytes, is_bearer: bool) -> Known:
        """What a header stands for that is not remembered; raises why not."""
        if is_bearer:
            if given[:7].lower() != _BEARER:
                raise refusal()
            given = given[7:]
        # No key is shorter or longer: what is longer is not hashed in vain.
        may_be_key = self._takes_keys and KEY_CHARS_MIN <= len(given) <= KEY_CHARS_MAX
        known = self._find_key(given) if may_be_key else None
        if known is None and is_bearer:
            known = self._find_token(given)
        if known is None:
            raise not_known_yet() if may_be_key and self._stored is None else refusal()
        return known

    def _find_key(self, key: bytes) -> Known | None:
        known = self._keys.get(sha256(key).digest())
        return known if known is not None and self._wall() < known.until else None

    def _find_token(self, token: bytes) -> Known | None:
        now = self._wall()
        verified = self._token_keys.verify(token, now) if self._token_keys is not None else None
        if verified is None:
            return None
        tier = self._tiers.get(verified.tier) or self._tiers[self._lowest_tier]
        return Known(Caller(verified.owner, tier.number, False, limit_or_none(tier.limit)), verified.until)

    def _index_keys(self) -> None:
        if not self._takes_keys:
            return
        found: dict[bytes, Known] = {}
        # The configuration's word counts where both have one.
        for key in (*(self._stored or ()), *self._configured):
            found[bytes.fromhex(key.sha256)] = Known(self._caller_of(key), key.expires or inf)
        self._keys = found
        self._bearers.clear()
        self._api_keys.clear()

    def _caller_of(self, key: ApiKey) -> Caller:
        tier = self._tiers.get(key.tier)
        if tier is None:
            tier = self._tiers[self._lowest_tier]
            if key.tier:
                logger.warning(
                    "an API key names a tier that is not configured; it has the lowest",
                    extra={"fields": {"key": key.name, "tier": key.tier}},
                )
        own = RateLimit(
            tier.limit.per_minute if key.per_minute is None else key.per_minute,
            tier.limit.burst if key.burst is None else key.burst,
            tier.limit.concurrent if key.concurrent is None else key.concurrent,
        )
        return Caller(
            key.counts_for,
            tier.number,
            False,
            limit_or_none(own),
            frozenset(key.models) if key.models else None,
            key.default_mode or "",
        )


def limit_or_none(limit: RateLimit) -> RateLimit | None:
    """None where nothing is limited, so that requests need not be counted."""
    return limit if limit.per_minute or limit.concurrent else None


def refusal() -> CarpoolError:
    """The error for every client whose credential is not valid (rule 2)."""
    return Unauthorized(
        "send a valid credential: `Authorization: Bearer <API key or token>`, or `X-API-Key: <API key>`"
    )


def not_known_yet() -> CarpoolError:
    """The error while the gateway cannot know whether a key is valid (rule 5)."""
    return BrokerDown("API keys cannot be checked right now; try again soon", retry_after_s=1)
