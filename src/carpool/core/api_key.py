"""An API key as it is stored: by its SHA-256, with what it lets its owner do. The key itself is nowhere.

1. A key that Carpool makes is `cp_` and 43 characters of `A-Za-z0-9_-`: 256 random bits, so a plain hash is enough, and
   no two are alike. A key that the operator brings is 20 to 256 printable ASCII characters without spaces, of any form:
   the operator must see to it that it cannot be guessed.
2. An owner is 1 to 64 printable ASCII characters. It is no address, nor does it begin as the owners of tokens do: so
   a caller with a key is never taken for an anonymous client of that address, or for the subject of a token.
3. Fields that a newer version wrote are passed over. A key that is not as it should be lets no client in, and does not
   prevent the other keys from being read: else one bad key would hide that another was revoked.
"""

import re
from collections.abc import Iterable
from ipaddress import ip_network
from typing import Annotated

import msgspec
from msgspec import Meta

from carpool.core.names import ModeName

KEY_PREFIX = b"cp_"
KEY_CHARS_MIN, KEY_CHARS_MAX = 20, 256
# What the owner of a token begins with: its subject follows, or the subject's hash.
TOKEN_OWNER, TOKEN_OWNER_HASHED = "jwt:", "jwt#"
OWNER_CHARS_MAX = 64
# The highest that a limit may be: a higher one would limit nothing in truth, and some sums would not be exact.
LIMIT_MAX = 1_000_000_000
Limit = Annotated[int, Meta(ge=0, le=LIMIT_MAX)]
Burst = Annotated[int, Meta(ge=1, le=LIMIT_MAX)]

_KEY = re.compile(rf"[\x21-\x7e]{{{KEY_CHARS_MIN},{KEY_CHARS_MAX}}}")
_OWNER = re.compile(r"[\x21-\x7e]{1,64}")


class KeyStoreError(Exception):
    """The place where keys are kept cannot be used; the text says why, and holds no key."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one key."""

    name: str
    # SHA-256 of the key.
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    # "": as the name.
    owner: str = ""
    # The tier's name; "": the lowest.
    tier: str = ""
    # Models that it may ask for; none named: all.
    models: tuple[str, ...] = ()
    # None: as the tier has it.
    per_minute: Limit | None = None
    burst: Burst | None = None
    concurrent: Limit | None = None
    # What `POST /v1/inference` does where its client does not say; None: as the model, the tier or the gateway has it.
    default_mode: ModeName | None = None
    # Seconds since 1970; 0: never, or not known.
    created: float = 0.0
    expires: float = 0.0

    @property
    def counts_for(self) -> str:
        """The owner."""
        return self.owner or self.name


def key_fault(key: str) -> str:
    """Why this cannot be a key; "" if it can. The text does not show it (rule 1)."""
    if _KEY.fullmatch(key):
        return ""
    return f"must be {KEY_CHARS_MIN} to {KEY_CHARS_MAX} printable ASCII characters without spaces"


def owner_fault(owner: str) -> str:
    """Why a key must not have this owner; "" if it may (rule 2)."""
    if not _OWNER.fullmatch(owner):
        return f"must be 1 to {OWNER_CHARS_MAX} printable ASCII characters without spaces"
    if owner.startswith((TOKEN_OWNER, TOKEN_OWNER_HASHED)):
        return f"must not begin with {TOKEN_OWNER} or {TOKEN_OWNER_HASHED}, as the owners of tokens do"
    try:
        ip_network(owner, strict=False)
    except ValueError:
        return ""
    return "must not be an address: those are the owners of requests without a credential"


def encode_key(key: ApiKey) -> bytes:
    """A key as it is stored."""
    return msgspec.json.encode(key)


def decode_keys(stored: Iterable[bytes]) -> list[ApiKey]:
    """The keys that can be read: a key that cannot lets no client in."""
    found = []
    for body in stored:
        try:
            key = msgspec.json.decode(body, type=ApiKey)
        except (ValueError, TypeError, RecursionError):  # msgspec's own, no UTF-8, no bytes, too deep
            continue
        if not owner_fault(key.counts_for):
            found.append(key)
    return found
