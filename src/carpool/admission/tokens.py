"""JSON Web Tokens: whose signature is trusted, and what a token must say. Signatures are checked by joserfc.

1. The keys are those of one file: a JWKS (or one JWK), a PEM with a public key or a certificate, or, where HS256 is the
   only algorithm that is allowed, a plain secret. Unless the operator said so, no file is a secret: the error page of a
   server in place of a key set, or public keys in a form that is not known here, can be read by anybody.
   Nothing that a token names is ever fetched: `jku`, `x5u`, `jwk` and `x5c` are not looked at.
2. Each key is for one algorithm: the one that it names, else the one of its type (RSA: RS256, EC on P-256: ES256,
   Ed25519: EdDSA, a secret: HS256). A token of another algorithm than its key's is refused, so no public key is ever
   used as a secret, and `none` fits no key.
3. `kid` picks the key; without it, or where keys have no name, the one for that algorithm. Never more than one is
   tried.
4. `crit` and `b64` ask for what is not done here: refused.
5. A token must have `exp`, and be within `nbf` and `exp`, give or take the leeway; `iss` and `aud` as configured; an
   owner. A claim of another type than it should have is a fault. A token that is over 8 KB is not looked at.
6. An owner is `jwt:` and the subject, or where that is long or has other than printable ASCII characters, `jwt#` and
   its SHA-256: two subjects never become one owner.

This module is imported only where tokens are wanted: joserfc brings much with it.
"""

import re
import warnings
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from carpool.core.api_key import TOKEN_OWNER, TOKEN_OWNER_HASHED
from carpool.core.finite import finite_float

TOKEN_BYTES_MAX = 8192
SECRET_BYTES_MIN = 32
RSA_BITS_MIN = 2048
KEYS_MAX = 256
# A larger number is no time in seconds; up to here sums with it stay exact.
SECONDS_MAX = 2**53

_TOKEN = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_PLAIN_SUBJECT = re.compile(r"[\x21-\x7e]{1,60}")
_decode_object = msgspec.json.Decoder(dict[str, Any], float_hook=finite_float).decode
_NOT_DONE_HERE = ("crit", "b64")

# By the type of a key: its class, and its algorithm.
KEY_TYPES: dict[str, tuple[type[Key], str]] = {
    "RSA": (RSAKey, "RS256"),
    "EC": (ECKey, "ES256"),
    "OKP": (OKPKey, "EdDSA"),
    "oct": (OctKey, "HS256"),
}
ALGORITHMS = tuple(algorithm for _, algorithm in KEY_TYPES.values())


class TokenRules(NamedTuple):
    """What a token must say, and where it says what."""

    # Algorithms that keys may be for; empty: any of ALGORITHMS, but then the file cannot be a plain secret.
    algorithms: Sequence[str] = ()
    issuer: str = ""
    audience: str = ""
    # How far clocks may differ, for `exp` and `nbf`; those with NTP differ by far less.
    leeway_s: float = 30.0
    owner_claim: str = "sub"
    tier_claim: str = "tier"


class Verified(NamedTuple):
    """What a token that is valid now says."""

    owner: str
    # "" if it names none.
    tier: str
    # The wall clock's time from which on it is valid no more.
    until: float


class TokenKeys:
    """The keys of one file, and the check of tokens by them."""

    def __init__(self, content: bytes, rules: TokenRules) -> None:
        """Read the keys; raises ValueError, in whose text is nothing of the content."""
        self._rules = rules
        # By name (None: it has none) and algorithm.
        self._keys: dict[tuple[str | None, str], Key] = {}
        for key, name, algorithm in read_keys(content, rules.algorithms):
            if (name, algorithm) in self._keys:
                raise ValueError(f"it has several keys for {algorithm} that `kid` does not tell apart")
            self._keys[name, algorithm] = key
        if not self._keys:
            raise ValueError(f"it has no key for {', '.join(rules.algorithms or ALGORITHMS)}")
        # A key set of one needs no names.
        self._only = next(iter(self._keys)) if len(self._keys) == 1 else None

    def verify(self, token: bytes, now_wall: float) -> Verified | None:
        """What a token says; None if it is not valid, whatever the fault."""
        if len(token) > TOKEN_BYTES_MAX or (parts := _TOKEN.fullmatch(token)) is None:
            return None
        try:
            header = _decode_object(_decode_part(parts[1]))
            if not self._is_signed(header, token[: parts.end(2)], _decode_part(parts[3])):
                return None
            claims = _decode_object(_decode_part(parts[2]))
        except (ValueError, RecursionError, JoseError):  # of which msgspec's is one
            return None
        return self._judge(claims, now_wall)

    def _is_signed(self, header: dict[str, Any], signed: bytes, signature: bytes) -> bool:
        algorithm, name = header.get("alg"), header.get("kid")
        if any(each in header for each in _NOT_DONE_HERE) or not isinstance(algorithm, str):
            return False
        if not isinstance(name, str | None):
            return False
        key = self._keys.get((name, algorithm)) or self._keys.get((None, algorithm))
        if key is None and name is None and self._only is not None and self._only[1] == algorithm:
            key = self._keys[self._only]
        return key is not None and JWSRegistry.algorithms[algorithm].verify(signed, signature, key)

    def _judge(self, claims: dict[str, Any], now_wall: float) -> Verified | None:
        rules = self._rules
        expires, begins = _seconds(claims.get("exp")), _seconds(claims.get("nbf", 0))
        if expires is None or begins is None or _seconds(claims.get("iat", 0)) is None:
            return None
        until = expires + rules.leeway_s
        if not begins - rules.leeway_s <= now_wall < until:
            return None
        if rules.issuer and claims.get("iss") != rules.issuer:
            return None
        if rules.audience and not _is_meant(rules.audience, claims.get("aud")):
            return None
        subject, tier = claims.get(rules.owner_claim), claims.get(rules.tier_claim, "") if rules.tier_claim else ""
        if not isinstance(subject, str) or not subject or not isinstance(tier, str):
            return None
        return Verified(owner_of_subject(subject), tier, until)


