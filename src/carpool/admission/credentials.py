"""Who asks, where a credential is asked for: an API key or a JSON Web Token.

1. `Authorization: Bearer …` has a key (`cp_…`) or a token, `X-API-Key: …` a key. Both headers at once are refused:
   nobody could say which of the two was meant.
2. Whatever is wrong with a credential, its client is told the same.
3. Keys are found by their SHA-256; there is nothing else to compare them with. The digest that was found is compared
   in constant time.
4. A token that was verified is remembered by its SHA-256, until it is over or the keys that sign tokens change; so many
   of them at most, the oldest go. A key is known until it is revoked or over: then the table of keys is another one.
5. While the stored keys have not been read yet, a key that is not known gets a 503: it may well be a good one.
6. A Caller is made once for each credential. The limits are the key's own, else its tier's.
"""

import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.core.api_key import KEY_PREFIX, ApiKey
from carpool.core.errors import BrokerDown, CarpoolError, Unauthorized
from carpool.core.ports import Caller, RateLimit

if TYPE_CHECKING:  # slow to import, and only some have it
    from carpool.admission.tokens import TokenKeys, Verified

logger = logging.getLogger("carpool")

# Tokens that are remembered.
KNOWN_MAX = 8192
# No key is longer; what is longer is not hashed in vain.
KEY_BYTES_MAX = 256

_BEARER = b"bearer "


class TierTerms(NamedTuple):
    """What a credential of a tier has."""

    number: int
    limit: RateLimit


class Known(NamedTuple):
    """A credential that is valid."""

    caller: Caller
    digest: bytes
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
        self._tokens: dict[bytes, Known] = {}
        self._index_keys()

    def __repr__(self) -> str:
        return f"<Credentials {len(self._keys)} keys, {len(self._tokens)} tokens known>"

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
        self._tokens = {}

    def identify(self, headers: dict[bytes, bytes]) -> Caller:
        """The caller with these headers; raises why not."""
        credential = headers.get(b"authorization")
        if credential is None:
            credential = headers.get(b"x-api-key")
            if credential is None:
                raise refusal()
            digest = sha256(credential).digest()
            known = self._keys.get(digest)
        else:
            if credential[:7].lower() != _BEARER or b"x-api-key" in headers:
                raise refusal()
            credential = credential[7:]
            digest = sha256(credential).digest()
            known = self._keys.get(digest) or self._tokens.get(digest)
        if known is not None and self._wall() < known.until and hmac.compare_digest(known.digest, digest):
            return known.caller
        return self._look_closer(credential, digest, known is None and b"authorization" in headers)

    def _look_closer(self, credential: bytes, digest: bytes, may_be_token: bool) -> Caller:
        """The caller of a credential that is not known yet; raises why not."""
        if credential.startswith(KEY_PREFIX):
            if self._takes_keys and self._stored is None and len(credential) <= KEY_BYTES_MAX:
                raise not_known_yet()
        elif self._token_keys is not None and may_be_token:
            verified = self._token_keys.verify(credential, self._wall())
            if verified is not None:
                return self._remember(digest, verified)
        raise refusal()

    def _remember(self, digest: bytes, verified: "Verified") -> Caller:
        tier = self._tiers.get(verified.tier) or self._tiers[self._lowest_tier]
        caller = Caller(verified.owner, tier.number, False, limit_or_none(tier.limit))
        tokens = self._tokens
        if len(tokens) >= KNOWN_MAX:
            del tokens[next(iter(tokens))]
        tokens[digest] = Known(caller, digest, verified.until)
        return caller

    def _index_keys(self) -> None:
        if not self._takes_keys:
            return
        found: dict[bytes, Known] = {}
        # The configuration's word counts where both have one.
        for key in (*(self._stored or ()), *self._configured):
            digest = bytes.fromhex(key.sha256)
            found[digest] = Known(self._caller_of(key), digest, key.expires or inf)
        self._keys = found

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
            key.counts_for, tier.number, False, limit_or_none(own), frozenset(key.models) if key.models else None
        )


def limit_or_none(limit: RateLimit) -> RateLimit | None:
    """None where nothing is limited, so that nobody need count."""
    return limit if limit.per_minute or limit.concurrent else None


def refusal() -> CarpoolError:
    """What everybody is told whose credential is not valid (rule 2)."""
    return Unauthorized("a valid credential is needed: `Authorization: Bearer …`, or `X-API-Key: …` for an API key")


def not_known_yet() -> CarpoolError:
    """What is told while nobody can say whether a key is valid."""
    return BrokerDown("API keys cannot be checked right now; try again soon", retry_after_s=1)