def owner_of_subject(subject: str) -> str:
    """The owner that a token's requests count for (rule 6). At most 64 characters."""
    if _PLAIN_SUBJECT.fullmatch(subject):
        return TOKEN_OWNER + subject
    return TOKEN_OWNER_HASHED + sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()[:60]


def read_keys(content: bytes, algorithms: Sequence[str]) -> list[tuple[Key, str | None, str]]:
    """The keys that can be used, each with its name and algorithm; raises ValueError."""
    text = content.strip()
    if text.startswith(b"{"):
        return _read_key_set(text, algorithms)
    if b"-----BEGIN " in text:
        found = _read_pem(text)
    elif set(algorithms) != {"HS256"}:
        raise ValueError(
            "it is neither a JSON Web Key Set nor a PEM; for a plain secret set auth.jwt_algorithms to HS256 alone"
        )
    else:
        # Without the line's end, which editors and `echo` add.
        secret = content.rstrip(b"\r\n")
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"a secret must have at least {SECRET_BYTES_MIN} bytes")
        found = _checked(_load(OctKey, secret))
    algorithm = KEY_TYPES[found.key_type][1]
    return [(found, None, algorithm)] if not algorithms or algorithm in algorithms else []


def _read_key_set(text: bytes, algorithms: Sequence[str]) -> list[tuple[Key, str | None, str]]:
    try:
        content = _decode_object(text)
        listed = msgspec.convert(content.get("keys", [content]), list[dict[str, Any]])
    except (ValueError, RecursionError):
        raise ValueError("it is not a JSON Web Key Set") from None
    if len(listed) > KEYS_MAX:
        raise ValueError(f"it has more than {KEYS_MAX} keys")
    found = []
    for entry in listed:
        kind, name = entry.get("kty"), entry.get("kid")
        algorithm = entry.get("alg")
        # Sets often have keys for other purposes, curves and algorithms beside.
        if not isinstance(kind, str) or kind not in KEY_TYPES or entry.get("use", "sig") != "sig":
            continue
        if kind in ("EC", "OKP") and entry.get("crv") not in ("P-256", "Ed25519"):
            continue
        key_class, usual = KEY_TYPES[kind]
        if algorithm not in (None, *ALGORITHMS) or (algorithms and usual not in algorithms):
            continue
        if algorithm not in (None, usual):
            raise ValueError(f"a key of type {kind} cannot be for {algorithm}")
        if not isinstance(name, str | None):
            raise ValueError("a `kid` is not a text")
        # Only what makes the key: whatever else is said of it has been looked at.
        material = {part: entry[part] for part in ("kty", "crv", "n", "e", "x", "y", "k") if part in entry}
        found.append((_checked(_load(key_class, material)), name, usual))
    return found


def _read_pem(text: bytes) -> Key:
    if b"PRIVATE KEY" in text:
        raise ValueError("it has a private key: tokens are checked by the public one, which is all that belongs here")
    for key_class, curve in (RSAKey, None), (ECKey, "P-256"), (OKPKey, "Ed25519"):
        try:
            key = _load(key_class, text)
        except ValueError:
            continue
        if curve is None or key.curve_name == curve:
            return _checked(key)
    raise ValueError("it is not a PEM with a public key or a certificate, for RSA, EC on P-256 or Ed25519")


def _load(key_class: Any, material: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of is refused later
            return key_class.import_key(material)
    except Exception:  # the library has several, and its texts may quote the key
        raise ValueError(f"a key of type {key_class.key_type} cannot be read") from None


def _checked(key: Key) -> Key:
    if weak := _weakness(key):
        raise ValueError(weak)
    return key


def _weakness(key: Key) -> str:
    if isinstance(key, OctKey):
        if len(key.raw_value) < SECRET_BYTES_MIN:
            return f"a secret must have at least {SECRET_BYTES_MIN} bytes"
        if len(set(key.raw_value)) == 1:
            return "a secret must not be one byte again and again"  # as a disk without power leaves a file
    if isinstance(key, RSAKey) and key.public_key.key_size < RSA_BITS_MIN:
        return f"an RSA key must have at least {RSA_BITS_MIN} bits"
    return ""


def _decode_part(part: bytes) -> bytes:
    return urlsafe_b64decode(part + b"=" * (-len(part) % 4))


def _seconds(claim: Any) -> float | None:
    """A NumericDate; None for whatever else there is."""
    if type(claim) not in (int, float) or not 0 <= claim <= SECONDS_MAX:
        return None
    return float(claim)


def _is_meant(audience: str, claim: Any) -> bool:
    if isinstance(claim, list):
        return all(isinstance(each, str) for each in claim) and audience in claim
    return bool(claim == audience)
